"""Writes directories in torch's distributed checkpoint format, from all ranks or one process.

Every rank writes one file; the directory appears when all are complete. Plan and metadata are
torch's own. Its file writer is not used, for two reasons: it keeps every tensor in memory until the
file is complete, but states on NVMe may be larger than memory; and it writes tied tensors once for
each name. So it is in torch 2.13.0: `_write_files_from_queue` in `filesystem.py` collects all
tensors of a file in `tensor_dict`, of which only its safetensors format has a use.
"""

from __future__ import annotations

import copy
import errno
import io
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_metadata import METADATA, gc_paused
from lightning_zero.checkpoint.dcp_reader import META_FILE
from lightning_zero.checkpoint.new_file import (
    DISK_FULL_ERRNOS,
    full_disk_error,
    name_path_in_errors,
)
from lightning_zero.checkpoint.save_record import (
    ALIGNMENT,
    RECORD,
    digest_item_ends,
    encode_record,
    trailer,
)
from lightning_zero.checkpoint.states import shards_in
from lightning_zero.checkpoint.storage import (
    CheckpointPath,
    Staging,
    as_local,
    create,
    file_sizes,
    locate,
    open_checked,
    stage,
    write_bytes,
)
from lightning_zero.checkpoint.torch_file import save_to
from lightning_zero.comm.control import Channel
from lightning_zero.health.together import run_on_all_ranks
from lightning_zero.record import streams
from lightning_zero.tiers.memory import aligned_empty

__all__ = ["SavePlanCache", "ShardedSave", "merge_metadata", "rank_file"]

_Written = tuple[SavePlan, list[WriteResult]]


def _append_items(planner: DefaultSavePlanner, file: BinaryIO, name: str) -> Iterator[WriteResult]:
    stored: dict[Any, _StorageInfo] = {}
    for item in planner.plan.items:
        value = planner.state_dict[item.index.fqn]
        key: Any = item.index
        if isinstance(value, CheckpointShard):
            key = (value.source, value.dtype, item.index.offset)
        if key not in stored:
            file.write(bytes(-file.tell() % ALIGNMENT))
            start = file.tell()
            _append(planner.resolve_data(item), file)
            stored[key] = _StorageInfo(name, start, file.tell() - start)
        yield WriteResult(item.index, stored[key].length, stored[key])


def _append(data: Tensor | io.BytesIO, file: BinaryIO) -> None:
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    data = data.detach().cpu()
    if data.untyped_storage().nbytes() != data.nbytes:  # torch.save writes the entire storage
        data = data.clone()
    save_to(file, data)


@dataclass
class SavePlanCache:
    """Results of one save that the next one over the same channel uses if nothing has changed."""

    # Source and dtype of every shard, by name.
    entries: dict[str, tuple[str, torch.dtype]] = field(default_factory=dict)
    metadata: bytes = b""  # torch's metadata, pickled; on rank 0
    last_written: _Written | None = None  # plan and results of the last save; None: send them anew

    def clear(self) -> None:
        """Drops plan and results; if one rank clears them, all ranks send theirs again."""
        self.metadata, self.last_written = b"", None

    def receive_entries(
        self, entries: dict[str, tuple[str, torch.dtype]], channel: Channel
    ) -> None:
        """Takes the entries of rank 0. Collective: every rank."""
        self.entries = channel.broadcast(entries)

    def merge(self, planner: DefaultSavePlanner, written: list[_Written]) -> None:
        """Makes the metadata of the plans and results of all ranks. On rank 0 only."""
        self.metadata = pickle.dumps(merge_metadata(planner, written))

    def gather_if_changed(
        self, write: Callable[[], tuple[_Written, str]], channel: Channel
    ) -> tuple[list[_Written] | None, list[str]]:
        """Calls `write` on every rank and gathers its results on rank 0. Collective: every rank.

        Returns:
            On rank 0, plans and write results of all ranks, or None if they equal those of the last
            save; None on other ranks. And the digests of all ranks.
        """

        def write_and_compare() -> tuple[bool, str]:
            last = self.last_written
            self.last_written, digest = write()
            return last != self.last_written, digest

        answers = run_on_all_ranks(write_and_compare, gather=channel.all_gather)
        digests = [digest for _, digest in answers]
        if not any(differs for differs, _ in answers):
            return None, digests
        assert self.last_written is not None
        with gc_paused():
            return channel.gather(self.last_written), digests


