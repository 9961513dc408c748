"""Bytes of this rank by state and tier, counted from the buffers that hold them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State
from lightning_zero.optim.clone import parameters_of
from lightning_zero.optim.state_view import full_state_shape, raw_states
from lightning_zero.tensors.composite import plain_tensors
from lightning_zero.tensors.guarded import Placement, placement_of
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.storage import Storage

__all__ = ["count_held", "count_memory", "full_checkpoint_bytes", "cpu_param_bytes", "full_bytes"]

_STATES_NUMEL = 2  # elements of Adam's states for each element of a trained parameter


def count_memory(
    buckets: Sequence[Bucket],
    optimizers: Collection[Optimizer],
    storage: Storage,
    comm: Communicator,
    averages: Iterable[Bucket],
) -> MemoryReport:
    """Counts the bytes that an engine holds on this rank now, while no step runs. Local.

    `averages`: buckets of averages of the weights, which count as optimizer state.
    """
    held: Counter[tuple[Tier, State]] = Counter()
    for counted in count_held(buckets, optimizers):
        held.update(counted)
    # Bytes with DistributedDataParallel: in the original dtypes of parameters.
    alone = dict.fromkeys(State, 0)
    for bucket in buckets:
        params = full_bytes(bucket)
        alone[State.PARAM] += params
        if any(parameter.requires_grad for parameter in bucket.parameters):
            alone[State.GRAD] += params
    for optimizer in optimizers:
        for placement, key, value in _states_of(optimizer):
            own = bucket_of(placement).orig_dtypes[placement.index]
            alone[State.OPTIM] += _full_numel(placement, key, value) * _own_itemsize(value, own)
        alone[State.OPTIM] += _missing_state_bytes(optimizer, buckets)
    for state in storage.state_offload.states:
        held[Tier.DEVICE, state] -= storage.state_offload.freed_bytes(state)
        held[Tier.CPU, state] += storage.state_offload.host_bytes(state)
    average_bytes = 0
    for bucket in averages:
        for tier, _, store in bucket.shards.stores():
            held[tier, State.OPTIM] += store.nbytes
            average_bytes += store.nbytes
        alone[State.OPTIM] += full_bytes(bucket)
    used = {Tier.DEVICE} | {tier for tier, _ in held}
    for bucket in buckets:
        used |= {bucket.plan.tiers.param, bucket.plan.tiers.optim, bucket.plan.tiers.grad}
    return MemoryReport(
        comm.rank,
        comm.mesh.num_shards,
        {tier.value: {s: held[tier, s] for s in State} for tier in Tier if tier in used},
        alone,
        buffer_bytes=storage.buffer_bytes,
        nvme_read_bytes=storage.bytes_read,
        nvme_written_bytes=storage.bytes_written,
        average_bytes=average_bytes,
    )


def count_held(
    buckets: Sequence[Bucket], optimizers: Iterable[Optimizer]
) -> list[Counter[tuple[Tier, State]]]:
    """Counts the bytes that each bucket holds now, by tier and state, without averages. Local."""
    held = {bucket: _allocated_bytes(bucket) for bucket in buckets}
    for optimizer in optimizers:
        for placement, _, value in _states_of(optimizer):
            if not isinstance(value, LazyTensor):  # the file of a lazy tensor is counted already
                nbytes = value.untyped_storage().nbytes()
                held[bucket_of(placement)][_tier_in_memory(placement), State.OPTIM] += nbytes
    return list(held.values())


def _allocated_bytes(bucket: Bucket) -> Counter[tuple[Tier, State]]:
    """Bytes held now in parameters, gradients, main parameters and files, by tier.

    Optimizer states in memory belong to the optimizer and are not counted here.
    """
    held: Counter[tuple[Tier, State]] = Counter()
    held[Tier.DEVICE, State.PARAM] = bucket.params.unsharded.allocated_bytes
    held[Tier.DEVICE, State.GRAD] = bucket.grads.allocated_bytes
    for tier, state, store in bucket.shards.stores():
        held[tier, state] += store.nbytes
    if (offloaded := bucket.grads.main.offloaded) is not None:
        held[bucket.plan.tiers.grad, State.GRAD] += offloaded.nbytes
    return held


def full_bytes(bucket: Bucket) -> int:
    """Bytes of the bucket's full parameters in their original dtypes."""
    slots = zip(bucket.plan.layout.slots, bucket.orig_dtypes, strict=True)
    return sum(slot.numel * dtype.itemsize for slot, dtype in slots)


