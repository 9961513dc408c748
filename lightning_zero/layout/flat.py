"""Flat layout of a bucket: the position of each parameter, and the part that each rank owns.

    flat space of a bucket, N = 3 ranks, parameters a, b, c, padding '.'

    |aaaaaaaaaaaa..|bbbbbbbbbbbbbbbbbbbbbbbb|cccccc......|    FlatLayout.of
    |<-- shard 0 ----->|<-- shard 1 ----->|<-- shard 2 ->|

    |bbbbbbbbbbbbbbbbbbbbbbbb|aaaaaaaaaaaa..|cccccc..|        FlatLayout.of_owned_tensors
    |<------ shard 0 ------->|<- shard 1 -->|<shard 2>|

Where the optimizer treats every element independently, shard boundaries ignore parameter
boundaries. Every rank then owns exactly 1/N, and its slice of a parameter is a contiguous range of
row-major elements, possibly empty. Where the optimizer needs full tensors, each parameter lies in
the shard of one rank, its owner, and a shard has the length of its tensors.

[Note: Shards of different lengths] Owned tensors in shards of equal length would need padding. The
four large matrices of a transformer block would take 2.7 times their elements on 8 ranks, in every
all-gather and in storage; an embedding alone in its bucket would take 8 times. So a shard has the
length of its tensors, collectives take the lengths (`split_sizes`), and owners are assigned over
the entire model (`assign_owners`), where the sizes even out, not bucket by bucket.

`FlatLayout` answers for all ranks, and `ShardLayout` for one of them, where the elements of a slot
are in flat tensors. No other module computes such positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

__all__ = ["ALIGN_NUMEL", "FlatLayout", "ShardLayout", "Slot", "assign_owners"]

# 64 bytes of bfloat16: a cache line, and more than the 16 bytes that tensor-core kernels require.
ALIGN_NUMEL = 32


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in the flat space.

    Attributes:
        owner: Rank whose shard contains the full parameter, and which alone steps it. None: every
            rank owns and steps a slice.
    """

    name: str  # qualified
    shape: tuple[int, ...]
    start: int  # first element, in the flat space
    owner: int | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """One past the last element, in the flat space."""
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The flat space of one bucket.

    Attributes:
        slots: Parameters in order, each aligned to `ALIGN_NUMEL`.
        bounds: First element of each rank's shard, and one past the last element; multiples of
            `ALIGN_NUMEL`. No shard is empty.
    """

    slots: tuple[Slot, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], world_size: int) -> FlatLayout:
        """Lays named shapes out one after another and pads the end to `world_size` equal shards."""
        slots = []
        stop = 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), _aligned(stop)))
            stop = slots[-1].stop
        shard_numel = _aligned(max(1, math.ceil(stop / world_size)))
        return cls(tuple(slots), tuple(rank * shard_numel for rank in range(world_size + 1)))

    @classmethod
    def of_owned_tensors(
        cls,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        owners: Sequence[int],
        world_size: int,
    ) -> FlatLayout:
        """Lays named shapes out by owner: shard after shard, each of the length of its tensors."""
        placed: dict[int, Slot] = {}
        named = list(shapes)
        bounds = [0]
        for rank in range(world_size):
            stop = bounds[-1]
            for index, (name, shape) in enumerate(named):
                if owners[index] == rank:
                    placed[index] = Slot(name, tuple(shape), _aligned(stop), rank)
                    stop = placed[index].stop
            bounds.append(_aligned(max(stop, bounds[-1] + 1)))
        return cls(tuple(placed[index] for index in range(len(named))), tuple(bounds))

    @cached_property
    def world_size(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def numel(self) -> int:
        """Elements of the flat space, padding included."""
        return self.bounds[-1]

    @cached_property
    def shard_numel(self) -> int:
        """Elements of the largest shard, padding included; all are equal without owners."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    @cached_property
    def split_sizes(self) -> tuple[int, ...] | None:
        """Elements of every shard, for collectives; None if they are equal."""
        numels = tuple(stop - start for start, stop in pairwise(self.bounds))
        return numels if len(set(numels)) > 1 else None

    @cached_property
    def has_tensor_owners(self) -> bool:
        """Whether every parameter has an owner."""
        return all(slot.owner is not None for slot in self.slots)

    def shard(self, rank: int) -> range:
        """Range of the flat space that `rank` owns."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def owned(self, slot: Slot, rank: int) -> range:
        """Elements of `slot` that `rank` owns, relative to the slot's first one; possibly empty."""
        start = min(max(self.bounds[rank] - slot.start, 0), slot.numel)
        stop = min(max(self.bounds[rank + 1] - slot.start, start), slot.numel)
        return range(start, stop)

    def of_rank(self, rank: int, *, is_replicated: bool = False) -> ShardLayout:
        """The elements that `rank` steps; with `is_replicated` all of them, in full shapes."""
        return ShardLayout(self, rank, is_replicated)

    @cached_property
    def gaps(self) -> list[range]:
        """Padding: ranges of the flat space that belong to no parameter."""
        edges = [0]
        for slot in sorted(self.slots, key=lambda slot: (slot.start, slot.stop)):
            edges += [slot.start, slot.stop]
        edges.append(self.numel)
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [range(start, stop) for start, stop in pairs if stop > start]


