"""Parses the file `.metadata` of torch's distributed checkpoint format, the index of its items.

[Note: Metadata without pickle] torch writes the file with pickle, which creates any object that a
file asks for. A checkpoint may come from an untrusted source, so the file is not unpickled.
`_PickleInterpreter` executes the few opcodes that torch's writers need. It gives access to no
class, function or attribute: a global is a name from a list, a call of it and its state are stored
in a record, and any other opcode is an error. The result is checked field by field, each at a known
depth, and only then converted into torch's own objects. The work is therefore bounded by the length
of the file: only strings and records are hashed, no memory is reserved for an announced length, and
a record that many names share is checked once.

Alternatives considered: `pickle.Unpickler` with a `find_class` that allows some classes. Its BUILD
opcode sets attributes of any object on its stack, including those classes; an index of its memo
reserves memory; and hashing a key of nested tuples does not terminate.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

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

from lightning_zero.checkpoint.atomic import CheckpointPath
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


# ---------------------------------------------------------------------------------------- opcodes


class _PickleInterpreter:
    """Executes the opcodes of one file. See [Note: Metadata without pickle]."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # lengths of the stack
        self._memo: dict[int, Any] = {}
        self._globals: dict[tuple[str, str], Any] = {}

    def run(self) -> Any:
        """Returns the object that the file describes.

        Raises:
            _InvalidMetadataError: The file has an opcode or a global that metadata does not have.
            IndexError, KeyError, ValueError: The file is damaged.
        """
        data, stack, memo = self._data, self._stack, self._memo
        push, steps = stack.append, _STEPS
        at = 0
        while True:
            code = data[at]
            at += 1
            # The most frequent opcodes, nine of ten: function calls would take most of the time.
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _GET4:
                push(memo[data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24])
                at += 4
            elif code == _GET1:
                push(memo[data[at]])
                at += 1
            elif code == _INT1:
                push(data[at])
                at += 1
            elif code == _INT2:
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif code == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif code == _TUPLE2:
                second = stack.pop()
                stack[-1] = (stack[-1], second)
            elif code == _MARK:
                self._marks.append(len(stack))
            elif code == _EMPTY_TUPLE:
                push(())
            elif code == _EMPTY_DICT:
                push({})
            elif code == _STOP:
                return stack.pop()
            elif code in steps:
                self._at = at
                steps[code](self)
                at = self._at
            else:
                raise _InvalidMetadataError(
                    f"opcode {bytes([code])!r} is not allowed in checkpoint metadata"
                )

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"it is {self._at - len(self._data)} bytes too short")
        return self._data[start : self._at]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _integer(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    # ---- values

    def protocol(self) -> None:
        self._byte()

    def frame(self) -> None:
        self._take(8)

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def int4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._byte()), "little", signed=True))

    def short_text(self) -> None:
        self._stack.append(self._take(self._byte()).decode())

    def text(self) -> None:
        self._stack.append(self._take(self._integer(4)).decode())

    # ---- containers

    def tuple3(self) -> None:
        first, second, third = self._stack[-3:]
        self._stack[-3:] = [(first, second, third)]

    def tuple(self) -> None:
        self._stack.append(tuple(self._since_mark()))

    def empty_list(self) -> None:
        self._stack.append([])

    def append(self) -> None:
        value = self._stack.pop()
        _expect_type(self._stack[-1], list).append(value)

    def appends(self) -> None:
        values = self._since_mark()
        _expect_type(self._stack[-1], list).extend(values)

    def setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def setitems(self) -> None:
        self._set(self._since_mark())

    def _set(self, values: list[Any]) -> None:
        keys = values[::2]
        if any(type(key) is not str and type(key) is not _Record for key in keys):
            raise _InvalidMetadataError("a key of a dict is neither a name nor an index")
        _expect_type(self._stack[-1], dict).update(zip(keys, values[1::2], strict=True))

    # ---- memo

    def put1(self) -> None:
        self._memo[self._byte()] = self._stack[-1]

    def put4(self) -> None:
        self._memo[self._integer(4)] = self._stack[-1]

    # ---- globals, calls and states

    def named(self) -> None:
        words = []
        for _ in range(2):
            end = self._data.index(b"\n", self._at)
            words.append(self._take(end - self._at).decode())
            self._at += 1
        self._push_global(*words)

    def stacked(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_global(_expect_type(module, str), _expect_type(name, str))

    def _push_global(self, module: str, name: str) -> None:
        key = (module, name)
        if key not in self._globals:
            if module == "torch" and name in _DTYPES:
                self._globals[key] = _DTYPES[name]
            elif key in _GLOBALS:
                self._globals[key] = _Global(key)
            else:
                raise _InvalidMetadataError(
                    f"{module}.{name} is not allowed in checkpoint metadata"
                )
        self._stack.append(self._globals[key])

    def call(self) -> None:
        arguments = _expect_type(self._stack.pop(), tuple)
        name = _expect_type(self._stack.pop(), _Global).name
        if name == _SIZE:
            (dims,) = arguments
            self._stack.append(_size(dims))
        elif name == _ORDERED_DICT and not arguments:
            self._stack.append({})
        elif name == _GETATTR:
            enum, member = arguments
            if _expect_type(enum, _Global).name not in _ENUMS:
                raise _InvalidMetadataError(f"{enum.name[1]}.{member} is no member of an enum")
            self._stack.append(_Record(enum.name, (member,)))
        else:
            self._stack.append(_Record(name, arguments))

    def build(self) -> None:
        state = self._stack.pop()
        _expect_type(self._stack[-1], _Record).build(state)


_MEMOIZE, _GET1, _GET4 = 0x94, ord("h"), ord("j")
_INT1, _INT2 = ord("K"), ord("M")
_MARK, _EMPTY_TUPLE, _TUPLE1, _TUPLE2 = ord("("), ord(")"), 0x85, 0x86
_EMPTY_DICT, _STOP = ord("}"), ord(".")
_STEPS: dict[int, Callable[[_PickleInterpreter], None]] = {
    ord(code): step
    for code, step in {
        "\x80": _PickleInterpreter.protocol,
        "\x95": _PickleInterpreter.frame,
        "N": _PickleInterpreter.none,
        "\x88": _PickleInterpreter.true,
        "\x89": _PickleInterpreter.false,
        "J": _PickleInterpreter.int4,
        "\x8a": _PickleInterpreter.long1,
        "\x8c": _PickleInterpreter.short_text,
        "X": _PickleInterpreter.text,
        "\x87": _PickleInterpreter.tuple3,
        "t": _PickleInterpreter.tuple,
        "]": _PickleInterpreter.empty_list,
        "a": _PickleInterpreter.append,
        "e": _PickleInterpreter.appends,
        "s": _PickleInterpreter.setitem,
        "u": _PickleInterpreter.setitems,
        "q": _PickleInterpreter.put1,
        "r": _PickleInterpreter.put4,
        "c": _PickleInterpreter.named,
        "\x93": _PickleInterpreter.stacked,
        "R": _PickleInterpreter.call,
        "\x81": _PickleInterpreter.call,  # NEWOBJ: the same for a record
        "b": _PickleInterpreter.build,
    }.items()
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


def parse_metadata(data: bytes) -> Metadata:
    """Parses the content of `.metadata` and executes nothing. See [Note: Metadata without pickle].

    Raises:
        ValueError: The metadata is damaged, or contains something that is not allowed.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    try:
        with gc_paused():
            metadata = _Converter().metadata(_PickleInterpreter(data).run())
            _check_tree(metadata.state_dict_metadata, metadata.planner_data)
            return metadata
    except (_InvalidMetadataError, ValueError) as error:
        raise ValueError(printable(str(error))) from None
    except LookupError:  # the stack, the memo or the data is too short
        raise ValueError("it is truncated or damaged") from None


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
