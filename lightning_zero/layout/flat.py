"""Flat layout of a bucket: the position of each parameter, and the part that each rank owns.

    flat space of a bucket, N = 3 ranks, parameters a, b, c, padding '.'

    |aaaaaaaaaaaa..|bbbbbbbbbbbbbbbbbbbbbbbb|cccccc......|    FlatLayout
    |<-- shard 0 ----->|<-- shard 1 ----->|<-- shard 2 ->|

    |bbbbbbbbbbbbbbbbbbbbbbbb|    OwnedLayout of rank 0
    |aaaaaaaaaaaa..|             of rank 1
    |cccccc..|                   of rank 2

Shard boundaries ignore parameter boundaries. Every rank has exactly 1/N, and its slice of a
parameter is a contiguous range of row-major elements, possibly empty. Where the optimizer treats
every element independently, each rank steps its slices.

[Note: Tensor owners] Where the optimizer needs full tensors, each parameter has an owner, the rank
that steps all of it. Only for the step, an all-to-all sends slices of parameters and gradients to
the owners, and another one sends the new values back. So forward and backward have equal shards in
every case: on NCCL a single all-gather and reduce-scatter, where shards of different lengths would
need N broadcasts and N reductions. Owners are assigned over the entire model (`assign_owners`), so
that the numbers of elements that ranks step are about equal, though not in one bucket.

`FlatLayout` answers for all ranks, and `ShardLayout` and `OwnedLayout` for one of them, where the
elements of a slot are in flat tensors. No other module computes such positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

__all__ = [
    "ALIGN_NUMEL",
    "FlatLayout",
    "OwnedLayout",
    "ShardLayout",
    "Slot",
    "StateBlocks",
    "StateLayouts",
    "assign_owners",
]

# 64 bytes of bfloat16: a cache line, and more than the 16 bytes that tensor-core kernels require.
ALIGN_NUMEL = 32


@dataclass(frozen=True)
class StateBlocks:
    """Optimizer states that have one number for each block of elements of a parameter.

    The first block begins with the first row-major element of the full tensor. Most optimizers have
    no such states.

    Attributes:
        numel: Elements of a block.
        keys: Keys of these states, each 1-D.
        memory_keys: Keys of the states that are in memory where others are in files, each of which
            has the length of a shard: those of blocks, and those that few parameters have.
        nbytes: Bytes of all states for the elements of a block, of a large parameter.
    """

    numel: int = 1
    keys: frozenset[str] = frozenset()
    memory_keys: frozenset[str] = frozenset()
    nbytes: int = 0


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in the flat space.

    Attributes:
        owner: Rank that steps the full parameter. None: every rank steps its slice.
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
        slots: Parameters in order, each aligned to a multiple of `ALIGN_NUMEL`.
        shard_numel: Elements of every rank's shard, padding included; aligned in the same way.
        world_size: Number of shards.
    """

    slots: tuple[Slot, ...]
    shard_numel: int
    world_size: int

    @classmethod
    def of(
        cls,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        world_size: int,
        owners: Sequence[int] | None = None,
        block_numel: int = 1,
    ) -> FlatLayout:
        """Lays named shapes out one after another and pads the end to `world_size` equal shards.

        Args:
            shapes: Names and shapes of the parameters.
            world_size: Number of shards.
            owners: Rank that steps each parameter as a full tensor; None: every rank steps slices.
            block_numel: Elements of the blocks that shards do not divide. See `StateBlocks`.
        """
        align = math.lcm(ALIGN_NUMEL, block_numel)
        slots = []
        stop = 0
        named = list(shapes)
        by_slot: Sequence[int | None] = [None] * len(named) if owners is None else owners
        for (name, shape), owner in zip(named, by_slot, strict=True):
            slots.append(Slot(name, tuple(shape), _aligned(stop, align), owner))
            stop = slots[-1].stop
        shard_numel = _aligned(max(1, math.ceil(stop / world_size)), align)
        return cls(tuple(slots), shard_numel, world_size)

    @property
    def numel(self) -> int:
        """Elements of the flat space, padding included."""
        return self.shard_numel * self.world_size

    @cached_property
    def has_tensor_owners(self) -> bool:
        """Whether every parameter has an owner."""
        return all(slot.owner is not None for slot in self.slots)

    def shard(self, rank: int) -> range:
        """Range of the flat space that `rank` owns."""
        return range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def owned(self, slot: Slot, rank: int) -> range:
        """Elements of `slot` that `rank` owns, relative to the slot's first one; possibly empty."""
        shard = self.shard(rank)
        start = min(max(shard.start - slot.start, 0), slot.numel)
        stop = min(max(shard.stop - slot.start, start), slot.numel)
        return range(start, stop)

    def of_rank(self, rank: int, *, is_replicated: bool = False) -> ShardLayout:
        """The elements of `rank`; with `is_replicated` all of them, in full shapes."""
        return ShardLayout(self, rank, is_replicated)

    def in_blocks(self, block_numel: int) -> FlatLayout:
        """Layout of tensors that have one number for each block of elements: 1-D slots."""
        slots = tuple(
            Slot(slot.name, (-(-slot.numel // block_numel),), slot.start // block_numel, slot.owner)
            for slot in self.slots
        )
        return FlatLayout(slots, self.shard_numel // block_numel, self.world_size)

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
    """The elements of a bucket that one rank has between uses: 1-D, in slot order.

    Every flat tensor of them (parameters, master, main gradient, an optimizer state) has this
    layout. Unless the layout has tensor owners, the rank steps these elements.

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
        slots = enumerate(self.layout.slots)
        return tuple(s.shape if self.is_replicated else (len(self.owned(i)),) for i, s in slots)

    @cached_property
    def is_stepped(self) -> tuple[bool, ...]:
        """Whether this rank steps each slot, or a slice of it, which may be empty: True."""
        return (True,) * len(self.layout.slots)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Splits a tensor of these elements into 1-D views, by slot."""
        return [flat[own.start : own.stop] for own in self.ranges]

    def within(self, index: int, start: int, stop: int) -> range:
        """Elements of slot `index` in [start, stop), counted as `ranges`; possibly empty."""
        own = self.ranges[index]
        first = max(own.start, start)
        return range(first, max(first, min(own.stop, stop)))


class StateLayouts:
    """Layouts of one rank's shards of the optimizer states of a bucket, by key.

    Args:
        layout: Elements of the rank.
        blocks: Blocks of the states.
    """

    def __init__(self, layout: ShardLayout, blocks: StateBlocks) -> None:
        self._elements = layout
        self._blocks = blocks

    @cached_property
    def _in_blocks(self) -> ShardLayout:
        elements = self._elements
        in_blocks = elements.layout.in_blocks(self._blocks.numel)
        return in_blocks.of_rank(elements.rank, is_replicated=elements.is_replicated)

    def is_in_blocks(self, key: str) -> bool:
        """Whether state `key` has one number for each block of elements."""
        return key in self._blocks.keys

    def of(self, key: str) -> ShardLayout:
        """Layout of state `key`, if it is sharded: the rank's elements, or its blocks."""
        return self._in_blocks if self.is_in_blocks(key) else self._elements

    def part(self, key: str, index: int, part: range) -> slice:
        """Part of the shard of state `key` of slot `index` that belongs to some elements.

        `part`: elements of the slot, counted as `ShardLayout.ranges`; they begin with a block.
        """
        first = self._elements.ranges[index].start
        numel = self._blocks.numel if self.is_in_blocks(key) else 1
        return slice((part.start - first) // numel, -((first - part.stop) // numel))


@dataclass(frozen=True)
class OwnedLayout:
    """The full tensors of a bucket that one rank owns, in a step: 1-D, in slot order.

    Padding after a tensor counts as part of it, so that each tensor is aligned. Its methods and
    attributes have the meaning of those of `ShardLayout`; a slot of another owner has no elements.
    See [Note: Tensor owners].

    Attributes:
        layout: Layout of the bucket, in which every slot has an owner.
        rank: The rank.
    """

    layout: FlatLayout
    rank: int

    def owned(self, index: int) -> range:
        """Elements of slot `index`: all of them or none."""
        slot = self.layout.slots[index]
        return range(slot.numel if slot.owner == self.rank else 0)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        ranges, start = [], 0
        for index, slot in enumerate(self.layout.slots):
            own = self.owned(index)
            ranges.append(range(start, start + len(own)) if own else range(0))
            start += _aligned(slot.numel) if slot.owner == self.rank else 0
        return tuple(ranges)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(s.shape if s.owner == self.rank else (0,) for s in self.layout.slots)

    @cached_property
    def is_stepped(self) -> tuple[bool, ...]:
        return tuple(slot.owner == self.rank for slot in self.layout.slots)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Splits a tensor of these elements into 1-D views, by slot."""
        return [flat[own.start : own.stop] for own in self.ranges]

    @cached_property
    def shard_parts(self) -> tuple[tuple[range, ...], ...]:
        """Parts of this rank's shard with the tensors of each owner, by owner, in slot order."""
        return tuple(self._parts(self.rank, owner) for owner in range(self.layout.world_size))

    @cached_property
    def shard_numels(self) -> list[int]:
        """Elements in `shard_parts`, by owner."""
        return [sum(map(len, parts)) for parts in self.shard_parts]

    @cached_property
    def numels(self) -> list[int]:
        """Elements of the tensors of this rank in the shard of each rank, by rank.

        Joined in the order of ranks, they are the tensors in slot order.
        """
        ranks = range(self.layout.world_size)
        return [sum(map(len, self._parts(rank, self.rank))) for rank in ranks]

    @cached_property
    def numel(self) -> int:
        return sum(self.numels)

    def _parts(self, rank: int, owner: int) -> tuple[range, ...]:
        """Ranges of the shard of `rank` with tensors of `owner`, none of them empty."""
        shard = self.layout.shard(rank)
        parts = []
        for slot in self.layout.slots:
            start = max(slot.start, shard.start)
            stop = min(_aligned(slot.stop), shard.stop)
            if slot.owner == owner and start < stop:
                parts.append(range(start - shard.start, stop - shard.start))
        return tuple(parts)


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


def _aligned(numel: int, align: int = ALIGN_NUMEL) -> int:
    return -(-numel // align) * align
