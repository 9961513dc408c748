"""Bytes at rest, of one rank and of all, by tier and state, before there is an engine.

[Note: Ranks that differ] Where an optimizer looks at whole tensors, shards are as long as the
tensors that their ranks own. Counts are then of one rank, and `MemoryByRank` has those of all.

[Note: Counted as the engine counts] Every rule here is one of `Shards`, `Gradients`, `Storage` and
`MemoryReport`, on the engine's own plan; a test compares them to the byte. What rests is what there
is after a step, before gradients are zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import OffloadConfig, Tier, padded_bytes, step_buffer_config
from lightning_zero.layout.plan import BucketPlan, Plan
from lightning_zero.layout.stage import State
from lightning_zero.planner.optimizers import OptimizerStates, StateSpec

__all__ = ["MemoryEstimator", "MemoryByRank", "RankMemory"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        tiers: By tier and state, as `MemoryReport.tiers`.
        nvme_buffer_bytes: CPU memory of the buffers through which files travel.
        module_buffer_bytes: Of the module's buffers, which every rank has whole on the device.
        average_bytes: Of averages of weights, among the optimizer state.
    """

    tiers: Mapping[Tier, Mapping[State, int]]
    nvme_buffer_bytes: int
    module_buffer_bytes: int
    average_bytes: int = 0

    def tier_bytes(self, tier: Tier) -> int:
        """Of all states in `tier`."""
        return sum(self.tiers.get(tier, {}).values())


@dataclass(frozen=True)
class MemoryByRank:
    """What rests on every rank that holds another shard.

    Attributes:
        by_rank: By rank; rank 0 alone where all have as many elements, some of them padding on the
            last ranks. See [Note: Ranks that differ].
    """

    by_rank: tuple[RankMemory, ...]

    @property
    def largest(self) -> int:
        """The rank with most on its device, and among equals the one with most in all."""

        def size(rank: int) -> tuple[int, int]:
            own = self.by_rank[rank]
            return own.tier_bytes(Tier.DEVICE), sum(map(own.tier_bytes, Tier))

        return max(range(len(self.by_rank)), key=size)

    def min_max_bytes(self, tier: Tier) -> tuple[int, int]:
        """Bytes in `tier` of the ranks with least and most."""
        sums = [memory.tier_bytes(tier) for memory in self.by_rank]
        return min(sums), max(sums)

    def node_bytes(self, tier: Tier, ranks_per_node: int) -> int:
        """Bytes in `tier` of the ranks of one machine, of the one with most."""
        count = len(self.by_rank)
        sums = [memory.tier_bytes(tier) for memory in self.by_rank]
        firsts = {first % count for first in range(0, count * ranks_per_node, ranks_per_node)}
        return max(sum(sums[(f + i) % count] for i in range(ranks_per_node)) for f in firsts)


