"""Memory of files that are mapped into it, given back while they are read through."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["release"]

_MADV_DONTNEED = 4


def release(path: Path) -> None:
    """Drops the pages of `path`, a file or a directory of files, from this process's memory.

    The next access reads them from the file again. Without it every page that was read once counts
    as resident until the system is short of memory. Only on Linux, elsewhere nothing happens.

    Danger: what was written to a private map of such a file is lost. Tensors of an opened
    checkpoint are not written.
    """
    if not sys.platform.startswith("linux"):
        return
    name = os.path.realpath(path)
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6 or not (fields[5] == name or fields[5].startswith(f"{name}/")):
                continue
            start, stop = (int(bound, 16) for bound in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)
