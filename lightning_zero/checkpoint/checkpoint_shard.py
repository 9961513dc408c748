"""This rank's part of a tensor as `torch.distributed.checkpoint` stores it: in boxes.

    shape (4, 6), elements [8, 19) of 24         . . . . . .
                                                 . . A A A A     A: offsets (1, 2), sizes (1, 4)
                                                 B B B B B B     B: offsets (2, 0), sizes (1, 6)
                                                 C . . . . .     C: offsets (3, 0), sizes (1, 1)

Checkpoint formats store boxes; a rank owns a flat range. The elements of each box are contiguous in
the flat range, so that writing one copies nothing.

Only this file uses the three hooks through which a tensor subclass describes its local part to
torch's planners. They are a private protocol of torch, which `DTensor` uses; a test guards them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Box", "CheckpointShard", "boxes_of_range"]


@dataclass(frozen=True)
class Box:
    """A block of a tensor whose elements are contiguous in row-major order."""

    offsets: tuple[int, ...]  # index of the first element, by dimension
    sizes: tuple[int, ...]  # in elements, by dimension; none is zero
    start: int  # first element, counted in the full flat tensor

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Splits the row-major elements [start, stop) of a tensor of `shape` into boxes, in order.

    Returns:
        At most 2n - 1 boxes in n dimensions: a ragged end on each side in every dimension but the
        last, and the rest in the middle. No box for an empty range.
    """
    if start >= stop:
        return []
    return _split(tuple(shape), (), start, stop, 0)


def _split(
    shape: tuple[int, ...], outer: tuple[int, ...], start: int, stop: int, origin: int
) -> list[Box]:
    """Boxes of [start, stop) within the block at `outer`, whose first element is `origin`."""
    lead = (1,) * len(outer)
    if not shape:
        return [Box(outer, lead, origin)]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner  # rows that hold an element
    is_first_ragged = start > first * inner
    is_last_ragged = stop < (last + 1) * inner
    if first == last and (is_first_ragged or is_last_ragged):
        base = first * inner
        return _split(shape[1:], (*outer, first), start - base, stop - base, origin + base)
    boxes: list[Box] = []
    if is_first_ragged:
        base = first * inner
        boxes += _split(shape[1:], (*outer, first), start - base, inner, origin + base)
        first += 1
    end = last if is_last_ragged else last + 1
    if end > first:
        offsets = (*outer, first, *(0 for _ in shape[1:]))
        sizes = (*lead, end - first, *shape[1:])
        boxes.append(Box(offsets, sizes, origin + first * inner))
    if is_last_ragged:
        base = last * inner
        boxes += _split(shape[1:], (*outer, last), 0, stop - base, origin + base)
    return boxes


_Read = Callable[[int, int], Tensor]
_aten = torch.ops.aten
_SAME_SHAPE_OPS = {_aten.detach.default, _aten.alias.default, _aten.clone.default}


class CheckpointShard(Tensor):
    """Flat range of a tensor that this rank writes; its values are read when they are written.

    It has the shape and dtype of the full tensor and no memory. Entries of a dict of shards can be
    renamed and deleted; `clone`, `detach` and `to(dtype)` are allowed. Any other operation would
    need the other ranks and is an error.
    """

    source: str  # the same for all entries of one tensor (tied weights), and on every rank
    owned: range  # row-major elements that this rank writes; may be empty
    _read: _Read

    @staticmethod
    def of(
        source: str, shape: Sequence[int], dtype: torch.dtype, owned: range, read: _Read
    ) -> CheckpointShard:
        """This rank's part of a tensor of `shape`, stored in `dtype`.

        The ranges `owned` of all ranks cover the tensor exactly once. `read(start, stop)` returns
        the elements [start, stop) of the full flat tensor, within `owned`: 1-D, on any device, in
        any dtype.
        """
        shard = Tensor._make_wrapper_subclass(CheckpointShard, torch.Size(shape), dtype=dtype)
        assert isinstance(shard, CheckpointShard)
        shard.source, shard.owned, shard._read = source, owned, read
        return shard

    @property
    def boxes(self) -> list[Box]:
        """Boxes that this rank writes. A tensor without elements is one box, on every rank."""
        if self.numel() == 0:
            return [Box((0,) * self.dim(), tuple(self.shape), 0)]
        return boxes_of_range(self.shape, self.owned.start, self.owned.stop)

    @property
    def owned_bytes(self) -> int:
        return len(self.owned) * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the full flat tensor: 1-D, in this dtype, on the CPU."""
        return self._read(start, stop).detach().to("cpu", self.dtype)

    def read_owned(self) -> Tensor:
        """Elements that this rank writes: 1-D, as the `read` given to `of` returns them."""
        return self._read(self.owned.start, self.owned.stop).detach()

    def backed_by(self, values: Tensor) -> CheckpointShard:
        """The same shard, read from `values`, a copy of `read_owned()`."""
        first = self.owned.start

        def read(start: int, stop: int) -> Tensor:
            return values[start - first : stop - first]

        return CheckpointShard.of(self.source, self.shape, self.dtype, self.owned, read)

    def cast(self, dtype: torch.dtype) -> CheckpointShard:
        """The same values, stored in `dtype`."""
        return CheckpointShard.of(self.source, self.shape, dtype, self.owned, self._read)

    # ---------------------------------------------------------------- torch's planners

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=box.chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box.chunk for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes:
            if index.offset == torch.Size(box.offsets):
                values = self.read(box.start, box.stop).contiguous()
                if values.numel():
                    # torch.save writes the entire storage: give it one of this size, uncopied.
                    values = torch.from_numpy(values.view(torch.uint8).numpy()).view(self.dtype)
                return values.view(box.sizes)
        raise ValueError(f"{index.fqn}: this rank holds no box at {index.offset}.")

    # ---------------------------------------------------------------- all other operations

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        shard = args[0] if args else None
        if isinstance(shard, CheckpointShard):
            if func in _SAME_SHAPE_OPS:
                return shard.cast(shard.dtype)
            if func is _aten._to_copy.default:
                return shard.cast((kwargs or {}).get("dtype") or shard.dtype)
        raise RuntimeError(
            f"{func.__name__} needs all values of a checkpoint entry, but this rank holds a shard; "
            "entries of a sharded checkpoint can be renamed, deleted, added and cast. To compute "
            'with full tensors, save with ZeroStrategy(checkpoint="full").'
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.cast(self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.source} is a shard inside a tuple or an object of the checkpoint, where it "
            "cannot be saved; put entries of the state dict into dicts and lists only."
        )

    # mypy drops the names of a dunder's keyword-only arguments, so even equal signatures mismatch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"CheckpointShard({self.source}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"elements {self.owned.start} to {self.owned.stop})"
        )
