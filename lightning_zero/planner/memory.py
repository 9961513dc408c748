"""Bytes of the model states between steps, by rank, tier and state, computed without an engine.

[Note: Ranks that differ] If an optimizer steps full tensors, a rank has the states of those that it
owns, so ranks differ. `RankMemory` is for one rank, `MemoryByRank` for all.

[Note: Counted as the engine counts] Every rule here is one of `Shards`, `Gradients`, `Storage` and
`MemoryReport`, applied to the engine's own plan; a test compares both to the byte. Counted is the
memory after a step, before gradients are zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import OffloadConfig, Tier, padded_bytes, step_buffer_config
from lightning_zero.layout.plan import BucketPlan, Master, Plan
from lightning_zero.layout.stage import State
from lightning_zero.optim.state_sizes import OptimizerStates, StateSpec

__all__ = ["MemoryEstimator", "MemoryByRank", "RankMemory"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank between steps.

    Attributes:
        tiers: Bytes by tier and state, as in `MemoryReport.tiers`.
        nvme_buffer_bytes: CPU memory of the buffers through which files are read and written.
        module_buffer_bytes: Bytes of the module's buffers, which are replicated on the devices.
        average_bytes: Bytes of weight averages; the optimizer state includes them.
    """

    tiers: Mapping[Tier, Mapping[State, int]]
    nvme_buffer_bytes: int
    module_buffer_bytes: int
    average_bytes: int = 0

    def tier_bytes(self, tier: Tier) -> int:
        """Bytes of all states in `tier`."""
        return sum(self.tiers.get(tier, {}).values())


@dataclass(frozen=True)
class MemoryByRank:
    """Memory of every rank of a shard group.

    Attributes:
        by_rank: Memory by rank; of rank 0 alone if all have the same (with padding on the last
            ranks). See [Note: Ranks that differ].
    """

    by_rank: tuple[RankMemory, ...]

    @property
    def largest(self) -> int:
        """Rank with the most bytes on its device; among equals, with the most bytes in total."""

        def size(rank: int) -> tuple[int, int]:
            own = self.by_rank[rank]
            return own.tier_bytes(Tier.DEVICE), sum(map(own.tier_bytes, Tier))

        return max(range(len(self.by_rank)), key=size)

    def min_max_bytes(self, tier: Tier) -> tuple[int, int]:
        """Smallest and largest number of bytes that a rank has in `tier`."""
        sums = [memory.tier_bytes(tier) for memory in self.by_rank]
        return min(sums), max(sums)

    def node_bytes(self, tier: Tier, ranks_per_node: int) -> int:
        """Bytes in `tier` on the node that has most."""
        count = len(self.by_rank)
        sums = [memory.tier_bytes(tier) for memory in self.by_rank]
        firsts = {first % count for first in range(0, count * ranks_per_node, ranks_per_node)}
        return max(sum(sums[(f + i) % count] for i in range(ranks_per_node)) for f in firsts)


