"""Local files that are on the disk when they are closed, and errors that name path and bytes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

__all__ = [
    "DISK_FULL_ERRNOS",
    "create",
    "explain_os_errors",
    "full_disk_error",
    "name_path_in_errors",
]

_BUFFER_BYTES = 1 << 20
_SYNC_BYTES = 1 << 26
_SYNC_FILE_RANGE_WRITE = 2
_GIB = 1024**3
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def create(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """Opens a new file of about `nbytes`, which is on the disk when the block ends."""
    with _NewFile(io.FileIO(path, "x"), _BUFFER_BYTES) as file:
        _reserve(file, nbytes)
        yield cast(BinaryIO, file)
        file.truncate(file.tell())
        file.flush()
        os.fsync(file.fileno())


class _NewFile(io.BufferedWriter):
    """A new file that goes to the disk while it is written; or all would wait for the last sync."""

    _started = 0  # bytes

    def write(self, data: Any) -> int:
        written = super().write(data)
        if self.tell() - self._started >= _SYNC_BYTES:
            self._started = self.tell()
            _call_linux("sync_file_range", self, 0, 0, _SYNC_FILE_RANGE_WRITE)
        return written


def _reserve(file: io.BufferedWriter, nbytes: int) -> None:
    # Not posix_fallocate: without support of the file system it writes to every block.
    if nbytes and (number := _call_linux("fallocate", file, 0, 0, nbytes)) in DISK_FULL_ERRNOS:
        raise OSError(number, os.strerror(number))


def _call_linux(name: str, file: io.BufferedWriter, *arguments: int) -> int:
    """Error of a function of Linux's C library for a file; 0 on success or another system."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    has_failed = function is not None and function(file.fileno(), *map(ctypes.c_int64, arguments))
    return ctypes.get_errno() if has_failed else 0


# ------------------------------------------------------------------------------------------ errors


@contextlib.contextmanager
def explain_os_errors(path: Any, nbytes: int) -> Iterator[None]:
    """Names `path` in every OSError, and on a full local disk also the bytes needed and free."""
    try:
        with name_path_in_errors(path):
            yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS or not isinstance(path, Path):
            raise
        free = shutil.disk_usage(path.parent).free
        raise full_disk_error(path, nbytes, free, error.errno) from error


@contextlib.contextmanager
def name_path_in_errors(path: object) -> Iterator[None]:
    """Names `path` in an OSError without a file name, such as those of writing and syncing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or str(path) in str(error):
            raise
        number, why = error.errno or errno.EIO, error.strerror or str(error)
        raise OSError(number, why, str(path)) from error


def full_disk_error(path: object, nbytes: int, free: int, number: int = errno.ENOSPC) -> OSError:
    return OSError(
        number,
        f"{path} was not written: it needs {nbytes} bytes ({nbytes / _GIB:.2f} GiB) and {free} "
        f"bytes ({free / _GIB:.2f} GiB) are free ({os.strerror(number)}); free some space or "
        "choose another folder. The previous file or directory is unchanged.",
    )
