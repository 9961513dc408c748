"""Stepped values on their way from the CPU to a CUDA device, cast on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind
from lightning_zero.tiers.buffers import aligned_empty

__all__ = ["Uploader"]

_BLOCK_BYTES = 2**23
_NUM_BLOCKS = 2


class Uploader:
    """Casts block by block into page-locked memory; one block travels while the next is cast."""

    def __init__(self, device: torch.device, *, pin: bool, recorder: Recorder) -> None:
        self._stream = torch.cuda.Stream(device)
        self._blocks = [aligned_empty(_BLOCK_BYTES, pin=pin) for _ in range(_NUM_BLOCKS)]
        self._events: list[torch.cuda.Event | None] = [None] * _NUM_BLOCKS
        self._next = 0
        self._recorder = recorder

    def send(self, values: Tensor, target: Tensor, name: str) -> None:
        """Copies `values` (1-D, CPU) to `target` (1-D, device); the current stream waits for it."""
        current = torch.cuda.current_stream(target.device)
        self._stream.wait_stream(current)  # whoever reads the old values has been queued before
        step = _BLOCK_BYTES // target.element_size()
        span = self._recorder.span
        with torch.cuda.stream(self._stream), span(Kind.TO_DEVICE, name, target.nbytes):
            for start in range(0, values.numel(), step):
                part = target[start : start + step]
                event = self._events[self._next]
                if event is not None:
                    event.synchronize()
                block = self._blocks[self._next].view(target.dtype)[: part.numel()]
                block.copy_(values[start : start + step])
                part.copy_(block, non_blocking=True)
                self._events[self._next] = self._stream.record_event()
                self._next = (self._next + 1) % _NUM_BLOCKS
        with span(Kind.TO_DEVICE, name, is_wait=True):
            current.wait_stream(self._stream)
