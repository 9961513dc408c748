"""Full tensors of one bucket on their owners, for the step of an optimizer that needs them.

See [Note: Tensor owners] in layout/flat.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.layout.flat import OwnedLayout

__all__ = ["Arriving", "FullTensors"]


class Arriving:
    """A tensor that an all-to-all fills.

    Args:
        finish: Returns the tensor, called once the all-to-all is done.
        pending: The all-to-all.
        comm: Communicator of the all-to-all.
    """

    def __init__(self, finish: Callable[[], Tensor], pending: Pending, comm: Communicator) -> None:
        self._finish = finish
        self._pending: Pending | None = pending  # None: it is done
        self._comm = comm

    def wait(self) -> Tensor:
        """Returns the tensor once it is complete."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._finish()

    def discard(self) -> None:
        """Drops the tensor without waiting for other ranks. Local."""
        if self._pending is not None:
            self._comm.discard(self._pending)
            self._pending = None


class FullTensors:
    """Sends shards of one bucket to the owners of its tensors, and full tensors back.

    Attributes:
        layout: Positions of this rank's full tensors, and of all tensors in its shard.
    """

    def __init__(self, layout: OwnedLayout, comm: Communicator, name: str) -> None:
        self.layout = layout
        self._comm = comm
        self._name = name

    def collect(self, shard: Tensor) -> Arriving:
        """Begins to collect this rank's full tensors, in `layout`. Collective: every rank.

        `shard`: this rank's shard of a flat tensor of the bucket: 1-D, on any device. The result is
        on the same device.
        """
        layout, device = self.layout, self._comm.device
        parts = [shard[own.start : own.stop] for parts in layout.shard_parts for own in parts]
        sent = torch.cat(parts) if parts else shard.new_empty(0)
        full = torch.empty(layout.numel, dtype=shard.dtype, device=device)
        pending = self._comm.all_to_all(
            full, sent.to(device), layout.numels, layout.shard_numels, self._name
        )
        return Arriving(lambda: full.to(shard.device), pending, self._comm)

    def distribute(self, full: Tensor, shard: Tensor) -> Arriving:
        """Begins to write all owners' tensors to their shards. Collective: every rank.

        Args:
            full: Result of `collect`, with new values.
            shard: 1-D, on any device; written when the result is waited for. Padding at the end of
                the bucket is left as it is.
        """
        layout, device = self.layout, self._comm.device
        received = torch.empty(sum(layout.shard_numels), dtype=full.dtype, device=device)
        pending = self._comm.all_to_all(
            received, full.to(device), layout.shard_numels, layout.numels, self._name
        )

        def write() -> Tensor:
            start = 0
            for own in (own for parts in layout.shard_parts for own in parts):
                shard[own.start : own.stop].copy_(received[start : start + len(own)])
                start += len(own)
            return shard

        return Arriving(write, pending, self._comm)
