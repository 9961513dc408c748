"""Where the mean gradient of a bucket rests when its optimizer shard is not stepped on the device.

A mean travels while backward goes on: from the device to page-locked CPU memory on a side stream,
from there to its file, if it has one. At most `MAX_GRADS_IN_FLIGHT` are under way at once;
`wait` waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """The means on their way, oldest first, and the stream on which they leave the device."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._queue: list[OffloadedGrad] = []
        # CPU memory of means on their way: page-locking it anew takes longer than the copy.
        self.scratch = ScratchPool(
            torch.device("cpu"), allocate=storage.cpu_empty, max_kept=MAX_GRADS_IN_FLIGHT
        )
        self._stream = streams.make_stream(storage.device)

    def admit(self, grad: OffloadedGrad) -> None:
        """Makes room for `grad`: what is oldest must have landed."""
        while len(self._queue) >= MAX_GRADS_IN_FLIGHT:
            self._queue[0].wait()
        self._queue.append(grad)

    def leave(self, grad: OffloadedGrad) -> None:
        if grad in self._queue:
            self._queue.remove(grad)

    def copy(self, source: Tensor, target: Tensor, name: str) -> streams.Event | None:
        """Copies the mean of bucket `name` from the device to CPU memory beside the computation."""
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


@dataclass
class _Transit:
    """A mean on its way: in CPU memory after `event`, in its file after `transfer`."""

    values: Tensor  # 1-D, CPU
    source: Tensor  # on the device; alive until the event
    event: streams.Event | None
    is_added: bool
    is_staged: bool = False  # `values` go back to the queue
    transfer: Transfer | None = None


class OffloadedGrad:
    """The mean gradient of one bucket, in CPU memory or in a file."""

    def __init__(
        self, queue: GradQueue, name: str, numel: int, dtype: torch.dtype, tier: Tier
    ) -> None:
        self._queue = queue
        self._name = name
        self._numel = numel
        self._dtype = dtype
        self._tier = tier
        self._transit: _Transit | None = None
        self._num_own_users = 0  # of the memory where it rests

    @cached_property
    def store(self) -> ShardStore:
        """Where the mean rests; made for the first one."""
        storage = self._queue.storage
        if self._tier is Tier.NVME:
            return storage.make_optim_store(f"{self._name}.grad", self._numel, self._dtype)
        store = MemoryShardStore(storage.cpu_empty(self._numel, self._dtype), Tier.CPU)
        self._num_own_users = _num_users(store.tensor)
        return store

    @cached_property
    def shard(self) -> Tensor:
        """The mean: 1-D, a CPU tensor or a LazyTensor, the same object every time."""
        return self.store.view(0, self._numel)

    @property
    def nbytes(self) -> int:
        """Bytes it takes at rest."""
        return self.store.nbytes if "store" in self.__dict__ else 0

    def view(self, start: int, stop: int) -> Tensor:
        return self.store.view(start, stop)

    def put(self, mean: Tensor, *, is_added: bool) -> None:
        """Sends a mean on its way here, to be added to what rests here or to replace that.

        1-D, on the device; not to be written to any more.
        """
        self.wait()
        self._queue.admit(self)
        values, is_staged = mean, False
        if isinstance(self.store, MemoryShardStore) and not is_added:
            values = self.store.tensor
        elif self._queue.storage.has_device_memory:
            values, is_staged = self._queue.scratch.acquire(self._numel, self._dtype), True
        event = None if values is mean else self._queue.copy(mean, values, self._name)
        self._transit = _Transit(values, mean, event, is_added, is_staged)
        if values is mean:
            self._land(self._transit)

    def drop_if_shared(self) -> None:
        """Leaves the memory of a mean that nobody needs to users who hold some of it, if any."""
        store = self.__dict__.get("store")
        if isinstance(store, MemoryShardStore):
            self.__dict__.pop("shard", None)
            if _num_users(store.tensor) > self._num_own_users:
                del self.__dict__["store"]

    def wait(self) -> None:
        """Waits until the mean rests here."""
        transit = self._end_transit()
        if transit is not None:
            if transit.transfer is None:
                self._land(transit)
            if transit.transfer is not None:
                transit.transfer.wait()
            self._give_back(transit)

    def drop(self) -> None:
        """Forgets what is on its way, after an exception."""
        transit = self._end_transit()
        if transit is not None:
            if transit.transfer is not None:
                transit.transfer.wait_until_done()
            self._give_back(transit)

    def _end_transit(self) -> _Transit | None:
        """What was on its way; it is in CPU memory by now."""
        transit, self._transit = self._transit, None
        self._queue.leave(self)
        if transit is not None and transit.event is not None:
            recorder = self._queue.storage.recorder
            with recorder.span(Kind.TO_CPU, self._name, is_wait=True):
                transit.event.synchronize()
        return transit

    def _give_back(self, transit: _Transit) -> None:
        if transit.is_staged:
            self._queue.scratch.release(transit.values)

    def _land(self, transit: _Transit) -> None:
        store = self.store
        if isinstance(store, FileShardStore):
            values = transit.values
            if transit.is_added:
                values = values.add_(store.fetch(0, self._numel))
            transit.transfer = store.begin_write(values)
        elif transit.is_added:
            store.fetch(0, self._numel).add_(transit.values)

    def apply_(self, change: Callable[[Tensor], object], start: int, stop: int) -> None:
        """Changes elements [start, stop) in place."""
        self.wait()
        values = self.store.fetch(start, stop)
        change(values)
        self.store.write(start, values)


def _num_users(tensor: Tensor) -> int:
    """How many tensors show the memory of `tensor`, and objects that stand for it."""
    num_users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return num_users
