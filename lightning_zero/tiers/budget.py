"""How much memory there is to rest in."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory_bytes", "local_world_size"]

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_memory_bytes() -> int:
    """CPU memory that this machine, or its container, can still give."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int(_CGROUP_USED.read_text()))
    except (OSError, StopIteration, ValueError):
        pass  # not Linux, or no such cgroup: what was found so far
    return max(available, 0)


def local_world_size() -> int:
    """Ranks that share this machine, as the launcher tells; all of them where it does not."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return max(int(value), 1)
    return 1
