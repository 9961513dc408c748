"""Directories in torch's distributed checkpoint format, written by all ranks or by one process.

Every rank writes a file, all or nothing. The plan and the metadata are torch's own. Its writer of
files is not taken: it keeps every tensor until the file is done, and states that rest on a disk
must never be in memory all at once; and it writes tied tensors once for each name.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.atomic import (
    DISK_FULL_ERRNOS,
    CheckpointPath,
    StagedDirectory,
    file_sizes,
    full_disk_error,
    locate,
    name_path_in_errors,
)
from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_metadata import METADATA, gc_paused
from lightning_zero.checkpoint.dcp_reader import META_FILE
from lightning_zero.checkpoint.remote import RemotePath
from lightning_zero.checkpoint.save_record import RECORD, digest_item_ends, encode_record, trailer
from lightning_zero.checkpoint.states import shards_in
from lightning_zero.checkpoint.torch_file import open_pread
from lightning_zero.comm.control import Channel
from lightning_zero.record import streams

__all__ = ["SavePlanCache", "ShardedSave", "merge_metadata", "rank_file"]

_ALIGNMENT = 64  # of an item in the file, so that a memory map of its elements is aligned
_BUFFER_BYTES = 2**20
_SYNC_BYTES = 2**26

_Written = tuple[SavePlan, list[WriteResult]]


def _write_items(
    folder: CheckpointPath, rank: int, planner: DefaultSavePlanner, save: str
) -> list[WriteResult]:
    """Writes the items of `planner.plan` and syncs; what two names share is written once."""
    path = folder / rank_file(rank)
    if isinstance(path, RemotePath):
        with name_path_in_errors(path), path.atomic_write(_owned_bytes(planner)) as file:
            results = list(_append_items(planner, file, path.name))
            file.write(trailer(save, path.name))
            return results
    results = []
    synced = 0
    with (
        name_path_in_errors(path),
        open(path, "xb", buffering=_BUFFER_BYTES) as file,
        ThreadPoolExecutor(1, thread_name_prefix="zero-save") as thread,
    ):
        syncing = thread.submit(file.flush)
        for result in _append_items(planner, file, path.name):
            results.append(result)
            if file.tell() - synced >= _SYNC_BYTES and syncing.done():
                syncing.result()
                synced = file.tell()
                syncing = thread.submit(os.fdatasync, file.fileno())  # else the last one waits
        syncing.result()
        file.write(trailer(save, path.name))
        file.flush()
        os.fsync(file.fileno())
    return results


def _digest(path: CheckpointPath, results: Iterable[WriteResult]) -> str:
    """See [Note: One save]. What is sent to a remote store is not read back."""
    if isinstance(path, RemotePath):
        return ""
    places = [result.storage_data for result in results]
    with open_pread(path) as pread:
        return digest_item_ends(pread, [(place.offset, place.length) for place in places])


def _append_items(planner: DefaultSavePlanner, file: BinaryIO, name: str) -> Iterator[WriteResult]:
    places: dict[Any, _StorageInfo] = {}
    for item in planner.plan.items:
        value = planner.state_dict[item.index.fqn]
        key: Any = item.index
        if isinstance(value, CheckpointShard):
            key = (value.source, value.dtype, item.index.offset)
        if key not in places:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            start = file.tell()
            _append(planner.resolve_data(item), file)
            places[key] = _StorageInfo(name, start, file.tell() - start)
        yield WriteResult(item.index, places[key].length, places[key])


def _append(data: Tensor | io.BytesIO, file: BinaryIO) -> None:
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    data = data.detach().cpu()
    if data.untyped_storage().nbytes() != data.nbytes:  # torch.save would write all of it
        data = data.clone()
    try:
        torch.save(data, file)
    except RuntimeError as error:  # of torch's archive, that has not all of its bytes
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@dataclass
class SavePlanCache:
    """What the saves over one channel have agreed on, which the next need not, while it holds."""

    # Source and dtype of every shard, by name.
    entries: dict[str, tuple[str, torch.dtype]] = field(default_factory=dict)
    metadata: bytes = b""  # torch's, pickled; on rank 0
    last_written: _Written | None = None  # of the last save; None: the next one sends all

    def clear(self) -> None:
        """Forgets plans and files; the next save agrees anew, also if one rank alone forgets."""
        self.metadata, self.last_written = b"", None

    def gather_if_changed(
        self, write: Callable[[], tuple[_Written, str]], channel: Channel
    ) -> tuple[list[_Written] | None, list[str]]:
        """Every rank's results of `write`: what was written, and the digest of it.

        Collective. What was written comes to rank 0 where one rank's differs from that of the last
        time, and is None elsewhere, and where all are as they were. The digests are empty there.
        """

        def write_and_compare() -> tuple[bool, str]:
            last = self.last_written
            self.last_written, digest = write()
            return last != self.last_written, digest

        answers = channel.attempt(write_and_compare) or []
        has_changed = channel.broadcast(any(differs for differs, _ in answers))
        digests = [digest for _, digest in answers]
        if not has_changed:
            return None, digests
        assert self.last_written is not None
        with gc_paused():
            return channel.gather(self.last_written), digests


@dataclass
class ShardedSave:
    """One checkpoint on its way to the disk."""

    target: CheckpointPath  # rank 0's, on every rank
    planner: DefaultSavePlanner  # with this rank's entries
    rest: io.BytesIO  # what goes into `meta.pt`, pickled; empty on other ranks than 0
    channel: Channel
    plan_cache: SavePlanCache  # of the saves before over this channel
    _staged: StagedDirectory | None = field(
        default=None, init=False
    )  # on rank 0, of a local target
    _may_be_referenced: bool = field(default=False, init=False)  # its folder, by remote metadata

    @classmethod
    def prepare(
        cls,
        checkpoint: dict[str, Any],
        target: CheckpointPath,
        shards: Mapping[str, CheckpointShard],
        channel: Channel,
        plan_cache: SavePlanCache | None = None,
    ) -> ShardedSave:
        """Agrees on what is to be written. Collective.

        Rank 0's dict says which entries there are and what they are called: hooks that change it on
        one rank only are as good as with a full file. The other ranks bring their `shards`: all
        that they have made for it, by source. The session of `channel` is held.
        """
        is_first = channel.rank == 0
        plan_cache = plan_cache or SavePlanCache()
        planner = DefaultSavePlanner()
        rest = io.BytesIO()
        agreed: dict[str, tuple[str, torch.dtype]] = {}

        def read_dict() -> None:
            if is_first:
                tree, others = _split_rest(checkpoint)
                torch.save(others, rest)
                planner.set_up_planner(tree, is_coordinator=True)
                for name, value in planner.state_dict.items():
                    if isinstance(value, CheckpointShard):
                        agreed[name] = (value.source, value.dtype)

        channel.attempt(read_dict)
        has_changed = agreed != plan_cache.entries
        address, has_changed = channel.broadcast((str(target), has_changed))
        if has_changed:
            plan_cache.entries = channel.broadcast(agreed)

        def bring_shards() -> None:
            if not is_first:
                entries = plan_cache.entries.items()
                planner.set_up_planner({n: shards[s].cast(dtype) for n, (s, dtype) in entries})
                planner.mappings = {}  # rank 0's has all names, in their order

        channel.attempt(bring_shards)
        return cls(locate(address), planner, rest, channel, plan_cache)

    @property
    def snapshot_bytes(self) -> int:
        """What `snapshot` takes for this rank's shards."""
        return sum({_key(shard): shard.owned_bytes for shard in _shards(self.planner)}.values())

    def snapshot(self, memory: dict[str, Tensor], *, pin: bool) -> None:
        """Copies this rank's values, so that training may go on before they are written. Local.

        Args:
            memory: Of the save before, used again; afterwards of this one.
            pin: Into page-locked memory, as copies from a GPU want it.
        """
        entries = self.planner.state_dict
        kept: dict[str, Tensor] = {}
        for name, value in entries.items():
            if isinstance(value, CheckpointShard):
                key, numel = _key(value), len(value.owned)
                if key not in kept:
                    room = memory.get(key)
                    if room is None or room.numel() != numel:
                        room = torch.empty(numel, dtype=value.dtype, pin_memory=pin)
                    kept[key] = room.copy_(value.read_owned(), non_blocking=pin)
                entries[name] = value.backed_by(kept[key])
            elif isinstance(value, Tensor):
                entries[name] = value.detach().to("cpu", copy=True)
            else:
                entries[name] = copy.deepcopy(value)
        memory.clear()
        memory.update(kept)
        if pin:
            streams.synchronize()

    def run(self) -> None:
        """Writes, and puts the directory in place when every rank has. Collective; waits.

        Raises:
            OSError: The disk is full, or the path cannot be written to; on every rank. What was at
                the path is as it was.
        """
        channel = self.channel
        is_first = channel.rank == 0
        folder: CheckpointPath | None = None
        try:
            made = channel.attempt(lambda: str(self._begin()) if is_first else None)
            made_at = (made[0] if made else None, secrets.token_hex(16))
            address, save = channel.broadcast(made_at)
            folder = locate(address)
            write = partial(self._write, folder, save)
            written, digests = self.plan_cache.gather_if_changed(write, channel)
            channel.attempt(partial(self._finish, folder, save, written, digests))
        except BaseException as error:
            self.plan_cache.clear()  # rank 0 may not have all of it
            if self._staged is not None:
                self._staged.discard()
            elif is_first and isinstance(folder, RemotePath) and not self._may_be_referenced:
                atomic.discard(folder)
            target = self.target
            if (
                isinstance(target, Path)
                and isinstance(error, OSError)
                and error.errno in DISK_FULL_ERRNOS
            ):
                raise self._full(target) from error
            raise

    def _begin(self) -> CheckpointPath:
        """The folder of this save's files; its name at a remote address is that of the save."""
        if isinstance(self.target, Path):
            self._staged = StagedDirectory(self.target)
            return self._staged.folder
        if self.target.is_file():
            raise FileExistsError(
                errno.EEXIST,
                "a full checkpoint is there, which a sharded one cannot replace at a remote "
                "address; delete it, or choose another name",
                str(self.target),
            )
        return self.target / f"save-{secrets.token_hex(4)}"

    def _write(self, folder: CheckpointPath, save: str) -> tuple[_Written, str]:
        plan = self.planner.create_local_plan()
        rank = self.channel.rank
        results = _write_items(folder, rank, self.planner, save)
        return (plan, results), _digest(folder / rank_file(rank), results)

    def _full(self, target: Path) -> OSError:
        """What to say when the disk was full, after the files are gone again. Collective."""
        needed = self.channel.gather(_owned_bytes(self.planner))
        measured = self.channel.attempt(lambda: shutil.disk_usage(target.parent).free)
        total, free = self.channel.broadcast((sum(needed or []), (measured or [0])[0]))
        return full_disk_error(target, total, free)

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
                    f"{rank_file(rank)} was written by another rank and is not seen on rank 0; a "
                    "sharded checkpoint needs a folder that all ranks share",
                    str(self.target),
                )
        if written is not None:
            with gc_paused():
                self.plan_cache.metadata = pickle.dumps(merge_metadata(self.planner, written))
        ends = {rank_file(rank): digest for rank, digest in enumerate(digests)}
        rest = self.rest.getbuffer()
        if isinstance(folder, RemotePath):
            assert isinstance(self.target, RemotePath)
            self._finish_remote(folder, self.target, encode_record(save, ends, {META_FILE: rest}))
            return
        assert self._staged is not None
        contents: dict[str, bytes | memoryview] = {
            METADATA: self.plan_cache.metadata,
            META_FILE: rest,
        }
        contents[RECORD] = encode_record(save, ends, contents)
        for name, content in contents.items():
            with name_path_in_errors(folder / name), open(folder / name, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        atomic.write_checksums(folder, contents)
        self._staged.publish()
        self._staged = None

    def _finish_remote(self, folder: RemotePath, target: RemotePath, noted: bytes) -> None:
        """See [Note: Whole or not there, remotely]."""
        metadata = pickle.loads(self.plan_cache.metadata)
        for index, place in metadata.storage_data.items():
            path = f"{folder.name}/{place.relative_path}"
            metadata.storage_data[index] = replace(place, relative_path=path)
        _write_file(folder / META_FILE, self.rest.getbuffer())
        _write_file(folder / RECORD, noted)
        for name in (atomic.CHECKSUMS, RECORD):  # of a directory that was copied there
            (target / name).remove()
        self._may_be_referenced = True  # also where storage fails to say that it has it
        _write_file(target / METADATA, pickle.dumps(metadata))
        _write_file(target / META_FILE, self.rest.getbuffer())
        with contextlib.suppress(Exception):  # the checkpoint is there; the next save tries again
            for other in target.iterdir():
                if _SAVE_ENTRY.fullmatch(other.name) and other.name != folder.name:
                    other.remove()


# What a save has at a remote address, or a directory that was copied there.
_SAVE_ENTRY = re.compile(r"(?:save-[0-9a-f]{8}|__\d+_\d+\.distcp)")


def _write_file(path: RemotePath, data: bytes | memoryview) -> None:
    with name_path_in_errors(path), path.atomic_write(len(data)) as file:
        file.write(data)


def _shards(planner: DefaultSavePlanner) -> list[CheckpointShard]:
    return [v for v in planner.state_dict.values() if isinstance(v, CheckpointShard)]


def _owned_bytes(planner: DefaultSavePlanner) -> int:
    return sum(shard.owned_bytes for shard in _shards(planner))


def merge_metadata(planner: DefaultSavePlanner, written: list[_Written]) -> Metadata:
    """What of which tensor lies where, by rank 0's planner and what all ranks planned and wrote.

    Raises:
        ValueError: The plans do not cover every tensor once.
    """
    plans, results = zip(*written, strict=True)
    _, metadata = planner.create_global_plan(list(plans))
    entries = metadata.state_dict_metadata  # by rank; readers like the module's order
    metadata.state_dict_metadata = {
        name: entries[name] for name in planner.state_dict if name in entries
    }
    metadata.storage_data = {each.index: each.storage_data for one in results for each in one}
    metadata.version = CURRENT_DCP_VERSION
    return metadata


def rank_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _split_rest(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is written by name, under the keys of the format; and the rest, for `meta.pt`."""
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
    """Puts dicts with shards into `tree`; of those that hold such dicts, the others into `rest`."""
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
    return f"{shard.source} as {shard.dtype}"  # tied tensors are copied once
