"""Opens, writes and verifies files of `torch.save`.

[Note: Torch files] They are zip archives: `data.pkl`, a pickle that refers to storages by number,
and one uncompressed record `data/<number>` for each storage, with its CRC32. `torch.load` ignores
the checksums, `find_damage` verifies them. The tensors of a remote file, which cannot be mapped,
become `LazyTensor`s. If some tensors are inside objects, where they cannot be replaced, the entire
file is read.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.checkpoint.storage import (
    ByteRange,
    CheckpointPath,
    Ranges,
    as_local,
    atomic_write,
    open_checked,
    open_ranges,
)
from lightning_zero.layout.foreign_names import printable
from lightning_zero.tensors.composite import is_composite, map_tensors
from lightning_zero.tensors.lazy import LazyTensor, read_flat

__all__ = [
    "NUM_THREADS",
    "Progress",
    "find_damage",
    "find_damage_in_part",
    "find_inflated",
    "has_checksums",
    "is_torch_file",
    "iter_bytes",
    "lazy_tensor",
    "no_progress",
    "open_torch_file",
    "open_without",
    "save_to",
    "span",
    "write_torch_file",
]

_ZIP_MAGIC = b"PK\x03\x04"
_REFUSAL = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")
_PICKLE_MAGIC = b"\x80"  # what torch.save wrote before 1.6, and writes on request

# ----------------------------------------------------------------------------------------- opening


def is_torch_file(path: CheckpointPath) -> bool:
    """Whether the first bytes of `path` are those of a file of `torch.save`."""
    with path.open("rb") as file:
        found = file.read(4)
    return found == _ZIP_MAGIC or found.startswith(_PICKLE_MAGIC)


def open_torch_file(
    path: CheckpointPath,
    *,
    weights_only: bool | None = None,
    pickle_module: ModuleType | None = None,
    is_mapped: bool = True,
) -> Any:
    """Loads the object given to `torch.save`, with its tensors on the CPU.

    Mapped tensors are private to this process: a write to one does not change the file.

    Raises:
        ValueError: The file is truncated or damaged.
        pickle.UnpicklingError: The file contains objects that `weights_only` refuses.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        is_zip = file.read(4) == _ZIP_MAGIC
        if is_zip and not _has_zip_end(file):  # it checks the end of the file
            raise ValueError(_damage_text(path, "its end is missing"))
        if is_zip and (why := find_inflated(file)):
            raise ValueError(_damage_text(path, why))
    load = partial(torch.load, weights_only=weights_only, pickle_module=pickle_module)
    runs_classes = weights_only is False or pickle_module is not None
    try:
        if (local := as_local(path)) is not None:
            return load(local, map_location="cpu", mmap=is_zip and is_mapped)
        with path.open("rb") as file:
            if not is_zip:
                return load(file, map_location="cpu")
            tree = load(file, map_location="meta")
            if _has_hidden_tensors(tree):
                file.seek(0)
                return load(file, map_location="cpu")
            return _with_lazy_tensors(path, tree)
    except Exception as error:
        raise _with_path(path, error, is_zip=is_zip, runs_classes=runs_classes) from error


def _has_zip_end(file: Any) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # the end is one of a large file, and damaged
        return False


def open_without(package: str, path: Path, *, weights_only: bool | None = None) -> Any:
    """As `open_torch_file`, with a placeholder for every object of a class of `package`.

    `package` need not be installed. `weights_only` refuses the classes of all other packages.
    """
    if weights_only is False:
        return open_torch_file(path, weights_only=False, pickle_module=_pickle_module(package))
    unsafe: list[str] = []
    # If it is not a zip file, or a damaged one, `open_torch_file` raises the error.
    with suppress(Exception), path.open("rb") as file:
        if find_inflated(file) is None:
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    foreign = [name for name in unsafe if name.startswith(f"{package}.")]
    with torch.serialization.safe_globals([(_placeholder(name), name) for name in foreign]):
        return open_torch_file(path, weights_only=True)


