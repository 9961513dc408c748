"""What of one bucket rests on this rank between its uses: parameters, master, optimizer states.

The master is what the optimizer steps: fp32 where parameters are narrower, else the parameters
themselves (in stages 1-2 a slice of the whole buffer, in stage 3 the shard). Each shard has a store
in its tier; `Bucket` says when it is used, this file where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from lightning_zero.comm.backends import Source
from lightning_zero.core.writes import Fingerprint
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.layout.stage import State
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.composite import is_composite
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tiers.storage import (
    FileShardStore,
    MemoryShardStore,
    ParamReader,
    ShardStore,
    Storage,
)

__all__ = ["Shards", "is_elementwise_state"]


def is_elementwise_state(value: object, numel: int) -> bool:
    """Whether `value` has one number for each of the `numel` elements of a 1-D slice.

    One number for the parameter, such as a counter of steps, has no dimensions.
    """
    if not isinstance(value, Tensor) or is_composite(value):
        return False
    return value.dim() > 0 and value.numel() == numel


class Shards:
    """The stores of one bucket's shards.

    Attributes:
        replicates_optim: OPTIM rests whole: every rank steps all elements.
        own_ranges: By slot, the elements that this rank steps, within the part that it steps.
        step_shapes: By slot, the shape in which it steps them.
        is_stepped: By slot, whether it steps any: all of it, or a slice, which may be empty.
        param_shard: What follows the master, the parameters of this rank's elements: 1-D, own part,
            param dtype; of the whole buffer, or `all_gather_input`.
        all_gather_input: What a gather sends; None where nothing is gathered before use.
        master: What is stepped: 1-D, own part, master dtype; None until it is needed.
        reader: Reads an `all_gather_input` that rests in a file.
        keeps_states_in_files: Optimizer states move to files; set with the optimizer.
        state_stores: Optimizer states in files, by key.
        num_writes: Counts steps and other changes of all values, some more than once.
        num_slot_writes: Counts changes of one slot alone, by slot.
    """

    def __init__(self, plan: BucketPlan, whole: FlatBuffer, storage: Storage, rank: int) -> None:
        self.plan = plan
        self.storage = storage
        self.replicates_optim = not plan.stage.has_shard(State.OPTIM)
        self._rank = rank
        self._whole = whole
        self.has_own_master = plan.has_own_master
        self.own_ranges = plan.layout.parts(rank)
        layout, slots = plan.layout, plan.layout.slots
        self.step_shapes = tuple(layout.step_shape(slot, rank) for slot in slots)
        self.is_stepped = tuple(slot.is_stepped_by(rank) for slot in slots)
        if self.replicates_optim:
            self.own_ranges = tuple(range(slot.start, slot.stop) for slot in slots)
            self.step_shapes = tuple(slot.shape for slot in slots)
            self.is_stepped = (True,) * len(slots)
        self.param_shard: ShardStore
        self.all_gather_input: ShardStore | None
        self.master: ShardStore | None
        self.drop()
        self.reader: ParamReader | None = None
        self.keeps_states_in_files = False
        self.num_writes = 0
        self.num_slot_writes = [0] * len(slots)
        self.state_stores: dict[str, ShardStore] = {}
        # The master as it was when others were left the memory that follows from it.
        self._former: tuple[StorageWeakRef, Tensor] | None = None
        self._print: Fingerprint | None = None  # of the own part of whole parameters

    # ---------------------------------------------------------------- which elements

    def owned(self, index: int) -> range:
        """Elements of slot `index`, counted from its own first one, that this rank steps."""
        if self.replicates_optim:
            return range(self.plan.layout.slots[index].numel)
        return self.plan.layout.owned(self.plan.layout.slots[index], self._rank)

    @property
    def has_tensor_owners(self) -> bool:
        """Every parameter is stepped by one rank, whole."""
        return not self.replicates_optim and self.plan.layout.has_tensor_owners

    def split_by_slot(self, part: Tensor) -> list[Tensor]:
        """By slot, 1-D views of a flat tensor of the elements that this rank steps."""
        return [part[own.start : own.stop] for own in self.own_ranges]

    def own_slice_of(self, whole: FlatBuffer) -> Tensor:
        """The part of a whole buffer that this rank steps: 1-D, a view."""
        return whole.tensor if self.replicates_optim else whole.shard(self._rank)

    @property
    def own_slice(self) -> Tensor:
        """The part of the whole buffer that this rank steps: 1-D, a view."""
        return self.own_slice_of(self._whole)

    @property
    def num_views(self) -> int:
        """How many views of the whole buffer are kept here, besides the buffer's own tensor."""
        return int(self.all_gather_input is None and not self.replicates_optim)

    def rebind_to_unsharded(self, old: Tensor) -> None:
        """The whole buffer has new memory; `old` is that of before, which others hold.

        They may put it back: what is the rounded master of now will be that master again.
        """
        if (store := self._separate_master) is not None:
            held = StorageWeakRef(old.untyped_storage())
            self._former = held, store.fetch(0, store.numel).clone()
        if self.all_gather_input is None:
            assert isinstance(self.param_shard, MemoryShardStore)
            self.param_shard.tensor = self.own_slice

    # ---------------------------------------------------------------- parameters and master

    def init_master(self, values: Tensor) -> None:
        """Makes a store for a master of these `values`: 1-D, own part, copied."""
        copy = values.to(self.plan.master_dtype, copy=True)
        self.master = self.storage.make_main_store(self.plan.name, copy, self.plan.tiers.optim)

    def init_params(self) -> None:
        """Makes stores from the whole parameters, for all but a master of its own dtype."""
        if self.plan.stage.has_shard(State.PARAM):
            copy, storage = self.own_slice.clone(), self.storage
            param = storage.make_param_store(self.plan.name, copy, self.plan.tiers.param)
            self.all_gather_input = self.param_shard = param
            if isinstance(param, FileShardStore):
                self.reader = ParamReader(param, storage.param_pool, storage.recorder)
        if not self.has_own_master:
            self.master = self.param_shard

    def ensure_master(self) -> ShardStore:
        """The master; made from the parameters where there is none yet."""
        if self.master is None:
            store = self.param_shard
            self.init_master(store.fetch(0, store.numel))
            assert self.master is not None
        return self.master

    @property
    def own_master(self) -> ShardStore | None:
        """The master, where it is another tensor than the parameters."""
        return None if self.master is self.param_shard else self.master

    @property
    def master_or_param(self) -> ShardStore:
        """This rank's elements in the fullest precision there is."""
        return self.master or self.param_shard

    def sharded_views(self) -> list[Tensor]:
        """By slot, what a parameter shows of its shard at rest: a 1-D slice, empty for a file."""
        if isinstance(self.master_or_param, MemoryShardStore):
            return self.split_by_slot(self.master_or_param.tensor)
        return [torch.empty(0, dtype=self.plan.master_dtype) for _ in self.plan.layout.slots]

    def master_view(self, index: int) -> Tensor:
        """Slot `index` in full precision: 1-D, own part; a view of memory, or what reads a file."""
        own = self.own_ranges[index]
        store = self.master_or_param
        return store.view(own.start, own.stop)

    def values(self, index: int) -> Tensor:
        """Slot `index` as `master_view` shows it: 1-D, plain; a copy of a file."""
        part = self.master_view(index)
        return part.read() if isinstance(part, LazyTensor) else part

    def change(self, index: int, write: Callable[[Tensor], object]) -> None:
        """Lets `write` change what `master_view` shows, in place: 1-D; parameters follow the master."""
        own = self.own_ranges[index]
        self.stop_reading()
        exact = self.master_or_param.fetch(own.start, own.stop)
        write(exact)
        self.num_slot_writes[index] += 1
        self._write(own.start, exact)

    def _write(self, start: int, values: Tensor) -> None:
        self.master_or_param.write(start, values)
        if self.own_master is not None:
            self.param_shard.write(start, values)

    def drop(self) -> None:
        """There are no shards beside the whole buffer."""
        self.all_gather_input = self.master = None
        self.param_shard = MemoryShardStore(self.own_slice, Tier.DEVICE)

    def store_master(self, values: Tensor) -> None:
        """Replaces this rank's elements: 1-D, any floating dtype; parameters follow the master."""
        self.num_writes += 1
        self.stop_reading()
        self.master_or_param.write(0, values)
        self.cast_master()

    def cast_master(self) -> None:
        """Rounds the master to the parameters' dtype, where it is a tensor of its own."""
        master = self.own_master
        if master is None:
            return
        self.stop_reading()
        with record_function(f"zero::cast {self.plan.name}"):
            self.param_shard.write(0, master.fetch(0, master.numel))
        self.mark_written()

    def all_gather_source(self) -> Source | None:
        """What a gather has to send of this rank, where it is not in the whole buffer."""
        if self.reader is not None:
            self.storage.recorder.count_read(is_hit=self.reader.has_begun)
            return self.reader.copy_to
        return (
            self.all_gather_input.tensor
            if isinstance(self.all_gather_input, MemoryShardStore)
            else None
        )

    def stop_reading(self) -> None:
        """Gives the buffers of a read ahead back: nobody needs it, or the file is to change."""
        if self.reader is not None:
            self.reader.cancel()

    # ---------------------------------------------------------------- written by others

    @property
    def _separate_master(self) -> ShardStore | None:
        """The master, where it is another tensor than parameters that rest whole."""
        return self.own_master if self.all_gather_input is None else None

    def sync_writes(self) -> None:
        """Takes elements that somebody has written to into the master, where it is another tensor.

        Averaged weights that a callback swaps in, or `p.data.clamp_()`, write to the whole
        parameters, which are the rounded master in every element that nobody has touched.
        """
        store, own = self._separate_master, self.own_slice
        if store is None or (self._print is not None and self._print.matches(own)):
            return
        master = store.fetch(0, own.numel())
        values = own.to(master.device)
        with torch.no_grad():
            is_changed, exact = values != master.to(own.dtype), values.to(master.dtype)
            if self._former is not None and self._former[0].expired():
                self._former = None
            if self._former is not None:
                former = self._former[1]
                exact = torch.where(values == former.to(own.dtype), former, exact)
            # On a device this look would wait for it, which costs more than writing in any case.
            if master.device.type != "cpu" or is_changed.any():
                torch.where(is_changed, exact, master, out=master)
                store.write(0, master)

    def assign(self, index: int, values: Tensor) -> None:
        """Takes this rank's elements of slot `index` that somebody has set: 1-D, any dtype.

        Elements that are the rounded master stay what the master is.
        """
        own = self.own_ranges[index]
        self.num_slot_writes[index] += 1
        if not own:
            return
        self.stop_reading()
        exact = self.master_or_param.fetch(own.start, own.stop)
        values = values.to(exact.device)
        with torch.no_grad():
            is_changed = values != exact.to(values.dtype)
            self._write(own.start, torch.where(is_changed, values.to(exact.dtype), exact))

    def mark_written(self) -> None:
        """Remembers the whole parameters as they follow from a master that is not beside them."""
        self.num_writes += 1
        store = self._separate_master
        if store is not None and self.storage.is_offloaded(store.tier):
            self._print = Fingerprint(self.own_slice)

    # ---------------------------------------------------------------- optimizer states

    def slice_state(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part of an optimizer state that is shaped like slot `index`, a copy.

        In the master's dtype, but for integers, which are codes of a kind.
        """
        device = self.storage.step_device(self.plan.tiers.optim)
        owned = self.owned(index)
        part = read_flat(whole, owned.start, owned.stop).view(self.step_shapes[index])
        dtype = self.plan.master_dtype if part.is_floating_point() else part.dtype
        return part.to(device, dtype, copy=True)

    def state_store(self, key: str, dtype: torch.dtype) -> ShardStore:
        """The file of optimizer state `key`, as long as the shard; zeros at first."""
        if key not in self.state_stores:
            name, numel = f"{self.plan.name}.{key}", len(self.plan.layout.shard(self._rank))
            self.state_stores[key] = self.storage.make_optim_store(name, numel, dtype)
        return self.state_stores[key]

    def state_view(self, index: int, key: str) -> Tensor:
        """Optimizer state `key` of slot `index`, read from its file when it is used: 1-D."""
        own = self.own_ranges[index]
        return self.state_stores[key].view(own.start, own.stop)

    def adopt_state(self, index: int, state: dict[str, Any]) -> None:
        """Moves states of slot `index` that are in memory, such as loaded ones, to their files."""
        own = self.own_ranges[index]
        for key, value in state.items():
            if is_elementwise_state(value, len(own)) and not isinstance(value, LazyTensor):
                self.state_store(key, value.dtype).write(own.start, value)
                state[key] = self.state_view(index, key)

    # ---------------------------------------------------------------- bytes

    def stores(self) -> Iterator[tuple[Tier, State, ShardStore]]:
        """Every store that holds memory or a file of its own, with what it holds.

        A master that is a tensor of its own counts as optimizer state, as in the ZeRO paper.
        """
        if self.all_gather_input is not None:
            yield self.plan.tiers.param, State.PARAM, self.all_gather_input
        if (master := self.own_master) is not None:
            yield self.plan.tiers.optim, State.OPTIM, master
        for store in self.state_stores.values():
            yield Tier.NVME, State.OPTIM, store
