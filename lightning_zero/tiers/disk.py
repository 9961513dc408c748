"""Directory of one process, under a shared path, for the files that hold its shards.

[Note: Whose directory] Jobs that share a disk must not use each other's files, and the leftovers of
a killed job must be removed. So each process makes a directory with a unique name and holds `flock`
on a file in it, which the kernel releases when the process ends, for any reason. A process that
finds a directory whose lock is free removes it. Between making a directory and locking it another
process may find its lock free: the maker checks again after locking, and starts over if the
directory was removed. A lock on a network disk may work within one machine only, so the name
contains the host and the boot id, and directories of other machines are not touched. Other users
may write to the shared path, too: links are not followed, and only what this user owns is removed.
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
from typing import Any

from lightning_zero.layout.offload import PAGE_BYTES
from lightning_zero.tiers.memory import aligned_empty

__all__ = [
    "allocate",
    "describe_io_error",
    "file_system_of",
    "free_bytes",
    "locked_directory",
    "machine",
    "remove_abandoned",
    "supports_o_direct",
]

_PREFIX = "lightning_zero"
_LOCK = ".lock"
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_REASONS = {
    errno.ENOENT: "does not exist; is the disk mounted? Make the directory first",
    errno.ENOTDIR: "is not a directory; use a directory on a local NVMe disk",
    errno.EACCES: "is not writable by user {uid}",
    errno.EROFS: "is mounted read-only",
    errno.ENOSPC: "is full, not even a directory can be made; free space on that disk",
}


def locked_directory(path: Path, *, rank: int) -> tuple[Path, int]:
    """Makes a directory of this process under `path`. See [Note: Whose directory].

    Returns:
        The directory, and the file descriptor that holds its lock: closing it releases the lock.

    Raises:
        OSError: `path` is missing, full or not writable.
    """
    job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "none")
    for _ in range(100):
        words = (_PREFIX, job, *machine(), f"rank{rank}", str(os.getpid()), secrets.token_hex(4))
        directory = path / ".".join(_word(word) for word in words)
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            why = f"cannot hold a directory: {error.strerror}"
            why = _REASONS.get(error.errno or 0, why).format(uid=os.getuid())
            raise OSError(error.errno, f"the NVMe path {why}", str(path)) from None
        with contextlib.suppress(FileNotFoundError):  # removed already: try again
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            if _is_locked(lock, directory / _LOCK):
                return directory, lock
            os.close(lock)
    raise RuntimeError(
        f"other processes removed each of 100 directories made under {path}; use another nvme_path."
    )


def remove_abandoned(path: Path) -> None:
    """Removes the directories under `path` that dead processes of this machine have left."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # `locked_directory` reports an unusable path
        names = sorted(os.listdir(path))
    here = set(machine())
    for name in names:
        words = name.split(".")
        if len(words) == 7 and words[0] == _PREFIX and here & set(words[2:4]):
            # Another user's directory cannot be opened and is not ours to remove.
            with contextlib.suppress(OSError):
                _remove_if_free(path / name)


def _remove_if_free(directory: Path) -> None:
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        return  # made by another user
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        directory.rmdir()  # fails if it is not empty: then it is not one of ours
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(lock)


def _is_locked(lock: int, path: Path) -> bool:
    """Locks the file at `path`; returns False if another process is removing it, or has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: no process can find it free
    return path.exists() and os.fstat(lock).st_ino == path.stat().st_ino


def machine() -> tuple[str, str]:
    """Returns host name and boot id; one equal value identifies this machine.

    Containers change the host name, restarts change the boot id. Both are safe in file names.
    """
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _word(socket.gethostname()) or "host", boot[:8] or "boot"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:60]


def allocate(path: Path, nbytes: int) -> None:
    """Makes a file of `nbytes` zeros with its blocks allocated.

    Raises:
        OSError: The disk has not enough space, or the file cannot be made; no file is left.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot make a file of {nbytes} bytes: {error.strerror}", str(path)
        ) from None
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)  # else what could be allocated stays allocated
        free = free_bytes(path.parent)
        raise OSError(
            error.errno,
            f"cannot allocate {nbytes} bytes ({error.strerror}; {free} bytes are free there); "
            "free space, use another nvme_path or offload less",
            str(path),
        ) from None
    finally:
        os.close(descriptor)


def supports_o_direct(directory: Path) -> bool:
    """Returns whether a page can be written and read with O_DIRECT.

    Some file systems accept the flag on opening a file and fail at the first write.
    """
    path = directory / "probe"
    array: Any = aligned_empty(PAGE_BYTES, pin=False).numpy()
    page = [memoryview(array)]
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            return os.pwritev(descriptor, page, 0) == os.preadv(descriptor, page, 0) == PAGE_BYTES
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        path.unlink(missing_ok=True)


def describe_io_error(error: OSError, path: Path, verb: str, offset: int, nbytes: int) -> OSError:
    """Returns `error` with the operation, the bytes and the file added."""
    reason = f"cannot {verb} {nbytes} bytes at offset {offset}: {error.strerror}"
    return OSError(error.errno, reason, str(path))


def free_bytes(path: Path) -> int:
    """Returns the bytes that this user may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: Path) -> str:
    """Returns the type of the file system of `path`, such as "ext4" or "tmpfs", or "unknown"."""
    best, kind = "", "unknown"
    resolved = str(path.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mounted, this_kind, *_ = line.split(" ")
            mounted = mounted.replace("\\040", " ")
            inside = mounted == "/" or f"{resolved}/".startswith(f"{mounted}/")
            if inside and len(mounted) >= len(best):
                best, kind = mounted, this_kind
    return kind
