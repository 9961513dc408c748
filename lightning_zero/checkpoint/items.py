"""The items of a directory of `torch.distributed.checkpoint`: boxes of tensors, and small objects.

Each is a small file of `torch.save` inside the file of the rank that wrote it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_zero.checkpoint.boxes import boxes_of_range
from lightning_zero.tensors.lazy import StoredTensor

__all__ = ["Items"]


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
