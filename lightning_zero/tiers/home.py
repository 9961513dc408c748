"""Where one flat tensor rests between its uses: in memory, or in a file.

A home answers for a flat range of elements. In memory that is a view; from a file it is a copy,
which `store` writes back. Who steps many ranges in a row lets a `Pipeline` move them instead:
`piece` names a range for it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.layout.offload import PAGE_BYTES, Tier, padded_bytes
from lightning_zero.tensors.lazy import StoredTensor
from lightning_zero.tiers.memory import aligned_empty
from lightning_zero.tiers.nvme_file import NvmeFile, Transfer
from lightning_zero.tiers.nvme_store import NvmeStore
from lightning_zero.tiers.pipeline import Piece

__all__ = ["PAGE_BYTES", "Home", "InFile", "InMemory", "padded_bytes"]


class Home(Protocol):
    """One flat tensor at rest.

    Attributes:
        tier: Where.
        numel: Elements.
        dtype: Of the elements.
        nbytes: Bytes it takes there.
    """

    tier: Tier
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes at rest."""

    def fetch(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), 1-D: a view of memory, or a copy in CPU memory."""

    def store(self, start: int, values: Tensor) -> None:
        """Replaces the elements from `start` on by `values`, 1-D, of any floating dtype."""

    def piece(
        self, start: int, stop: int, *, is_read: bool = True, is_written: bool = True
    ) -> Piece | None:
        """Elements [start, stop) for a pipeline; None where they are in memory."""

    def look(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), 1-D, to be shown to others: a view, or a StoredTensor."""


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
        """See `Home`."""
        return self.tensor[start:stop]

    def store(self, start: int, values: Tensor) -> None:
        """See `Home`."""
        target = self.tensor[start : start + values.numel()]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)

    def piece(
        self, start: int, stop: int, *, is_read: bool = True, is_written: bool = True
    ) -> Piece | None:
        """See `Home`."""
        return None

    def look(self, start: int, stop: int) -> Tensor:
        """See `Home`."""
        return self.tensor[start:stop]


class InFile:
    """A tensor in a file, padded to whole pages.

    A range for a pipeline must start at a multiple of `PAGE_BYTES` elements.
    """

    tier = Tier.NVME

    def __init__(self, store: NvmeStore, name: str, numel: int, dtype: torch.dtype) -> None:
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self._file: NvmeFile = store.create(name, padded_bytes(numel, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return padded_bytes(self.numel, self.dtype)

    def fetch(self, start: int, stop: int) -> Tensor:
        """See `Home`. Waits for writes under way."""
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        first, nbytes = self._pages(start, stop)
        memory = aligned_empty(nbytes, pin=False)
        self._file.read(first, memory).wait()
        skipped = start * self.dtype.itemsize - first
        wanted = memory[skipped : skipped + (stop - start) * self.dtype.itemsize]
        return wanted.view(self.dtype)

    def store(self, start: int, values: Tensor) -> None:
        """See `Home`. Waits until the values are written."""
        if not values.numel():
            return
        stop = start + values.numel()
        first, nbytes = self._pages(start, stop)
        memory = aligned_empty(nbytes, pin=False)
        skipped = start * self.dtype.itemsize - first
        wanted = values.numel() * self.dtype.itemsize
        if skipped or wanted != nbytes:
            self._file.read(first, memory).wait()  # the neighbours in the outer pages
        memory[skipped : skipped + wanted].view(self.dtype).copy_(values)
        self._file.write(first, memory).wait()

    def begin_fetch(self, start: int, stop: int, buffer: Tensor) -> Transfer:
        """Begins to read elements [start, stop) into `buffer`: uint8, aligned, large enough."""
        nbytes = padded_bytes(stop - start, self.dtype)
        return self._file.read(start * self.dtype.itemsize, buffer[:nbytes])

    def begin_store(self, values: Tensor) -> Transfer:
        """Begins to replace the first elements by `values`: 1-D, whole pages or all elements."""
        memory = aligned_empty(padded_bytes(values.numel(), self.dtype), pin=False)
        memory[: values.numel() * self.dtype.itemsize].view(self.dtype).copy_(values)
        return self._file.write(0, memory)

    def piece(
        self, start: int, stop: int, *, is_read: bool = True, is_written: bool = True
    ) -> Piece:
        """See `Home`."""
        assert start % PAGE_BYTES == 0
        nbytes = padded_bytes(stop - start, self.dtype)
        offset = start * self.dtype.itemsize
        return Piece(self._file, offset, nbytes, is_read=is_read, is_written=is_written)

    def look(self, start: int, stop: int) -> Tensor:
        """See `Home`."""

        def read(first: int, last: int) -> Tensor:
            return self.fetch(start + first, start + last)

        return StoredTensor.of((stop - start,), self.dtype, read)

    def _pages(self, start: int, stop: int) -> tuple[int, int]:
        """First byte and number of bytes of the whole pages around elements [start, stop)."""
        first = start * self.dtype.itemsize // PAGE_BYTES * PAGE_BYTES
        last = -(-stop * self.dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        return first, last - first