@dataclass
class ShardedSave:
    """One save of a sharded checkpoint."""

    target: CheckpointPath  # rank 0's path, on every rank
    planner: DefaultSavePlanner  # holds this rank's entries
    rest: io.BytesIO  # content of `meta.pt`, pickled; empty on ranks other than 0
    channel: Channel
    plan_cache: SavePlanCache  # from earlier saves over this channel
    total_bytes: int  # of the shards of all ranks
    _staged: Staging | None = field(default=None, init=False)  # being written; on rank 0

    @classmethod
    def prepare(
        cls,
        checkpoint: dict[str, Any],
        target: CheckpointPath,
        shards: Mapping[str, CheckpointShard],
        channel: Channel,
        plan_cache: SavePlanCache | None = None,
    ) -> ShardedSave:
        """Agrees on the entries to be written. Collective: every rank.

        The entries and their names are those of rank 0's `checkpoint`. So a hook that changes it on
        rank 0 alone takes effect, as with a full checkpoint. Every other rank passes its
        `shards`, by source. The caller holds the session of `channel`.
        """
        is_first = channel.rank == 0
        plan_cache = plan_cache or SavePlanCache()
        planner = DefaultSavePlanner()
        rest = io.BytesIO()
        agreed: dict[str, tuple[str, torch.dtype]] = {}

        def read_dict() -> tuple[str, bool]:
            if is_first:
                tree, others = _split_rest(checkpoint)
                torch.save(others, rest)
                planner.set_up_planner(tree, is_coordinator=True)
                for name, value in planner.state_dict.items():
                    if isinstance(value, CheckpointShard):
                        agreed[name] = (value.source, value.dtype)
            return str(target), agreed != plan_cache.entries

        together = partial(run_on_all_ranks, gather=channel.all_gather)
        address, has_changed = together(read_dict)[0]
        if has_changed:
            plan_cache.receive_entries(agreed, channel)

        def set_up_shards() -> int:
            if not is_first:
                entries = plan_cache.entries.items()
                own = {name: shards[source].cast(dtype) for name, (source, dtype) in entries}
                # A tensor without elements is one box on every rank; only rank 0 writes it.
                planner.set_up_planner({n: shard for n, shard in own.items() if shard.numel()})
                planner.mappings = {}  # rank 0's planner has all names, in order
            return _owned_bytes(planner)

        total_bytes = sum(together(set_up_shards))
        return cls(locate(address), planner, rest, channel, plan_cache, total_bytes)

    @property
    def snapshot_bytes(self) -> int:
        """CPU memory that `snapshot` needs for this rank's shards."""
        return _owned_bytes(self.planner)

    def snapshot(self, memory: dict[str, Tensor], *, pin: bool) -> None:
        """Copies this rank's values, so that training continues before they are written. Local.

        Args:
            memory: CPU tensors of the last save, which are reused; replaced by those of this save.
            pin: Copy into pinned memory, for asynchronous copies from a GPU.
        """
        entries = self.planner.state_dict
        copies: dict[str, Tensor] = {}
        for name, value in entries.items():
            if isinstance(value, CheckpointShard):
                key, numel = _key(value), len(value.owned)
                if key not in copies:
                    buffer = memory.get(key)
                    if buffer is None or buffer.numel() != numel:
                        raw = aligned_empty(numel * value.dtype.itemsize, pin=pin)
                        buffer = raw.view(value.dtype)
                    copies[key] = buffer.copy_(value.read_owned(), non_blocking=pin)
                entries[name] = value.backed_by(copies[key])
            elif isinstance(value, Tensor):
                entries[name] = value.detach().to("cpu", copy=True)
            else:
                entries[name] = copy.deepcopy(value)
        memory.clear()
        memory.update(copies)
        if pin:
            streams.synchronize()

    def run(self) -> None:
        """Writes the files, and publishes the directory when all are complete. Collective; blocks.

        Raises:
            OSError: The disk is full, or the path cannot be written to; on every rank. The previous
                content of the path is unchanged.
        """
        channel = self.channel
        together = partial(run_on_all_ranks, gather=channel.all_gather)
        free = None  # bytes on the disk of rank 0, before the save
        try:
            begin = self._begin if channel.rank == 0 else lambda: ("", "", None)
            address, save, free = together(begin)[0]
            folder = locate(address)
            write = partial(self._write, folder, save)
            written, digests = self.plan_cache.gather_if_changed(write, channel)
            together(partial(self._finish, folder, save, written, digests))
        except BaseException as error:
            self.plan_cache.clear()  # rank 0 may have received only a part of the plans
            if self._staged is not None:
                self._staged.discard()
            is_full = isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS
            if is_full and free is not None:
                raise full_disk_error(self.target, self.total_bytes, free) from error
            raise

    def _begin(self) -> tuple[str, str, int | None]:
        """Creates the folder of this save's files.

        Returns:
            The folder's address, the name of this save, and the free bytes of a local disk.
        """
        self._staged = stage(self.target, index=(METADATA, META_FILE))
        local = as_local(self._staged.folder)
        free = shutil.disk_usage(local).free if local else None
        return str(self._staged.folder), secrets.token_hex(16), free

    def _write(self, folder: CheckpointPath, save: str) -> tuple[_Written, str]:
        """Writes this rank's file; tied tensors are written once."""
        planner, rank = self.planner, self.channel.rank
        plan = planner.create_local_plan()
        path = folder / rank_file(rank)
        with name_path_in_errors(path), create(path, _owned_bytes(planner)) as file:
            # Relative to the target, of which a remote folder is a part.
            name = path.name if as_local(folder) else f"{folder.name}/{path.name}"
            results = list(_append_items(planner, file, name))
            file.write(trailer(save, path.name))
        digest = ""  # of a remote file, which is not read back
        if as_local(path):
            stored = [result.storage_data for result in results]
            with open_checked(path) as ranges:
                digest = digest_item_ends(ranges, [(info.offset, info.length) for info in stored])
        return (plan, results), digest

    def _finish(
        self, folder: CheckpointPath, save: str, written: list[_Written] | None, digests: list[str]
    ) -> None:
        if self.channel.rank != 0:
            return
        files = file_sizes(folder)
        for rank in range(self.channel.size):
            if rank_file(rank) not in files:
                raise OSError(
                    errno.EIO,
                    f"{rank_file(rank)} was written by rank {rank}, but rank 0 does not see it; a "
                    "sharded checkpoint needs a folder that all ranks share",
                    str(self.target),
                )
        if written is not None:
            with gc_paused():
                self.plan_cache.merge(self.planner, written)
        ends = {rank_file(rank): digest for rank, digest in enumerate(digests)}
        assert self._staged is not None
        contents: dict[str, bytes | memoryview] = {
            METADATA: self.plan_cache.metadata,
            META_FILE: self.rest.getbuffer(),
        }
        contents[RECORD] = encode_record(save, ends, contents)
        for name, content in contents.items():
            write_bytes(folder / name, content)
        self._staged.publish(listed=contents)


