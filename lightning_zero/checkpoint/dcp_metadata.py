"""Reads the file `.metadata` of torch's distributed checkpoint format, the index of its items.

[Note: Metadata without code] torch writes the file with pickle, which creates any object that a
file asks for. A checkpoint may come from an untrusted source. `_RecordUnpickler` therefore accepts
the opcodes of torch's writers only, and gives access to no class, function or attribute: a global
is a name from a list, and a call of it and its state are stored in a record. The result is checked
field by field, each at a known depth, and only then converted into torch's own objects. The work is
bounded by the length of the file: only strings and records are hashed, and a record that many names
share is checked once.

Alternatives considered: `pickle.Unpickler`, which is written in C, with a `find_class` that allows
some classes. An index of its memo reserves memory, hashing a key of nested tuples does not
terminate, and neither can be changed in a subclass. An index of our own in JSON: a second
description of each item, while the checkpoints of other writers still need this one.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_zero.checkpoint.storage import CheckpointPath
from lightning_zero.layout.foreign_names import check_inside, printable

__all__ = [
    "METADATA",
    "gc_paused",
    "parse_metadata",
    "read_metadata",
]

METADATA = ".metadata"  # torch's
_MAX_BYTES = 2**29  # size of the file; a chunk of a tensor takes about 150
_MAX_DIMS = 64
_MAX_PATH = 256  # keys from the root of the checkpoint to a value
_MAX_MISSING_ITEMS = 2**16  # empty entries in all lists together

_FORMAT = "torch.distributed.checkpoint"
_METADATA_MODULE = f"{_FORMAT}.metadata"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
_SIZE = ("torch", "Size")
_LAYOUT = ("torch.serialization", "_get_layout")
_ORDERED_DICT = ("collections", "OrderedDict")
_GETATTR = ("builtins", "getattr")  # of a member of an enum, as Python 3.11.0 to 3.11.3 pickles it
_ENUMS = {
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    (_OLD_MODULE, "MEM_FORMAT_ENCODING"),
}
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
)
_GLOBALS = {
    *((_METADATA_MODULE, name) for name in _CLASSES),
    (_OLD_MODULE, "TensorProperties"),
    *_ENUMS,
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
    (f"{_FORMAT}.filesystem", "_StorageInfo"),
    _SIZE,
    _LAYOUT,
    _ORDERED_DICT,
    _GETATTR,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


_Path = tuple[str | int, ...]  # keys from the root of the checkpoint to a value


class _InvalidMetadataError(Exception):
    """The file contains something that metadata does not have."""


@dataclass(frozen=True)
class _Global:
    """A global that the file names; the file can only call it."""

    name: tuple[str, str]  # module, and name in it


class _Record:
    """A call of a global and the state set on it. Hashed by identity."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: tuple[str, str], arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None

    def build(self, state: Any) -> None:
        if self.state is not None:
            raise _InvalidMetadataError("the state of a record is set twice")
        self.state = state


# -------------------------------------------------------------------------------------- unpickling

# Those that torch's writers need, besides those that `_RecordUnpickler` implements.
_OPCODES = b"\x80\x95.N\x88\x89JKM\x8a\x8cX)\x85\x86\x87t]ae}(qrhj\x94c\x93"


