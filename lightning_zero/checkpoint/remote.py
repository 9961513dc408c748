"""Checkpoints at addresses of remote storage, such as `s3://bucket/run/last.ckpt`, through fsspec.

[Note: Whole or not there, remotely] Object stores rename nothing, but a file is there only when all
of it has been sent. A checkpoint that is one file therefore replaces the one before by itself. A
sharded one has the files of each save in a folder of their own, and one file that names them, which
is written last:

    NAME/save-1c9be0d2/__0_0.distcp   what rank 0 wrote, and so on for each rank
    NAME/save-1c9be0d2/meta.pt        the rest
    NAME/.metadata                    where everything is: whoever reads it sees one save or another
    NAME/meta.pt                      the rest once more, where others look for it

What a save before has left goes when the next one is complete.

[Note: Reading remotely] Nothing is downloaded as a whole: a reader asks for ranges of bytes. Large
ones come in pieces, several at a time; small ones out of blocks, of which the last few are kept.
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
_OF_ONE_PROCESS = {"memory"}
_PATTERN = set("*?[")
_BLOCK_BYTES = 128 * 1024
_NUM_BLOCKS = 4  # kept for each file
_PIECE_BYTES = 8 * 1024**2
_NUM_PIECES = 8  # asked for at once
_MAX_UPLOADS = 1000  # in which a file is sent; stores allow ten thousand

# Given size and offset; less at the end of the file, as `os.pread`.
Pread = Callable[[int, int], bytes | bytearray]


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether it is an address of another file system than the local or a mounted one."""
    return get_protocol(os.fspath(path)) not in _LOCAL


def check_shared(path: str | os.PathLike[str], world_size: int) -> None:
    """Refuses storage of which each rank has its own, and what cannot be reached at all. Local.

    Raises:
        ValueError: `memory://`, with several ranks.
        ImportError: A package is missing that fsspec needs for the address.
    """
    if not is_remote(path):
        return
    RemotePath(os.fspath(path))
    if get_protocol(os.fspath(path)) in _OF_ONE_PROCESS and world_size > 1:
        raise ValueError(
            f"{path} is in the memory of one process, and each of {world_size} ranks is a process "
            "of its own; use storage that all ranks share, such as s3://, or a path."
        )


class _Status(NamedTuple):
    st_size: int


class RemotePath:
    """What readers and writers of checkpoints ask of a `Path`, for an address that fsspec knows.

    Raises:
        ImportError: A package is missing that fsspec needs for it.
        ValueError: A protocol that fsspec does not know.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        try:
            self._system, self._key = url_to_fs(self._address)
        except ImportError as error:
            raise ImportError(f"{address} needs {_package(address)}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{address} is no address that fsspec can use: {error}.") from error
        # Blocks belong to this object, which a reader of one file keeps while it reads.
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

    # ---------------------------------------------------------------- what is there

    def refresh(self) -> None:
        """Forgets what fsspec remembers of folders: other processes write to them."""
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
        """Bytes of all files below, by the name from here."""
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
        """To be read, of which only what is asked for is fetched."""
        assert mode == "rb", "see `atomic_write`"
        return io.BufferedReader(ByteRange(self.pread, 0, self._nbytes))

    def read_text(self, encoding: str = "utf-8") -> str:
        return bytes(self._system.cat_file(self._key)).decode(encoding)

    def pread(self, size: int, offset: int) -> bytearray:
        """As `os.pread`."""
        return self.read(offset, min(offset + size, self._nbytes))

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes [start, stop). See [Note: Reading remotely].

        Raises:
            OSError: The file has not so many, or the store sends others.
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
                        f"{self} gave {len(piece)} bytes for [{at}, {end}): it has been replaced "
                        "or is damaged, or its store cannot read parts of a file."
                    )
                data[at - start : end - start] = piece
        return data

    def _read_block(self, number: int) -> bytearray:
        start = number * _BLOCK_BYTES
        return self._fetch(start, min(start + _BLOCK_BYTES, self._nbytes))

    # ---------------------------------------------------------------- writing

    @contextlib.contextmanager
    def atomic_write(self, nbytes: int) -> Iterator[BinaryIO]:
        """A new file of about `nbytes` that appears when the block ends; see `atomic_write`."""
        # Whether fsspec holds files back is said for a whole file system: for one of our own.
        system, key = url_to_fs(self._address, skip_instance_cache=True)
        with contextlib.suppress(NotImplementedError):
            system.makedirs(system._parent(key), exist_ok=True)
        num_pieces = -(-nbytes // (_PIECE_BYTES * _MAX_UPLOADS))
        upload_bytes = _PIECE_BYTES * max(2, num_pieces)
        with system.transaction, system.open(key, "wb", block_size=upload_bytes) as file:
            yield cast(BinaryIO, _InPieces(file))
        self.refresh()
        self.__dict__.pop("_nbytes", None)
        self._block.cache_clear()

    def remove(self) -> None:
        """Deletes a file or a folder; nothing where nothing is."""
        self.refresh()
        if not _PATTERN.intersection(self._key):
            with contextlib.suppress(FileNotFoundError):
                self._system.rm(self._key, recursive=True)
            return
        # `rm` would take the name for a pattern, and delete all that matches it.
        found = self._system.find(self._key, withdirs=True, detail=True)
        for name, entry in sorted(found.items(), reverse=True):  # a folder after what is in it
            is_folder = entry["type"] == "directory"
            with contextlib.suppress(FileNotFoundError):  # folders that end with their last file
                (self._system.rmdir if is_folder else self._system.rm_file)(name)


class _InPieces(io.RawIOBase):
    """Hands large writes on in pieces: the file below keeps a copy of what it is given."""

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
    """`length` bytes of a file, from byte `start` on, as a file of its own to be read.

    Attributes:
        failure: What reading failed of, which torch's reader replaces by an error of its own.
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
            raise OSError(f"no byte {origin + offset} in a part of {self._length}")
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


def _package(address: str) -> str:
    """What is to be installed for an address."""
    known: dict[str, Any] = known_implementations.get(get_protocol(address), {})
    package = str(known.get("class", "")).partition(".")[0]
    if package in ("", "fsspec"):
        return "a package that is not installed"
    return f"`pip install {package}`"
