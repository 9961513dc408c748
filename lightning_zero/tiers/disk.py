"""What a disk is asked directly: room, free bytes, O_DIRECT, and what its errors mean."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

from lightning_zero.tiers.buffers import ALIGNMENT, aligned_empty

__all__ = ["allocate", "explained", "file_system_of", "free_bytes", "takes_direct"]


def allocate(path: Path, nbytes: int) -> None:
    """Make a file of `nbytes` zeros that have their room on the disk.

    Raises:
        OSError: There is no such room, and no file then; or the file cannot be made.
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


def takes_direct(directory: Path) -> bool:
    """Whether a page can be written and read past the page cache; some refuse only then."""
    path = directory / "probe"
    array: Any = aligned_empty(ALIGNMENT, pin=False).numpy()
    page = memoryview(array)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    try:
        return os.pwritev(descriptor, [page], 0) == os.preadv(descriptor, [page], 0) == ALIGNMENT
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def explained(error: OSError, path: Path, verb: str, offset: int, nbytes: int) -> OSError:
    """`error`, with what was tried on which bytes of which file."""
    reason = f"cannot {verb} {nbytes} bytes at offset {offset}: {error.strerror}"
    return OSError(error.errno, reason, str(path))


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: Path) -> str:
    """The type of the file system of `path` ("ext4", "tmpfs"); "unknown" where none is told."""
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
