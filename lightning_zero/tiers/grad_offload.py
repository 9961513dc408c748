"""Mean gradients of buckets whose optimizer shard is not stepped on the device.

A mean is transferred while backward continues: from the device to page-locked CPU memory on a side
stream and, in the NVMe tier, from there to its file. At most `MAX_GRADS_IN_FLIGHT` means are in
flight at once; `OffloadedGrad.wait` waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_zero.layout.offload import MAX_GRADS_IN_FLIGHT, Tier
from lightning_zero.record import streams
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.buffer import ScratchPool
from lightning_zero.tiers.nvme import Transfer
from lightning_zero.tiers.storage import FileShardStore, MemoryShardStore, ShardStore, Storage

__all__ = ["GradQueue", "OffloadedGrad"]


class GradQueue:
    """Queue of the means in flight, oldest first, and the stream that copies them."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._queue: list[OffloadedGrad] = []
        # CPU memory of means in flight, kept because page-locking it takes longer than the copy.
        self.scratch = ScratchPool(
            torch.device("cpu"), allocate=storage.cpu_empty, max_kept=MAX_GRADS_IN_FLIGHT
        )
        self._stream = streams.make_stream(storage.device)

    def enqueue(self, grad: OffloadedGrad) -> None:
        """Appends `grad`, after waiting for the oldest means if the queue is full."""
        while len(self._queue) >= MAX_GRADS_IN_FLIGHT:
            self._queue[0].wait()
        self._queue.append(grad)

    def remove(self, grad: OffloadedGrad) -> None:
        if grad in self._queue:
            self._queue.remove(grad)

    def copy(self, source: Tensor, target: Tensor, name: str) -> streams.Event | None:
        """Copies the mean of bucket `name` from the device to CPU memory during computation."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(streams.current(source.device))
        moving = self.storage.recorder.copy_span
        with streams.on(self._stream):
            with moving(name, target.nbytes, source.device, target.device):
                target.copy_(source, non_blocking=True)
            event: streams.Event = self._stream.record_event()
            return event


@dataclass(frozen=True)
class _GradTransfer:
    """A mean in flight: in CPU memory after `event`, in its file after `transfer`."""

    values: Tensor  # 1-D, CPU
    source: Tensor  # on the device; kept alive until `event`
    event: streams.Event | None
    is_added: bool  # added to the stored mean; else replaces it
    has_staging: bool = False  # `values` belong to the queue's scratch memory
    is_stored: bool = False  # it is in the store, or `transfer` brings it there
    transfer: Transfer | None = None


class OffloadedGrad:
    """Mean gradient of one bucket, in CPU memory or in a file."""

    def __init__(
        self, queue: GradQueue, name: str, numel: int, dtype: torch.dtype, tier: Tier
    ) -> None:
        self._queue = queue
        self._name = name
        self._numel = numel
        self._dtype = dtype
        self._tier = tier
        self._pending: _GradTransfer | None = None
        self._num_own_users = 0  # users of the stored mean's memory that are its own

    @cached_property
    def store(self) -> ShardStore:
        """Store of the mean, made for the first mean."""
        storage = self._queue.storage
        if self._tier is Tier.NVME:
            return storage.make_optim_store(f"{self._name}.grad", self._numel, self._dtype)
        assert self._tier is Tier.CPU
        store = MemoryShardStore(storage.cpu_empty(self._numel, self._dtype), Tier.CPU)
        self._num_own_users = _num_users(store.tensor)
        return store

    @cached_property
    def shard(self) -> Tensor:
        """The mean: 1-D, a CPU tensor or a LazyTensor; the same object every time."""
        return self.store.view(0, self._numel)

    @property
    def nbytes(self) -> int:
        """Bytes of the store; 0 before there is one."""
        return self.store.nbytes if "store" in self.__dict__ else 0

    def view(self, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the mean: a view, or a LazyTensor."""
        return self.store.view(start, stop)

    def put(self, mean: Tensor, *, is_added: bool) -> None:
        """Begins to transfer a mean, which is added to the stored mean or replaces it.

        Args:
            mean: 1-D, on the device. The caller must not write to it any more.
            is_added: Whether it is added; else it replaces the stored mean.
        """
        self.wait()
        self._queue.enqueue(self)
        values, has_staging = mean, False
        if isinstance(self.store, MemoryShardStore) and not is_added:
            values = self.store.tensor
        elif self._queue.storage.has_device_memory:
            values, has_staging = self._queue.scratch.acquire(self._numel, self._dtype), True
        event = None if values is mean else self._queue.copy(mean, values, self._name)
        pending = _GradTransfer(values, mean, event, is_added, has_staging)
        self._pending = self._stored(pending) if values is mean else pending

    def drop_if_shared(self) -> None:
        """Drops the store of a mean that is no longer needed if users still hold its memory."""
        store = self.__dict__.get("store")
        if isinstance(store, MemoryShardStore):
            self.__dict__.pop("shard", None)
            if _num_users(store.tensor) > self._num_own_users:
                del self.__dict__["store"]

    def wait(self) -> None:
        """Waits until the mean is stored."""
        pending = self._take_pending()
        if pending is not None:
            pending = self._stored(pending)
            if pending.transfer is not None:
                pending.transfer.wait()
            self._release_staging(pending)

    def cancel(self) -> None:
        """Drops a mean in flight."""
        pending = self._take_pending()
        if pending is not None:
            if pending.transfer is not None:
                pending.transfer.wait_until_done()
            self._release_staging(pending)

    def _take_pending(self) -> _GradTransfer | None:
        """Removes and returns the mean in flight, once it is in CPU memory."""
        pending, self._pending = self._pending, None
        self._queue.remove(self)
        if pending is not None and pending.event is not None:
            recorder = self._queue.storage.recorder
            with recorder.span(Kind.TO_CPU, self._name, is_wait=True):
                pending.event.synchronize()
        return pending

    def _release_staging(self, pending: _GradTransfer) -> None:
        if pending.has_staging:
            self._queue.scratch.release(pending.values)

    def _stored(self, pending: _GradTransfer) -> _GradTransfer:
        """Stores the mean, or begins to write it to its file, unless that was done before."""
        if pending.is_stored:
            return pending
        store, transfer = self.store, None
        if isinstance(store, FileShardStore):
            values = pending.values
            if pending.is_added:
                values = values.add_(store.fetch(0, self._numel))
            transfer = store.begin_write(values)
        elif pending.is_added:
            store.fetch(0, self._numel).add_(pending.values)
        return replace(pending, is_stored=True, transfer=transfer)

    def apply_(self, change: Callable[[Tensor], object], start: int, stop: int) -> None:
        """Changes elements [start, stop) in place."""
        self.wait()
        values = self.store.fetch(start, stop)
        change(values)
        self.store.write(start, values)


def _num_users(tensor: Tensor) -> int:
    """Returns the number of tensors and storage objects that use the memory of `tensor`."""
    num_users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return num_users
