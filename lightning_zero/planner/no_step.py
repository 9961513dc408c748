"""Peak and all-gathers of a step by formulas, for a module whose inputs are unknown.

Activations are not counted. Units are assumed to be used once each, in the order of registration.
The peak is an upper bound of what the engine allocates besides model states and activations: no
gradient counts as zeroed, and the largest buckets count as in use at the same time.
"""

from __future__ import annotations

from collections import Counter

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.plan import BucketPlan, Plan
from lightning_zero.layout.stage import State
from lightning_zero.planner.engine_run import Peak

__all__ = ["peak_without_step"]


def peak_without_step(plan: Plan, config: ZeroConfig, *, on_gloo: bool, rank: int = 0) -> Peak:
    """Upper bound of the peak without activations; all-gathers before use.

    Args:
        plan: Plan of the engine.
        config: Settings of the plan.
        on_gloo: Whether the backend is gloo, which receives into buffers of its own.
        rank: Rank whose shards are counted, where ranks differ.
    """
    root, *others = [
        [bucket for bucket in unit.buckets if bucket.stage.shards_params] for unit in plan.units
    ]
    units = [unit for unit in others if unit]
    keeps_all = config.reshard_after_forward is False
    counts = Counter({bucket.name: 1 for bucket in root})
    for unit in units:
        is_kept = keeps_all or unit is units[-1]  # from forward to backward
        counts.update(dict.fromkeys({b.name for b in unit}, 1 if is_kept else 2))
    unsharded = _nbytes(root) + (
        sum(map(_nbytes, units)) if keeps_all else _unsharded_bytes(units, config)
    )
    return Peak(unsharded, _grad_bytes(plan, config, on_gloo, rank), num_all_gathers=counts)


def _nbytes(unit: list[BucketPlan]) -> int:
    return sum(bucket.layout.numel * bucket.dtype.itemsize for bucket in unit)


def _unsharded_bytes(units: list[list[BucketPlan]], config: ZeroConfig) -> int:
    """Most bytes of a unit and of those that are unsharded with it.

    Without prefetching these are two: one is resharded only after the next has been unsharded.
    """
    most, budget = 0, config.prefetch_bucket_size if config.overlap_comm else None
    for index, unit in enumerate(units):
        nbytes, numel = _nbytes(unit), 0
        for number, other in enumerate(units[index + 1 :]):
            numel += sum(bucket.layout.numel for bucket in other)
            if number > 0 if budget is None else numel > budget:
                break
            nbytes += _nbytes(other)
        most = max(most, nbytes)
    return most


def _grad_bytes(plan: Plan, config: ZeroConfig, on_gloo: bool, rank: int) -> int:
    """Bytes of the gradient buckets in use, and of the buffers of a reduction."""
    trained = [bucket for bucket in plan.buckets if bucket.is_trainable]
    opened = [
        bucket.layout.numel * bucket.dtype.itemsize
        for bucket in trained
        if bucket.stage.has_shard(State.GRAD)
    ]
    in_use = sorted(opened)[-2 if config.overlap_comm else -1 :]
    received = [0]
    for bucket in trained:
        grad_itemsize = plan.grad_dtype(bucket).itemsize
        if on_gloo:
            shard = len(bucket.layout.shard(rank))
            received.append((plan.world_size - 1) * shard * bucket.dtype.itemsize)
        elif bucket.dtype.itemsize != grad_itemsize:
            received.append(bucket.layout.numel * grad_itemsize)
    return sum(in_use) + max(received)
