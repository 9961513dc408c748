"""Shards of one bucket on this rank between uses: parameters, master, optimizer states.

For the tensors, see [Note: Tensors of a bucket] in bucket.py. Each shard has a store in its tier.
`Bucket` decides when a shard is used; this module knows where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.profiler import record_function

from lightning_zero.comm.backends import Source
from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.full_tensors import FullTensors
from lightning_zero.core.optim_states import OptimStates
from lightning_zero.layout.flat import OwnedLayout, ShardLayout
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import BucketPlan, Master
from lightning_zero.layout.stage import State
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.storage import (
    FileShardStore,
    MemoryShardStore,
    ParamReader,
    ShardStore,
    Storage,
)

__all__ = ["Shards"]


class Shards:
    """The stores of one bucket's shards. See [Note: Tensors of a bucket].

    Attributes:
        replicates_optim: Whether optimizer states are replicated: every rank steps all elements.
        layout: Own elements.
        step_layout: Elements that this rank steps: own ones, or the full tensors that it owns.
        full_tensors: Exchange of full tensors in a step; None: own elements are stepped, or this is
            the only shard.
        param_shard: Store of this rank's parameters: 1-D, own elements. A slice of the unsharded
            buffer, in the parameter dtype, or `all_gather_input`.
        all_gather_input: Store of the shard that an all-gather sends, cast to the parameter dtype
            if it is the master (`BucketPlan.shard_dtype`). None unless parameters are sharded.
        master: Store that the optimizer steps: 1-D, own elements, master dtype; `param_shard` where
            the dtypes agree. None until it is needed.
        reader: Reader of an `all_gather_input` that is stored in a file.
        states: Shards of the optimizer states.
        num_writes: Counter of steps and other writes to all values; some count more than once.
    """

    def __init__(
        self, plan: BucketPlan, unsharded_params: FlatBuffer, storage: Storage, comm: Communicator
    ) -> None:
        self.plan = plan
        self.storage = storage
        self.replicates_optim = not plan.stage.has_shard(State.OPTIM)
        self.comm = comm
        rank = comm.mesh.shard_rank
        # Whether an all-gather first copies the shard to the device.
        self._is_uploaded = storage.has_device_memory and plan.tiers.param is Tier.CPU
        self._unsharded_params = unsharded_params
        self.has_separate_master = plan.master.is_separate
        self.layout = plan.layout.of_rank(rank, is_replicated=self.replicates_optim)
        self.step_layout: ShardLayout | OwnedLayout = self.layout
        self.full_tensors: FullTensors | None = None
        if plan.layout.has_tensor_owners and not self.replicates_optim:
            self.step_layout = owned = OwnedLayout(plan.layout, rank)
            if comm.mesh.num_shards > 1:
                self.full_tensors = FullTensors(owned, comm, plan.name)
        self.states = OptimStates(plan, self.layout, self.step_layout, storage)
        self.param_shard: ShardStore = MemoryShardStore(self.own_slice, Tier.DEVICE)
        self.all_gather_input: ShardStore | None = None
        self.master: ShardStore | None = None
        self.reader: ParamReader | None = None
        self.num_writes = 0

    # ---------------------------------------------------------------- which elements

    def owned(self, index: int) -> range:
        """Own elements of slot `index`, counted from the slot's first element."""
        return self.layout.owned(index)

    @property
    def has_tensor_owners(self) -> bool:
        """Whether each parameter is stepped as a full tensor by the one rank that owns it."""
        return isinstance(self.step_layout, OwnedLayout)

    def own_slice_of(self, buffer: FlatBuffer) -> Tensor:
        """The own elements of an unsharded buffer: 1-D, a view."""
        return buffer.tensor if self.replicates_optim else buffer.shard(self.layout.rank)

    @property
    def own_slice(self) -> Tensor:
        """The own elements of the unsharded parameters: 1-D, a view."""
        return self.own_slice_of(self._unsharded_params)

    @property
    def num_views(self) -> int:
        """Number of views of the unsharded buffer that this object keeps."""
        return int(self.all_gather_input is None and not self.replicates_optim)

    @property
    def are_copies(self) -> bool:
        """Whether own elements are stored in other memory than the unsharded buffer."""
        return self.all_gather_input is not None or self.separate_master is not None

    def rebind_to_unsharded(self) -> None:
        """Switches to the memory of the unsharded buffer, which is new."""
        if self.all_gather_input is None:
            assert isinstance(self.param_shard, MemoryShardStore)
            self.param_shard.rebind(self.own_slice)

    # ---------------------------------------------------------------- parameters and master

    def init_master(self, values: Tensor) -> None:
        """Creates the store of a master with a copy of `values`: 1-D, own elements."""
        copy = values.to(self.plan.master_dtype, copy=True)
        self.master = self.storage.make_master_store(self.plan.name, copy, self.plan.tiers.optim)

    def init_stores(self, values: Tensor) -> None:
        """Creates the stores from own elements: 1-D, in full precision."""
        plan, storage = self.plan, self.storage
        if plan.stage.has_shard(State.PARAM):
            copy = values.to(plan.shard_dtype, copy=True)
            param = storage.make_param_store(plan.name, copy, plan.tiers.param)
            self.all_gather_input = self.param_shard = param
            if isinstance(param, FileShardStore):
                self.reader = ParamReader(param, storage.param_pool, storage.recorder)
        if not self.has_separate_master:
            self.master = self.param_shard
        elif plan.master is Master.SEPARATE:
            self.init_master(values)

    def ensure_master(self) -> ShardStore:
        """Returns the store of the master; creates it from the parameters if there is none yet."""
        if self.master is None:
            store = self.param_shard
            self.init_master(store.fetch(0, store.numel))
            assert self.master is not None
        return self.master

    @property
    def separate_master(self) -> ShardStore | None:
        """The master, if it is a tensor other than the parameters."""
        return None if self.master is self.param_shard else self.master

    @property
    def master_or_param(self) -> ShardStore:
        """This rank's elements in the highest precision available."""
        return self.master or self.param_shard

    def master_view(self, index: int) -> Tensor:
        """Slot `index` in full precision: 1-D, own elements; a view, or a LazyTensor of a file."""
        own = self.layout.ranges[index]
        store = self.master_or_param
        return store.view(own.start, own.stop)

    def values(self, index: int) -> Tensor:
        """Slot `index` in full precision: 1-D, own elements; a view, or a copy of a file."""
        part = self.master_view(index)
        return part.read() if isinstance(part, LazyTensor) else part

    def change(self, index: int, write: Callable[[Tensor], object]) -> None:
        """Lets `write` change slot `index` in place, in full precision: 1-D, own elements.

        The parameters follow the master.
        """
        own = self.layout.ranges[index]
        self.before_write()
        master = self.master_or_param.fetch(own.start, own.stop)
        write(master)
        self.write(own.start, master)

    def write(self, start: int, values: Tensor) -> None:
        """Writes own elements from `start` on, in full precision: 1-D; the parameters follow."""
        self.master_or_param.write(start, values)
        if self.separate_master is not None:
            self.param_shard.write(start, values)

    def drop(self) -> None:
        """Drops all shards: the parameters have tensors of their own again. Local."""
        self.all_gather_input = self.master = None
        self.param_shard = MemoryShardStore(self._unsharded_params.tensor.new_empty(0), Tier.DEVICE)

    def store_master(self, values: Tensor) -> None:
        """Writes this rank's elements, 1-D in any floating dtype; the parameters follow."""
        self.count_write()
        self.before_write()
        self.master_or_param.write(0, values)
        self.cast_master()

    def cast_master(self) -> None:
        """Rounds the master to the parameter dtype, if it is a tensor of its own."""
        master = self.separate_master
        if master is None:
            return
        self.stop_reading()
        with record_function(f"zero::cast {self.plan.name}"):
            self.param_shard.write(0, master.fetch(0, master.numel))

    def all_gather_source(self) -> Source | None:
        """Shard that this rank sends in an all-gather; None: it is in the unsharded buffer."""
        if self.reader is not None:
            self.storage.recorder.count_read(is_hit=self.reader.has_begun)
            return self.reader.copy_to
        if not isinstance(self.all_gather_input, MemoryShardStore):
            return None
        source = self.all_gather_input.tensor
        if self.replicates_optim:  # every rank has all elements, in an average of the weights
            own = self.plan.layout.shard(self.layout.rank)
            return source[own.start : own.stop]
        return source

    def count_write(self) -> None:
        """Counts a write of the engine to all values."""
        self.num_writes += 1

    def before_write(self) -> None:
        """Before the shard is written: ends reads of its file and its copies to the device."""
        self.stop_reading()
        self.comm.wait_for_uploads(self._is_uploaded)

    def stop_reading(self) -> None:
        """Cancels a read ahead and returns its buffers."""
        if self.reader is not None:
            self.reader.reset()

    # ---------------------------------------------------------------- bytes

    def stores(self) -> Iterator[tuple[Tier, State, ShardStore]]:
        """Every store that holds memory or a file of its own, with its tier and the state it holds.

        A master that is a tensor of its own counts as optimizer state, as in the ZeRO paper.
        """
        if self.all_gather_input is not None:
            yield self.plan.tiers.param, State.PARAM, self.all_gather_input
        if self.separate_master is not None:
            yield self.plan.tiers.optim, State.OPTIM, self.separate_master
        for store in self.states.stores.values():
            yield Tier.NVME, State.OPTIM, store
