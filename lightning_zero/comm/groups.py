"""The process groups of an engine: along which axes they are made, and how they are cut."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.layout.mesh import Mesh

__all__ = ["Axes", "cut_connections", "open_axes"]


@dataclass(frozen=True)
class Axes:
    """This rank's groups for data.

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


def cut_connections(groups: Iterable[Any]) -> None:
    """Ends what is under way on groups, on this rank: gloo's connections close, NCCL aborts.

    NCCL's groups end all together: one alone may wait for a kernel that waits for another's
    (https://github.com/pytorch/pytorch/issues/119797). Groups that are destroyed are left out.
    """
    known: list[tuple[Any, set[str]]] = []
    for group in groups:
        with suppress(RuntimeError, ValueError):
            dist.get_backend(group)  # raises where it is destroyed
            # Of a group with one for each kind of device the name tells none of them.
            devices = group._device_types
            known.append((group, {group._get_backend(d).name().lower() for d in devices}))
    of_nccl = [group for group, backends in known if "nccl" in backends]
    if of_nccl:
        backend = of_nccl[0]._get_backend(torch.device("cuda"))
        backend._group_start()
        for group in of_nccl:
            with suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group(group)
        backend._group_end()
    for group, backends in known:
        if "gloo" in backends:
            _close_pairs(group)


def _close_pairs(group: Any) -> None:
    """Closes a group's connections of gloo.

    Destroying the group does not while anything, a transfer or a traceback, refers to it. A receive
    that times out closes those with all peers; where the peer has gone it fails, and closes none.
    """
    nothing = torch.empty(1)
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([nothing], peer, 2**30).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