def _owned_bytes(planner: DefaultSavePlanner) -> int:
    """Bytes of this rank's shards; tied ones are written once."""
    shards = [v for v in planner.state_dict.values() if isinstance(v, CheckpointShard)]
    return sum({_key(shard): shard.owned_bytes for shard in shards}.values())


def merge_metadata(planner: DefaultSavePlanner, written: list[_Written]) -> Metadata:
    """The metadata, from rank 0's planner and the plans and write results of all ranks.

    Raises:
        ValueError: The plans do not cover every tensor exactly once.
    """
    plans, results = zip(*written, strict=True)
    _, metadata = planner.create_global_plan(list(plans))
    # DCP orders by rank; the next lines restore the order of the module
    entries = metadata.state_dict_metadata
    metadata.state_dict_metadata = {
        name: entries[name] for name in planner.state_dict if name in entries
    }
    metadata.storage_data = {each.index: each.storage_data for result in results for each in result}
    metadata.version = CURRENT_DCP_VERSION
    return metadata


def rank_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _split_rest(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits into entries that DCP stores, under the keys of the format, and those of `meta.pt`."""
    tree: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key == "optimizer_states":
            tree.update({f"optimizer_{number}": state for number, state in enumerate(value)})
        elif key == "state_dict":
            tree[key] = value
        else:
            _split(key, value, tree, rest)
    return tree, rest


def _split(key: str, value: Any, tree: dict[str, Any], rest: dict[str, Any]) -> None:
    """Puts dicts with shards into `tree`, at any depth, and everything else into `rest`."""
    if not shards_in(value):
        rest[key] = value
    elif not isinstance(value, Mapping) or any(
        isinstance(v, CheckpointShard) for v in value.values()
    ):
        tree[key] = value
    else:
        tree[key], rest[key] = {}, {}
        for name, part in value.items():
            _split(name, part, tree[key], rest[key])


def _key(shard: CheckpointShard) -> str:
    return f"{shard.source} as {shard.dtype}"  # the same for tied tensors, which are copied once
