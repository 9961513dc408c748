"""Where every parameter of a bucket lies in one flat space, and which part of it each rank owns.

    flat space of a bucket, N = 3 ranks, parameters a, b, c, padding '.'

    |aaaaaaaaaaaa..|bbbbbbbbbbbbbbbbbbbbbbbb|cccccc......|
    |<-- shard 0 ----->|<-- shard 1 ----->|<-- shard 2 ->|

Shard boundaries ignore parameter boundaries, so every rank owns exactly 1/N. A rank's share of a
parameter is a contiguous range of its row-major elements, possibly empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ALIGN_NUMEL", "Layout", "Slot"]

# 64 bytes of bfloat16: a cache line, and more than the 16 bytes that tensor-core kernels ask for.
ALIGN_NUMEL = 32


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the flat space.

    Attributes:
        name: Qualified name of the parameter.
        shape: Its shape.
        start: First element, in the flat space.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element, in the flat space."""
        return self.start + self.numel


@dataclass(frozen=True)
class Layout:
    """The flat space of one bucket.

    Attributes:
        slots: The parameters in order, each aligned to `ALIGN_NUMEL`.
        world_size: Number of shards.
        shard_numel: Elements of every shard, padding included; a multiple of `ALIGN_NUMEL`.
    """

    slots: tuple[Slot, ...]
    world_size: int
    shard_numel: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], world_size: int) -> Layout:
        """Lays named shapes out one after another and pads the end to `world_size` equal shards."""
        slots = []
        stop = 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), _round_up(stop, ALIGN_NUMEL)))
            stop = slots[-1].stop
        shard_numel = _round_up(max(1, math.ceil(stop / world_size)), ALIGN_NUMEL)
        return cls(tuple(slots), world_size, shard_numel)

    @property
    def numel(self) -> int:
        """Elements of the flat space, padding included: `world_size * shard_numel`."""
        return self.world_size * self.shard_numel

    @property
    def parameter_numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def shard(self, rank: int) -> range:
        """The part of the flat space that `rank` owns."""
        return range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def owned(self, slot: Slot, rank: int) -> range:
        """Elements of `slot`, counted from its own first one, that `rank` owns; possibly empty."""
        return self.within(slot, self.shard(rank))

    def within_shard(self, slot: Slot, rank: int) -> range:
        """The same elements, counted from the first one of the shard of `rank`."""
        owned = self.owned(slot, rank)
        start = slot.start + owned.start - rank * self.shard_numel if owned else 0
        return range(start, start + len(owned))

    @staticmethod
    def within(slot: Slot, part: range) -> range:
        """Elements of `slot`, counted from its own first one, that lie in `part`."""
        start = min(max(part.start - slot.start, 0), slot.numel)
        stop = min(max(part.stop - slot.start, start), slot.numel)
        return range(start, stop)

    def gaps(self) -> list[range]:
        """The padding: ranges of the flat space that belong to no parameter."""
        edges = [0]
        for slot in self.slots:
            edges += [slot.start, slot.stop]
        edges.append(self.numel)
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [range(start, stop) for start, stop in pairs if stop > start]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