class _Placeholder:
    """Object of a class that is not installed; accepts any arguments."""

    def __new__(cls, *arguments: Any) -> _Placeholder:
        return super().__new__(cls)


def _placeholder(name: str) -> type[_Placeholder]:
    return type(name.rpartition(".")[2], (_Placeholder,), {})


def _pickle_module(package: str) -> ModuleType:
    """A copy of the module pickle whose unpickler replaces classes of `package`."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.split(".")[0] == package:
                return _placeholder(name)
            return super().find_class(module, name)

    changed = ModuleType("pickle")
    changed.__dict__.update(vars(pickle))
    changed.Unpickler = Unpickler  # type: ignore[attr-defined]
    return changed


def _with_path(
    path: CheckpointPath, error: Exception, *, is_zip: bool, runs_classes: bool
) -> Exception:
    """The error to raise for an error of reading a torch file; it names the file."""
    if isinstance(error, pickle.UnpicklingError):
        if is_zip or "Unsupported" in str(error):  # a class that is refused
            return pickle.UnpicklingError(f"{path}: {printable(_refusal_text(str(error)))}")
    elif isinstance(error, OSError) and error.errno:
        return OSError(error.errno, f"cannot be read ({error.strerror})", str(path))
    elif isinstance(error, (MemoryError, ImportError)):
        return error
    elif runs_classes and (isinstance(error, AttributeError) or not _is_raised_by_torch(error)):
        return error  # of a class that is unpickled, or missing
    return ValueError(_damage_text(path, printable(f"{type(error).__name__}: {error}")))


def _refusal_text(text: str) -> str:
    """Torch's text about a class that it refuses, with the cure in words of the Trainer."""
    refusal = _REFUSAL.search(text)
    if refusal is None:
        return text
    return (
        f"Weights only load failed: {refusal[1]} is not loaded by default. If you trust the file, "
        "pass weights_only=False where you load it (fit, test, load_from_checkpoint, fabric.load); "
        "or save without it: "
        "save_hyperparameters(ignore=[...])."
    )


def _is_raised_by_torch(error: Exception) -> bool:
    """Whether torch, or the C code that it calls, has raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(torch.__file__).parent in Path(frame.f_code.co_filename).parents


_MAX_INFLATED_BYTES = 2**26


def find_inflated(file: Any) -> str | None:
    """Describes an archive whose compressed records need too much memory; None if it has none."""
    try:
        records = zipfile.ZipFile(file).infolist()
    except _ZIP_ERRORS as error:
        return f"the directory of its records at the end is damaged ({error})"
    finally:
        file.seek(0)
    inflated = sum(
        entry.file_size
        for entry in records
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size
    )
    if inflated > _MAX_INFLATED_BYTES:
        return f"compressed records would take {inflated} bytes, and torch.save compresses none"
    return None


class _TensorFinder(pickle.Pickler):
    has_found = False

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        self.has_found = True
        return list, ()  # do not pickle the tensor


def _has_hidden_tensors(tree: Any) -> bool:
    """Whether a tensor is inside an object, not only in dicts, lists and other pytrees."""
    finder = _TensorFinder(io.BytesIO())
    try:
        finder.dump([leaf for leaf in tree_leaves(tree) if not isinstance(leaf, Tensor)])
    except Exception:  # an object that cannot be pickled
        return True
    return finder.has_found


def _with_lazy_tensors(path: CheckpointPath, tree: Any) -> Any:
    """Replaces tensors on the meta device, for which torch has noted their offsets in the file."""
    ranges = open_ranges(path)
    tensors: dict[object, LazyTensor] = {}  # by offset, so that tied tensors stay one tensor

    def lazy(tensor: Tensor) -> LazyTensor:
        start = tensor.untyped_storage()._checkpoint_offset
        assert start is not None
        key = (start, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        return tensors.setdefault(key, lazy_tensor(ranges, start, tensor.detach()))

    def value(tensor: Tensor) -> Tensor:
        if is_composite(tensor):
            return map_tensors(lambda part: lazy(part).read(), tensor)
        return lazy(tensor)

    return tree_map_only(Tensor, value, tree)


def lazy_tensor(ranges: Ranges, origin: int, like: Tensor) -> LazyTensor:
    """A tensor like `like`, on the meta device, whose storage starts at byte `origin` of a file."""
    return LazyTensor.of(like.shape, like.dtype, partial(_read_elements, ranges, origin, like))


def _read_elements(ranges: Ranges, origin: int, like: Tensor, start: int, stop: int) -> Tensor:
    is_plain = like.is_contiguous()
    first, last = (start, stop) if is_plain else (0, span(like.shape, like.stride()))
    at = origin + (int(like.storage_offset()) + first) * like.element_size()
    if start == stop:
        return torch.empty(0, dtype=like.dtype)
    data = ranges(at, at + (last - first) * like.element_size())
    values = torch.frombuffer(data, dtype=like.dtype)
    if is_plain:
        return values
    return values.as_strided(like.shape, like.stride()).reshape(-1)[start:stop]


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements in a storage from the first to the last of a nonempty tensor."""
    return 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def _damage_text(path: CheckpointPath, why: str) -> str:
    return (
        f"{path} ({path.stat().st_size} bytes) is truncated, damaged or not written by "
        f"torch.save: {why}. If its save or copy was interrupted, use an earlier checkpoint or "
        "copy it again."
    )


