"""Where one flat tensor rests between its uses: in memory, or in a file.

A store answers for a flat range of elements. In memory that is a view; from a file it is a copy,
which `write` writes back. Who steps many ranges in a row lets a `Pipeline` move them instead:
`range_of` names a range for it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.layout.offload import PAGE_BYTES, Tier, padded_bytes
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.memory import aligned_empty
from lightning_zero.tiers.nvme import NvmeStore, Transfer
from lightning_zero.tiers.pipeline import FileRange

__all__ = ["InFile", "InMemory", "ShardStore"]


class ShardStore(Protocol):
    """One flat tensor at rest."""

    tier: Tier  # where
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes there."""

    def fetch(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), 1-D: a view of memory, or a copy in CPU memory."""

    def write(self, start: int, values: Tensor) -> None:
        """Replaces the elements from `start` on by `values`, 1-D, of any floating dtype."""

    def look(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), 1-D, to be shown to others: a view, or a LazyTensor."""


class InMemory:
    """A tensor in the memory of a device or of the CPU."""

    def __init__(self, tensor: Tensor, tier: Tier) -> None:
        self.tensor = tensor
        self.tier = tier
        self.numel = tensor.numel()
        self.dtype = tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        return self.tensor.untyped_storage().nbytes()

    def fetch(self, start: int, stop: int) -> Tensor:
        """See `ShardStore`."""
        return self.tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """See `ShardStore`."""
        target = self.tensor[start : start + values.numel()]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)

    look = fetch


class InFile:
    """A tensor in a file, padded to whole pages."""

    tier = Tier.NVME

    def __init__(self, store: NvmeStore, name: str, numel: int, dtype: torch.dtype) -> None:
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.nbytes = padded_bytes(numel, dtype)
        self._file = store.create(name, self.nbytes)

    def fetch(self, start: int, stop: int) -> Tensor:
        """See `ShardStore`. Waits for writes under way."""
        memory, first, own = self._around(start, stop)
        self._file.read(first, memory).wait()
        return memory[own].view(self.dtype)

    def write(self, start: int, values: Tensor) -> None:
        """See `ShardStore`. Waits until the values are written."""
        memory, first, own = self._around(start, start + values.numel())
        if memory[own].numel() != memory.numel():
            self._file.read(first, memory).wait()  # the neighbours in the outer pages
        memory[own].view(self.dtype).copy_(values)
        self._file.write(first, memory).wait()

    def look(self, start: int, stop: int) -> Tensor:
        """See `ShardStore`."""

        def read(first: int, last: int) -> Tensor:
            return self.fetch(start + first, start + last)

        return LazyTensor.of((stop - start,), self.dtype, read)

    def begin_fetch(self, start: int, stop: int, buffer: Tensor) -> Transfer:
        """Begins to read elements [start, stop) into `buffer`: uint8, aligned, large enough."""
        nbytes = padded_bytes(stop - start, self.dtype)
        return self._file.read(start * self.dtype.itemsize, buffer[:nbytes])

    def begin_write(self, values: Tensor) -> Transfer:
        """Begins to replace the first elements by `values`: 1-D, whole pages or all elements."""
        memory = aligned_empty(padded_bytes(values.numel(), self.dtype), pin=False)
        memory[: values.numel() * self.dtype.itemsize].view(self.dtype).copy_(values)
        return self._file.write(0, memory)

    def range_of(
        self, start: int, stop: int, *, is_read: bool = True, is_written: bool = True
    ) -> FileRange:
        """Elements [start, stop) for a pipeline; `start` is a multiple of `PAGE_BYTES`."""
        nbytes = padded_bytes(stop - start, self.dtype)
        offset = start * self.dtype.itemsize
        return FileRange(self._file, offset, nbytes, is_read=is_read, is_written=is_written)

    def _around(self, start: int, stop: int) -> tuple[Tensor, int, slice]:
        """Memory for the whole pages around [start, stop), their offset, and its bytes therein."""
        first = start * self.dtype.itemsize // PAGE_BYTES * PAGE_BYTES
        last = padded_bytes(stop, self.dtype) if stop > start else first
        own = slice(start * self.dtype.itemsize - first, stop * self.dtype.itemsize - first)
        return aligned_empty(last - first, pin=False), first, own
