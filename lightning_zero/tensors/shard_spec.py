"""Which part of one parameter each rank has, and where the elements of this rank are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.layout.flat import FlatLayout, Slot
from lightning_zero.layout.mesh import Mesh

__all__ = ["ShardSpec", "InMemoryShard", "LocalShard"]


class ShardComm(Protocol):
    """The ranks that have a shard of one parameter: of `Communicator`, what is asked here."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def device(self) -> torch.device: ...

    def sum_over_shards_(self, values: Tensor, name: str) -> Tensor: ...

    def max_(self, values: Tensor, name: str) -> Tensor: ...

    def wait_for_cpu_copies(self) -> None: ...


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Which elements of one parameter each rank has."""

    slot: Slot
    layout: FlatLayout  # of its bucket
    comm: ShardComm

    @property
    def owned(self) -> range:
        """This rank's row-major elements."""
        return self.layout.owned(self.slot, self.comm.mesh.shard_rank)

    @cached_property
    def _ranges(self) -> tuple[range, ...]:
        ranks = range(self.layout.world_size)
        return tuple(self.layout.owned(self.slot, rank) for rank in ranks)

    def matches(self, other: ShardSpec) -> bool:
        """Whether every rank has the same elements of both. The same answer on every rank."""
        if self.comm is not other.comm:
            return False
        is_one = self.layout is other.layout and self.slot == other.slot
        return is_one or self._ranges == other._ranges


class LocalShard(Protocol):
    """This rank's elements, wherever they rest."""

    def read(self) -> Tensor:
        """They, 1-D and plain: a view of memory, or a copy of what rests in a file."""

    def change(self, write: Callable[[Tensor], object]) -> None:
        """Lets `write` change them in place: 1-D and plain."""

    @property
    def version(self) -> int:
        """Counts their changes, the same on every rank."""

    def check_memory(self, call: str, num_bytes: int) -> None:
        """Raises where full values do not fit into memory. Collective: `call` is what asks."""


@dataclass(frozen=True)
class InMemoryShard:
    """A part in memory: of a result, say."""

    values: Tensor
    version: int = 0

    def read(self) -> Tensor:
        return self.values

    def change(self, write: Callable[[Tensor], object]) -> None:
        write(self.values)

    def check_memory(self, call: str, num_bytes: int) -> None:
        """Nothing: what it was computed from has been asked."""
