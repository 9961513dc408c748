"""Resident memory of this process, as Linux counts it: what C++ and the allocator hold is in it."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["peak_bytes", "reset_peak", "resident_bytes"]


def resident_bytes() -> int:
    """Bytes of memory that this process has now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that `resident_bytes` has been since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Returns freed memory to the system where glibc can; what is left is the first peak."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024  # "VmRSS:   1234 kB"
    raise RuntimeError(f"/proc/self/status has no {key}; Linux is needed.")
