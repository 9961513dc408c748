"""Where the mean gradient of a bucket rests when its optimizer shard is not stepped on the device.

[Note: Landing] A mean travels while backward goes on: from the device to page-locked CPU memory on
a side stream, from there to its file, if it has one. At most `_MAX_LANDING` means are on their way;
`settle` waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.layout.offload import Tier
from lightning_zero.record.spans import Kind
from lightning_zero.tiers import Home, InFile, InMemory, Storage, Transfer

__all__ = ["GradHome", "Landing"]

_MAX_LANDING = 2


class Landing:
    """The means on their way, oldest first, and the stream on which they leave the device."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._queue: list[GradHome] = []
        self._spare: list[Tensor] = []  # CPU memory of means that have landed, uint8
        is_cuda = storage.device.type == "cuda"
        self._stream = torch.cuda.Stream(storage.device) if is_cuda else None

    def admit(self, home: GradHome) -> None:
        """Makes room for `home`: what is oldest must have landed."""
        while len(self._queue) >= _MAX_LANDING:
            self._queue[0].settle()
        self._queue.append(home)

    def leave(self, home: GradHome) -> None:
        """`home` has landed or was dropped."""
        if home in self._queue:
            self._queue.remove(home)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """CPU memory for a mean on its way: 1-D; `give` it back."""
        nbytes = numel * dtype.itemsize
        fitting = [memory for memory in self._spare if memory.numel() >= nbytes]
        if not fitting:
            return self.storage.cpu_empty(numel, dtype)
        chosen = min(fitting, key=Tensor.numel)
        self._spare = [memory for memory in self._spare if memory is not chosen]
        return chosen[:nbytes].view(dtype)

    def give(self, memory: Tensor) -> None:
        """Keeps memory that `take` gave for the next mean: page-locking it anew takes longer."""
        if len(self._spare) < _MAX_LANDING:
            whole = torch.empty(0, dtype=torch.uint8)
            storage = memory.untyped_storage()
            self._spare.append(whole.set_(storage, 0, (storage.nbytes(),), (1,)))

    def copy(self, source: Tensor, target: Tensor, name: str) -> torch.cuda.Event | None:
        """Copies the mean of bucket `name` from the device to CPU memory beside the computation."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            recorder = self.storage.recorder
            with recorder.moving(name, target.nbytes, source.device, target.device):
                target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
            return event


@dataclass
class _Flight:
    """A mean on its way: in CPU memory after `event`, in its file after `transfer`."""

    values: Tensor  # 1-D, CPU
    source: Tensor  # on the device; alive until the event
    event: torch.cuda.Event | None
    is_added: bool
    is_staged: bool = False  # `values` go back to the landing
    transfer: Transfer | None = None


class GradHome:
    """The mean gradient of one bucket, in CPU memory or in a file.

    Attributes:
        home: Where it rests.
    """

    def __init__(
        self, landing: Landing, name: str, numel: int, dtype: torch.dtype, tier: Tier
    ) -> None:
        self._landing = landing
        self._name = name
        self._numel = numel
        self._dtype = dtype
        self._tier = tier
        self._home: Home | None = None  # None until the first mean
        self._flight: _Flight | None = None
        self._shown: Tensor | None = None

    @property
    def home(self) -> Home:
        """Where the mean rests; made at the first use."""
        if self._home is None:
            storage = self._landing.storage
            if self._tier is Tier.NVME:
                self._home = storage.make_optim(f"{self._name}.grad", self._numel, self._dtype)
            else:
                self._home = InMemory(storage.cpu_empty(self._numel, self._dtype), Tier.CPU)
        return self._home

    @property
    def shard(self) -> Tensor:
        """The mean: 1-D, a CPU tensor or a StoredTensor, the same object every time."""
        if self._shown is None:
            self._shown = self.home.look(0, self._numel)
        return self._shown

    @property
    def nbytes(self) -> int:
        """Bytes it takes at rest."""
        return self._home.nbytes if self._home is not None else 0

    def look(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop): a view, or a StoredTensor."""
        return self.home.look(start, stop)

    def put(self, mean: Tensor, *, is_added: bool) -> None:
        """Sends a mean on its way here.

        Args:
            mean: 1-D, on the device; not to be written to any more.
            is_added: Add it to what rests here instead of replacing that.
        """
        self.settle()
        self._landing.admit(self)
        storage = self._landing.storage
        if isinstance(self.home, InMemory) and not is_added:
            event = self._landing.copy(mean, self.home.tensor, self._name)
            self._flight = _Flight(self.home.tensor, mean, event, is_added)
        elif storage.is_apart:
            staging = self._landing.take(self._numel, self._dtype)
            event = self._landing.copy(mean, staging, self._name)
            self._flight = _Flight(staging, mean, event, is_added, is_staged=True)
        else:
            self._flight = _Flight(mean, mean, None, is_added)
            self._land(self._flight)

    def settle(self) -> None:
        """Waits until the mean rests here."""
        flight = self._flight
        if flight is None:
            return
        self._flight = None
        self._landing.leave(self)
        if flight.event is not None:
            recorder = self._landing.storage.recorder
            with recorder.span(Kind.TO_CPU, self._name, is_wait=True):
                flight.event.synchronize()
        if flight.transfer is None:
            self._land(flight)
        if flight.transfer is not None:
            flight.transfer.wait()
        if flight.is_staged:
            self._landing.give(flight.values)

    def _land(self, flight: _Flight) -> None:
        home = self.home
        if isinstance(home, InFile):
            values = flight.values
            if flight.is_added:
                values = values.add_(home.fetch(0, self._numel))
            flight.transfer = home.begin_store(values)
        elif flight.is_added:
            home.fetch(0, self._numel).add_(flight.values)

    def apply_(self, change: Callable[[Tensor], object], start: int, stop: int) -> None:
        """Changes elements [start, stop) in place."""
        self.settle()
        values = self.home.fetch(start, stop)
        change(values)
        self.home.store(start, values)

    def drop(self) -> None:
        """Forgets what is on its way, after an exception."""
        flight, self._flight = self._flight, None
        self._landing.leave(self)
        if flight is None:
            return
        if flight.event is not None:
            flight.event.synchronize()
        if flight.transfer is not None:
            flight.transfer.settle()
        if flight.is_staged:
            self._landing.give(flight.values)
