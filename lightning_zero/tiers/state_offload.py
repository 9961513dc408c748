"""States whose device memory is free between two steps, while CPU memory keeps their values.

A loop of reinforcement learning alternates between training and generation, which needs the device
memory for something else. Storage objects stay the same, so that parameters, optimizers and views
need not know of it. While a state is offloaded, reading a view of it gives NaN on the CPU and
raises on CUDA (tensors/freed.py); the engine's own uses raise before that. Pinned memory is kept
for the next time, because it takes long to allocate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_zero.layout.stage import State
from lightning_zero.record import streams
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.freed import free, refill
from lightning_zero.tiers.memory import aligned_empty

__all__ = ["StateOffload"]


class StateOffload:
    """The offloaded states of one engine, by kind."""

    def __init__(self) -> None:
        self._copies: dict[State, list[_HostCopy]] = {}
        self._pinned: list[Tensor] = []  # memory of earlier copies, 1-D, uint8

    @property
    def states(self) -> list[State]:
        """Kinds of state that are offloaded now."""
        return list(self._copies)

    def offload(self, state: State, holders: Iterable[Tensor | FlatBuffer], *, pin: bool) -> None:
        """Copies the memory of `holders` to the CPU and frees it.

        `pin`: whether the copies are page-locked.
        """
        self.check(state)
        copies: dict[int, _HostCopy] = {}
        for holder in holders:
            tensor = holder.tensor if isinstance(holder, FlatBuffer) else holder
            storage = tensor.untyped_storage()
            # A storage that NumPy uses, or another library, cannot be freed.
            if storage._cdata not in copies and storage.nbytes() and storage.resizable():
                memory = self._host_memory(storage.nbytes(), pin=pin)
                copies[storage._cdata] = _HostCopy(holder, tensor, memory)
        for copy in copies.values():
            copy.free()
        self._copies[state] = list(copies.values())

    def reload(self, state: State) -> None:
        """Restores the memory and the values of one kind of state, if it is offloaded. Waits."""
        copies = self._copies.pop(state, [])
        for copy in copies:
            copy.restore()
        if copies and copies[0].device.type == "cuda":
            streams.current(copies[0].device).synchronize()
            self._pinned += [copy.values for copy in copies]

    def _host_memory(self, nbytes: int, *, pin: bool) -> Tensor:
        if not pin:
            return torch.empty(nbytes, dtype=torch.uint8)
        for number, memory in enumerate(self._pinned):
            if memory.nbytes == nbytes:
                return self._pinned.pop(number)
        return aligned_empty(nbytes, pin=True)

    def check(self, *states: State) -> None:
        """Raises a RuntimeError if one of `states` is offloaded; without any, if a state is."""
        for state in states or State:
            if state in self._copies:
                raise RuntimeError(
                    f"the engine's {state.value} states are offloaded, and this call needs them; "
                    "call engine.reload_states() on every rank first."
                )

    def host_bytes(self, state: State) -> int:
        """Bytes of CPU memory that keep the values of `state`."""
        return sum(copy.values.nbytes for copy in self._copies.get(state, ()))

    def freed_bytes(self, state: State) -> int:
        """Bytes that the freed storages of `state` still report as theirs."""
        return sum(copy.reported_bytes for copy in self._copies.get(state, ()))


class _HostCopy:
    """Copy of one storage in CPU memory, `values`: 1-D, uint8, of the storage's size."""

    def __init__(self, holder: Tensor | FlatBuffer, tensor: Tensor, values: Tensor) -> None:
        self._buffer = holder if isinstance(holder, FlatBuffer) else None
        self._storage = storage = tensor.untyped_storage()
        self._nbytes = storage.nbytes()
        self._spare: object = None
        self._all = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._all.set_(storage, 0, (self._nbytes,), (1,))
        self.device = tensor.device
        self.values = values
        values.copy_(self._all, non_blocking=True)

    @property
    def reported_bytes(self) -> int:
        return 0 if self._buffer is not None else self._storage.nbytes()

    def free(self) -> None:
        if self._buffer is not None:
            self._buffer.free()
        else:
            self._spare = free(self._storage, None)

    def restore(self) -> None:
        if self._buffer is not None:
            self._buffer.allocate()
        else:
            refill(self._storage, self._nbytes, self._spare)
        self._all.copy_(self.values, non_blocking=True)
