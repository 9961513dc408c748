"""The elements of one bucket in full precision, for code between steps and for optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.core.params import Params
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.layout.flat import FlatLayout
from lightning_zero.layout.stage import State
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tiers.storage import ShardStore

__all__ = ["Masters"]


class Masters:
    """The elements of one bucket in full precision: own or all of them.

    If there is no master, they are the parameters themselves.

    Args:
        params: The parameters of the bucket; writes to them are synced first.
        shards: Their shards.
        worker: The thread that may step buckets: all of its steps come first.
    """

    def __init__(self, params: Params, shards: Shards, worker: StepWorker) -> None:
        self._params, self._shards, self._worker = params, shards, worker
        self._device = shards.storage.device

    # ---------------------------------------------------------------- this rank's elements

    def fetch(self) -> Tensor:
        """The elements that this rank steps: 1-D, a view of memory or a copy of a file. Local."""
        store = self._store()
        return store.fetch(0, store.numel)

    def shard_views(self) -> list[Tensor]:
        """Own elements in full precision, by slot: 1-D, to be read before the next step.

        Views of memory, or LazyTensors if the shard is in a file. Local, but waits for an
        all-gather in flight.
        """
        store = self._store()
        return [store.view(own.start, own.stop) for own in self._shards.layout.ranges]

    def _store(self) -> ShardStore:
        self._shards.storage.state_offload.check(
            State.PARAM if self._shards.separate_master is None else State.OPTIM
        )
        self._worker.drain()
        self._params.wait_for_unshard()
        self._params.sync_writes()
        return self._shards.master_or_param

    def load(self, read: Callable[[int, range], Tensor | None]) -> None:
        """Writes new values to masters and parameters, each rank its own elements. Collective.

        `read`, called with a slot and its elements `owned`, returns their values in any floating
        dtype, or None to leave the slot as it is. Every rank must load the same slots.
        """
        shard = self.fetch()
        self._shards.before_write()
        with torch.no_grad():
            for index, part in enumerate(self._shards.layout.split(shard)):
                values = read(index, self._shards.owned(index))
                if values is not None:
                    part.copy_(values.reshape(-1))
            self.store(shard)

    def store(self, shard: Tensor) -> None:
        """Writes the tensor of `fetch()` back to masters and parameters. Collective."""
        with torch.no_grad():
            self._shards.store_master(shard)
            self._params.reshard()  # ranks may differ in what a forward has left unsharded
            if self._params.is_unsharded and not self._shards.replicates_optim:
                self._params.all_gather().wait()

    # ---------------------------------------------------------------- all elements

    def full_tensors(self) -> list[Tensor]:
        """All elements of each slot in full precision, n-D, to be read at once. Collective."""
        self._shards.storage.state_offload.check(State.PARAM)
        self._params.wait_for_unshard()
        self._params.sync_writes()
        is_exact = self._shards.master_or_param.dtype == self._params.unsharded.tensor.dtype
        if is_exact and self._params.is_unsharded:
            return self._params.unsharded.views
        return self.all_gather().views

    def all_gather(self) -> FlatBuffer:
        """All elements in full precision in a new buffer, on every rank. Collective; waits."""
        return self.all_gather_values(self.fetch())

    def all_gather_values(self, part: Tensor, layout: FlatLayout | None = None) -> FlatBuffer:
        """A new buffer with every rank's `part`: 1-D. Collective.

        `layout`: of the buffer, and of the parts; None: that of the master.
        """
        shards = self._shards
        self._worker.drain()  # its all-gathers come first on all ranks
        with torch.no_grad():
            if shards.replicates_optim:
                memory = part.to(self._device, copy=True)
            else:
                memory = shards.comm.all_gather_shards(part, shards.plan.name)
            return FlatBuffer(layout or shards.plan.layout, part.dtype, self._device, memory=memory)

    def all_gather_state(self, key: str, slices: Sequence[Tensor | None]) -> list[Tensor]:
        """Full optimizer states, by slot, from every rank's slices. Collective.

        Args:
            key: Key of the state.
            slices: By slot, 1-D as `OptimStates.slice` makes them; None counts as zeros.
        """
        layout = self._shards.states.layouts.of(key)
        given = (part.dtype for part in slices if part is not None)
        dtype = next(given, self._shards.plan.master_dtype)
        joined = torch.zeros(layout.numel, dtype=dtype, device=self._device)
        for target, part in zip(layout.split(joined), slices, strict=True):
            if part is not None:
                target.copy_(part.reshape(-1))
        return self.all_gather_values(joined, layout.layout).views

    def broadcast_from(self, values: FlatBuffer, from_rank: int = 0) -> None:
        """Copies `values` of `from_rank` to all masters and parameters. Collective."""
        self._shards.comm.broadcast_(values.tensor, from_rank)
        with torch.no_grad():
            self._shards.store_master(self._shards.own_slice_of(values))
            if self._params.unsharded.is_allocated:
                self._params.unsharded.tensor.copy_(values.tensor)

    # ---------------------------------------------------------------- views for the user

    def install_own_views(self) -> Tensor:
        """Points the parameters at slices of `fetch()`, until `uninstall_views`; returns `fetch()`.

        If they are written, `store` must follow.
        """
        shard = self.fetch()
        self._shards.before_write()
        self._params.install_views(self._shards.layout.split(shard))
        return shard
