"""Memory that disk and device can both reach: page-aligned, pinned where there is CUDA."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "BufferPool", "aligned_empty"]

ALIGNMENT = 4096  # bytes; what O_DIRECT asks of memory, offsets and lengths
_MADV_WIPEONFORK = 18  # <linux/mman.h>; the mmap module does not name it


class _Pages(mmap.mmap):
    """Anonymous private memory that begins on a page; unpins itself before it goes."""

    pinned_at: int | None = None  # address

    def __del__(self) -> None:
        if self.pinned_at is not None:
            # A driver that is shut down has unpinned it already.
            with contextlib.suppress(Exception):
                torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def aligned_empty(nbytes: int, *, pin: bool) -> Tensor:
    """Uninitialised memory for transfers.

    Pages of our own, not `torch.empty(pin_memory=True)`: that one rounds up to a power of two.

    Args:
        nbytes: Size.
        pin: Pin it where CUDA is there; elsewhere it makes no difference.

    Returns:
        1-D, uint8, `nbytes`, CPU, beginning at a multiple of 4096.

    Raises:
        RuntimeError: The driver refuses to pin this much.
    """
    return _map(nbytes, pin=pin)[0]


class BufferPool:
    """`count` buffers of `nbytes` each that are taken and given back, by any thread."""

    count: int
    nbytes: int  # of one buffer

    def __init__(self, count: int, nbytes: int, *, pin: bool) -> None:
        if count < 1 or nbytes < 1:
            raise ValueError(f"expected a count and bytes of at least 1, got {count} and {nbytes}")
        self.count = count
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        for _ in range(count):
            buffer, pages = _map(nbytes, pin=pin)
            # A fork shares private pages until one side writes, and a transfer under way would
            # then fill the other side's copy (open(2), O_DIRECT). A child gets zeros instead.
            with contextlib.suppress(OSError):
                pages.madvise(_MADV_WIPEONFORK)
            self._free.append(buffer)

    def take(self) -> Tensor | None:
        """A free buffer, 1-D, uint8, `nbytes`; None if all are taken."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, buffer: Tensor) -> None:
        """Give back what `take` gave; nothing may use its memory any more."""
        with self._lock:
            self._free.append(buffer)
            assert len(self._free) <= self.count

    def close(self) -> None:
        """Let go of the buffers; `take` returns None from now on."""
        with self._lock:
            self._free.clear()
            self.count = 0


def _map(nbytes: int, *, pin: bool) -> tuple[Tensor, _Pages]:
    pages = _Pages(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages make few, long segments of a transfer: 2.4 times the rate of small ones on a
    # virtual disk of a cloud. Some kernels have none.
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    assert tensor.data_ptr() % ALIGNMENT == 0, tensor.data_ptr()
    if pin and torch.cuda.is_available():
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(
                f"cannot pin {nbytes} bytes of CPU memory (CUDA error {int(code)}); use smaller or "
                "fewer buffers, or pin_memory=False"
            )
        pages.pinned_at = tensor.data_ptr()
    return tensor, pages
