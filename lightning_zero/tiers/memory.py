"""CPU memory for transfers, page-aligned and pinned for CUDA, and how much is available.

[Note: Forks] A forked process, such as a DataLoader worker, gets zeros in place of pinned memory
and of transfer buffers. Linux copies pinned pages at the fork itself since 5.10, so that each
worker would cost as much memory and time as all pinned tiers. Older kernels move the parent's pages
at its first write, while the device uses the old ones. A transfer in flight would fill the pages of
one side only (open(2), O_DIRECT). Alternative considered: MADV_DONTFORK. The addresses are then
free in the child, which may map other memory there; a tensor that the child drops unmaps it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.layout.offload import PAGE_BYTES
from lightning_zero.record.streams import Event

__all__ = [
    "BufferPool",
    "aligned_empty",
    "available_memory_bytes",
    "local_world_size",
    "make_buffers",
]

_MADV_WIPEONFORK = 18  # <linux/mman.h>; the mmap module does not name it


class _Pages(mmap.mmap):
    """Anonymous private memory that begins on a page boundary; unpinned when it is freed."""

    pinned_at: int | None = None  # address; None: not pinned

    def wipe_on_fork(self) -> None:
        """Gives a forked process zeros instead of this memory: see [Note: Forks]."""
        with contextlib.suppress(OSError):  # Linux only
            self.madvise(_MADV_WIPEONFORK)

    def __del__(self) -> None:
        if self.pinned_at is not None:
            # A driver that has shut down has unpinned it already.
            with contextlib.suppress(Exception):
                torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def aligned_empty(nbytes: int, *, pin: bool) -> Tensor:
    """Allocates uninitialized CPU memory: 1-D, uint8, `nbytes`, at a multiple of 4096.

    The pages are mapped directly: `torch.empty(pin_memory=True)` rounds up to a power of two. A
    forked process gets zeros in place of pinned memory. Pinned pages are on the NUMA node of the
    calling thread, others on that of the thread that first writes to them.

    Args:
        nbytes: Bytes to allocate.
        pin: Whether to pin the memory if CUDA is available.

    Raises:
        RuntimeError: The driver cannot pin so much memory.
    """
    return _map(nbytes, pin=pin)[0]


def make_buffers(count: int, nbytes: int, *, pin: bool) -> list[Tensor]:
    """Allocates `count` tensors as `aligned_empty` does; a forked process gets zeros."""
    if count < 1 or nbytes < 1:
        raise ValueError(f"expected a count and bytes of at least 1, got {count} and {nbytes}")
    buffers = []
    for _ in range(count):
        buffer, pages = _map(nbytes, pin=pin)
        pages.wipe_on_fork()
        buffers.append(buffer)
    return buffers


class BufferPool:
    """Pool of buffers for any thread, in first-in, first-out order."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.nbytes = buffers[0].numel()  # bytes of one buffer
        self._free: deque[tuple[Tensor, Event | None]] = deque((buffer, None) for buffer in buffers)
        self._is_closed = False

    def acquire(self, *, waits: bool = True) -> Tensor | None:
        """Returns a free buffer (1-D, uint8, `nbytes`), or None if all are in use.

        With `waits`, waits for the copy that still reads the buffer; else returns None in that
        case.
        """
        try:
            buffer, left = self._free.popleft()
        except IndexError:
            return None
        if left is not None and not left.query():
            if not waits:
                self._free.appendleft((buffer, left))
                return None
            left.synchronize()
        return buffer

    def release(self, buffer: Tensor, left: Event | None = None) -> None:
        """Returns a buffer to the pool; `left`: event after which nothing uses its memory."""
        if not self._is_closed:
            self._free.append((buffer, left))

    def close(self) -> None:
        """Frees the buffers once no copy reads them; `acquire` then returns None."""
        self._is_closed = True
        while self.acquire() is not None:
            pass


def _map(nbytes: int, *, pin: bool) -> tuple[Tensor, _Pages]:
    pages = _Pages(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages make a transfer of few, long segments: 2.4 times the rate of small pages on a
    # cloud's virtual disk. Some kernels have none.
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    assert tensor.data_ptr() % PAGE_BYTES == 0, tensor.data_ptr()
    if pin and nbytes and torch.cuda.is_available():
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(
                f"cannot pin {nbytes} bytes of CPU memory (CUDA error {int(code)}); use smaller or "
                "fewer buffers, or pin_memory=False."
            )
        pages.pinned_at = tensor.data_ptr()
        pages.wipe_on_fork()
    return tensor, pages


# By cgroup version: mount folder, files of limit and usage, and the cache's name in memory.stat.
_CGROUPS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def available_memory_bytes() -> int:
    """Returns the free CPU memory of this machine, or of the container or job if that is less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass  # not Linux
    return max(min([available, *cgroup_free_bytes()]), 0)


def cgroup_free_bytes(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yields the free bytes of each cgroup of this process; cached file pages count as free."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        folder, limit, used, cache = _CGROUPS[1 if controllers else 2]
        own = Path(path.lstrip("/"))
        for group in [own, *own.parents]:
            try:
                text = (mount / folder / group / limit).read_text().strip()
                if text == "max":
                    continue
                taken = int((mount / folder / group / used).read_text())
                stat = (mount / folder / group / "memory.stat").read_text().split()
            except (OSError, ValueError):
                continue  # not visible inside a container
            cached = int(stat[stat.index(cache) + 1]) if cache in stat else 0
            yield int(text) - taken + cached


def local_world_size() -> int:
    """Returns the number of ranks on this machine if the launcher sets it, else of all ranks."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return max(int(value), 1)
    return 1