@dataclass(frozen=True)
class ShardLayout:
    """The elements of a bucket that one rank has between uses, and steps: 1-D, in slot order.

    Every flat tensor of them (parameters, master, main gradient, an optimizer state) has this
    layout.

    Attributes:
        layout: Layout of the bucket.
        rank: The rank.
        is_replicated: Whether the rank has all elements, as all others do, not a shard.
    """

    layout: FlatLayout
    rank: int
    is_replicated: bool

    @cached_property
    def in_flat(self) -> range:
        """Range of the flat space, with padding."""
        return range(self.layout.numel) if self.is_replicated else self.layout.shard(self.rank)

    @cached_property
    def numel(self) -> int:
        return len(self.in_flat)

    def owned(self, index: int) -> range:
        """Elements of slot `index`, counted from the slot's first element; possibly empty."""
        slot = self.layout.slots[index]
        return range(slot.numel) if self.is_replicated else self.layout.owned(slot, self.rank)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """`owned` of every slot, counted from the first element of `in_flat`."""
        pairs = [(slot, self.owned(index)) for index, slot in enumerate(self.layout.slots)]
        first = self.in_flat.start
        starts = [slot.start + owned.start - first if owned else 0 for slot, owned in pairs]
        stops = [start + len(owned) for start, (_, owned) in zip(starts, pairs, strict=True)]
        return tuple(map(range, starts, stops))

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape in which each slot is stepped: the full shape, or one dimension."""
        return tuple(
            slot.shape
            if self.is_replicated or slot.owner == self.rank
            else (len(self.owned(index)),)
            for index, slot in enumerate(self.layout.slots)
        )

    @cached_property
    def is_stepped(self) -> tuple[bool, ...]:
        """Whether this rank steps each slot, or a slice of it, which may be empty."""
        owners = (slot.owner for slot in self.layout.slots)
        return tuple(self.is_replicated or owner in (None, self.rank) for owner in owners)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Splits a tensor of these elements into 1-D views, by slot."""
        return [flat[own.start : own.stop] for own in self.ranges]

    def within(self, index: int, start: int, stop: int) -> range:
        """Elements of slot `index` in [start, stop), counted as `ranges`; possibly empty."""
        own = self.ranges[index]
        first = max(own.start, start)
        return range(first, max(first, min(own.stop, stop)))


def assign_owners(numels: Sequence[int], world_size: int) -> list[int]:
    """Assigns each tensor to a rank, so that ranks own about equally many elements.

    The largest tensor comes first; each goes to the rank with the fewest elements so far. The
    largest sum is at most 4/3 of the optimum (R. L. Graham, "Bounds on Multiprocessing Timing
    Anomalies", 1969). The result is the same on every rank.
    """
    loads = [0] * world_size
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += max(numels[index], 1)
    return owners


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL
