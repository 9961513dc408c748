"""One flat tensor, its n-D views, and the freeing of its memory under autograd's eyes."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, UntypedStorage

from lightning_zero.layout.flat import FlatLayout
from lightning_zero.tensors.freed import free, refill

__all__ = ["FlatBuffer", "ScratchPool", "is_flat_buffer_view", "views_of", "promoted_dtype"]

_MARK = "_is_flat_buffer"  # on a storage, whose Python object lives as long as itself


class FlatBuffer:
    """The whole flat space of a bucket in one dtype, with one view for each parameter.

    [Note: Freeing under autograd] Operations save views of a parameter for backward (a linear layer
    saves `weight.t()`), and those hold the storage object, not the parameter. So the storage object
    lives as long as a graph may hold it; `free` takes its memory and `allocate` gives the same
    object memory again, and a view saved in forward sees the values gathered for backward. Version
    counters do not move, for the values are the same.

    [Note: Memory that others hold] Users take views too: `p.detach()`, the values of
    `state_dict()`. Where new values are put in the place of all old ones, and where the memory is
    freed for good, what others hold is left to them, with its values: the buffer goes on in a new
    storage (`replace_memory`). `num_holders` counts; it cannot tell a user's view from a saved one.

    Attributes:
        layout: The flat space.
        tensor: 1-D, `layout.numel`.
        is_allocated: The storage has memory of its own.
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
        self.is_allocated = True
        self._lay_over(memory)

    def _lay_over(self, memory: Tensor) -> None:
        self.tensor: Tensor = memory
        self.views: list[Tensor] = [
            memory[slot.start : slot.stop].view(slot.shape) for slot in self.layout.slots
        ]
        self._gaps = [memory[gap.start : gap.stop] for gap in self.layout.gaps]
        self._zero_gaps()
        self._nbytes = memory.untyped_storage().nbytes()
        self._spare: UntypedStorage | None = None  # what the storage is exchanged with, while freed
        setattr(memory.untyped_storage(), _MARK, True)

    @property
    def allocated_bytes(self) -> int:
        return self._nbytes if self.is_allocated else 0

    def allocate(self) -> None:
        """Gives the storage its memory back, uninitialised but for zero padding."""
        if self.is_allocated:
            return
        refill(self.tensor.untyped_storage(), self._nbytes, self._spare)
        self.is_allocated = True
        self._zero_gaps()

    def free(self) -> None:
        """Frees the memory under the views, which are unusable until the next `allocate`.

        See [Note: Reads of freed memory]. Memory that NumPy has a view of stays: torch marks its
        storage for good.
        """
        storage = self.tensor.untyped_storage()
        if self.is_allocated and storage.resizable():
            self._spare = free(storage, self._spare)
            self.is_allocated = False

    def num_holders(self, num_known: int) -> int:
        """How many tensors show this memory, besides the buffer's own and `num_known` others."""
        storage = self.tensor.untyped_storage()
        own = 1 + len(self.views) + len(self._gaps) + 1  # and `storage`
        num_users: int = torch._C._storage_Use_Count(storage._cdata)
        return num_users - own - num_known

    def replace_memory(self, *, copies: bool) -> None:
        """Leaves the memory to those who hold it; the buffer goes on in new memory.

        `copies`: with the same values; else uninitialised but for zero padding.
        """
        old = self.tensor
        self.is_allocated = True
        self._lay_over(torch.empty_like(old))
        if copies:
            self.tensor.copy_(old)

    def shard(self, rank: int) -> Tensor:
        """The 1-D part that `rank` owns, a view."""
        part = self.layout.shard(rank)
        return self.tensor[part.start : part.stop]

    def _zero_gaps(self) -> None:
        # Padding must be zero wherever somebody sums over a whole buffer.
        for gap in self._gaps:
            gap.zero_()


def is_flat_buffer_view(tensor: Tensor) -> bool:
    """Whether a strided tensor is a view of some `FlatBuffer`, which may free its memory."""
    return hasattr(tensor.untyped_storage(), _MARK)


def views_of(tensor: Tensor) -> list[tuple[Tensor, int]]:
    """All tensors of this process on the storage of `tensor`, with the elements before them.

    Those that Python knows. Looks at all of its objects, which takes a moment.
    """
    storage = tensor.untyped_storage()._cdata
    found = []
    with torch._C.DisableTorchFunctionSubclass():  # guarded parameters would be made whole
        for one in gc.get_objects():
            if not issubclass(type(one), Tensor):
                continue
            try:
                if Tensor.untyped_storage(one)._cdata == storage:
                    offset = Tensor.storage_offset(one) * Tensor.element_size(one)
                    found.append((one, offset // tensor.element_size()))
            except (RuntimeError, NotImplementedError):
                continue  # without a storage
    return found


class ScratchPool:
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

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of `numel` elements, uninitialised; `release` it back."""
        nbytes = numel * dtype.itemsize
        fitting = [t for t in self._spare if t.untyped_storage().nbytes() >= nbytes]
        if not fitting:
            return self._allocate(numel, dtype)
        chosen = min(fitting, key=lambda t: t.untyped_storage().nbytes())
        self._spare = [t for t in self._spare if t is not chosen]
        return self._empty(0, dtype).set_(chosen.untyped_storage(), 0, (numel,), (1,))

    def release(self, tensor: Tensor) -> None:
        if len(self._spare) < self._max_kept:
            self._spare.append(tensor)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def clear(self) -> None:
        self._spare.clear()


def promoted_dtype(dtype: torch.dtype, others: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that holds all of them exactly."""
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype
