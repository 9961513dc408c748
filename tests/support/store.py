"""Storage shared by several processes behind an fsspec protocol: `store://`, in ./store."""

from __future__ import annotations

import errno
import os
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

__all__ = ["Store", "register"]


class Store(DirFileSystem):
    """File system of a directory that counts the bytes read and can simulate failures."""

    protocol = "store"
    num_read = 0  # bytes read by this process
    broken = ""  # writing names with this suffix fails

    def __init__(self, **options: Any) -> None:
        local = LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)
        super().__init__(path=os.path.abspath("store"), fs=local, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("store://").rstrip("/")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if Store.broken and mode != "rb" and path.endswith(Store.broken):
            raise OSError(errno.EIO, "the store does not answer", path)
        return super().open(path, mode, **options)

    def cat_ranges(self, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
        found = super().cat_ranges(paths, starts, ends, **options)
        Store.num_read += sum(map(len, found))
        return found


def register() -> None:
    """Registers the protocol in this process."""
    fsspec.register_implementation("store", Store, clobber=True)
