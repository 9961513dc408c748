"""Checkpoints at addresses of remote storage, such as `s3://bucket/run/last.ckpt`, through fsspec.

[Note: Atomic replacement on remote storage] Object stores cannot rename, but a file appears only
when it has been sent completely. A full checkpoint, which is one file, therefore replaces its
predecessor atomically. A sharded checkpoint has one folder for the files of each save, and a file
that names them and is written last:

    NAME/save-1c9be0d2/__0_0.distcp   file of rank 0, and so on for each rank
    NAME/save-1c9be0d2/meta.pt        all other entries
    NAME/.metadata                    index of the files; its readers see one save or the other
    NAME/meta.pt                      a copy of the other entries, for other readers

The files of a previous save are deleted when the next one is complete.

[Note: Reading remotely] No file is downloaded completely: a reader requests ranges of bytes. Large
ranges are fetched in pieces, several at a time; small ranges come from blocks, of which the last
few are cached.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

__all__ = ["ByteRange", "Pread", "RemotePath", "check_shared", "is_remote"]

_LOCAL = {"file", "local"}
_PER_PROCESS = {"memory"}
_WILDCARDS = set("*?[")
_BLOCK_BYTES = 128 * 1024
_NUM_BLOCKS = 4  # cached for each file
_PIECE_BYTES = 8 * 1024**2
_NUM_PIECES = 8  # requested at the same time
_MAX_UPLOADS = 1000  # parts in which a file is sent; stores allow ten thousand

# Called with size and offset; returns fewer bytes at the end of the file, like `os.pread`.
Pread = Callable[[int, int], bytes | bytearray]


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an address on neither the local nor a mounted file system."""
    return get_protocol(os.fspath(path)) not in _LOCAL


def check_shared(path: str | os.PathLike[str], world_size: int) -> None:
    """Refuses storage that ranks do not share, and storage that cannot be used at all. Local.

    Raises:
        ValueError: The address is `memory://`, and there are several ranks.
        ImportError: A package is missing that fsspec needs for the address.
    """
    if not is_remote(path):
        return
    RemotePath(os.fspath(path))
    if get_protocol(os.fspath(path)) in _PER_PROCESS and world_size > 1:
        raise ValueError(
            f"{path} is in the memory of one process, but {world_size} ranks are separate "
            "processes; use storage that all ranks share, such as s3://, or a path."
        )


class _Status(NamedTuple):
    st_size: int


