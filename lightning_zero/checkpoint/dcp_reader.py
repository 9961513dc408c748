"""Opens a directory in the format of `torch.distributed.checkpoint`, whoever wrote it.

The files of ranks are mapped into memory; of remote ones, ranges are read. Each item in them is a
small file of `torch.save`, of which the elements are a record without gaps. A tensor is a
`LazyTensor`: a flat range of it is a view of the map where one item holds it, and else a copy of
what the items hold, whatever boxes the writer's ranks had. torch's own reader reads the whole of
every item that it needs a part of.
"""

from __future__ import annotations

import io
import math
import mmap
import operator
import pickle
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_zero.checkpoint.atomic import (
    CheckpointPath,
    file_identity,
    file_sizes,
    replaced_while_read_error,
)
from lightning_zero.checkpoint.checkpoint_shard import boxes_of_range
from lightning_zero.checkpoint.dcp_chunks import check_complete
from lightning_zero.checkpoint.dcp_metadata import METADATA, read_metadata
from lightning_zero.checkpoint.remote import ByteRange, Pread, RemotePath
from lightning_zero.checkpoint.save_record import find_foreign_files, find_foreign_items
from lightning_zero.checkpoint.torch_file import (
    NUM_THREADS,
    find_damage_in_part,
    find_inflated,
    open_pread,
    open_torch_file,
    span,
)
from lightning_zero.layout.foreign_names import printable
from lightning_zero.tensors.composite import unflatten_composites
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["METADATA", "META_FILE", "find_damage", "is_sharded", "open_sharded"]

