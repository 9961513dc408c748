"""Bytes of the model states at an optimizer step, computed from a plan.

For messages before the first step of a run: there are no gradients and no states of optimizers yet,
and the module of a run, which may hold its Trainer, cannot be copied, as the planner does. A test
compares these bytes with those that an engine counts.

[Note: Ranks that differ] If an optimizer steps full tensors, a rank has the states of those that it
owns, so ranks differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.layout.offload import Tier, padded_bytes
from lightning_zero.layout.plan import BucketPlan, Master, Plan
from lightning_zero.layout.stage import State
from lightning_zero.optim.state_sizes import OptimizerStates, StateSpec

__all__ = ["MemoryByRank", "Tiers", "expected_bytes"]

Tiers = Mapping[Tier, Mapping[State, int]]  # bytes by tier and state, as in `MemoryReport.tiers`


@dataclass(frozen=True)
class MemoryByRank:
    """Bytes of the model states on every rank of a shard group.

    Attributes:
        by_rank: Bytes by rank; of rank 0 alone if all have the same (with padding on the last
            ranks). See [Note: Ranks that differ].
    """

    by_rank: tuple[Tiers, ...]

    @property
    def largest(self) -> int:
        """Rank with the most bytes on its device; among equals, with the most bytes in total."""

        def size(rank: int) -> tuple[int, int]:
            sums = {tier: sum(states.values()) for tier, states in self.by_rank[rank].items()}
            return sums[Tier.DEVICE], sum(sums.values())

        return max(range(len(self.by_rank)), key=size)

    def most_bytes(self, tier: Tier) -> int:
        """Bytes in `tier` on the largest rank."""
        return sum(self.by_rank[self.largest].get(tier, {}).values())

    def min_max_bytes(self, tier: Tier) -> tuple[int, int]:
        """Smallest and largest number of bytes that a rank has in `tier`."""
        sums = [sum(tiers.get(tier, {}).values()) for tiers in self.by_rank]
        return min(sums), max(sums)

    def node_bytes(self, tier: Tier, ranks_per_node: int) -> int:
        """Bytes in `tier` on the node that has most."""
        count = len(self.by_rank)
        sums = [sum(tiers.get(tier, {}).values()) for tiers in self.by_rank]
        firsts = {first % count for first in range(0, count * ranks_per_node, ranks_per_node)}
        return max(sum(sums[(f + i) % count] for i in range(ranks_per_node)) for f in firsts)


def expected_bytes(
    plan: Plan,
    named: Mapping[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    *,
    has_device_memory: bool,
    accumulates: bool = False,
    fallback: StateSpec | None = None,
) -> MemoryByRank:
    """Bytes of the model states on every rank, after a step and before gradients are zeroed.

    Args:
        plan: Plan of the engine.
        named: Parameters of the module by name; they may be on the meta device.
        optimizers: Optimizers of the engine.
        has_device_memory: Whether the device has memory of its own.
        accumulates: Whether a step has several micro-batches.
        fallback: See `OptimizerStates`.
    """
    count = _Count(plan, named, OptimizerStates(optimizers, fallback), has_device_memory)
    are_equal = not any(bucket.layout.has_tensor_owners for bucket in plan.buckets)
    ranks = range(1 if are_equal else plan.world_size)
    return MemoryByRank(tuple(count.tiers(rank, accumulates) for rank in ranks))


@dataclass(frozen=True)
class _Count:
    plan: Plan
    named: Mapping[str, nn.Parameter]
    states: OptimizerStates
    has_device_memory: bool

    def tiers(self, rank: int, accumulates: bool) -> Tiers:
        used = {Tier.DEVICE}
        for bucket in self.plan.buckets:
            used |= {bucket.tiers.param, bucket.tiers.optim, bucket.tiers.grad}
        held = {tier: dict.fromkeys(State, 0) for tier in Tier if tier in used}
        for bucket in self.plan.buckets:
            counted = [self._param(bucket), *self._grad(bucket, accumulates)]
            for tier, state, nbytes in (*counted, *self._optimizer(bucket, rank)):
                held.setdefault(tier, dict.fromkeys(State, 0))[state] += nbytes
        return held

    def _param(self, bucket: BucketPlan) -> tuple[Tier, State, int]:
        if not bucket.stage.has_shard(State.PARAM):
            return Tier.DEVICE, State.PARAM, bucket.layout.numel * bucket.dtype.itemsize
        tier = bucket.tiers.param
        nbytes = self._stored(bucket.layout.shard_numel, bucket.shard_dtype, tier)
        return tier, State.PARAM, nbytes

    def _grad(self, bucket: BucketPlan, accumulates: bool) -> Iterator[tuple[Tier, State, int]]:
        if not bucket.is_trainable:
            return
        dtype = self.plan.grad_dtype(bucket)
        is_offloaded = bucket.tiers.grad.is_offloaded(has_device_memory=self.has_device_memory)
        tier = bucket.tiers.grad if is_offloaded else Tier.DEVICE
        if not bucket.stage.has_shard(State.GRAD):
            # Micro-batches accumulate in the dtype of the reduced gradient. The reduction is in
            # place if that is the dtype of the local one: stage 0 has no shard.
            replicates = not bucket.stage.has_shard(State.OPTIM)
            local = dtype if accumulates or replicates else bucket.dtype
            yield Tier.DEVICE, State.GRAD, bucket.layout.numel * local.itemsize
            if replicates or (local == dtype and not is_offloaded):
                return
        yield tier, State.GRAD, self._stored(bucket.layout.shard_numel, dtype, tier)

    def _optimizer(self, bucket: BucketPlan, rank: int) -> Iterator[tuple[Tier, State, int]]:
        """Bytes of the main parameters, if they are a separate tensor, and of the states."""
        tier, dtype, layout = bucket.tiers.optim, bucket.master_dtype, bucket.layout
        replicates = not bucket.stage.has_shard(State.OPTIM)
        if bucket.master is Master.SEPARATE:
            numel = layout.numel if replicates else layout.shard_numel
            stored = numel * dtype.itemsize if replicates else self._stored(numel, dtype, tier)
            yield tier, State.OPTIM, stored
        in_memory, files = 0, dict[str, int]()
        for slot in layout.slots:
            states = self.states.of(self.named[slot.name], dtype, slot.shape)
            if tier is Tier.NVME and not layout.has_tensor_owners:
                files.update(states.elementwise)
                in_memory += states.memory_bytes(len(layout.owned(slot, rank)))
            elif replicates or slot.owner == rank:
                in_memory += states.full_bytes(slot.shape)
            elif slot.owner is None:
                in_memory += states.slice_bytes(len(layout.owned(slot, rank)))
        yield Tier.CPU if tier is Tier.NVME and in_memory else tier, State.OPTIM, in_memory
        for size in files.values():
            nbytes = padded_bytes(layout.shard_numel * size, torch.uint8)
            yield Tier.NVME, State.OPTIM, nbytes

    def _stored(self, numel: int, dtype: torch.dtype, tier: Tier) -> int:
        is_padded = tier.is_offloaded(has_device_memory=self.has_device_memory)
        return padded_bytes(numel, dtype) if is_padded else numel * dtype.itemsize