class RemotePath:
    """The methods of `Path` that checkpoints need, for an address that fsspec supports.

    Raises:
        ImportError: A package is missing that fsspec needs for the address.
        ValueError: fsspec does not support the protocol.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        try:
            self._system, self._key = url_to_fs(self._address)
        except ImportError as error:
            raise ImportError(f"{address} needs {_install_hint(address)}: {error}") from error
        except ValueError as error:
            raise ValueError(
                f"{address} is not an address that fsspec supports: {error}."
            ) from error
        # The cache belongs to this object, which the reader of a file keeps.
        self._block = lru_cache(_NUM_BLOCKS)(self._read_block)

    def __str__(self) -> str:
        return self._address

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._address}/{name}")

    @property
    def name(self) -> str:
        return PurePosixPath(self._key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self._key).suffix

    # ---------------------------------------------------------------- listing

    def refresh(self) -> None:
        """Clears fsspec's cached listings, since other processes write to the folders."""
        self._system.invalidate_cache()

    def exists(self) -> bool:
        return bool(self._system.exists(self._key))

    def is_file(self) -> bool:
        return bool(self._system.isfile(self._key))

    def is_dir(self) -> bool:
        return not self.is_file() and bool(self._system.isdir(self._key))

    def stat(self) -> _Status:
        return _Status(self._nbytes)

    def files(self) -> dict[str, int]:
        """Bytes of all files below this folder, by relative name."""
        found: dict[str, Any] = self._system.find(self._key, detail=True)
        root = self._key.rstrip("/") + "/"
        return {name.removeprefix(root): int(entry["size"]) for name, entry in found.items()}

    def iterdir(self) -> Iterator[RemotePath]:
        for name in dict.fromkeys(file.split("/")[0] for file in self.files()):
            yield self / name

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        return (path for path in self.iterdir() if PurePosixPath(path.name).match(pattern))

    # ---------------------------------------------------------------- reading

    @cached_property
    def _nbytes(self) -> int:
        return int(self._system.info(self._key)["size"])

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the file for reading; only the bytes that are read are fetched."""
        assert mode == "rb", "see `atomic_write`"
        return io.BufferedReader(ByteRange(self.pread, 0, self._nbytes))

    def read_text(self, encoding: str = "utf-8") -> str:
        return bytes(self._system.cat_file(self._key)).decode(encoding)

    def pread(self, size: int, offset: int) -> bytearray:
        """Like `os.pread`."""
        return self.read(offset, min(offset + size, self._nbytes))

    def read(self, start: int, stop: int) -> bytearray:
        """Reads the bytes [start, stop). See [Note: Reading remotely].

        Raises:
            OSError: The file is shorter, or the store returns a wrong number of bytes.
        """
        if stop - start >= _BLOCK_BYTES:
            return self._fetch(start, stop)
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        data = bytearray().join(self._block(number) for number in range(first, last + 1))
        return data[start - first * _BLOCK_BYTES : stop - first * _BLOCK_BYTES]

    def _fetch(self, start: int, stop: int) -> bytearray:
        data = bytearray(stop - start)
        step = _PIECE_BYTES * _NUM_PIECES
        for begin in range(start, stop, step):
            starts = list(range(begin, min(begin + step, stop), _PIECE_BYTES))
            stops = [min(at + _PIECE_BYTES, stop) for at in starts]
            pieces = self._system.cat_ranges(
                [self._key] * len(starts), starts, stops, on_error="raise"
            )
            for at, end, piece in zip(starts, stops, pieces, strict=True):
                if len(piece) != end - at:
                    raise OSError(
                        f"{self} returned {len(piece)} bytes for [{at}, {end}): it was replaced, "
                        "is damaged, or its store cannot read parts of a file."
                    )
                data[at - start : end - start] = piece
        return data

    def _read_block(self, number: int) -> bytearray:
        start = number * _BLOCK_BYTES
        return self._fetch(start, min(start + _BLOCK_BYTES, self._nbytes))

    # ---------------------------------------------------------------- writing

    @contextlib.contextmanager
    def atomic_write(self, nbytes: int) -> Iterator[BinaryIO]:
        """Opens a new file of about `nbytes` that appears when the block ends."""
        # fsspec's transactions apply to a file system object: use a separate one.
        system, key = url_to_fs(self._address, skip_instance_cache=True)
        with contextlib.suppress(NotImplementedError):
            system.makedirs(system._parent(key), exist_ok=True)
        num_pieces = -(-nbytes // (_PIECE_BYTES * _MAX_UPLOADS))
        upload_bytes = _PIECE_BYTES * max(2, num_pieces)
        with system.transaction, system.open(key, "wb", block_size=upload_bytes) as file:
            yield cast(BinaryIO, _ChunkedWriter(file))
        self.refresh()
        self.__dict__.pop("_nbytes", None)
        self._block.cache_clear()

    def remove(self) -> None:
        """Deletes a file or a folder, if it exists."""
        self.refresh()
        if not _WILDCARDS.intersection(self._key):
            with contextlib.suppress(FileNotFoundError):
                self._system.rm(self._key, recursive=True)
            return
        # `rm` would interpret the name as a pattern and delete everything that matches it.
        found = self._system.find(self._key, withdirs=True, detail=True)
        for name, entry in sorted(found.items(), reverse=True):  # a folder after its files
            delete = self._system.rmdir if entry["type"] == "directory" else self._system.rm_file
            with contextlib.suppress(FileNotFoundError):  # folders that vanish with the last file
                delete(name)


class _ChunkedWriter(io.RawIOBase):
    """Splits large writes into pieces, because the underlying file copies what it receives."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            self._file.write(view[start : start + _PIECE_BYTES])
        self._at += len(view)
        return len(view)


class ByteRange(io.RawIOBase):
    """The bytes [start, start + length) of a file, as a file for reading.

    Attributes:
        failure: Error of the last failed read, which torch's reader replaces by an error of its
            own; None before.
    """

    failure: OSError | None = None

    def __init__(self, pread: Pread, start: int, length: int) -> None:
        self._pread = pread
        self._start = start
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError(f"cannot seek to byte {origin + offset} of {self._length}")
        self._at = origin + offset
        return self._at

    def readinto(self, into: Any) -> int:
        size = max(0, min(len(into), self._length - self._at))
        try:
            read = self._pread(size, self._start + self._at) if size else b""
        except OSError as error:
            self.failure = error
            raise
        into[: len(read)] = read
        self._at += len(read)
        return len(read)


def _install_hint(address: str) -> str:
    """Command that installs the package for an address."""
    known: dict[str, Any] = known_implementations.get(get_protocol(address), {})
    package = str(known.get("class", "")).partition(".")[0]
    if package in ("", "fsspec"):
        return "a package that is not installed"
    return f"`pip install {package}`"
