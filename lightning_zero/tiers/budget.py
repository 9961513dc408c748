"""How much memory there is to rest in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory_bytes", "local_world_size"]

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
    return max(min([available, *cgroup_rooms()]), 0)


def cgroup_rooms(
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
