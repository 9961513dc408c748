"""Writes a sharded checkpoint: every rank its own file, all or nothing."""

from __future__ import annotations

import copy
import errno
import hashlib
import io
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.dcp import METADATA, REST
from lightning_zero.checkpoint.rank_file import RankFile, Written
from lightning_zero.checkpoint.shard_tensor import ShardTensor
from lightning_zero.checkpoint.sharded import shards_in
from lightning_zero.comm.channel import Channel

__all__ = ["ShardedSave", "split_rest"]


@dataclass
class ShardedSave:
    """One checkpoint on its way to the disk.

    Attributes:
        target: Rank 0's path, on every rank.
        planner: torch's, with this rank's entries.
        rest: What goes into `meta.pt`, pickled; empty on other ranks than 0.
        channel: Between the ranks.
    """

    target: Path
    planner: DefaultSavePlanner
    rest: io.BytesIO
    channel: Channel

    @classmethod
    def prepare(
        cls,
        checkpoint: dict[str, Any],
        target: Path,
        shards: Mapping[str, ShardTensor],
        channel: Channel,
    ) -> ShardedSave:
        """Agrees on what is to be written. Collective.

        Rank 0's dict says which entries there are and what they are called: hooks that change it on
        one rank only are as good as with a full file. The other ranks bring their shards.

        Args:
            checkpoint: As Lightning made it and hooks have changed it.
            target: Where to.
            shards: All shards that this rank has made for it, by source.
            channel: Its session is held.
        """
        is_first = channel.rank == 0
        planner = DefaultSavePlanner()
        rest = io.BytesIO()
        agreed: dict[str, tuple[str, torch.dtype]] = {}

        def read_dict() -> None:
            if is_first:
                tree, others = split_rest(checkpoint)
                torch.save(others, rest)
                planner.set_up_planner(tree, is_coordinator=True)
                for name, value in planner.state_dict.items():
                    if isinstance(value, ShardTensor):
                        agreed[name] = (value.source, value.dtype)

        channel.attempt(read_dict)
        target, entries = channel.broadcast((target, agreed))

        def bring_shards() -> None:
            if not is_first:
                planner.set_up_planner(
                    {name: shards[source].cast(dtype) for name, (source, dtype) in entries.items()}
                )
                planner.mappings = {}  # rank 0's has all names, in their order

        channel.attempt(bring_shards)
        return cls(target, planner, rest, channel)

    @property
    def snapshot_bytes(self) -> int:
        """What `snapshot` takes for this rank's shards."""
        shards = [v for v in self.planner.state_dict.values() if isinstance(v, ShardTensor)]
        return sum({_key(shard): shard.owned_bytes for shard in shards}.values())

    def snapshot(self, memory: dict[str, Tensor], *, pin: bool) -> None:
        """Copies this rank's values, so that training may go on before they are written. Local.

        Args:
            memory: Of the save before, used again; afterwards of this one.
            pin: Into page-locked memory, as copies from a GPU want it.
        """
        entries = self.planner.state_dict
        kept: dict[str, Tensor] = {}
        for name, value in entries.items():
            if isinstance(value, ShardTensor):
                key = _key(value)
                if key not in kept:
                    kept[key] = _copy_of(value, memory.get(key), pin)
                entries[name] = _reading(value, kept[key])
            elif isinstance(value, Tensor):
                entries[name] = value.detach().to("cpu", copy=True)
            else:
                entries[name] = copy.deepcopy(value)
        memory.clear()
        memory.update(kept)
        if pin:
            torch.cuda.synchronize()

    def run(self) -> None:
        """Writes, and puts the directory in place when every rank has. Collective; waits.

        Raises:
            OSError: The disk is full, or the path cannot be written to; on every rank. What was at
                the path is as it was.
        """
        channel = self.channel
        is_first = channel.rank == 0
        folder: Path | None = None
        try:
            made = channel.attempt(lambda: directory.begin(self.target) if is_first else None)
            folder = channel.broadcast(made[0] if made else None)
            assert folder is not None
            metadata = self._plan()
            file = RankFile(folder, channel.rank)
            written = channel.attempt(lambda: file.write(self.planner))
            if metadata is None or written is None:
                channel.attempt(lambda: None)
            else:
                channel.attempt(partial(self._finish, folder, metadata, written))
        except BaseException as error:
            if is_first and folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full() from error
            raise

    def _plan(self) -> Metadata | None:
        """Torch's plan of the whole: on rank 0."""
        metadata: Metadata | None = None
        plans = self.channel.attempt(self.planner.create_local_plan)

        def merge() -> None:
            nonlocal metadata
            if plans is not None:
                _, metadata = self.planner.create_global_plan(plans)
                entries = metadata.state_dict_metadata  # by rank; readers like the module's order
                metadata.state_dict_metadata = {
                    name: entries[name] for name in self.planner.state_dict if name in entries
                }

        self.channel.attempt(merge)
        return metadata

    def _full(self) -> OSError:
        """What to say when the disk was full, after the files are gone again. Collective."""
        shards = [v for v in self.planner.state_dict.values() if isinstance(v, ShardTensor)]
        needed = self.channel.gather(sum(shard.owned_bytes for shard in shards))
        measured = self.channel.attempt(lambda: shutil.disk_usage(self.target.parent).free)
        total, free = self.channel.broadcast((sum(needed or []), (measured or [0])[0]))
        return OSError(
            errno.ENOSPC,
            f"the disk is full: the checkpoint needs {total} bytes, and {free} are free there; "
            "what was there is unharmed. Free some space or save elsewhere",
            str(self.target),
        )

    def _finish(self, folder: Path, metadata: Metadata, written: list[Written]) -> None:
        for one in written:
            file = folder / one.file
            if not file.is_file() or file.stat().st_size != one.num_bytes:
                raise OSError(
                    errno.EIO,
                    f"{one.file} was written by another rank and is not seen on rank 0; a sharded "
                    "checkpoint needs a folder that all ranks share",
                    str(self.target),
                )
        FileSystemWriter(folder).finish(metadata, [one.results for one in written])
        with open(folder / REST, "wb") as rest:
            rest.write(self.rest.getbuffer())
            rest.flush()
            os.fsync(rest.fileno())
        digests = {one.file: one.digest for one in written}
        digests[REST] = hashlib.sha256(self.rest.getbuffer()).hexdigest()
        digests[METADATA] = directory.hash_file(folder / METADATA)
        directory.write_checksums(folder, digests)
        directory.put_in_place(folder, self.target)


def split_rest(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
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
    elif not isinstance(value, Mapping) or any(isinstance(v, ShardTensor) for v in value.values()):
        tree[key] = value
    else:
        tree[key], rest[key] = {}, {}
        for name, part in value.items():
            _split(name, part, tree[key], rest[key])


def _key(shard: ShardTensor) -> str:
    return f"{shard.source} as {shard.dtype}"  # tied tensors are copied once


def _copy_of(shard: ShardTensor, memory: Tensor | None, pin: bool) -> Tensor:
    numel = len(shard.owned)
    if memory is None or memory.numel() != numel:
        memory = torch.empty(numel, dtype=shard.dtype, pin_memory=pin)
    return memory.copy_(shard.read_owned(), non_blocking=pin)


def _reading(shard: ShardTensor, kept: Tensor) -> ShardTensor:
    origin = shard.owned.start

    def read(start: int, stop: int) -> Tensor:
        return kept[start - origin : stop - origin]

    return ShardTensor.of(shard.source, shard.shape, shard.dtype, shard.owned, read)
