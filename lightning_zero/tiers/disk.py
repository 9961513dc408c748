"""The files of one process that hold shards, in a directory under a shared path.

[Note: Whose directory] Jobs that share a disk must not meet, and what a killed job leaves must go.
So each process makes a directory with a name of its own and holds `flock` on a file in it, which
the kernel lets go of when the process ends, however it ends. Who finds a directory whose lock is
free removes it. Between making a directory and locking it another may find it free: the maker looks
again after locking, and begins anew if it was removed. A lock on a network disk may hold for one
machine only, so the name carries the host and the boot, and those of other machines are left alone.
Other users may write to the shared path too: a link is not followed, and only what belongs to this
user is removed.
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
    "mount_of",
    "remove_abandoned",
    "supports_o_direct",
]

_PREFIX = "lightning_zero"
_LOCK = ".lock"
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_REASONS = {
    errno.ENOENT: "does not exist; is the disk mounted? Make the directory first",
    errno.ENOTDIR: "is no directory; give a directory on a local NVMe disk",
    errno.EACCES: "is not writable by user {uid}",
    errno.EROFS: "is mounted read-only",
    errno.ENOSPC: "is full, not even a directory can be made; free space on that disk",
}


def locked_directory(path: Path, *, rank: int) -> tuple[Path, int]:
    """Make a directory of this process under `path`. See [Note: Whose directory].

    Returns:
        The directory, and the file descriptor that holds its lock: closing it gives it up.
    """
    job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "none")
    for _ in range(100):
        words = (_PREFIX, job, *machine(), f"rank{rank}", str(os.getpid()), secrets.token_hex(4))
        directory = path / ".".join(_word(word) for word in words)
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            why = f"cannot take a directory: {error.strerror}"
            why = _REASONS.get(error.errno or 0, why).format(uid=os.getuid())
            raise OSError(error.errno, f"the NVMe path {why}", str(path)) from None
        with contextlib.suppress(FileNotFoundError):  # removed already: begin anew
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            if _is_locked(lock, directory / _LOCK):
                return directory, lock
            os.close(lock)
    raise RuntimeError(f"other processes removed every directory made under {path}, 100 times")


def remove_abandoned(path: Path) -> None:
    """Remove directories under `path` that processes of this machine left when they died."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # whether `path` can be used is asked elsewhere
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
        return  # another user's, who may have put it there
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        directory.rmdir()  # fails if it is not empty: then it is none of ours
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
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


def machine() -> tuple[str, str]:
    """Host name, which containers change, and boot, which restarts change: either is enough.

    In the characters that the names of files may have everywhere.
    """
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _word(socket.gethostname()) or "host", boot[:8] or "boot"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:60]


def allocate(path: Path, nbytes: int) -> None:
    """Make a file of `nbytes` zeros that have their room on the disk; without it, no file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot make a file of {nbytes} bytes: {error.strerror}", str(path)
        ) from None
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)  # what could be allocated stays allocated otherwise
        free = free_bytes(path.parent)
        raise OSError(
            error.errno,
            f"cannot allocate {nbytes} bytes ({error.strerror}; {free} bytes are free there); "
            "free space, take another nvme_path or offload less",
            str(path),
        ) from None
    finally:
        os.close(descriptor)


def supports_o_direct(directory: Path) -> bool:
    """Whether a page can be written and read past the page cache; some refuse only then."""
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
    """`error`, with what was tried on which bytes of which file."""
    reason = f"cannot {verb} {nbytes} bytes at offset {offset}: {error.strerror}"
    return OSError(error.errno, reason, str(path))


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: Path) -> str:
    """Such as "ext4", "tmpfs"; "unknown" where none is told."""
    return mount_of(path)[0]


def mount_of(path: Path) -> tuple[str, set[str]]:
    """The kind of the file system of `path` ("unknown" where none is told), and its options."""
    best, kind, options = "", "unknown", set[str]()
    resolved = str(path.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mounted, this_kind, these, *_ = line.split(" ")
            mounted = mounted.replace("\\040", " ")
            inside = mounted == "/" or f"{resolved}/".startswith(f"{mounted}/")
            if inside and len(mounted) >= len(best):
                best, kind, options = mounted, this_kind, set(these.split(","))
    return kind, options
