"""A file that is there whole or not at all: written beside, synced, renamed over what was there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from typing_extensions import Buffer

from lightning_zero.checkpoint.directory import put_in_place
from lightning_zero.checkpoint.leftovers import beside, named_beside, remove_leftovers

__all__ = ["explained", "replacing"]

_GIB = 1024**3
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _WholeWrites(FileIO):
    """A file without a buffer, of which one `write` writes everything."""

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < view.nbytes:  # the system may take less, on a disk that is getting full
            written += super().write(view[written:]) or 0
        return written


@contextlib.contextmanager
def replacing(path: Path, nbytes: int) -> Iterator[FileIO]:
    """A new file that takes the place of whatever is at `path` when the block ends well.

    A link at `path` is replaced, not followed; so is a directory. After an exception, or where
    the process dies, what was at `path` is unchanged; what a dead process has left is removed by
    the next one that writes to the same path.

    Args:
        path: Its folder exists.
        nbytes: Size of the file, or a little more. The space is reserved first, where the file
            system can, so that a full disk is known before anything is written.

    Raises:
        OSError: The file cannot be written. On a full disk it names path, bytes needed and free.
    """
    _remove_leftovers(path)
    temporary = beside(path, "incomplete")
    with explained(path, nbytes), _WholeWrites(temporary, "x") as file:
        try:
            with contextlib.suppress(OSError):  # where the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)  # at work: not a left-over
            remove_leftovers(path.parent, os.fstat(file.fileno()).st_mtime)
            _reserve(file, nbytes)
            yield file
            file.truncate(file.tell())
            os.fsync(file)
            put_in_place(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def explained(path: Path, nbytes: int) -> Iterator[None]:
    """Says in the error of a full disk how much was needed for `path` and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno,
            f"{path} was not written: it needs {nbytes} bytes ({nbytes / _GIB:.2f} GiB) and "
            f"{free} bytes ({free / _GIB:.2f} GiB) are free ({os.strerror(error.errno)}); make "
            "room or choose another folder. What was there before is unchanged.",
        ) from error


def _reserve(file: FileIO, nbytes: int) -> None:
    # Not posix_fallocate, which writes to every block where the file system cannot do better.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or not nbytes:
        return
    arguments = (ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes))
    if allocate(file.fileno(), *arguments) and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _remove_leftovers(path: Path) -> None:
    for leftover in named_beside(path, "incomplete"):
        if leftover.is_dir():
            continue
        with contextlib.suppress(OSError), FileIO(leftover) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
            leftover.unlink()
