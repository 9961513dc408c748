"""What killed jobs have left in a folder of checkpoints, and which of it may go.

[Note: Whose leftover] While a checkpoint is written, and while an old one is deleted, it has a name
of its own beside its place: `.NAME.incomplete-OWNER-RANDOM`, `.NAME.removed-OWNER-RANDOM`. A job
that is killed leaves it, and a later save of any name in the folder removes it, if it is certain
that nobody works on it: other jobs may save to the same folder at this moment. OWNER is the process
that began it, rank 0: host, boot and process namespace in one number, process number, and when the
process started, for numbers are used again. On the owner's own machine the kernel knows whether the
process lives; without rank 0 no rank goes on with a save. Elsewhere nobody can tell (locks of a
network file system may hold for one machine only), but every save writes all the time, so what
nothing was written to for a day, by the clock of the file system itself, is nobody's.

What was set aside as `.NAME.replaced-...` may be the only copy of a checkpoint and is left alone
here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

__all__ = ["beside", "named_beside", "remove_leftovers"]

_MAX_NAME = 200  # of the 255 that file systems allow
_OWNED = r"(?:([0-9a-f]{8})-(\d+)-(\d+)-)?[0-9a-f]{8}"
_NAME = re.compile(rf"\..+\.(?:incomplete|removed)-{_OWNED}")
_ABANDONED_S = 24 * 3600.0


def beside(target: Path, kind: str) -> Path:
    """A new name beside `target`, owned by this process. See [Note: Whose leftover]."""
    owner = f"{_machine()}-{os.getpid()}-{_started(os.getpid())}"
    name = f".{target.name[:_MAX_NAME]}.{kind}-{owner}-{secrets.token_hex(4)}"
    return target.parent / name


def named_beside(target: Path, kind: str) -> list[Path]:
    """What lies beside `target` under such names, whoever owns it."""
    name = re.compile(re.escape(f".{target.name[:_MAX_NAME]}.{kind}-") + _OWNED)
    with contextlib.suppress(OSError):
        return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name))
    return []


def remove_leftovers(folder: Path, now: float) -> list[Path]:
    """Removes what is certainly nobody's. What cannot be removed stays.

    Args:
        folder: Of checkpoints.
        now: Seconds, by the clock of its file system.

    Returns:
        What was removed.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            found = _NAME.fullmatch(path.name)
            with contextlib.suppress(OSError):
                if found and _is_abandoned(path, found, now):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    removed.append(path)
    return removed


def _is_abandoned(path: Path, found: re.Match[str], now: float) -> bool:
    machine, pid, started = found.groups()
    if machine == _machine() and started != "0":
        since = _started(int(pid))
        return since != int(started) if since else not _lives(int(pid))
    times = [path.lstat().st_mtime]
    if path.is_dir():
        times += [entry.lstat().st_mtime for entry in path.iterdir()]
    return now - max(times) > _ABANDONED_S


def _machine() -> str:
    """Where process numbers mean the same: containers have numbers of their own."""
    words = [socket.gethostname()]
    with contextlib.suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        words.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def _lives(pid: int) -> bool:
    """Whether there is such a process, also where /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _started(pid: int) -> int:
    """When a process of this machine started, in ticks since boot; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0