class _RecordUnpickler(pickle._Unpickler):
    """Unpickles a file into records. See [Note: Metadata without code]."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]  # the values on the stack since the last mark

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._globals: dict[tuple[str, str], _Global | torch.dtype] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._globals:
            if module == "torch" and name in _DTYPES:
                self._globals[key] = _DTYPES[name]
            elif key in _GLOBALS:
                self._globals[key] = _Global(key)
            else:
                raise _InvalidMetadataError(
                    f"{module}.{name} is not allowed in checkpoint metadata; if you trust it, "
                    f"let torch convert it: python -m {_FORMAT}.format_utils dcp_to_torch PATH FILE"
                )
        return self._globals[key]

    def _call(self) -> None:
        arguments = _expect_type(self.stack.pop(), tuple)
        name = _expect_type(self.stack.pop(), _Global).name
        if name == _SIZE:
            (dims,) = arguments
            self.stack.append(_size(dims))
        elif name == _ORDERED_DICT and not arguments:
            self.stack.append({})
        elif name == _GETATTR:
            enum, member = arguments
            if _expect_type(enum, _Global).name not in _ENUMS:
                raise _InvalidMetadataError(f"{enum.name[1]}.{member} is no member of an enum")
            self.stack.append(_Record(enum.name, (member,)))
        else:
            self.stack.append(_Record(name, arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        _expect_type(self.stack[-1], _Record).build(state)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, values: list[Any]) -> None:
        keys = values[::2]
        if any(type(key) is not str and type(key) is not _Record for key in keys):
            raise _InvalidMetadataError("a key of a dict is neither a name nor an index")
        _expect_type(self.stack[-1], dict).update(zip(keys, values[1::2], strict=True))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in _OPCODES},
        ord("R"): _call,
        0x81: _call,  # NEWOBJ: the same for a record
        ord("b"): _build,
        ord("s"): _set_item,
        ord("u"): _set_items,
    }


def _expect_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        _refuse(f"a {kind.__name__.strip('_').lower()}", value)
    return value


def _refuse(expected: str, value: object) -> NoReturn:
    found = value.kind[1] if isinstance(value, _Record) else type(value).__name__.strip("_")
    raise _InvalidMetadataError(f"expected {expected}, got {found}")


def _size(dims: Any) -> torch.Size:
    if type(dims) not in (tuple, list, torch.Size) or len(dims) > _MAX_DIMS:
        _refuse(f"a size of at most {_MAX_DIMS} dimensions", dims)
    return torch.Size(map(_non_negative_int, dims))


def _non_negative_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        _refuse("an integer from 0 to 2^63", value)
    return int(value)


# --------------------------------------------------------------------------------------- checking


class _Converter:
    """Checks records and converts them into torch's objects; shared records once."""

    def __init__(self) -> None:
        # Keys: id of the record, which the root keeps alive, and name of the conversion.
        self._converted: dict[tuple[int, str], Any] = {}
        self._checked_paths: set[str] = set()  # relative paths of files

    def metadata(self, root: object) -> Metadata:
        if not isinstance(root, _Record) or root.kind != (_METADATA_MODULE, "Metadata"):
            raise _InvalidMetadataError(f"it is not metadata of {_FORMAT}")
        fields = self._fields(root, "Metadata")
        entries = {
            self._text(name): self._memoized(entry, self._entry)
            for name, entry in _expect_type(fields.get("state_dict_metadata"), dict).items()
        }
        storage = {
            self._index(index): self._memoized(info, self._storage_info)
            for index, info in _expect_type(fields.get("storage_data"), dict).items()
        }
        _check_storage(entries, storage)
        return Metadata(entries, self._value_paths(fields.get("planner_data")), storage)

    def _memoized(self, record: object, convert: Callable[[Any], Any]) -> Any:
        key = (id(record), convert.__name__)  # a file may use one record in two roles
        if key not in self._converted:
            self._converted[key] = convert(record)
        return self._converted[key]

    def _fields(self, record: object, kind: str) -> dict[str, Any]:
        """Attributes of a record of class `kind`, by name."""
        if not isinstance(record, _Record) or record.kind[1] != kind:
            _refuse(f"a {kind}", record)
        if record.arguments or type(record.state) not in (dict, type(None)):
            raise _InvalidMetadataError(f"a {kind} has an unknown layout")
        return record.state or {}

    def _text(self, value: object) -> str:
        return str(_expect_type(value, str))

    def _entry(self, record: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(record, _Record) and record.kind[1] == "BytesStorageMetadata":
            return BytesStorageMetadata()
        fields = self._fields(record, "TensorStorageMetadata")
        size = _size(fields.get("size"))
        chunks = [
            self._memoized(chunk, self._chunk) for chunk in _expect_type(fields.get("chunks"), list)
        ]
        for chunk in chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(size):
                raise _InvalidMetadataError("a chunk and its tensor differ in their dimensions")
            if any(
                offset + n > dim_size
                for offset, n, dim_size in zip(chunk.offsets, chunk.sizes, size, strict=True)
            ):
                raise _InvalidMetadataError("a chunk lies outside its tensor")
        dtype = self._memoized(fields.get("properties"), self._dtype)
        _check_bytes(size, dtype)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _chunk(self, record: object) -> ChunkStorageMetadata:
        fields = self._fields(record, "ChunkStorageMetadata")
        return ChunkStorageMetadata(_size(fields.get("offsets")), _size(fields.get("sizes")))

    def _dtype(self, record: object) -> torch.dtype:
        if not isinstance(record, _Record) or record.kind[1] != "TensorProperties":
            _refuse("a TensorProperties", record)
        state = record.state  # a tuple; a dict in the first versions of torch
        dtype = state.get("dtype") if type(state) is dict else _expect_type(state, tuple)[0]
        if not isinstance(dtype, torch.dtype):
            _refuse("a dtype", dtype)
        return dtype

    def _index(self, record: object) -> MetadataIndex:
        fields = self._fields(record, "MetadataIndex")
        offset, index = fields.get("offset"), fields.get("index")
        return MetadataIndex(
            self._text(fields.get("fqn")),
            None if offset is None else _size(offset),
            None if index is None else _non_negative_int(index),
        )

    def _storage_info(self, record: object) -> _StorageInfo:
        fields = self._fields(record, "_StorageInfo")
        path = self._text(fields.get("relative_path"))
        if path not in self._checked_paths:
            check_inside(path)
            self._checked_paths.add(path)
        start, length = (
            _non_negative_int(fields.get("offset")),
            _non_negative_int(fields.get("length")),
        )
        if fields.get("transform_descriptors"):
            raise _InvalidMetadataError(
                "items are compressed or encrypted, which cannot be read here"
            )
        return _StorageInfo(path, start, length)

    def _value_paths(self, planner_data: object) -> dict[str, _Path]:
        """Path of each value in the checkpoint's tree, by name; empty if the writer omitted it."""
        if type(planner_data) is not dict:
            return {}
        return {
            self._text(name): tuple(self._memoized(path, self._path))
            for name, path in planner_data.items()
        }

    def _path(self, path: Any) -> _Path:
        if type(path) not in (tuple, list) or not 0 < len(path) <= _MAX_PATH:
            _refuse(f"a path of at most {_MAX_PATH} keys", path)
        for key in path:
            if type(key) is not str:
                _non_negative_int(key)
        return tuple(path)


def _check_bytes(size: Sequence[int], dtype: torch.dtype) -> None:
    # Dimensions of size 0 are left out of the product, since strides leave them out, too.
    if math.prod(dim or 1 for dim in size) * dtype.itemsize >= 2**63:
        raise _InvalidMetadataError("a tensor is larger than 2^63 bytes")


def _check_storage(entries: Mapping[str, Any], storage: Mapping[MetadataIndex, Any]) -> None:
    """Checks that every object and every chunk of a tensor is stored in a file."""
    tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    num_items = len(entries) - len(tensors) + sum(len(e.chunks) for e in tensors.values())
    if num_items > len(storage):
        raise _InvalidMetadataError(f"{num_items} items have {len(storage)} storage entries")
    for name, entry in entries.items():
        indices = [MetadataIndex(name)]
        if name in tensors:
            indices = [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        if any(index not in storage for index in indices):
            raise _InvalidMetadataError(f"{printable(name)} has no storage entry")


def _check_tree(names: Iterable[str], paths: Mapping[str, _Path]) -> None:
    """Checks that the paths form one tree, and that its lists have few missing items."""
    leaves = {paths.get(name, (name,)) for name in names}
    kinds: dict[_Path, type] = {(): str}  # type of the keys of each dict (str) and list (int)
    lengths: dict[_Path, int] = {}
    for path in leaves:
        for depth, key in enumerate(path):
            inner = path[:depth]
            if inner in leaves or kinds.setdefault(inner, type(key)) is not type(key):
                raise _InvalidMetadataError("the paths of its values do not form one tree")
            if isinstance(key, int):
                lengths[inner] = max(lengths.get(inner, 0), key + 1)
    if sum(lengths.values()) > sum(map(len, leaves)) + _MAX_MISSING_ITEMS:
        raise _InvalidMetadataError("a list has far more indices than values")


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Turns the garbage collector off while thousands of live objects are created per rank.

    Otherwise it would traverse all of them again and again, which takes most of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _unpickle(data: bytes) -> Any:
    try:
        return _RecordUnpickler(data).load()
    except (_InvalidMetadataError, MemoryError):
        raise
    except Exception as error:  # the stack, the memo or the data is too short, or of other types
        raise ValueError(f"it is truncated or damaged: {type(error).__name__}: {error}") from None


def parse_metadata(data: bytes) -> Metadata:
    """Parses the content of `.metadata` and executes nothing. See [Note: Metadata without code].

    Raises:
        ValueError: The metadata is damaged, or contains something that is not allowed.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    try:
        with gc_paused():
            metadata = _Converter().metadata(_unpickle(data))
            _check_tree(metadata.state_dict_metadata, metadata.planner_data)
            return metadata
    except (_InvalidMetadataError, ValueError) as error:
        raise ValueError(printable(str(error))) from None


def read_metadata(folder: CheckpointPath) -> Metadata:
    """Reads the metadata of the directory `folder`.

    Raises:
        ValueError: The metadata is missing or damaged, or contains something that is not allowed.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory, so it is not a sharded checkpoint.")
    path = folder / METADATA
    if not path.is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"{folder} is not a sharded checkpoint, or it is incomplete: expected a file "
            f"{METADATA}, found {printable(found)}; pass the directory that the checkpoint was "
            "saved to."
        )
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        return parse_metadata(data)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}): the checkpoint is damaged, or was not written by "
            f"{_FORMAT}."
        ) from error
