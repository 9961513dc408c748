"""Elements of one parameter that each rank has, and access to the elements of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.layout.flat import FlatLayout, Slot
from lightning_zero.layout.mesh import Mesh
from lightning_zero.tensors.live import LiveTensors

__all__ = ["DetachableShard", "InMemoryShard", "LocalShard", "ShardSpec"]


class ShardComm(Protocol):
    """The part of `Communicator` that sharded tensors use."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def device(self) -> torch.device: ...

    def sum_over_shards_(self, values: Tensor, name: str) -> Tensor: ...

    def max_(self, values: Tensor, name: str) -> Tensor: ...

    def all_gather_shards(
        self, shard: Tensor, name: str, split_sizes: Sequence[int] | None
    ) -> Tensor: ...

    def announce(self, name: str) -> None: ...


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Sharding of one parameter over the ranks of a shard group.

    Attributes:
        slot: Slot of the parameter in its bucket.
        layout: Layout of the bucket.
        comm: Communicator of the ranks that have a shard.
        drain: Waits for a worker thread that steps parameters; called before an all-gather,
            because the all-gathers of those steps come first on all ranks.
        live: Sharded tensors of the engine that are alive.
        number: Number of the parameter among these.
    """

    slot: Slot
    layout: FlatLayout
    comm: ShardComm
    drain: Callable[[], object]
    live: LiveTensors
    number: int

    @property
    def owned(self) -> range:
        """This rank's row-major elements."""
        return self.layout.owned(self.slot, self.comm.mesh.shard_rank)

    @cached_property
    def _ranges(self) -> tuple[range, ...]:
        ranks = range(self.layout.world_size)
        return tuple(self.layout.owned(self.slot, rank) for rank in ranks)

    def all_gather(self, own: Tensor, name: str) -> Tensor:
        """All elements of a tensor that is sharded in this way: new, on the device of `comm`.

        Collective: every rank.

        Args:
            own: This rank's elements: 1-D, of any dtype, on any device.
            name: Name of the all-gather in reports of long waits.
        """
        self.drain()
        # No shard may be empty: ranks before and after those with elements send one more.
        sizes = [max(len(owned), 1) for owned in self._ranges]
        shard = own if own.numel() else own.new_zeros(1)
        start = next((rank for rank, owned in enumerate(self._ranges) if owned), 0)
        flat = self.comm.all_gather_shards(shard, name, sizes)
        return flat[start : start + self.slot.numel]

    def matches(self, other: ShardSpec) -> bool:
        """Whether every rank has the same elements of both. The result is equal on all ranks."""
        if self.comm is not other.comm:
            return False
        is_one = self.layout is other.layout and self.slot == other.slot
        return is_one or self._ranges == other._ranges


class LocalShard(Protocol):
    """Access to this rank's elements, in memory or in a file."""

    def read(self) -> Tensor:
        """The elements, 1-D and plain: a view of memory, or a copy read from a file."""

    def change(self, write: Callable[[Tensor], object]) -> None:
        """Calls `write` with the elements, 1-D and plain, to change them in place."""

    def check_memory(self, call: str, num_bytes: int) -> None:
        """Raises if full values do not fit into memory. Collective: every rank.

        Args:
            call: Name of the operation that needs them, for the error.
            num_bytes: Size of the full values.
        """


class DetachableShard(LocalShard, Protocol):
    """Access to elements of a parameter or gradient that may get new values."""

    def detach(self) -> None:
        """Keeps a copy of the present values, which later changes apply to."""


@dataclass(frozen=True)
class InMemoryShard:
    """Elements in memory, such as those of a result."""

    values: Tensor

    def read(self) -> Tensor:
        return self.values

    def change(self, write: Callable[[Tensor], object]) -> None:
        write(self.values)

    def check_memory(self, call: str, num_bytes: int) -> None:
        """Does nothing: the tensor from which the elements were computed has been checked."""