# ----------------------------------------------------------------------------------------- writing

PIECE_BYTES = 16 * 1024**2
_RECORD_BYTES = 512  # upper bound for the headers of a record
_PICKLE_BYTES = 2**13  # of most files, in addition

Progress = Callable[[int], object]  # called with the bytes that were written since the last call


def no_progress(nbytes: int) -> None:
    """A `Progress` that does nothing."""


def write_torch_file(tree: object, path: CheckpointPath, progress: Progress = no_progress) -> None:
    """Like `torch.save(tree, path)`, but atomically. `LazyTensor`s are read into memory.

    Raises:
        OSError: The file cannot be written; see `atomic_write`.
    """
    storages = _storage_bytes(tree)
    nbytes = sum(storages)
    with atomic_write(path, nbytes + _RECORD_BYTES * (len(storages) + 8) + _PICKLE_BYTES) as file:
        save_to(file, tree)
    progress(nbytes)


def save_to(file: Any, tree: object) -> None:
    """`torch.save` to an open file, with the OSError that torch's archive writer hides."""
    try:
        torch.save(tree, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _storage_bytes(tree: object) -> list[int]:
    """Bytes of each storage in dicts, lists and other pytrees."""
    nbytes: dict[int, int] = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, LazyTensor):
            nbytes[id(leaf)] = leaf.nbytes
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided and not is_composite(leaf):
            nbytes[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
    return list(nbytes.values())


def iter_bytes(tensor: Tensor, progress: Progress) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, at most `PIECE_BYTES` at a time."""
    step = max(1, PIECE_BYTES // tensor.element_size())
    for start in range(0, tensor.numel(), step):
        part = read_flat(tensor, start, min(start + step, tensor.numel())).detach()
        yield part.cpu().contiguous().view(torch.uint8).numpy().data
        progress(part.nbytes)


# ---------------------------------------------------------------------------------------- checking

NUM_THREADS = 4
_CHECKED_BYTES = 256 * 1024  # per read and thread; small, so that verifying takes little memory
_CHECKED_REMOTE_BYTES = 4 * 1024**2  # a network has a latency
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the extra field
# Errors of zipfile for damaged bytes: a bad name, a negative offset, an unsupported flag.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,  # and NotImplementedError
    ValueError,  # and UnicodeDecodeError
)


def find_damage(path: CheckpointPath, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Verifies this rank's share of the records of a file by their checksums, in parallel.

    A file in torch's format from before 1.6, which has no checksums, is accepted; so are records
    that were written without one.

    Returns:
        One line for each damaged record.
    """
    with path.open("rb") as file:
        if file.read(4) != _ZIP_MAGIC:
            return []
    size, own = path.stat().st_size, slice(rank, None, world_size)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(_damage_in(path, 0, size, own, pool.map))


def find_damage_in_part(path: CheckpointPath, start: int, length: int) -> str | None:
    """Describes a damaged record of a small torch file that is a part of `path`; or None."""
    return next(_damage_in(path, start, length, slice(None), map), None)


def _damage_in(
    path: CheckpointPath, start: int, length: int, own: slice, each: Callable[..., Iterable[Any]]
) -> Iterator[str]:
    """Describes the damaged records of a torch file that is a part of `path`.

    `own`: selects records, ordered by size. `each`: `map`, or one that uses threads.
    """
    with open_checked(path) as ranges:
        try:
            records = zipfile.ZipFile(ByteRange(ranges, start, length)).infolist()
        except _ZIP_ERRORS as error:
            if ranges(start, start + 1) != _PICKLE_MAGIC:
                yield f"the directory of its records at the end is missing or damaged ({error})"
            return
        ordered = sorted(records, key=lambda entry: -entry.file_size)
        check = partial(_check_record, path, ranges, start)
        yield from filter(None, each(check, ordered[own]))


def has_checksums(path: CheckpointPath) -> bool:
    """Whether a file is a torch file whose records have checksums."""
    with path.open("rb") as file:
        if not _has_zip_end(file):
            return False
        try:
            records = zipfile.ZipFile(file).infolist()
            return any(entry.CRC for entry in records if "/data/" in entry.filename)
        except _ZIP_ERRORS:
            return True  # `find_damage` reports the error


def _check_record(
    path: CheckpointPath, ranges: Ranges, origin: int, entry: zipfile.ZipInfo
) -> str | None:
    """Describes the damage of a record, or None. Offsets in `entry` count from byte `origin`."""
    try:
        if entry.compress_type == zipfile.ZIP_STORED:
            step = _CHECKED_BYTES if as_local(path) else _CHECKED_REMOTE_BYTES
            return _compare_record(ranges, step, origin + entry.header_offset, entry)
        with (
            path.open("rb") as file,
            zipfile.ZipFile(file) as archive,
            archive.open(entry) as record,
        ):
            while record.read(_CHECKED_BYTES):
                pass
        return None
    except _ZIP_ERRORS as error:
        return f"record {entry.filename!r} cannot be read ({type(error).__name__}: {error})"


def _compare_record(ranges: Ranges, step: int, start: int, entry: zipfile.ZipInfo) -> str | None:
    name_start = start + _LOCAL_HEADER.size
    header = ranges(start, name_start)
    if len(header) < _LOCAL_HEADER.size or header[:4] != _ZIP_MAGIC:
        return f"record {entry.filename} has no header"
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    name = ranges(name_start, name_start + name_bytes)
    if name != entry.filename.encode():
        return f"record {entry.filename} is named {name!r} in its header"
    offset = name_start + name_bytes + extra_bytes
    crc, left = 0, entry.file_size
    while left:
        block = ranges(offset, offset + min(left, step))
        if not block:
            return f"record {entry.filename} lacks its last {left} bytes"
        crc = zlib.crc32(block, crc)
        offset, left = offset + len(block), left - len(block)
    if entry.CRC and crc != entry.CRC:  # torch writes 0 if computing checksums is turned off
        return (
            f"record {entry.filename} ({entry.file_size} bytes) has checksum {crc:08x}, expected "
            f"{entry.CRC:08x}"
        )
    return None
