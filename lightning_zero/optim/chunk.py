"""A shard in the chunks in which it is stepped: what rests in files passes through one buffer.

[Note: Homes in a step] A shard has up to five kinds of flat tensors: the master, the parameters
that follow from it, the gradient, and the optimizer's states (Adam: two). Each has a home: memory
of the device where the bucket is stepped, other memory, or a file. What rests in files passes
through buffers of fixed size, so the shard is stepped in chunks; the rest is used where it is, or
copied for the chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.core.bucket import Bucket
from lightning_zero.tiers import PAGE_BYTES, InFile, Piece

__all__ = ["Chunk", "chunks_of", "part_of"]

MASTER, PARAM, GRAD = "master", "param", "grad"


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a shard.

    Attributes:
        start: A multiple of the page size.
        stop: One past the last element.
        is_first: The first chunk, which also stands for parameters of which this rank owns nothing.
        pieces: What of it rests in files.
        names: Of the pieces: "master", "param", "grad", or "state." and a key.
        dtypes: Of the pieces.
    """

    start: int
    stop: int
    is_first: bool
    pieces: tuple[Piece, ...]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    def tensors(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """By name, the pieces as 1-D tensors of `stop - start` elements.

        Args:
            views: uint8, one for each piece.
        """
        numel = self.stop - self.start
        named = zip(self.names, views, self.dtypes, strict=True)
        return {name: view.view(dtype)[:numel] for name, view, dtype in named}


def chunks_of(bucket: Bucket, slots: Collection[int]) -> list[Chunk]:
    """The chunks that hold anything of `slots`; one where everything is in memory."""
    files = _files_of(bucket)
    numel = bucket.shards.stepped().numel
    step = numel
    if files:
        itemsize = sum(home.dtype.itemsize for home in files.values())
        nbytes = bucket.shards.storage.step_buffer_bytes
        step = nbytes // itemsize // PAGE_BYTES * PAGE_BYTES
        if not step:
            raise ValueError(
                f"a buffer of {nbytes} bytes cannot hold {PAGE_BYTES} elements of all {len(files)} "
                f"tensors of {bucket.plan.name} that rest in files; use a larger buffer_size."
            )
    chunks = []
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        if start and not any(part_of(bucket, index, start, stop) for index in slots):
            continue
        pieces = [
            home.piece(start, stop, is_read=name != PARAM, is_written=name != GRAD)
            for name, home in files.items()
        ]
        dtypes = tuple(home.dtype for home in files.values())
        chunks.append(Chunk(start, stop, start == 0, tuple(pieces), tuple(files), dtypes))
    return chunks


def part_of(bucket: Bucket, index: int, start: int, stop: int) -> range:
    """Elements of the shard within [start, stop) that belong to slot `index`."""
    own = bucket.shards.own_range(index)
    first = max(own.start, start)
    return range(first, max(first, min(own.stop, stop)))


def _files_of(bucket: Bucket) -> Mapping[str, InFile]:
    """By name, the homes that are files and pass through buffers."""
    if bucket.plan.layout.holds_whole_tensors:
        return {}  # a chunk would end within a tensor: its shard is read and written at once
    homes = {MASTER: bucket.shards.stepped(), GRAD: bucket.grads.home}
    if bucket.shards.has_own_master:
        homes[PARAM] = bucket.shards.follower
    homes.update((f"state.{key}", home) for key, home in bucket.shards.state_homes.items())
    return {name: home for name, home in homes.items() if isinstance(home, InFile)}
