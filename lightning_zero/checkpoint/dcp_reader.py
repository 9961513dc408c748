"""Opens a directory in the format of `torch.distributed.checkpoint`, from any writer.

The ranges of the files of ranks are read (see `open_ranges`). Each item in them is
a small file of `torch.save`, whose elements are one contiguous record. A tensor becomes a
`LazyTensor`: a flat range of it is a view of the map if one item contains the range, and otherwise
a copy from several items, for any boxes of the writer's ranks. torch's own reader would read every
item completely, even if it needs only a part.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_zero.checkpoint.checkpoint_shard import boxes_of_range
from lightning_zero.checkpoint.dcp_chunks import check_complete
from lightning_zero.checkpoint.dcp_metadata import METADATA, read_metadata
from lightning_zero.checkpoint.save_record import find_foreign_files, find_foreign_items
from lightning_zero.checkpoint.states import METADATA_KEY
from lightning_zero.checkpoint.storage import (
    ByteRange,
    CheckpointPath,
    Ranges,
    file_sizes,
    identity,
    open_ranges,
    replaced_while_read_error,
)
from lightning_zero.checkpoint.torch_file import (
    NUM_THREADS,
    find_damage_in_part,
    find_inflated,
    open_torch_file,
    span,
)
from lightning_zero.layout.foreign_names import printable
from lightning_zero.tensors.composite import unflatten_composites
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["METADATA", "META_FILE", "find_damage", "is_sharded", "open_sharded"]

META_FILE = "meta.pt"  # Lightning's name: all entries but those of the module and the optimizers
_NUM_FILES = 16  # files of ranks that are kept open
_MAX_HEADERS_BYTES = 2**16  # bytes of an item that are not its elements
# Errors that torch's reader raises for damaged bytes, besides RuntimeError.
_DAMAGE_ERRORS = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)


class _ItemReader:
    """Reads items of the directory `folder`; `metadata` gives file and offset of each."""

    def __init__(self, folder: CheckpointPath, metadata: Metadata) -> None:
        self._storage = metadata.storage_data
        self._folder = folder
        open_file = partial(_open_file, folder, identity(folder))
        self._ranges = lru_cache(_NUM_FILES)(open_file)  # of the file with a name
        self._items: dict[MetadataIndex, tuple[int, Tensor]] = {}  # see `_item`
        self._layouts: dict[bytes, Tensor] = {}  # by pickle; many items have the same one
        self._tensors: dict[object, LazyTensor] = {}  # by file and offset of their chunks

    def open_files(self) -> None:
        """Opens the files if there are few, so that they stay readable if they are replaced."""
        names = {info.relative_path for info in self._storage.values()}
        for name in sorted(names) if len(names) <= _NUM_FILES else ():
            self._ranges(name)

    def tensor(self, name: str, entry: TensorStorageMetadata) -> LazyTensor:
        """The tensor `name`; tied weights, which have several names, give the same object."""
        dtype = entry.properties.dtype
        chunks = [self._storage[MetadataIndex(name, c.offsets)] for c in entry.chunks]
        key = (dtype, entry.size, *((info.relative_path, info.offset) for info in chunks))
        read = partial(self._read_range, name, entry)
        return self._tensors.setdefault(key, LazyTensor.of(entry.size, dtype, read))

    def load_object(self, name: str, weights_only: bool | None) -> Any:
        """The object `name`, which is not a tensor."""
        info = self._storage[MetadataIndex(name)]
        content = io.BytesIO(self._item_file(info).read(info.length))
        try:
            if why := find_inflated(content):
                raise ValueError(why)
            return torch.load(content, map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            file = printable(str(self._folder / info.relative_path))
            raise pickle.UnpicklingError(f"{printable(name)} in {file}: {error}") from error
        except Exception as error:
            if weights_only is False and not isinstance(error, _DAMAGE_ERRORS):
                raise  # raised by a class that is unpickled
            raise self._damage_error(name, info, error) from error

    def _read_range(self, name: str, entry: TensorStorageMetadata, start: int, stop: int) -> Tensor:
        boxes = {torch.Size(box.offsets): box for box in boxes_of_range(entry.size, start, stop)}
        chunks = [box.chunk for box in boxes.values()]
        parts = create_read_items_for_chunk_list(name, entry, chunks)
        dtype = entry.properties.dtype
        flat: Tensor | None = None
        for part in parts:
            sizes = entry.chunks[part.storage_index.index or 0].sizes
            values = self._block(
                part.storage_index, dtype, sizes, part.storage_offsets, part.lengths
            )
            if values.numel() == stop - start and _is_plain(values):
                return values.view(-1)
            flat = torch.empty(stop - start, dtype=dtype) if flat is None else flat
            box = boxes[part.dest_index.offset]  # type: ignore[index]
            target = flat[box.start - start : box.stop - start].view(box.sizes)
            ranges = zip(part.dest_offsets, part.lengths, strict=True)
            target[tuple(slice(offset, offset + size) for offset, size in ranges)].copy_(values)
        return torch.empty(0, dtype=dtype) if flat is None else flat

    def _block(
        self,
        index: MetadataIndex,
        dtype: torch.dtype,
        item_sizes: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> Tensor:
        """Block at `offsets` of an item with `item_sizes`; all in elements, by dimension."""
        info = self._storage[index]
        try:
            start, item = self._item(index, dtype, item_sizes)
            strides, numel = item.stride(), span(sizes, item.stride())
            first = int(item.storage_offset()) + sum(map(operator.mul, offsets, strides))
            start += first * dtype.itemsize
            if start + numel * dtype.itemsize > info.offset + info.length:
                raise ValueError("it is smaller than its size in the metadata")
            data = self._ranges(info.relative_path)(start, start + numel * dtype.itemsize)
            return torch.frombuffer(data, dtype=dtype).as_strided(sizes, strides)
        except (*_DAMAGE_ERRORS, RuntimeError, pickle.UnpicklingError) as error:
            raise self._damage_error(index.fqn, info, error) from error

    def _item(
        self, index: MetadataIndex, dtype: torch.dtype, sizes: Sequence[int]
    ) -> tuple[int, Tensor]:
        """Byte of the file at which the storage of an item starts; the item on the meta device."""
        if index not in self._items:
            nbytes = math.prod(sizes) * dtype.itemsize
            start, like = self._open_item(self._storage[index], nbytes)
            if not isinstance(like, Tensor) or like.layout != torch.strided:
                raise ValueError("it is not a dense tensor")
            if like.dtype != dtype or like.shape != torch.Size(sizes):
                raise ValueError(
                    f"its metadata has {dtype} of {tuple(sizes)}, its file has {like.dtype} of "
                    f"{tuple(like.shape)}"
                )
            self._items[index] = start, like
        return self._items[index]

    def _open_item(self, info: Any, nbytes: int) -> tuple[int, Tensor]:
        item = self._item_file(info)
        try:
            start, like = self._layout(item, info.length - nbytes)
        except Exception as error:
            raise (item.failure or error) from error
        return info.offset + start, like

    def _item_file(self, info: Any) -> ByteRange:
        """An item as a file for reading."""
        return ByteRange(self._ranges(info.relative_path), info.offset, info.length)

    def _layout(self, item: Any, header_bytes: int) -> tuple[int, Tensor]:
        """Byte of an item at which its elements start; the item on the meta device.

        `header_bytes` is the number of bytes of the item that are not its elements.
        """
        # Fewer bytes cannot inflate to much.
        if header_bytes > _MAX_HEADERS_BYTES:
            why = find_inflated(item)
            if why:
                raise ValueError(why)
        reader: Any = torch.PyTorchFileReader(item)
        pickled = reader.get_record("data.pkl")
        if pickled not in self._layouts:
            if reader.get_record("byteorder") != sys.byteorder.encode():
                raise RuntimeError("its byte order differs from this machine's")
            item.seek(0)
            self._layouts[pickled] = torch.load(item, map_location="meta", weights_only=True)
        return reader.get_record_offset("data/0"), self._layouts[pickled]

    def _damage_error(self, name: str, info: Any, error: Exception) -> Exception:
        file = printable(str(self._folder / info.relative_path))
        if isinstance(error, OSError) and error.errno:
            return OSError(error.errno, f"{printable(name)}: {error.strerror}", file)
        return ValueError(
            f"{printable(name)} cannot be read from {file} ({printable(str(error))}): the "
            "checkpoint is damaged."
        )


def _open_file(folder: CheckpointPath, expected: object, name: str) -> Ranges:
    ranges = open_ranges(folder / name)
    if identity(folder) != expected:
        raise replaced_while_read_error(folder)
    return ranges


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0


def is_sharded(path: CheckpointPath) -> bool:
    """Whether `path` is a sharded checkpoint: a directory in DCP's format."""
    return (path / METADATA).is_file()


