"""A flat tensor with n-D views, whose memory is freed while autograd keeps the views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, UntypedStorage

from lightning_zero.layout.flat import FlatLayout
from lightning_zero.tensors.freed import free, refill
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["FlatBuffer", "ScratchPool", "is_flat_buffer_view", "promoted_dtype"]

_MARK = "_is_flat_buffer"  # set on the storage's Python object, which lives as long as the storage


class FlatBuffer:
    """Unsharded flat buffer of a bucket in one dtype, with one view for each parameter.

    [Note: Freeing under autograd] Operations save views of a parameter for backward (a linear layer
    saves `weight.t()`). These views hold the storage object, not the parameter. So the storage
    object lives as long as a graph may hold it: `free` takes its memory, `allocate` gives the same
    object new memory, and a view saved in forward sees the values gathered for backward. Version
    counters do not change, because the values are the same.

    [Note: Memory that others hold] Users take views too: `p.detach()`. Where they may assign one
    back as `p.data`, the buffer moves to new memory (`replace_memory`), and their views keep the
    old values. Otherwise they follow the buffer, and cannot be read while it is freed (freed.py).
    In place of a permanent `free`, `drop` leaves the memory to them.

    Attributes:
        layout: Layout of the flat buffer.
        tensor: Flat buffer: 1-D, `layout.numel`.
        is_allocated: Whether the storage has memory of its own.
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
        """Creates a buffer of zeros, or one over `memory`, whose padding alone is zeroed."""
        self.layout = layout
        if memory is None:
            memory = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.is_allocated = True
        self._create_views(memory)

    def _create_views(self, memory: Tensor) -> None:
        self.tensor: Tensor = memory
        self.views: list[Tensor] = [
            memory[slot.start : slot.stop].view(slot.shape) for slot in self.layout.slots
        ]
        # Padding is zero: sums over the full buffer (norms, reductions) include it.
        self._gaps = [memory[gap.start : gap.stop].zero_() for gap in self.layout.gaps]
        self._nbytes = memory.untyped_storage().nbytes()
        self._spare: UntypedStorage | None = None  # swapped with the storage while that is freed
        setattr(memory.untyped_storage(), _MARK, True)

    @property
    def allocated_bytes(self) -> int:
        return self._nbytes if self.is_allocated else 0

    def allocate(self) -> None:
        """Allocates memory for the storage again, uninitialized except for zero padding."""
        if self.is_allocated:
            return
        refill(self.tensor.untyped_storage(), self._nbytes, self._spare)
        self.is_allocated = True
        for gap in self._gaps:
            gap.zero_()

    def free(self) -> None:
        """Frees the memory under the views, which are unusable until the next `allocate`.

        See [Note: Reads of freed memory]. Memory with a NumPy view is kept: torch makes its storage
        permanently non-resizable.
        """
        storage = self.tensor.untyped_storage()
        if self.is_allocated and storage.resizable():
            self._spare = free(storage, self._spare)
            self.is_allocated = False

    @property
    def has_arrays(self) -> bool:
        """Whether NumPy has, or had, a view of the memory, which keeps its address for good."""
        return self.is_allocated and not self.tensor.untyped_storage().resizable()

    def drop(self) -> None:
        """Leaves the memory to the views that others hold; the buffer is empty then."""
        self.tensor = self.tensor.new_empty(0)
        self.views, self._gaps, self._spare = [], [], None
        self.is_allocated = False

    def aliases(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of this memory."""
        if tensor.layout is not torch.strided or isinstance(tensor, LazyTensor):
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        storage = self.tensor.untyped_storage()
        return bool(tensor.untyped_storage()._cdata == storage._cdata)

    def num_holders(self, num_known: int) -> int:
        """Number of tensors on this memory besides the buffer's own and `num_known` others."""
        storage = self.tensor.untyped_storage()
        own = 1 + len(self.views) + len(self._gaps) + 1  # the last one is `storage`
        num_users: int = torch._C._storage_Use_Count(storage._cdata)
        return num_users - own - num_known

    def replace_memory(self) -> Tensor:
        """Moves the buffer to new memory with the same values; views of users keep the old memory.

        Returns:
            A tensor on the old memory.
        """
        old = self.tensor
        self._create_views(old.clone())
        return old

    def shard(self, rank: int) -> Tensor:
        """Shard of `rank`, a 1-D view."""
        owned = self.layout.shard(rank)
        return self.tensor[owned.start : owned.stop]


def is_flat_buffer_view(tensor: Tensor) -> bool:
    """Whether a strided tensor is a view of some `FlatBuffer`, which may free its memory."""
    return hasattr(tensor.untyped_storage(), _MARK)


class ScratchPool:
    """Pool of flat buffers for reductions; buffers are reused until `clear`.

    On CPU, the first touch of newly allocated memory costs a page fault for every 4 KiB, about as
    much time as the reduction itself. On a device the caching allocator reuses memory.

    Args:
        device: Device of the buffers.
        allocate: Function of (numel, dtype) that returns a new 1-D tensor; None: `torch.empty`.
        max_kept: Maximum number of unused buffers that are kept, on CPU; 0 on other devices.
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
        self._spare: list[Tensor] = []  # unused buffers: 1-D, one storage each

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized 1-D tensor of `numel` elements, until `release`."""
        nbytes, chosen, smallest = numel * dtype.itemsize, None, math.inf
        for index, spare in enumerate(self._spare):
            size = spare.untyped_storage().nbytes()
            if nbytes <= size < smallest:
                chosen, smallest = index, size
        if chosen is None:
            return self._allocate(numel, dtype)
        storage = self._spare.pop(chosen).untyped_storage()
        return self._empty(0, dtype).set_(storage, 0, (numel,), (1,))

    def release(self, tensor: Tensor) -> None:
        """Returns a tensor of `acquire` to the pool."""
        if len(self._spare) < self._max_kept:
            self._spare.append(tensor)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def clear(self) -> None:
        self._spare.clear()


def promoted_dtype(dtype: torch.dtype, others: Sequence[torch.dtype]) -> torch.dtype:
    """Promotes `dtype` with all `others`, so that it represents every value exactly."""
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype
