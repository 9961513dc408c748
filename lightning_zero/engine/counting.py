"""This rank's bytes by state and tier, counted from the buffers that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State
from lightning_zero.optim.state import missing_state_bytes, own_itemsize
from lightning_zero.tensors.composite import plain_tensors
from lightning_zero.tensors.guarded import Placement, placement_of
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.storage import Storage

__all__ = ["allocated_bytes", "count_memory", "held_bytes", "whole_bytes"]


def count_memory(
    buckets: Sequence[Bucket],
    optimizers: Iterable[Optimizer],
    storage: Storage,
    comm: Communicator,
    averages: Iterable[Bucket],
) -> MemoryReport:
    """What an engine holds on this rank at this moment, while nothing steps. Local.

    `averages`: buckets of averages of the weights, which count as optimizer state.
    """
    held = {tier: dict.fromkeys(State, 0) for tier in _tiers_of(buckets)}
    alone = dict.fromkeys(State, 0)
    for bucket in buckets:
        for (tier, state), nbytes in allocated_bytes(bucket).items():
            held[tier][state] += nbytes
        for state, nbytes in _data_parallel_bytes(bucket).items():
            alone[state] += nbytes
    for optimizer in optimizers:
        for placement, value in _states_of(optimizer):
            if not isinstance(value, LazyTensor):  # those are counted by their bucket
                of_tier = held.setdefault(_tier_in_memory(placement), dict.fromkeys(State, 0))
                of_tier[State.OPTIM] += value.untyped_storage().nbytes()
            own = bucket_of(placement).own_dtypes[placement.index]
            alone[State.OPTIM] += _whole_numel(placement, value) * own_itemsize(value, own)
        alone[State.OPTIM] += missing_state_bytes(optimizer, buckets)
    average_bytes = 0
    for bucket in averages:
        for tier, _, store in bucket.shards.stores():
            held.setdefault(tier, dict.fromkeys(State, 0))[State.OPTIM] += store.nbytes
            average_bytes += store.nbytes
        alone[State.OPTIM] += whole_bytes(bucket)
    return MemoryReport(
        comm.rank,
        comm.mesh.num_shards,
        {tier.value: states for tier, states in held.items()},
        alone,
        buffer_bytes=storage.buffer_bytes,
        nvme_read_bytes=storage.bytes_read,
        nvme_written_bytes=storage.bytes_written,
        average_bytes=average_bytes,
    )


def allocated_bytes(bucket: Bucket) -> dict[tuple[Tier, State], int]:
    """Bytes held at this moment in parameters, gradients, masters and files, by tier.

    Optimizer states in memory belong to the optimizer and are not counted here.
    """
    held: Counter[tuple[Tier, State]] = Counter()
    held[Tier.DEVICE, State.PARAM] = bucket.whole.allocated_bytes
    held[Tier.DEVICE, State.GRAD] = bucket.grads.allocated_bytes
    for tier, state, store in bucket.shards.stores():
        held[tier, state] += store.nbytes
    if bucket.offloaded_grad is not None:
        held[bucket.plan.tiers.grad, State.GRAD] += bucket.offloaded_grad.nbytes
    return dict(held)


def whole_bytes(bucket: Bucket) -> int:
    """Bytes of whole parameters in the dtypes that they are given back in."""
    slots = zip(bucket.plan.layout.slots, bucket.own_dtypes, strict=True)
    return sum(slot.numel * dtype.itemsize for slot, dtype in slots)


def held_bytes(bucket: Bucket) -> int:
    """Bytes of parameters in CPU memory now, which go as the whole comes."""
    held = allocated_bytes(bucket)
    tiers = {Tier.CPU, Tier.DEVICE} if bucket.device.type == "cpu" else {Tier.CPU}
    return sum(n for (tier, state), n in held.items() if tier in tiers and state is State.PARAM)


def _data_parallel_bytes(bucket: Bucket) -> dict[State, int]:
    """Bytes that DistributedDataParallel takes for them: in the dtypes in which they were given.

    Optimizer state is counted beside this.
    """
    params = whole_bytes(bucket)
    is_trained = any(parameter.requires_grad for parameter in bucket.parameters)
    return {State.PARAM: params, State.GRAD: params if is_trained else 0, State.OPTIM: 0}


def _tiers_of(buckets: Sequence[Bucket]) -> list[Tier]:
    """The device, and those where states are meant to rest."""
    used = {Tier.DEVICE}
    for bucket in buckets:
        tiers = bucket.plan.tiers
        used |= {tiers.param, tiers.optim, tiers.grad}
    return [tier for tier in Tier if tier in used]


def _states_of(optimizer: Optimizer) -> Iterator[tuple[Placement, Tensor]]:
    for parameter, state in optimizer.state.items():
        placement = placement_of(parameter)
        for value in plain_tensors(state):
            yield placement, value


def _tier_in_memory(placement: Placement) -> Tier:
    """Where states of a bucket rest that are not in files."""
    tier = bucket_of(placement).plan.tiers.optim
    return Tier.CPU if tier is Tier.NVME else tier


def _whole_numel(placement: Placement, value: Tensor) -> int:
    """Elements that the whole tensor has of which `value` is this rank's part."""
    bucket = bucket_of(placement)
    is_whole = bucket.steps_whole or bucket.shards.holds_whole_tensors
    is_slice = not is_whole and (value.dim() == 1 or value.shape == placement.shape)
    return placement.shape.numel() if is_slice else value.numel()
