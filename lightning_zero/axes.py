"""Process groups along the two axes of a `Mesh`, and the all-reduce over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.exchange import Native, Pending, backend_for
from lightning_zero.flight import Mark
from lightning_zero.mesh import Mesh
from lightning_zero.recorder import Recorder

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
        return _GlooAllReduce(group, mesh.num_replicas)
    return Native(None, group, mesh.replica_rank, mesh.num_replicas, device, recorder)


class _GlooAllReduce:
    """Gloo's own all-reduce, which goes on in its threads whether anybody waits or not.

    `PeerToPeer` would send its second half only when it is waited for.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, whole: Tensor) -> Pending:
        """See `AllReduce`."""
        return _Summing(dist.all_reduce(whole, group=self._group, async_op=True), whole, self._size)


class _Summing:
    """A sum under way, which becomes a mean."""

    marks: tuple[Mark, Mark] | None = None

    def __init__(self, work: Any, tensor: Tensor, size: int) -> None:
        self._work = work
        self._tensor: Tensor | None = tensor
        self._size = size

    def wait(self) -> None:
        """See `Pending`."""
        work, self._work = self._work, None  # gloo's may be waited for once only
        if work is not None:
            work.wait()
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            tensor.mul_(1 / self._size)
