"""CPU memory that disk and device can both reach: page-aligned, pinned for CUDA; and how much."""

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
    """Anonymous private memory that begins on a page; unpins itself before it goes."""

    pinned_at: int | None = None  # address

    def __del__(self) -> None:
        if self.pinned_at is not None:
            # A driver that is shut down has unpinned it already.
            with contextlib.suppress(Exception):
                torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def aligned_empty(nbytes: int, *, pin: bool) -> Tensor:
    """Uninitialised CPU memory: 1-D, uint8, `nbytes`, beginning at a multiple of 4096.

    Pages of our own, not `torch.empty(pin_memory=True)`: that one rounds up to a power of two.
    Pinned, if asked for, where CUDA is there; a RuntimeError where the driver refuses this much.
    """
    return _map(nbytes, pin=pin)[0]


def make_buffers(count: int, nbytes: int, *, pin: bool) -> list[Tensor]:
    """`count` tensors as of `aligned_empty`, which a forked child does not share."""
    if count < 1 or nbytes < 1:
        raise ValueError(f"expected a count and bytes of at least 1, got {count} and {nbytes}")
    buffers = []
    for _ in range(count):
        buffer, pages = _map(nbytes, pin=pin)
        # A fork shares private pages until one side writes, and a transfer under way would then
        # fill the other side's copy (open(2), O_DIRECT). A child gets zeros instead.
        with contextlib.suppress(OSError):
            pages.madvise(_MADV_WIPEONFORK)
        buffers.append(buffer)
    return buffers


class BufferPool:
    """Buffers that are taken and given back, by any thread; first given, first taken."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.nbytes = buffers[0].numel()  # of one buffer
        self._free: deque[tuple[Tensor, Event | None]] = deque((one, None) for one in buffers)
        self._is_closed = False

    def take(self, *, waits: bool = True) -> Tensor | None:
        """A free buffer, 1-D, uint8, `nbytes`; None if all are taken.

        `waits`: for copies to a device that `give` has told of; else None if one is under way.
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

    def give(self, buffer: Tensor, left: Event | None = None) -> None:
        """Give back what `take` gave; nothing may use its memory any more once `left` is past."""
        if not self._is_closed:
            self._free.append((buffer, left))

    def close(self) -> None:
        """Let go of the buffers; `take` returns None from now on."""
        self._is_closed = True
        while self.take() is not None:
            pass  # no copy reads it any more


def _map(nbytes: int, *, pin: bool) -> tuple[Tensor, _Pages]:
    pages = _Pages(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages make few, long segments of a transfer: 2.4 times the rate of small ones on a
    # virtual disk of a cloud. Some kernels have none.
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    assert tensor.data_ptr() % PAGE_BYTES == 0, tensor.data_ptr()
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


# By version of control groups: where they are mounted, and the files of limit and use.
_CGROUPS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def available_memory_bytes() -> int:
    """CPU memory that this machine, or the container or job that we run in, can still give."""
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
    """Bytes that each control group around this process has left, its cache of files counted in."""
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
                continue  # not seen from inside a container
            cached = int(stat[stat.index(cache) + 1]) if cache in stat else 0
            yield int(text) - taken + cached


def local_world_size() -> int:
    """Ranks that share this machine, as the launcher tells; all of them where it does not."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return max(int(value), 1)
    return 1
