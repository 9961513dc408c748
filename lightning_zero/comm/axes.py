"""Process groups along the two axes of a `Mesh`, and the all-reduce over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.backends import GlooAllReduce, Native, Pending, backend_for
from lightning_zero.layout.mesh import Mesh
from lightning_zero.record.recorder import Recorder

__all__ = ["AllReduce", "Axes", "open_axes", "replica_exchange"]


class AllReduce(Protocol):
    """Averages over the ranks that hold the same shard."""

    def all_reduce(self, whole: Tensor) -> Pending:
        """Averages `whole` in place."""


@dataclass(frozen=True)
class Axes:
    """This rank's groups.

    Attributes:
        world: Small sums and broadcasts.
        shard: Reductions within the group; `world` where that is all ranks.
        gather: Gathers within it; None where they share `shard`.
        replica: The ranks that hold the same shard; None where there is one replica.
    """

    world: Any
    shard: Any
    gather: Any = None
    replica: Any = None

    @property
    def groups(self) -> list[Any]:
        """Those that there are, each once."""
        shard = None if self.shard is self.world else self.shard
        groups = (self.gather, shard, self.replica, self.world)
        return [group for group in groups if group is not None]


def open_axes(mesh: Mesh, world: Any, *, has_gather_group: bool, timeout: timedelta | None) -> Axes:
    """Makes the groups. Collective: every rank takes part in making every group, in one order."""

    def along(axis: list[list[int]]) -> Any:
        made = [dist.new_group(ranks, timeout=timeout) for ranks in axis]
        return next(group for group, ranks in zip(made, axis, strict=True) if mesh.rank in ranks)

    is_divided = mesh.num_replicas > 1
    return Axes(
        world,
        shard=along(mesh.groups()) if is_divided else world,
        gather=along(mesh.groups()) if has_gather_group else None,
        replica=along(mesh.replicas()) if is_divided else None,
    )


def replica_exchange(group: Any, mesh: Mesh, device: torch.device, recorder: Recorder) -> AllReduce:
    """How a shard is averaged over `group`, on a stream of its own where there are streams."""
    if backend_for(device) == "gloo":
        return GlooAllReduce(group, mesh.num_replicas)
    return Native(None, group, mesh.replica_rank, mesh.num_replicas, device, recorder)
