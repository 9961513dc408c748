"""Buffers of a module, such as BatchNorm's statistics, copied from rank 0 as DDP copies them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """Buffers such as BatchNorm's statistics, which every rank copies from rank 0.

    They are copied when DDP copies them: before a forward, if an earlier one may have changed them,
    even before the backward of the earlier one.

    Attributes:
        are_fresh: Whether they are unchanged since the last copy: no forward with gradients has run
            since, except in micro-batches that end no step.
        were_copied: Whether they have been copied at least once.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, is_on: bool) -> None:
        self.are_fresh = self.were_copied = False
        self._module = module
        self._comm = comm
        self._is_on = is_on and comm.size > 1  # else each rank keeps its own
        self._has_shared = False  # in the last `refresh`

    @property
    def is_due(self) -> bool:
        """Whether `refresh` would be collective."""
        if self.are_fresh or not self._is_on:
            return False
        return next(self._module.buffers(), None) is not None

    def note_forward(self, *, may_change: bool) -> None:
        """Notes a forward that changes buffers or not, as far as the next copy must know."""
        self.are_fresh = not may_change

    def refresh(self) -> None:
        """Copies rank 0's buffers to all ranks, unless they are fresh. Collective."""
        self._has_shared = not self.are_fresh
        if self._has_shared:
            self._share()
        self.are_fresh = self.were_copied = True

    def share_again(self) -> None:
        """Repeats the copy of `refresh`, after each rank has written to buffers. Collective."""
        has_shared, self._has_shared = self._has_shared, False
        if has_shared:
            self._share()

    def _share(self) -> None:
        if not self._is_on:
            return
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._module.buffers():
            if buffer.layout is not torch.strided:
                continue  # no backend communicates it: each rank keeps its own
            groups.setdefault(buffer.dtype, []).append(buffer)
        for buffers in groups.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._comm.broadcast_(flat.view(torch.uint8))  # backends do not support every dtype
            if self._comm.rank:
                parts = flat.split([buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    # A graph that has saved it stays valid, as under DDP.
                    with torch.autograd._unsafe_preserve_version_counter(buffer):  # type: ignore[attr-defined]
                        buffer.detach().copy_(part.view_as(buffer))
