"""The main gradient of one bucket: the mean over ranks that this rank steps with, on its tier.

[Note: Offloaded gradients] If the optimizer does not step on the device, each mean is copied to an
`OffloadedGrad` right after its reduction, while backward continues; `wait`, at the end of backward,
waits for it. `tensor` is then the view of that store: a CPU tensor, or one that is read from its
file when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_zero.core.param_grads import GradShard
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import OverlappedStep
from lightning_zero.core.writes import is_same_memory
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers.grad_offload import OffloadedGrad
from lightning_zero.tiers.storage import ShardStore

__all__ = ["MainGrad"]


class MainGrad:
    """Mean gradients of one bucket, own elements: all if optimizer states are replicated.

    Args:
        shards: Shards of the bucket, with its plan.
        shard_specs: Elements of each slot that each rank steps, by slot.
        overlapped: Step of a worker with these gradients.

    Attributes:
        dtype: Dtype of the mean.
        offloaded: Store of the mean; None if it is on the device.
        is_full: Whether every rank has all elements, as in stage 0.
        tensor: The mean, 1-D, from its first reduction until all of it is zeroed. It may be a view
            of the unsharded gradients.
        slices: Elements of each slot in `tensor`: 1-D, n-D if replicated; [] without a mean.
        held: Slots whose mean `.grad` shows or, in a backward, will show.
    """

    def __init__(
        self,
        shards: Shards,
        shard_specs: Sequence[ShardSpec],
        dtype: torch.dtype,
        offloaded: OffloadedGrad | None,
        overlapped: OverlappedStep,
    ) -> None:
        self.dtype = dtype
        self.offloaded = offloaded
        self.is_full = shards.replicates_optim
        self.tensor: Tensor | None = None
        self.slices: list[Tensor] = []
        self.held: set[int] = set()
        self._own, self._device = shards.layout, shards.comm.device
        self._shard_specs = list(shard_specs)
        self._overlapped = overlapped
        self._views: list[Tensor] = []  # what `.grad` shows, by slot
        self._grad_shards: WeakSet[GradShard] = WeakSet()  # those of an offloaded mean

    # ---------------------------------------------------------------- memory

    def make_shard(self, *, is_zero: bool = False) -> Tensor:
        """Own elements of a mean to come: 1-D, on the device."""
        make = torch.zeros if is_zero else torch.empty
        return make(self._own.numel, dtype=self.dtype, device=self._device)

    def fits_into(self, buffer: FlatBuffer) -> bool:
        """Whether the mean may be a view of `buffer`, in which its elements were reduced."""
        return self.offloaded is None and buffer.tensor.dtype == self.dtype

    def add(self, reduced: Tensor, *, is_in_buffer: bool = False) -> None:
        """Adds a mean over ranks: `make_shard`, or, in the unsharded buffer, a view of it."""
        if self.offloaded is not None:
            self.offloaded.put(reduced, is_added=self.tensor is not None)
            self._set(self.offloaded.shard)
        elif self.tensor is None:
            self._set(reduced)
        elif is_in_buffer:  # the sum takes no memory beside the buffer
            self._move_to(reduced.add_(self.tensor))
        else:
            self.tensor.add_(reduced)

    def wait(self) -> None:
        """Waits until an offloaded mean is stored."""
        if self.offloaded is not None:
            self.offloaded.wait()

    def is_in(self, buffer: FlatBuffer) -> bool:
        """Whether the mean is a view of `buffer`."""
        return self.tensor is not None and buffer.aliases(self.tensor)

    def move_out_of(self, buffer: FlatBuffer) -> None:
        """Moves the mean out of `buffer`, to memory of its own."""
        if self.tensor is not None and self.is_in(buffer):
            self._move_to(self.tensor.clone())

    def _move_to(self, mean: Tensor) -> None:
        """Moves to `mean`; the tensors that show the mean, which users may hold, follow."""
        self.tensor, self.slices = mean, self._split(mean)
        for index, part in enumerate(self.slices):
            self._repoint(index, part)

    def _repoint(self, index: int, values: Tensor) -> None:
        """Makes the tensor that shows slot `index` show `values`."""
        view = self._views[index]
        if isinstance(view, ShardedTensor):
            cast("GradShard", view.shard).repoint(values)
        else:
            view.data = values

    def forget(self, slots: Iterable[int]) -> None:
        """Drops what the user has zeroed: nothing is added to it. Users may hold the tensors."""
        if self.tensor is None:
            return
        zeroed = self.held.intersection(slots)
        self.held -= zeroed
        if self.held:
            for index in sorted(zeroed):
                self._repoint(index, _copy(self.slices[index]))
                [self._views[index]] = self._make_views([index])
            if zeroed:
                self.apply_(Tensor.zero_, sorted(zeroed))
            return
        self._drop()
        if self.offloaded is not None:
            for shard in list(self._grad_shards):  # only shards that the user holds are left
                shard.detach()
            self.offloaded.drop_if_shared()

    def close(self) -> None:
        """Drops the mean, also one in flight to its tier."""
        if self.offloaded is not None:
            self.offloaded.cancel()
        self.held.clear()
        self._drop()

    def _drop(self) -> None:
        self.tensor, self.slices, self._views = None, [], []

    def _set(self, mean: Tensor) -> None:
        """Makes `mean` the main gradient, with its slices and views."""
        if self.tensor is mean:
            return
        self.tensor, self.slices = mean, self._split(mean)
        self._views = self._make_views(range(len(self.slices)))

    def _split(self, mean: Tensor) -> list[Tensor]:
        """Elements of each slot in `mean`."""
        if self.offloaded is not None:
            return [self.offloaded.view(part.start, part.stop) for part in self._own.ranges]
        slices = self._own.split(mean)
        if not self.is_full:
            return slices
        return [part.view(shape) for part, shape in zip(slices, self._own.shapes, strict=True)]

    def _make_views(self, slots: Sequence[int]) -> list[Tensor]:
        """New tensors that show `slots`."""
        if self.is_full:
            return [self.slices[index].detach() for index in slots]
        parts = [GradShard(self, self._overlapped, i, self.slices[i]) for i in slots]
        if self.offloaded is not None:
            self._grad_shards.update(parts)
        return [
            ShardedTensor.of(part, self._shard_specs[part.index], "p.grad", part.values)
            for part in parts
        ]

    # ---------------------------------------------------------------- `.grad`

    def views_of(self, slots: Sequence[int]) -> list[Tensor]:
        """The means of `slots` as `.grad` shows them, without autograd history."""
        for index in slots if self.is_full else ():
            view = self._views[index]  # an ordinary tensor, which a user can change
            if view.requires_grad or not is_same_memory(view, self.slices[index]):
                self._views[index] = self.slices[index].detach()
        return [self._views[index] for index in slots]

    def shows(self, index: int, grad: Tensor) -> bool:
        """Whether `grad` is the view of slot `index`, and not a tensor that the user has set."""
        if not self._views or grad is not self._views[index]:
            return False
        return not self.is_full or is_same_memory(grad, self.slices[index])

    def copy_(self, index: int, grad: Tensor) -> None:
        """Copies a gradient that the user has set as `.grad` of slot `index`: full, or sharded.

        Collective if it is sharded in another way.
        """
        self._overlapped.wait()
        if self.tensor is None:
            self.add(self.make_shard(is_zero=True))
            self.wait()
        own = grad
        if not self.is_full:
            spec = self._shard_specs[index]
            if isinstance(grad, ShardedTensor) and spec.matches(grad.spec):
                own = grad.local
            else:
                full = grad.full_tensor() if isinstance(grad, ShardedTensor) else grad
                own = read_flat(full.to_dense(), spec.owned.start, spec.owned.stop)
        self.held.add(index)
        self.apply_(lambda part: part.copy_(own), [index])

    # ---------------------------------------------------------------- values

    def values(self) -> Tensor:
        """The mean, 1-D; a LazyTensor of a file, zeros without one."""
        return self.make_shard(is_zero=True) if self.tensor is None else self.tensor

    def apply_(
        self, change: Callable[[Tensor], object], indices: Sequence[int] | None = None
    ) -> None:
        """Changes the mean elementwise and in place, on its tier.

        `indices`: slots; None: all at once, with padding, which must stay zero.
        """
        assert self.tensor is not None
        self._overlapped.wait()  # a worker may read it
        if self.offloaded is None:
            for part in [self.tensor] if indices is None else [self.slices[i] for i in indices]:
                change(part)
            return
        ranges = [range(self._own.numel)]
        if indices is not None:
            ranges = [self._own.ranges[index] for index in indices]
        for own in ranges:
            self.offloaded.apply_(change, own.start, own.stop)

    @property
    def store(self) -> ShardStore | None:
        """Store of the mean; None if it is on the device."""
        return None if self.offloaded is None else self.offloaded.store

    def device_memory(self, buffer: FlatBuffer | None) -> Iterator[Tensor]:
        """Yields the mean, if it is on the device, in other memory than `buffer`."""
        if self.tensor is None or self.offloaded is not None:
            return
        if buffer is None or not self.is_in(buffer):
            yield self.tensor


def _copy(values: Tensor) -> Tensor:
    return values.read() if isinstance(values, LazyTensor) else values.clone()
