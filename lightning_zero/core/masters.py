"""The elements of one bucket in full precision, for code between steps and for optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.core.shards import Shards
from lightning_zero.layout.flat import FlatLayout
from lightning_zero.layout.stage import State
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tiers.storage import ShardStore

__all__ = ["Masters"]


class MasterBucket(Protocol):
    """The part of `Bucket` that `Masters` uses: its shards, and the moments to wait for."""

    @property
    def shards(self) -> Shards: ...
    @property
    def unsharded_params(self) -> FlatBuffer: ...
    @property
    def comm(self) -> Communicator: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_unsharded(self) -> bool: ...

    def wait_for_all_steps(self) -> None: ...
    def wait_for_unshard(self) -> None: ...
    def sync_writes(self) -> None: ...
    def reshard(self) -> None: ...
    def all_gather_params(self) -> Pending: ...
    def install_views(self, views: Sequence[Tensor]) -> None: ...


class Masters:
    """The elements of one bucket in full precision: own or all of them.

    If there is no master, they are the parameters themselves.
    """

    def __init__(self, bucket: MasterBucket) -> None:
        self._bucket = bucket
        self._shards = bucket.shards

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
        self._bucket.wait_for_all_steps()
        self._bucket.wait_for_unshard()
        self._bucket.sync_writes()
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
        bucket = self._bucket
        with torch.no_grad():
            self._shards.store_master(shard)
            bucket.reshard()  # ranks may differ in what a forward has left unsharded
            if bucket.is_unsharded and not self._shards.replicates_optim:
                bucket.all_gather_params().wait()

    # ---------------------------------------------------------------- all elements

    def full_tensors(self) -> list[Tensor]:
        """All elements of each slot in full precision, n-D, to be read at once. Collective."""
        bucket = self._bucket
        self._shards.storage.state_offload.check(State.PARAM)
        bucket.wait_for_unshard()
        bucket.sync_writes()
        is_exact = self._shards.master_or_param.dtype == bucket.unsharded_params.tensor.dtype
        if is_exact and bucket.is_unsharded:
            return bucket.unsharded_params.views
        return self.all_gather().views

    def all_gather(self) -> FlatBuffer:
        """All elements in full precision in a new buffer, on every rank. Collective; waits."""
        return self.all_gather_values(self.fetch())

    def all_gather_values(self, part: Tensor, layout: FlatLayout | None = None) -> FlatBuffer:
        """A new buffer with every rank's `part`: 1-D. Collective.

        `layout`: of the buffer, and of the parts; None: that of the master.
        """
        bucket, plan = self._bucket, self._shards.plan
        bucket.wait_for_all_steps()  # their all-gathers come first on all ranks
        with torch.no_grad():
            if self._shards.replicates_optim:
                memory = part.to(bucket.device, copy=True)
            else:
                memory = bucket.comm.all_gather_shards(part, plan.name)
            return FlatBuffer(layout or plan.layout, part.dtype, bucket.device, memory=memory)

    def all_gather_state(self, key: str, slices: Sequence[Tensor | None]) -> list[Tensor]:
        """Full optimizer states, by slot, from every rank's slices. Collective.

        Args:
            key: Key of the state.
            slices: By slot, 1-D as `OptimStates.slice` makes them; None counts as zeros.
        """
        layout = self._shards.states.layouts.of(key)
        bucket = self._bucket
        given = (part.dtype for part in slices if part is not None)
        dtype = next(given, self._shards.plan.master_dtype)
        joined = torch.zeros(layout.numel, dtype=dtype, device=bucket.device)
        for target, part in zip(layout.split(joined), slices, strict=True):
            if part is not None:
                target.copy_(part.reshape(-1))
        return self.all_gather_values(joined, layout.layout).views

    def broadcast_from(self, values: FlatBuffer, from_rank: int = 0) -> None:
        """Copies `values` of `from_rank` to all masters and parameters. Collective."""
        bucket = self._bucket
        bucket.comm.broadcast_(values.tensor, from_rank)
        with torch.no_grad():
            self._shards.store_master(self._shards.own_slice_of(values))
            if bucket.unsharded_params.is_allocated:
                bucket.unsharded_params.tensor.copy_(values.tensor)

    # ---------------------------------------------------------------- views for the user

    def install_own_views(self) -> Tensor:
        """Points the parameters at slices of `fetch()`, until `uninstall_views`; returns `fetch()`.

        If they are written, `store` must follow.
        """
        shard = self.fetch()
        self._shards.before_write()
        self._bucket.install_views(self._shards.layout.split(shard))
        return shard
