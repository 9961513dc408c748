"""Buffers such as BatchNorm's statistics, which all ranks have from rank 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """Those of one module.

    Args:
        module: Whose buffers they are.
        comm: Copies them.
        is_on: Copy at all; else each rank keeps its own.

    Attributes:
        are_fresh: No forward has changed them since they were copied, or a backward needs them.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, is_on: bool) -> None:
        self.are_fresh = False
        self._module = module
        self._comm = comm
        self._is_on = is_on
        self._has_shared = False  # by the last `refresh`

    @property
    def is_due(self) -> bool:
        """`refresh` is collective."""
        if self.are_fresh or not self._is_on or self._comm.size == 1:
            return False
        return next(self._module.buffers(), None) is not None

    def refresh(self) -> None:
        """Copies rank 0's to all ranks, unless they are fresh. Collective."""
        self._has_shared = not self.are_fresh
        if self._has_shared:
            self._share()
        self.are_fresh = True

    def share_again(self) -> None:
        """After each rank has written to those that `refresh` has copied, if any. Collective."""
        has_shared, self._has_shared = self._has_shared, False
        if has_shared:
            self._share()

    def _share(self) -> None:
        if not self._is_on or self._comm.size == 1:
            return
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._module.buffers():
            if buffer.layout is not torch.strided:
                continue  # no backend sends it: each rank has its own
            groups.setdefault(buffer.dtype, []).append(buffer)
        for buffers in groups.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._comm.broadcast_(flat.view(torch.uint8))  # backends do not know every dtype
            if self._comm.rank:
                parts = flat.split([buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.detach().copy_(part.view_as(buffer))