META_FILE = "meta.pt"  # Lightning's: what is neither the module's nor an optimizer's
_NUM_FILES = 16  # of ranks, kept at hand
_MAX_HEADERS_BYTES = 2**16  # of an item, beside its elements
# What wrong bytes make torch's reader raise, beside RuntimeError.
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
    """Reads items of the directory `folder`, whose `metadata` says where each lies."""

    def __init__(self, folder: CheckpointPath, metadata: Metadata) -> None:
        self._places = metadata.storage_data
        self._folder = folder
        # A remote one keeps blocks that it read.
        self._file = lru_cache(_NUM_FILES)(lambda name: folder / name)
        self._maps: dict[Path, mmap.mmap] = {}
        self._identity = file_identity(folder) if isinstance(folder, Path) else None
        self._items: dict[MetadataIndex, tuple[int, Tensor]] = {}  # see `_item`
        self._layouts: dict[bytes, Tensor] = {}  # by pickle, of which many items have the same
        self._tensors: dict[object, LazyTensor] = {}  # by where they lie

    def hold(self) -> None:
        """Maps the files if they are few: they are read also when the directory is replaced."""
        names = {place.relative_path for place in self._places.values()}
        files = [self._file(name) for name in sorted(names)] if len(names) <= _NUM_FILES else []
        for file in files:
            if isinstance(file, Path):
                self._map(file)

    def tensor(self, name: str, entry: TensorStorageMetadata) -> LazyTensor:
        """The tensor `name`; names of the same data, as of tied weights, give the same object."""
        dtype = entry.properties.dtype
        places = [self._places[MetadataIndex(name, c.offsets)] for c in entry.chunks]
        where = (dtype, entry.size, *((p.relative_path, p.offset) for p in places))
        read = partial(self._read_range, name, entry)
        return self._tensors.setdefault(where, LazyTensor.of(entry.size, dtype, read))

    def load_object(self, name: str, weights_only: bool | None) -> Any:
        """The object `name`, which is not a tensor."""
        place = self._places[MetadataIndex(name)]
        with self._reading(self._file(place.relative_path)) as pread:
            item = io.BufferedReader(ByteRange(pread, place.offset, place.length))
            content = io.BytesIO(item.read(place.length))  # `pread` gives 2 GiB at most at once
        try:
            if why := find_inflated(content):
                raise ValueError(why)
            return torch.load(content, map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{self._shown(name, place)}: {error}") from error
        except Exception as error:
            if weights_only is False and not isinstance(error, _DAMAGE_ERRORS):
                raise  # of a class that is unpickled
            raise self._damaged(name, place, error) from error

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
            place = zip(part.dest_offsets, part.lengths, strict=True)
            target[tuple(slice(offset, offset + size) for offset, size in place)].copy_(values)
        return torch.empty(0, dtype=dtype) if flat is None else flat

    def _block(
        self,
        index: MetadataIndex,
        dtype: torch.dtype,
        item_sizes: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> Tensor:
        """The block at `offsets` of an item that has `item_sizes`."""
        place = self._places[index]
        file = self._file(place.relative_path)
        try:
            start, item = self._item(file, index, dtype, item_sizes)
            strides, numel = item.stride(), span(sizes, item.stride())
            first = int(item.storage_offset()) + sum(map(operator.mul, offsets, strides))
            start += first * dtype.itemsize
            if start + numel * dtype.itemsize > place.offset + place.length:
                raise ValueError("it is smaller than its metadata says")
            if isinstance(file, RemotePath):
                data: Any = file.read(start, start + numel * dtype.itemsize)
                flat = torch.frombuffer(data, dtype=dtype)
            else:
                flat = torch.frombuffer(self._map(file), dtype=dtype, offset=start, count=numel)
            return flat.as_strided(sizes, strides)
        except (*_DAMAGE_ERRORS, RuntimeError, pickle.UnpicklingError) as error:
            raise self._damaged(index.fqn, place, error) from error

    def _item(
        self, file: CheckpointPath, index: MetadataIndex, dtype: torch.dtype, sizes: Sequence[int]
    ) -> tuple[int, Tensor]:
        """Where in the file the storage of an item begins, and the item on the meta device."""
        if index not in self._items:
            nbytes = math.prod(sizes) * dtype.itemsize
            start, like = self._find(file, self._places[index], nbytes)
            if not isinstance(like, Tensor) or like.layout != torch.strided:
                raise ValueError("it is no dense tensor")
            if like.dtype != dtype or like.shape != torch.Size(sizes):
                raise ValueError(f"it is {like.dtype} of {tuple(like.shape)}, not as its metadata")
            self._items[index] = start, like
        return self._items[index]

    def _find(self, file: CheckpointPath, place: Any, nbytes: int) -> tuple[int, Tensor]:
        with self._reading(file) as pread:
            item: Any = ByteRange(pread, place.offset, place.length)
            try:
                start, like = self._layout(item, place.length - nbytes)
            except Exception as error:
                raise (item.failure or error) from error
        return place.offset + start, like

    def _layout(self, item: Any, num_others: int) -> tuple[int, Tensor]:
        """Where in an item its elements begin, beside which it has `num_others` bytes."""
        # Compressed, less than this cannot take much.
        if num_others > _MAX_HEADERS_BYTES and (why := find_inflated(item)):
            raise ValueError(why)
        reader: Any = torch.PyTorchFileReader(item)
        pickled = reader.get_record("data.pkl")
        if pickled not in self._layouts:
            if reader.get_record("byteorder") != sys.byteorder.encode():
                raise RuntimeError("its bytes are in another order")
            item.seek(0)
            self._layouts[pickled] = torch.load(item, map_location="meta", weights_only=True)
        return reader.get_record_offset("data/0"), self._layouts[pickled]

    def _shown(self, name: str, place: Any) -> str:
        file = self._file(place.relative_path)
        return f"{printable(name)} in {printable(str(file))}"

    def _damaged(self, name: str, place: Any, error: Exception) -> Exception:
        file = printable(str(self._file(place.relative_path)))
        if isinstance(error, OSError) and error.errno:
            return OSError(error.errno, f"{printable(name)}: {error.strerror}", file)
        return ValueError(
            f"{printable(name)} cannot be read from {file} ({printable(str(error))}): the "
            "checkpoint is damaged."
        )

    def _reading(self, file: CheckpointPath) -> AbstractContextManager[Pread]:
        if not isinstance(file, Path):
            return open_pread(file)
        mapped = self._map(file)  # and not the file of this name, which may be another by now
        return nullcontext(lambda size, offset: mapped[offset : offset + size])

    def _map(self, file: Path) -> mmap.mmap:
        """The file in memory: private, so that a write to a tensor does not write to the file."""
        if file not in self._maps:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            with open(file, "rb") as stream:
                mapped = mmap.mmap(
                    stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            if isinstance(self._folder, Path) and file_identity(self._folder) != self._identity:
                raise replaced_while_read_error(self._folder)
            mapped.madvise(mmap.MADV_SEQUENTIAL)
            self._maps[file] = mapped
        return self._maps[file]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0


def is_sharded(path: CheckpointPath) -> bool:
    """Whether `path` is a directory in this format."""
    return (path / METADATA).is_file()


def find_damage(folder: CheckpointPath, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Compares this rank's share of the items with the checksums in them, in parallel, in pieces.

    Returns:
        One line for each file of which an item is damaged.
    """
    try:
        metadata = read_metadata(folder)
    except ValueError as error:
        return [str(error)]
    names = {(p.relative_path, p.offset, p.length): i.fqn for i, p in metadata.storage_data.items()}
    mine = sorted(names, key=lambda place: -place[2])[rank::world_size]
    sizes = file_sizes(folder)
    files = {name: folder / name for name, _, _ in mine}

    def check(place: tuple[str, int, int]) -> str | None:
        name, start, length = place
        if name not in sizes:
            return f"{printable(name)} is missing"
        line = find_damage_in_part(files[name], start, length)
        what = f"{printable(name)} ({sizes[name]} bytes) differs from its checksums"
        return line and f"{what} in {printable(names[place])}: {line}"

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        lines = list(pool.map(check, mine))
    by_file = {place[0]: line for place, line in zip(mine, lines, strict=True) if line}
    problems = list(by_file.values())
    if any(name not in sizes for name in files):
        return problems
    if rank == 0:
        problems += find_foreign_files(folder, metadata)
    return problems + find_foreign_items(folder, metadata, rank, world_size)


def open_sharded(folder: CheckpointPath, *, weights_only: bool | None = None) -> dict[str, Any]:
    """A directory as the dict that a Lightning checkpoint file holds, of tensors not yet read.

    Understood are what `ZeroStrategy` and Lightning's `ModelParallelStrategy` write, a state dict
    saved by itself, and one under "model" with its optimizer's under "optimizer" or "optim".

    Returns:
        "state_dict", "optimizer_states" where there are any (keyed by parameter names, otherwise in
        torch's form), and the rest.

    Raises:
        ValueError: A directory that is none of these, or of which something is missing.
    """
    metadata = read_metadata(folder)
    check_complete(folder, metadata)
    if strangers := find_foreign_files(folder, metadata):
        raise ValueError(
            f"{folder} is no whole checkpoint: {'; '.join(strangers[:20])}. Use another "
            "checkpoint, or copy this one again."
        )
    items = _ItemReader(folder, metadata)
    items.hold()
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
    return _merged(_as_lightning(tree), _load_rest(folder, metadata, weights_only))


def _load_rest(
    folder: CheckpointPath, metadata: Metadata, weights_only: bool | None
) -> dict[str, Any]:
    """From beside the files of ranks, which a remote save has in a folder of their own."""
    names = {place.relative_path for place in metadata.storage_data.values()}
    for beside in (*sorted({str(PurePosixPath(name).parent) for name in names} - {"."}), "."):
        path = folder / META_FILE if beside == "." else folder / beside / META_FILE
        if path.is_file():
            rest = open_torch_file(path, weights_only=weights_only, is_mapped=False)
            if not isinstance(rest, dict):
                raise ValueError(f"{path} holds a {type(rest).__name__}, expected a dict.")
            return rest
    return {}


def _merged(tree: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Both, also where a dict of `rest` lacks what has shards: that is in the dict of `tree`."""
    merged = {**tree, **rest}
    for key in tree.keys() & rest.keys():
        if isinstance(tree[key], dict) and isinstance(rest[key], dict):
            merged[key] = _merged(tree[key], rest[key])
    return merged


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
        entries = state["state"] = unflatten_composites(state.get("state", {}))
        if any(isinstance(key, int) for g in state["param_groups"] for key in g["params"]):
            # By number, as torch's optimizers: the format has no numbers as names.
            state["state"] = {int(key): entry for key, entry in entries.items()}
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint


def _is_optimizer_state(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("param_groups"), list)
