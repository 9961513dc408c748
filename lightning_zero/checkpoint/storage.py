"""Files of checkpoints, on local disks or at addresses such as `s3://bucket/run/last.ckpt`.

Only this module distinguishes the two. A format knows names, dtypes and shapes of tensors, and at
which byte of a file their elements are. This module reads these bytes (`open_ranges`), and replaces
a file (`atomic_write`) or a directory (`stage`) when the new one is complete. Remote storage is
used through fsspec.

[Note: Atomic replacement on remote storage] Object stores cannot rename, but a file appears only
when it has been sent completely. A full checkpoint, which is one file, therefore replaces its
predecessor atomically. A sharded checkpoint has one folder for the files of each save, and a file
that names them and is written last:

    NAME/save-1c9be0d2/__0_0.distcp   file of rank 0, and so on for each rank
    NAME/save-1c9be0d2/meta.pt        all other entries
    NAME/.metadata                    index of the files; its readers see one save or the other
    NAME/meta.pt                      a copy of the other entries, for other readers

The files of a previous save are deleted when the next one is complete. A directory without such an
index is not replaced; it is complete when its last file is.

[Note: Reading remotely] No file is downloaded completely: a reader requests ranges of bytes. Large
ranges are fetched in pieces, several at a time; small ranges come from blocks, of which the last
few are cached.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from lightning_zero.checkpoint import atomic, new_file
from lightning_zero.checkpoint.atomic import StagedDirectory, file_identity
from lightning_zero.checkpoint.checksums import CHECKSUMS
from lightning_zero.checkpoint.new_file import name_path_in_errors

__all__ = [
    "ByteRange",
    "CheckpointPath",
    "Ranges",
    "RemotePath",
    "Staging",
    "as_local",
    "atomic_write",
    "check_shared",
    "create",
    "file_sizes",
    "identity",
    "is_remote",
    "local_path",
    "locate",
    "open_checked",
    "open_ranges",
    "read_consistently",
    "complete_renames",
    "remove",
    "replaced_while_read_error",
    "stage",
    "write_bytes",
]

_LOCAL = {"file", "local"}
_LOCAL_URL = re.compile(r"(?:file|local):(?://)?")
_NUM_TRIES = 100
_PER_PROCESS = {"memory"}
_WILDCARDS = set("*?[")
_BLOCK_BYTES = 128 * 1024
_NUM_BLOCKS = 4  # cached for each file
_PIECE_BYTES = 8 * 1024**2
_NUM_PIECES = 8  # requested at the same time
_MAX_UPLOADS = 1000  # parts in which a file is sent; stores allow ten thousand

# Called with the first byte and one past the last; returns fewer bytes at the end of the file.
Ranges = Callable[[int, int], Any]


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
        return io.BufferedReader(ByteRange(self.read, 0, self._nbytes))

    def read_text(self, encoding: str = "utf-8") -> str:
        return bytes(self._system.cat_file(self._key)).decode(encoding)

    def read(self, start: int, stop: int) -> bytearray:
        """Reads the bytes [start, stop), fewer at the end. See [Note: Reading remotely].

        Raises:
            OSError: The store returns a wrong number of bytes.
        """
        stop = min(stop, self._nbytes)
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
        num_pieces = -(-nbytes // (_PIECE_BYTES * _MAX_UPLOADS))
        upload_bytes = _PIECE_BYTES * max(2, num_pieces)
        with name_path_in_errors(self):
            with contextlib.suppress(NotImplementedError):
                system.makedirs(system._parent(key), exist_ok=True)
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


# Entries of a save at an address, or of a directory that was copied there.
_SAVE_ENTRY = re.compile(r"(?:save-[0-9a-f]{8}|__\d+_\d+\.distcp)")


class RemoteStaging:
    """A directory that is written, and then replaces `target` by replacing its `index`.

    See [Note: Atomic replacement on remote storage].

    Attributes:
        folder: The folder for the files of this save; without an index the target itself.
    """

    folder: RemotePath

    def __init__(self, target: RemotePath, index: Sequence[str]) -> None:
        if index and target.is_file():
            raise cannot_replace(target, "a full checkpoint", "a sharded one")
        if not index and target.exists():
            raise cannot_replace(target, "a directory", "another one")
        self.folder = target / f"save-{secrets.token_hex(4)}" if index else target
        self._target = target
        self._index = index
        self._may_be_referenced = False  # by an index; then the folder must not be deleted

    def publish(self, listed: Iterable[str] = ()) -> None:
        """Copies the index to the target, and deletes the files of earlier saves.

        `listed`: names of files in the folder that are not those of each rank.
        """
        self._may_be_referenced = True  # even if the write fails after the storage has the file
        if not self._index:
            return
        for name in {CHECKSUMS, *listed}.difference(self._index):
            (self._target / name).remove()  # from a directory that was copied there
        for name in self._index:
            data = (self.folder / name).open().read()
            with (self._target / name).atomic_write(len(data)) as file:
                file.write(data)
        with contextlib.suppress(Exception):  # the save is complete; the next one deletes them
            for other in self._target.iterdir():
                if _SAVE_ENTRY.fullmatch(other.name) and other.name != self.folder.name:
                    other.remove()

    def discard(self) -> None:
        """Deletes the folder unless it may be published; files that cannot be deleted stay."""
        if not self._may_be_referenced:
            with contextlib.suppress(Exception):  # file systems of fsspec raise errors of any class
                self.folder.remove()


def cannot_replace(path: RemotePath, old: str, new: str) -> FileExistsError:
    why = f"it holds {old}, which {new} cannot replace on remote storage; delete it, or choose"
    return FileExistsError(errno.EEXIST, f"{why} another name", str(path))


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

    def __init__(self, ranges: Ranges, start: int, length: int) -> None:
        self._ranges = ranges
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
        start = self._start + self._at
        try:
            read = self._ranges(start, start + size) if size else b""
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


# ---------------------------------------------------------------------------------- local or remote

_T = TypeVar("_T")

CheckpointPath = Path | RemotePath
Staging = StagedDirectory | RemoteStaging


def locate(path: str | os.PathLike[str]) -> CheckpointPath:
    """Resolves the path of a checkpoint: `local_path`, or remote storage with a fresh listing."""
    if not is_remote(path):
        return local_path(path)
    remote = RemotePath(os.fspath(path))
    remote.refresh()
    return remote


def local_path(path: str | os.PathLike[str]) -> Path:
    """Absolute path on a local or mounted file system; `path` may begin with `~` or `file://`.

    Raises:
        ValueError: A URL of another file system.
    """
    text = os.fspath(path)
    if match := _LOCAL_URL.match(text):
        text = text[match.end() :]
    if "://" in text:
        raise ValueError(f"expected a path on a local or mounted file system, got {text}.")
    return Path(text).expanduser().absolute()


def as_local(path: CheckpointPath) -> Path | None:
    """`path` for a function that needs a file of the operating system; None for a remote one."""
    return path if isinstance(path, Path) else None


def file_sizes(folder: CheckpointPath) -> dict[str, int]:
    """Bytes of every file below a folder, by relative name, sorted."""
    if isinstance(folder, RemotePath):
        return dict(sorted(folder.files().items()))
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


# ----------------------------------------------------------------------------------------- reading


def open_ranges(path: CheckpointPath) -> Ranges:
    """Opens a file to read the bytes [start, stop).

    A local file is mapped privately: a write to a range does not change the file, and the ranges
    stay those of this file if another replaces it. Ranges of a remote file are requested.
    """
    if isinstance(path, RemotePath):
        return path.read
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    return lambda start, stop: memoryview(mapped)[start:stop]


@contextlib.contextmanager
def open_checked(path: CheckpointPath) -> Iterator[Ranges]:
    """As `open_ranges`, with an OSError where a local disk fails; from several threads."""
    if isinstance(path, RemotePath):
        yield path.read
        return
    with path.open("rb", buffering=0) as file:
        yield partial(_pread, path, file.fileno())


def _pread(path: Path, descriptor: int, start: int, stop: int) -> bytes:
    try:
        return os.pread(descriptor, stop - start, start)
    except OSError as error:
        reason = f"cannot read {stop - start} bytes at offset {start}: {error.strerror}"
        raise OSError(error.errno, reason, str(path)) from error


def read_consistently(target: CheckpointPath, read: Callable[[], _T]) -> _T:
    """Result of `read`, repeated until `target` is not replaced while it is read.

    Raises:
        OSError: `target` is replaced again and again.
    """
    for _ in range(_NUM_TRIES):
        complete_renames(target)
        before = identity(target)
        try:
            result = read()
        except (OSError, ValueError):
            if identity(target) == before:
                raise
        else:
            if identity(target) == before:
                return result
    raise replaced_while_read_error(target)


def replaced_while_read_error(target: CheckpointPath) -> OSError:
    why = "another save replaced it while it was read; open it again"
    return OSError(errno.ESTALE, why, str(target))


def identity(target: CheckpointPath) -> object:
    """A key that changes when `target` is replaced; always None for a remote path."""
    return file_identity(target) if isinstance(target, Path) else None


# ----------------------------------------------------------------------------------------- writing


def atomic_write(path: CheckpointPath, nbytes: int) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens a file that replaces `path` when the block ends, as `atomic.atomic_write`.

    Missing folders are created. A file does not replace a remote folder.
    """
    if isinstance(path, Path):
        atomic.make_folder(path.parent)
        return atomic.atomic_write(path, nbytes)
    if path.is_dir():
        raise cannot_replace(path, "a directory", "a file")
    return path.atomic_write(nbytes)


def create(path: CheckpointPath, nbytes: int) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens a new file of a `Staging`, which is stored completely when the block ends."""
    if isinstance(path, RemotePath):
        return path.atomic_write(nbytes)
    return new_file.create(path, nbytes)


def write_bytes(path: CheckpointPath, data: bytes | memoryview) -> None:
    """Writes a new file of a `Staging`."""
    with name_path_in_errors(path), create(path, len(data)) as file:
        file.write(data)


def stage(target: CheckpointPath, index: Sequence[str] = ()) -> Staging:
    """Begins a directory that replaces `target` when it is published.

    Args:
        target: Path of the directory.
        index: Names of the files from which readers find all others. A remote directory without
            them cannot be replaced.
    """
    if isinstance(target, RemotePath):
        return RemoteStaging(target, index)
    return StagedDirectory(target)


def complete_renames(target: CheckpointPath) -> None:
    """Restores a local `target` if a process stopped while it replaced it."""
    if isinstance(target, Path):
        atomic.recover(target)


def remove(target: CheckpointPath) -> None:
    """Deletes a file, a link or a directory, which is never seen in part."""
    if isinstance(target, RemotePath):
        target.remove()
    else:
        atomic.remove(target)