class MemoryEstimator:
    """Counts the bytes of the model states on each rank.

    Args:
        plan: Plan of the engine.
        module: Module of the plan; its tensors may be on the meta device.
        optimizers: Optimizers of the engine.
        offloads: Offload of parameters and of the optimizer, as in `ZeroConfig.offloads`.
        has_device_memory: Whether the device has memory of its own.
        accumulates: Whether a step has several micro-batches.
        steps_by_bucket: Whether optimizer states may be stored on NVMe. False for optimizers that
            can only step all parameters in one call. States of full tensors are never stored there.
        averages: Tier of each weight average: CPU, or DEVICE for the tier of the optimizer.
        fallback: See `OptimizerStates`.
    """

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        offloads: tuple[OffloadConfig | None, OffloadConfig | None] = (None, None),
        has_device_memory: bool = True,
        accumulates: bool = False,
        steps_by_bucket: bool = True,
        averages: Sequence[Tier] = (),
        fallback: StateSpec | None = None,
    ) -> None:
        self.plan = plan
        self.has_device_memory = has_device_memory
        self.accumulates = accumulates
        self.named = parameters_by_name(module)
        self.states = OptimizerStates(optimizers, fallback)
        self._module = module
        self._offloads = offloads
        self._steps_by_bucket = steps_by_bucket
        self._averages = averages

    def ranks(self) -> MemoryByRank:
        """Memory of every rank."""
        are_equal = not any(bucket.layout.has_tensor_owners for bucket in self.plan.buckets)
        numbers = [0] if are_equal else range(self.plan.world_size)
        return MemoryByRank(tuple(self.rank_memory(rank) for rank in numbers))

    def rank_memory(self, rank: int = 0) -> RankMemory:
        """Memory of one rank of a shard group."""
        used = {Tier.DEVICE}
        for bucket in self.plan.buckets:
            used |= {bucket.tiers.param, bucket.tiers.optim, bucket.tiers.grad}
        held = {tier: dict.fromkeys(State, 0) for tier in Tier if tier in used}

        def add(tier: Tier, state: State, nbytes: int) -> None:
            held.setdefault(tier, dict.fromkeys(State, 0))[state] += nbytes

        for bucket in self.plan.buckets:
            numel = len(bucket.layout.shard(rank))
            add(*self._param(bucket, numel))
            for tier, nbytes in self._grad(bucket, numel):
                add(tier, State.GRAD, nbytes)
            add(bucket.tiers.optim, State.OPTIM, self._master(bucket, numel))
            for tier, nbytes in self._optimizer_states(bucket, rank):
                add(tier, State.OPTIM, nbytes)
        average_bytes = 0
        for tier, nbytes in self._weight_averages(rank):
            add(tier, State.OPTIM, nbytes)
            average_bytes += nbytes
        buffers = sum(b.numel() * b.element_size() for b in self._module.buffers())
        return RankMemory(held, self._nvme_buffer_bytes(), buffers, average_bytes)

    def parameter(self, bucket: BucketPlan, index: int) -> nn.Parameter:
        """Parameter of a slot."""
        return self.named[bucket.layout.slots[index].name]

    # ---------------------------------------------------------------- by state

    def _param(self, bucket: BucketPlan, numel: int) -> tuple[Tier, State, int]:
        if not bucket.stage.has_shard(State.PARAM):
            return Tier.DEVICE, State.PARAM, bucket.layout.numel * bucket.dtype.itemsize
        tier = bucket.tiers.param
        return tier, State.PARAM, self._stored_bytes(numel, bucket.shard_dtype, tier)

    def _grad(self, bucket: BucketPlan, numel: int) -> list[tuple[Tier, int]]:
        if not bucket.is_trainable:
            return []
        layout, dtype = bucket.layout, self.plan.grad_dtype(bucket)
        if not bucket.stage.has_shard(State.OPTIM):
            # Reduced in place: there is no shard.
            return [(Tier.DEVICE, layout.numel * dtype.itemsize)]
        is_offloaded = bucket.tiers.grad.is_offloaded(has_device_memory=self.has_device_memory)
        tier = bucket.tiers.grad if is_offloaded else Tier.DEVICE
        shard = (tier, self._stored_bytes(numel, dtype, tier))
        if bucket.stage.has_shard(State.GRAD):
            return [shard]
        # Micro-batches accumulate in the dtype of the reduced gradient.
        unsharded_dtype = dtype if self.accumulates else bucket.dtype
        unsharded = (Tier.DEVICE, layout.numel * unsharded_dtype.itemsize)
        is_in_place = unsharded_dtype == dtype and not is_offloaded
        return [unsharded] if is_in_place else [unsharded, shard]

    def _master(self, bucket: BucketPlan, numel: int) -> int:
        if bucket.master is not Master.SEPARATE:
            return 0
        if not bucket.stage.has_shard(State.OPTIM):
            return bucket.layout.numel * bucket.master_dtype.itemsize
        return self._stored_bytes(numel, bucket.master_dtype, bucket.tiers.optim)

    def _optimizer_states(self, bucket: BucketPlan, rank: int) -> list[tuple[Tier, int]]:
        in_memory, files = 0, dict[str, int]()
        for index, slot in enumerate(bucket.layout.slots):
            states = self.states.of(self.parameter(bucket, index), bucket.master_dtype)
            if self._keeps_states_in_files(bucket):
                files.update(states.elementwise)
                in_memory += states.other_bytes
            elif not bucket.stage.has_shard(State.OPTIM) or slot.owner == rank:
                in_memory += states.full_bytes(slot.shape)
            elif slot.owner is None:
                owned = len(bucket.layout.owned(slot, rank))
                in_memory += owned * states.element_bytes + states.other_bytes
        numel, tier = len(bucket.layout.shard(rank)), bucket.tiers.optim
        in_files = sum(padded_bytes(numel * size, torch.uint8) for size in files.values())
        memory = Tier.CPU if tier is Tier.NVME else tier
        return [(t, n) for t, n in ((memory, in_memory), (Tier.NVME, in_files)) if n]

    def _weight_averages(self, rank: int) -> list[tuple[Tier, int]]:
        """Tier and bytes by bucket and average: as the main parameter, but never on NVMe."""
        found = []
        for bucket in self.plan.buckets:
            layout, is_sharded = bucket.layout, bucket.stage.has_shard(State.OPTIM)
            numel = len(layout.shard(rank)) if is_sharded else layout.numel
            is_deferred = bucket.master is Master.DEFERRED
            dtype = bucket.dtype if is_deferred else bucket.master_dtype
            for wanted in self._averages:
                is_on_device = wanted is Tier.DEVICE or not self.has_device_memory
                is_on_device &= bucket.tiers.optim is Tier.DEVICE
                tier = Tier.DEVICE if is_on_device else Tier.CPU
                found.append((tier, self._stored_bytes(numel, dtype, tier)))
        return found

    def _keeps_states_in_files(self, bucket: BucketPlan) -> bool:
        if not self._steps_by_bucket or bucket.layout.has_tensor_owners:
            return False
        return bucket.tiers.optim is Tier.NVME

    def _stored_bytes(self, numel: int, dtype: torch.dtype, tier: Tier) -> int:
        is_padded = tier.is_offloaded(has_device_memory=self.has_device_memory)
        return padded_bytes(numel, dtype) if is_padded else numel * dtype.itemsize

    # ---------------------------------------------------------------- NVMe

    def _nvme_buffer_bytes(self) -> int:
        param, optimizer = self._offloads
        nbytes = 0
        if self.steps_files:
            nbytes += step_buffer_config(param, optimizer).total_buffer_bytes
        if any(b.tiers.param is Tier.NVME for b in self.plan.buckets):
            nbytes += (param or OffloadConfig()).total_buffer_bytes
        return nbytes

    @property
    def steps_files(self) -> bool:
        """Whether a step needs NVMe buffers; shards of full tensors are read without them."""
        return self._steps_by_bucket and any(
            self.stepped_files(bucket)
            for bucket in self.plan.buckets
            if not bucket.layout.has_tensor_owners
        )

    def stepped_files(self, bucket: BucketPlan, rank: int = 0) -> list[tuple[bool, bool, int]]:
        """Files of `rank` that a step of `bucket` uses: (is read, is written, bytes) of each."""
        if not bucket.is_trainable or not bucket.stage.has_shard(State.OPTIM):
            return []
        layout, files = bucket.layout, []
        numel = len(layout.shard(rank))
        param_in_file = bucket.stage.has_shard(State.PARAM) and bucket.tiers.param is Tier.NVME
        param = padded_bytes(numel, bucket.dtype)
        master = padded_bytes(numel, bucket.master_dtype)
        grad = padded_bytes(numel, self.plan.grad_dtype(bucket))
        if bucket.master is Master.SEPARATE:
            if bucket.tiers.optim is Tier.NVME:
                files.append((True, True, master))
            if param_in_file:
                files.append((False, True, param))
        elif param_in_file:
            files.append((True, True, param))
        if bucket.tiers.grad is Tier.NVME:
            files.append((True, False, grad))
        if self._keeps_states_in_files(bucket):
            kept: dict[str, int] = {}
            for index in range(len(layout.slots)):
                parameter = self.parameter(bucket, index)
                kept.update(self.states.of(parameter, bucket.master_dtype).elementwise)
            sizes = [padded_bytes(numel * size, torch.uint8) for size in kept.values()]
            files += [(True, True, nbytes) for nbytes in sizes]
        return files
