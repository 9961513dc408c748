"""One flat tensor, its n-D views, and the freeing of its memory under autograd's eyes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.layout.flat import FlatLayout

__all__ = ["FlatBuffer", "Scratch", "is_of_flat_buffer", "widest"]

_MARK = "_is_of_flat_buffer"  # on a storage, whose Python object lives as long as itself


class FlatBuffer:
    """The whole flat space of a bucket in one dtype, with one view for each parameter.

    [Note: Freeing under autograd] Operations save views of a parameter for backward (a linear layer
    saves `weight.t()`), and those hold the storage object, not the parameter. So the storage object
    lives as long as the buffer; `free` empties it and `allocate` fills the same object again, and a
    view saved in forward sees the values gathered for backward. Version counters do not move, for
    the values are the same.

    Attributes:
        layout: The flat space.
        tensor: 1-D, `layout.numel`; its storage is empty while the buffer is freed.
        views: One n-D view for each slot, in order.
    """

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        memory: Tensor | None = None,
    ) -> None:
        """Makes a buffer of zeros, or lays one over `memory`, of which only padding is zeroed."""
        self.layout = layout
        if memory is None:
            memory = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.tensor: Tensor = memory
        self.views: list[Tensor] = [
            self.tensor[slot.start : slot.stop].view(slot.shape) for slot in layout.slots
        ]
        self._gaps = [self.tensor[gap.start : gap.stop] for gap in layout.gaps]
        self._zero_gaps()
        self._nbytes = self.tensor.untyped_storage().nbytes()
        setattr(self.tensor.untyped_storage(), _MARK, True)

    @property
    def is_allocated(self) -> bool:
        return self.tensor.untyped_storage().size() > 0

    @property
    def allocated_bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def allocate(self) -> None:
        """Gives the storage its memory back, uninitialised but for zero padding."""
        if self.is_allocated:
            return
        self.tensor.untyped_storage().resize_(self._nbytes)
        self._zero_gaps()

    def free(self) -> None:
        """Empties the storage; every view of it is invalid until the next `allocate`.

        Memory that NumPy has a view of stays: torch marks its storage for good.
        """
        storage = self.tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)

    def num_holders(self, num_known: int) -> int:
        """How many tensors show this memory, besides the buffer's own and `num_known` others."""
        storage = self.tensor.untyped_storage()
        own = 1 + len(self.views) + len(self._gaps) + 1  # and `storage`
        num_users: int = torch._C._storage_Use_Count(storage._cdata)
        return num_users - own - num_known

    def shard(self, rank: int) -> Tensor:
        """The 1-D part that `rank` owns, a view."""
        part = self.layout.shard(rank)
        return self.tensor[part.start : part.stop]

    def _zero_gaps(self) -> None:
        # Padding must be zero wherever somebody sums over a whole buffer.
        for gap in self._gaps:
            gap.zero_()


def is_of_flat_buffer(tensor: Tensor) -> bool:
    """Whether a strided tensor is a view of some `FlatBuffer`, which may free its memory."""
    return hasattr(tensor.untyped_storage(), _MARK)


class Scratch:
    """Flat tensors for the time of a reduction, kept for the next one until `clear`.

    On CPU, memory that was just allocated costs a page fault for every 4 KiB at its first touch,
    about as much as the reduction's own work on it. On a device the caching allocator does all of
    this.

    `allocate` makes new memory of so many elements, 1-D; None: torch does.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        allocate: Callable[[int, torch.dtype], Tensor] | None = None,
        max_kept: float = math.inf,
    ) -> None:
        self._max_kept = max_kept if device.type == "cpu" else 0
        self._device = device
        self._allocate = allocate or self._empty
        self._spare: list[Tensor] = []  # 1-D, each the owner of its storage

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of `numel` elements, uninitialised; `give` it back."""
        nbytes = numel * dtype.itemsize
        fitting = [t for t in self._spare if t.untyped_storage().nbytes() >= nbytes]
        if not fitting:
            return self._allocate(numel, dtype)
        chosen = min(fitting, key=lambda t: t.untyped_storage().nbytes())
        self._spare = [t for t in self._spare if t is not chosen]
        return self._empty(0, dtype).set_(chosen.untyped_storage(), 0, (numel,), (1,))

    def give(self, tensor: Tensor) -> None:
        if len(self._spare) < self._max_kept:
            self._spare.append(tensor)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def clear(self) -> None:
        self._spare.clear()


def widest(dtype: torch.dtype, others: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that holds all of them exactly."""
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype
