"""A directory of one process under a shared path, that outlives no one.

[Note: Whose directory] Jobs that share a disk must not meet, and what a killed job leaves must go.
So each process makes a directory with a name of its own and holds `flock` on a file in it, which
the kernel lets go of when the process ends, however it ends. Who finds a directory whose lock is
free removes it. Between making a directory and locking it another may find it free: the maker looks
again after locking, and begins anew if it was removed. A lock on a network disk may hold for one
machine only, so the name carries the host and the boot, and those of other machines are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

__all__ = ["locked_directory", "remove_abandoned"]

_PREFIX = "lightning_zero"
_LOCK = ".lock"
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


def locked_directory(path: Path, *, rank: int) -> tuple[Path, int]:
    """Make a directory of this process under `path`. See [Note: Whose directory].

    Returns:
        The directory, and the file descriptor that holds its lock: closing it gives it up.

    Raises:
        OSError: `path` is missing, no directory, or not writable.
    """
    job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "none")
    for _ in range(100):
        words = (_PREFIX, job, *_machine(), f"rank{rank}", str(os.getpid()), secrets.token_hex(4))
        directory = path / ".".join(_word(word) for word in words)
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise _explained(error, path) from None
        with contextlib.suppress(FileNotFoundError):  # removed already: begin anew
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            if _is_locked(lock, directory / _LOCK):
                return directory, lock
            os.close(lock)
    raise RuntimeError(f"other processes removed every directory made under {path}, 100 times")


def remove_abandoned(path: Path) -> list[Path]:
    """Remove directories under `path` that processes of this machine left when they died.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    try:
        directories = [path / name for name in sorted(os.listdir(path))]
    except OSError:
        return removed  # whether `path` can be used is asked elsewhere
    here = {_word(word) for word in _machine()}
    for directory in directories:
        words = directory.name.split(".")
        if len(words) != 7 or words[0] != _PREFIX or not here & set(words[2:4]):
            continue
        # Another user's directory cannot be opened and is not ours to remove.
        with contextlib.suppress(OSError):
            if _remove_if_free(directory):
                removed.append(directory)
    return removed


def _remove_if_free(directory: Path) -> bool:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        directory.rmdir()  # fails if it is not empty: then it is none of ours
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
        return True
    finally:
        os.close(lock)


def _is_locked(lock: int, path: Path) -> bool:
    """Lock it; False if another is about to remove it, or did."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: nobody can find it free
    return path.exists() and os.fstat(lock).st_ino == path.stat().st_ino


def _machine() -> tuple[str, str]:
    """Host name, which containers change, and boot, which restarts change: either is enough."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot[:8] or "boot"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:60]


def _explained(error: OSError, path: Path) -> OSError:
    reasons = {
        errno.ENOENT: "does not exist; is the disk mounted? Make the directory first",
        errno.ENOTDIR: "is no directory; give a directory on a local NVMe disk",
        errno.EACCES: f"is not writable by user {os.getuid()}",
        errno.EROFS: "is mounted read-only",
        errno.ENOSPC: "is full, not even a directory can be made; free space on that disk",
    }
    reason = reasons.get(error.errno or 0, f"cannot take a directory: {error.strerror}")
    return OSError(error.errno, f"the NVMe path {reason}", str(path))