class MemoryEstimator:
    """Counts what rests on a rank.

    Args:
        plan: The engine's.
        module: It was made of; meta tensors will do.
        optimizers: The same as the engine's.
        offloads: For parameters and optimizer, as `ZeroConfig.offloads`.
        has_device_memory: CPU memory is other memory than the device's.
        accumulates: Several micro-batches are summed before a step.
        steps_by_bucket: What the optimizers keep may go to files; False for those that can only
            step everything in one call. That of optimizers of whole tensors never does.
        averages: Of the weights, and where each rests: in CPU memory, or where it is stepped
            (DEVICE).
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
        """What rests on every rank."""
        are_alike = all(bucket.layout.split_sizes is None for bucket in self.plan.buckets)
        numbers = [0] if are_alike else range(self.plan.world_size)
        return MemoryByRank(tuple(self.rank_memory(rank) for rank in numbers))

    def rank_memory(self, rank: int = 0) -> RankMemory:
        """What rests on `rank`, among those that share one set of shards."""
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
            for tier, nbytes in self._moments(bucket, rank):
                add(tier, State.OPTIM, nbytes)
        average_bytes = 0
        for tier, nbytes in self._averaged(rank):
            add(tier, State.OPTIM, nbytes)
            average_bytes += nbytes
        buffers = sum(b.numel() * b.element_size() for b in self._module.buffers())
        return RankMemory(held, self._nvme_buffer_bytes(), buffers, average_bytes)

    def parameter(self, bucket: BucketPlan, index: int) -> nn.Parameter:
        """The parameter of a slot."""
        return self.named[bucket.layout.slots[index].name]

    # ---------------------------------------------------------------- by state

    def _param(self, bucket: BucketPlan, numel: int) -> tuple[Tier, State, int]:
        if not bucket.stage.has_shard(State.PARAM):
            return Tier.DEVICE, State.PARAM, bucket.layout.numel * bucket.dtype.itemsize
        tier = bucket.tiers.param
        return tier, State.PARAM, self._at_rest(numel, bucket.dtype, tier)

    def _grad(self, bucket: BucketPlan, numel: int) -> list[tuple[Tier, int]]:
        if not bucket.is_trainable:
            return []
        layout, dtype = bucket.layout, self.plan.grad_dtype(bucket)
        if not bucket.stage.has_shard(State.OPTIM):  # the mean is whole, in the buffer itself
            return [(Tier.DEVICE, layout.numel * dtype.itemsize)]
        is_offloaded = bucket.tiers.grad.is_offloaded(has_device_memory=self.has_device_memory)
        tier = bucket.tiers.grad if is_offloaded else Tier.DEVICE
        mean = (tier, self._at_rest(numel, dtype, tier))
        if bucket.stage.has_shard(State.GRAD):
            return [mean]
        # Micro-batches are summed in the mean's dtype; else the whole buffer has the parameters'.
        of_whole = dtype if self.accumulates else bucket.dtype
        whole = (Tier.DEVICE, layout.numel * of_whole.itemsize)
        is_in_place = of_whole == dtype and not is_offloaded
        return [whole] if is_in_place else [whole, mean]

    def _master(self, bucket: BucketPlan, numel: int) -> int:
        if not bucket.begins_with_master:
            return 0
        if not bucket.stage.has_shard(State.OPTIM):
            return bucket.layout.numel * bucket.master_dtype.itemsize
        return self._at_rest(numel, bucket.master_dtype, bucket.tiers.optim)

    def _moments(self, bucket: BucketPlan, rank: int) -> list[tuple[Tier, int]]:
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
        of_files = sum(padded_bytes(numel * size, torch.uint8) for size in files.values())
        memory = Tier.CPU if tier is Tier.NVME else tier
        return [(t, n) for t, n in ((memory, in_memory), (Tier.NVME, of_files)) if n]

    def _averaged(self, rank: int) -> list[tuple[Tier, int]]:
        """By bucket and average: as the master, but never in files."""
        found = []
        for bucket in self.plan.buckets:
            layout, is_sharded = bucket.layout, bucket.stage.has_shard(State.OPTIM)
            numel = len(layout.shard(rank)) if is_sharded else layout.numel
            dtype = bucket.master_dtype if bucket.begins_with_master else bucket.dtype
            for wanted in self._averages:
                is_on_device = wanted is Tier.DEVICE or not self.has_device_memory
                is_on_device &= bucket.tiers.optim is Tier.DEVICE
                tier = Tier.DEVICE if is_on_device else Tier.CPU
                found.append((tier, self._at_rest(numel, dtype, tier)))
        return found

    def _keeps_states_in_files(self, bucket: BucketPlan) -> bool:
        may = self._steps_by_bucket and not bucket.layout.has_tensor_owners
        return may and bucket.tiers.optim is Tier.NVME

    def _at_rest(self, numel: int, dtype: torch.dtype, tier: Tier) -> int:
        is_padded = tier.is_offloaded(has_device_memory=self.has_device_memory)
        return padded_bytes(numel, dtype) if is_padded else numel * dtype.itemsize

    # ---------------------------------------------------------------- buffers of files

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
        """A step needs buffers for files; shards of whole tensors are read at once."""
        return self._steps_by_bucket and any(
            self.stepped_files(bucket)
            for bucket in self.plan.buckets
            if not bucket.layout.has_tensor_owners
        )

    def stepped_files(self, bucket: BucketPlan, rank: int = 0) -> list[tuple[bool, bool, int]]:
        """For each file of `rank` that a step of `bucket` uses: is read, is written, bytes."""
        if not bucket.is_trainable or not bucket.stage.has_shard(State.OPTIM):
            return []
        layout, files = bucket.layout, []
        numel = len(layout.shard(rank))
        param_in_file = bucket.stage.has_shard(State.PARAM) and bucket.tiers.param is Tier.NVME
        param = padded_bytes(numel, bucket.dtype)
        master = padded_bytes(numel, bucket.master_dtype)
        grad = padded_bytes(numel, self.plan.grad_dtype(bucket))
        if bucket.has_own_master:
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
            of_file = [padded_bytes(numel * size, torch.uint8) for size in kept.values()]
            files += [(True, True, nbytes) for nbytes in of_file]
        return files