def find_damage(folder: CheckpointPath, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Verifies this rank's share of the items by their checksums, in parallel.

    Returns:
        One line for each file with a damaged item.
    """
    try:
        metadata = read_metadata(folder)
    except ValueError as error:
        return [str(error)]
    names = {(p.relative_path, p.offset, p.length): i.fqn for i, p in metadata.storage_data.items()}
    own_items = sorted(names, key=lambda item: -item[2])[rank::world_size]
    sizes = file_sizes(folder)
    files = {name: folder / name for name, _, _ in own_items}

    def check(item: tuple[str, int, int]) -> str | None:
        name, start, length = item
        if name not in sizes:
            return f"{printable(name)} is missing"
        line = find_damage_in_part(files[name], start, length)
        if not line:
            return None
        what = f"{printable(name)} ({sizes[name]} bytes) differs from its checksums"
        return f"{what} in {printable(names[item])}: {line}"

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        lines = list(pool.map(check, own_items))
    by_file = {item[0]: line for item, line in zip(own_items, lines, strict=True) if line}
    problems = list(by_file.values())
    if any(name not in sizes for name in files):
        return problems
    if rank == 0:
        problems += find_foreign_files(folder, metadata)
    return problems + find_foreign_items(folder, metadata, rank, world_size)


def open_sharded(
    folder: CheckpointPath, *, weights_only: bool | None = None, keeps_keys: bool = False
) -> dict[str, Any]:
    """Opens a directory as the dict of a Lightning checkpoint; its tensors are not yet read.

    Reads the checkpoints of `ZeroStrategy` and of Lightning's `ModelParallelStrategy` and
    `FSDPStrategy`, a plain state dict, and a state dict under "model" with the optimizer's under
    "optimizer" or "optim".

    Args:
        folder: The directory.
        weights_only: As for `torch.load`.
        keeps_keys: Whether a dict without a "state_dict" keeps its keys. It always does if it was
            saved with the names of its modules.

    Returns:
        "state_dict", "optimizer_states" if there are any (with parameter names as keys, otherwise
        as torch has them), and all other entries.

    Raises:
        ValueError: The directory is in another format, or a part of it is missing.
    """
    metadata = read_metadata(folder)
    check_complete(folder, metadata)
    if foreign := find_foreign_files(folder, metadata):
        raise ValueError(
            f"{folder} is not one complete checkpoint: {'; '.join(foreign[:20])}. Use another "
            "checkpoint, or copy this one again."
        )
    items = _ItemReader(folder, metadata)
    items.open_files()
    paths: Mapping[str, Sequence[str | int]] = metadata.planner_data or {}
    ordered = [name for name in paths if name in metadata.state_dict_metadata]
    ordered += [name for name in metadata.state_dict_metadata if name not in paths]
    values: dict[str, Any] = {}
    for name in ordered:
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            values[name] = items.tensor(name, entry)
        else:
            values[name] = items.load_object(name, weights_only)
    tree = unflatten_state_dict(values, {name: tuple(paths.get(name, (name,))) for name in values})
    rest = _load_rest(folder, metadata, weights_only)
    note = rest.get(METADATA_KEY)
    is_named = isinstance(note, Mapping) and "modules" in note
    if is_named or (keeps_keys and "state_dict" not in tree):
        return _with_composites(_merged(tree, rest))
    return _merged(_as_lightning(tree), rest)


def _with_composites(contents: dict[str, Any]) -> dict[str, Any]:
    """Restores composite tensors in the optimizer states among the entries."""
    for state in filter(_is_optimizer_state, contents.values()):
        state["state"] = unflatten_composites(state.get("state", {}))
    return contents


def _load_rest(
    folder: CheckpointPath, metadata: Metadata, weights_only: bool | None
) -> dict[str, Any]:
    """Loads `meta.pt` from the folder of the ranks' files; a remote save has one of its own."""
    names = {info.relative_path for info in metadata.storage_data.values()}
    for parent in (*sorted({str(PurePosixPath(name).parent) for name in names} - {"."}), "."):
        path = folder / META_FILE if parent == "." else folder / parent / META_FILE
        if path.is_file():
            rest = open_torch_file(path, weights_only=weights_only, is_mapped=False)
            if not isinstance(rest, dict):
                raise ValueError(f"{path} contains a {type(rest).__name__}, expected a dict.")
            return rest
    return {}


def _merged(tree: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Merges both, also nested dicts: entries with shards are in `tree`, the others in `rest`."""
    merged = {**tree, **rest}
    for key in tree.keys() & rest.keys():
        if isinstance(tree[key], dict) and isinstance(rest[key], dict):
            merged[key] = _merged(tree[key], rest[key])
    return merged


def _as_lightning(tree: dict[str, Any]) -> dict[str, Any]:
    checkpoint = dict(tree)
    if isinstance(tree.get("model"), dict) and "state_dict" not in tree:
        checkpoint["state_dict"] = checkpoint.pop("model")
        # Some writers flatten the optimizer's state; it stays under its own name.
        named = [key for key in ("optimizer", "optim") if _is_optimizer_state(checkpoint.get(key))]
        states = [checkpoint.pop(key) for key in named]
    elif isinstance(tree.get("state_dict"), dict):
        states = []
    else:
        return {"state_dict": tree}
    while _is_optimizer_state(checkpoint.get(f"optimizer_{len(states)}")):
        states.append(checkpoint.pop(f"optimizer_{len(states)}"))
    for state in states:
        # A checkpoint from before the first step has no "state".
        entries = state["state"] = unflatten_composites(state.get("state", {}))
        if any(isinstance(key, int) for g in state["param_groups"] for key in g["params"]):
            # torch's optimizers number the parameters; DCP stores the numbers as strings.
            state["state"] = {int(key): entry for key, entry in entries.items()}
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint


def _is_optimizer_state(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("param_groups"), list)