def full_checkpoint_bytes(buckets: Iterable[Bucket]) -> int:
    """Bytes of CPU memory that a full checkpoint with Adam's states takes on rank 0.

    Counts parameters in their original dtypes, and for trained parameters Adam's states and the
    main parameters, if these are wider.
    """
    total = 0
    for bucket in buckets:
        total += full_bytes(bucket)
        master = bucket.plan.master_dtype
        slots = bucket.plan.layout.slots
        for slot, own, p in zip(slots, bucket.orig_dtypes, bucket.parameters, strict=True):
            if p.requires_grad:
                num_states = _STATES_NUMEL
                if own.itemsize < master.itemsize:
                    num_states += 1  # the main parameter
                total += slot.numel * num_states * master.itemsize
    return total


def cpu_param_bytes(bucket: Bucket) -> int:
    """Bytes of the bucket's parameters in CPU memory now, which are freed when it is unwrapped."""
    held = _allocated_bytes(bucket)
    tiers = {Tier.CPU, Tier.DEVICE} if bucket.device.type == "cpu" else {Tier.CPU}
    return sum(n for (tier, state), n in held.items() if tier in tiers and state is State.PARAM)


def _states_of(optimizer: Optimizer) -> Iterator[tuple[Placement, str, Tensor]]:
    """Yields every tensor of the states of parameters, with the key that it has or is part of."""
    for parameter, state in raw_states(optimizer).items():
        placement = placement_of(parameter)
        for key, entry in state.items():
            for value in plain_tensors(entry):
                yield placement, key, value


def _tier_in_memory(placement: Placement) -> Tier:
    """Tier of a bucket's optimizer states that are not in files."""
    tier = bucket_of(placement).plan.tiers.optim
    return Tier.CPU if tier is Tier.NVME else tier


def _full_numel(placement: Placement, key: str, value: Tensor) -> int:
    """Number of elements of the full tensor that `value` is a shard of."""
    bucket = bucket_of(placement)
    is_full = bucket.shards.replicates_optim or bucket.shards.has_tensor_owners
    is_slice = not is_full and (value.dim() == 1 or value.shape == placement.shape)
    return math.prod(full_state_shape(placement, key)) if is_slice else value.numel()


def _missing_state_bytes(optimizer: Optimizer, buckets: Sequence[Bucket]) -> int:
    """Estimates the bytes of states that other ranks own. Local.

    A parameter of another rank counts as the parameter of this rank that has as many dimensions and
    is nearest in size, with its own sizes substituted in the states' shapes. It counts as 0 if
    this rank has no such parameter.
    """
    members = set(parameters_of(optimizer))
    return sum(
        _bytes_of_missing(bucket, index, optimizer)
        for bucket in buckets
        if bucket.shards.has_tensor_owners
        for index, parameter in enumerate(bucket.parameters)
        if not bucket.shards.step_layout.is_stepped[index]
        and parameter.requires_grad
        and parameter in members
    )


def _bytes_of_missing(bucket: Bucket, index: int, optimizer: Optimizer) -> int:
    shape, own = bucket.plan.layout.slots[index].shape, bucket.orig_dtypes[index]
    similar = [known for known in raw_states(optimizer) if len(known.shape) == len(shape)]
    if not similar:
        return 0
    nearest = min(similar, key=lambda known: abs(known.shape.numel() - math.prod(shape)))
    nbytes = 0
    for tensor in plain_tensors(raw_states(optimizer)[nearest]):
        sizes = tuple(tensor.shape)
        if len(sizes) == len(shape):
            triples = zip(sizes, nearest.shape, shape, strict=True)
            sizes = tuple(mine if size == other else size for size, other, mine in triples)
        nbytes += math.prod(sizes) * _own_itemsize(tensor, own)
    return nbytes


def _own_itemsize(state: Tensor, own: torch.dtype) -> int:
    """Bytes per element of `state` if the optimizer stepped parameters in their `own` dtype."""
    is_masters = state.dim() > 0 and state.is_floating_point() and own.is_floating_point
    return min(own.itemsize, state.itemsize) if is_masters else state.itemsize
