"""The last part of a mean gradient: from one group's share of the ranks to all of them.

[Note: Partial means] A reduction gives each rank its shard of the mean over its group. It is summed
over micro-batches as it is, and averaged over replicas once, with the last of them: sums and means
may change places, and a mean that is complete, which is the same on every replica, stays what it
is. So the links between groups carry one shard for each step, not for each micro-batch, and until
then `.grad` is this group's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.tiers.grad_offload import GradHome

__all__ = ["ReplicaMean"]


class ReplicaMean:
    """How far the shard of one bucket has come. See [Note: Partial means].

    Attributes:
        is_partial: What rests is this group's; the same on every rank, unless a user has zeroed
            gradients on some.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        self.is_partial = False
        self._comm = comm
        self._name = name
        self._pending: Pending | None = None

    @property
    def is_under_way(self) -> bool:
        """Somebody else writes to the shard."""
        return self._pending is not None

    def add(self) -> None:
        """A mean over the group has been added."""
        self.is_partial = self._comm.mesh.num_replicas > 1

    def begin(self, shard: Tensor) -> None:
        """Issues the average of `shard`, in place. Collective."""
        if self._pending is None and self._comm.mesh.num_replicas > 1:
            self._pending = self._comm.average_replicas(shard, self._name)

    def finish(self) -> None:
        """Waits for what `begin` issued. At the end of backward only: others come late to it."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self.is_partial = False

    def average_at_home(self, home: GradHome, numel: int) -> None:
        """Averages a shard that does not rest on the device, where it rests. Collective; waits."""

        def average(values: Tensor) -> None:
            travelling = values.to(self._comm.device)
            self._comm.average_replicas(travelling, self._name).wait()
            if travelling is not values:
                values.copy_(travelling)

        if self._comm.mesh.num_replicas > 1:
            with torch.no_grad():
                home.apply_(average, 0, numel)
            self.is_partial = False

    def drop(self) -> None:
        """Forgets what is under way, after an exception."""
        if self._pending is not None:
            self._comm.forget(self._pending)
        self._pending = None
        self.is_partial = False
