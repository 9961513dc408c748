"""Opens a directory in the format of `torch.distributed.checkpoint`, whoever wrote it.

Each is a small file of `torch.save` inside the file of the rank that wrote it.

Tensors are `StoredTensor`s: a flat range of one reads those bytes only, from the items that hold
them, whatever boxes the writer's ranks had.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_zero.checkpoint.shard_tensor import boxes_of_range
from lightning_zero.tensors.composite import put_together
from lightning_zero.tensors.lazy import StoredTensor

__all__ = ["METADATA", "REST", "Items", "is_sharded", "open_sharded"]


@dataclass(frozen=True)
class _Data:
    """Where the elements of an item lie: contiguous, from byte `start` of `file` on."""

    file: Path
    start: int


class Items:
    """Reads items of the directory `folder`, whose `metadata` says where each lies."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._places = metadata.storage_data
        self._data: dict[MetadataIndex, _Data | None] = {}  # None: not contiguous
        self._tensors: dict[object, StoredTensor] = {}  # by where they lie

    def tensor(self, name: str, entry: TensorStorageMetadata) -> StoredTensor:
        """The tensor `name`; a flat range of it reads the items that hold it, and of them that.

        Names of the same data, as of tied weights, give the same object.
        """
        dtype = entry.properties.dtype
        places = [self._places[MetadataIndex(name, c.offsets)] for c in entry.chunks]
        where = (dtype, entry.size, *((p.relative_path, p.offset) for p in places))

        def read(start: int, stop: int) -> Tensor:
            return self._read_range(name, entry, start, stop)

        return self._tensors.setdefault(where, StoredTensor.of(entry.size, dtype, read))

    def load_object(self, name: str, weights_only: bool | None) -> Any:
        """The object `name`, which is not a tensor."""
        return torch.load(
            self._item(MetadataIndex(name)), map_location="cpu", weights_only=weights_only
        )

    def _read_range(self, name: str, entry: TensorStorageMetadata, start: int, stop: int) -> Tensor:
        flat = torch.empty(stop - start, dtype=entry.properties.dtype)
        for box in boxes_of_range(entry.size, start, stop):
            target = flat[box.start - start : box.stop - start].view(box.sizes)
            for chunk in entry.chunks:
                low = [max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True)]
                high = [
                    min(a + m, b + n)
                    for a, m, b, n in zip(
                        box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True
                    )
                ]
                if any(a >= b for a, b in zip(low, high, strict=True)):
                    continue
                ours = _slices(low, high, box.offsets)
                theirs = _slices(low, high, chunk.offsets)
                index = MetadataIndex(name, chunk.offsets)
                target[ours] = self._read_part(index, chunk.sizes, target.dtype, theirs)
        return flat

    def _read_part(
        self,
        index: MetadataIndex,
        sizes: Sequence[int],
        dtype: torch.dtype,
        part: tuple[slice, ...],
    ) -> Tensor:
        """The block `part` of an item of `sizes`."""
        if index not in self._data:
            self._data[index] = self._find_data(index, dtype)
        data = self._data[index]
        if data is None:
            whole: Tensor = torch.load(self._item(index), map_location="cpu", weights_only=True)
            return whole[part]
        strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        first = sum(s.start * stride for s, stride in zip(part, strides, strict=True))
        last = sum((s.stop - 1) * stride for s, stride in zip(part, strides, strict=True))
        elements = _read_elements(data, first, last + 1, dtype)
        return elements.as_strided([s.stop - s.start for s in part], strides)

    def _find_data(self, index: MetadataIndex, dtype: torch.dtype) -> _Data | None:
        place = self._places[index]
        item = self._item(index)
        try:
            like = torch.load(item, map_location="meta", weights_only=True)
            item.seek(0)
            reader = torch.PyTorchFileReader(item)
            start = reader.get_record_offset("data/0")  # type: ignore[attr-defined]
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(
                f"{index.fqn} cannot be read from {self._folder / place.relative_path} ({error}): "
                "the checkpoint is damaged."
            ) from error
        if place.__dict__.get("transform_descriptors") or like.dtype != dtype:
            raise ValueError(f"{index.fqn} in {self._folder} is stored in a form unknown here.")
        if not like.is_contiguous() or like.storage_offset() or sys.byteorder != "little":
            return None
        return _Data(self._folder / place.relative_path, place.offset + start)

    def _item(self, index: MetadataIndex) -> io.BufferedReader:
        place = self._places[index]
        view = _FileView(self._folder / place.relative_path, place.offset, place.length)
        return io.BufferedReader(view)


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _read_elements(data: _Data, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    memory = torch.empty((stop - start) * dtype.itemsize, dtype=torch.uint8)
    view = memoryview(memory.numpy())  # type: ignore[arg-type]
    with open(data.file, "rb", buffering=0) as file:
        file.seek(data.start + start * dtype.itemsize)
        while view.nbytes:
            count = file.readinto(view)
            if not count:
                raise ValueError(f"{data.file} ends too early: the checkpoint is damaged.")
            view = view[count:]
    return memory.view(dtype)


class _FileView(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed in close()
        self._offset, self._length, self._position = offset, length, 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view) or 0
        self._position += count
        return count


METADATA = ".metadata"  # torch's
REST = "meta.pt"  # Lightning's: what is neither the module's nor an optimizer's


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory in this format."""
    return (Path(path) / METADATA).is_file()


def open_sharded(
    path: str | os.PathLike[str], *, weights_only: bool | None = None
) -> dict[str, Any]:
    """A directory as the dict that a Lightning checkpoint file holds, of tensors not yet read.

    Understood are what `ZeroStrategy` and Lightning's `ModelParallelStrategy` write, a state dict
    saved by itself, and one under "model" with its optimizer's under "optimizer" or "optim".

    Args:
        path: The directory.
        weights_only: As in `torch.load`, for what is not a tensor.

    Returns:
        "state_dict", "optimizer_states" where there are any (keyed by parameter names, otherwise in
        torch's form), and the rest.

    Raises:
        ValueError: A directory that is none of these, or of which something is missing.
    """
    folder = Path(path)
    metadata = _read_metadata(folder)
    _check_complete(folder, metadata)
    items = Items(folder, metadata)
    paths: Mapping[str, Sequence[str | int]] = metadata.planner_data or {}
    ordered = [name for name in paths if name in metadata.state_dict_metadata]
    ordered += [name for name in metadata.state_dict_metadata if name not in paths]
    tree: dict[str, Any] = {}
    for name in ordered:
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            value: Any = items.tensor(name, entry)
        else:
            value = items.load_object(name, weights_only)
        _place(tree, tuple(paths.get(name, (name,))), value)
    rest = {}
    if (folder / REST).is_file():
        rest = torch.load(folder / REST, map_location="cpu", weights_only=weights_only)
    return _merged(_as_lightning(tree), rest)


def _merged(tree: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Both, also where a dict of `rest` lacks what has shards: that is in the dict of `tree`."""
    merged = {**tree, **rest}
    for key in tree.keys() & rest.keys():
        if isinstance(tree[key], dict) and isinstance(rest[key], dict):
            merged[key] = _merged(tree[key], rest[key])
    return merged


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of torch's metadata and no others: a checkpoint must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        # A dotted name would reach whatever the module imports.
        if "." not in name and (is_dtype or (module, name) in _ALLOWED):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in checkpoint metadata")


_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


def _read_metadata(folder: Path) -> Metadata:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no directory, so it is no sharded checkpoint.")
    if not (folder / METADATA).is_file():
        found = ", ".join(sorted(os.listdir(folder))[:8]) or "nothing"
        raise ValueError(
            f"{folder} is no sharded checkpoint, or an incomplete one: expected a file {METADATA}, "
            f"found {found}; give the directory that the checkpoint was saved to."
        )
    with open(folder / METADATA, "rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
            raise ValueError(
                f"{folder / METADATA} cannot be read ({error}): the checkpoint is damaged, or "
                "written by something else than torch.distributed.checkpoint."
            ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise ValueError(f"{folder / METADATA} is no metadata of torch.distributed.checkpoint.")
    return metadata


def _check_complete(folder: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), end)
    problems = []
    for name, end in ends.items():
        file = folder / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size < end:
            problems.append(f"{name} has {file.stat().st_size} bytes of at least {end}")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored < math.prod(entry.size):
                problems.append(f"{name} has {stored} elements of {math.prod(entry.size)}")
    if problems:
        raise ValueError(
            f"{folder} is incomplete: {'; '.join(problems)}. Use another checkpoint, or copy this "
            "one again."
        )


def _place(tree: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Puts `value` into nested dicts and lists, as its path says: integers count in lists."""
    container: Any = tree
    for key, following in pairwise(path):
        if isinstance(container, list):
            assert isinstance(key, int)
            container += [None] * (key + 1 - len(container))
            if container[key] is None:
                container[key] = [] if isinstance(following, int) else {}
            container = container[key]
        else:
            container = container.setdefault(key, [] if isinstance(following, int) else {})
    key = path[-1]
    if isinstance(container, list):
        assert isinstance(key, int)
        container += [None] * (key + 1 - len(container))
    container[key] = value


def _as_lightning(tree: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tree.get("state_dict"), dict):
        checkpoint = dict(tree)
        states: list[dict[str, Any]] = []
        while f"optimizer_{len(states)}" in checkpoint:
            states.append(checkpoint.pop(f"optimizer_{len(states)}"))
    elif isinstance(tree.get("model"), dict):
        checkpoint = dict(tree)
        checkpoint["state_dict"] = checkpoint.pop("model")
        # Others flatten an optimizer's state; that stays under the name it has.
        named = [key for key in ("optimizer", "optim") if _is_optimizer_state(checkpoint.get(key))]
        states = [checkpoint.pop(key) for key in named]
    else:
        return {"state_dict": tree}
    for state in states:
        # Absent if saved before the first step.
        entries = state["state"] = put_together(state.get("state", {}))
        if any(isinstance(key, int) for g in state["param_groups"] for key in g["params"]):
            # By number, as torch's optimizers: the format has no numbers as names.
            state["state"] = {int(key): entry for key, entry in entries.items()}
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint


def _is_optimizer_state(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("param_groups"), list)
