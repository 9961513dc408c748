"""Norms and clipping of sharded gradients.

One scalar is all-reduced (tensors/reductions.py), then each rank scales its own shard. The results
are those of `torch.nn.utils.clip_grad_norm_` on full gradients, without any all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.tensors.buffer import promoted_dtype
from lightning_zero.tensors.reductions import norms_over_ranks

__all__ = ["clip_by_norm", "clip_by_value", "grad_norms", "total_norm"]

_NAME = "a norm of gradients"  # name of the all-reduce in reports of long waits


def total_norm(
    buckets: Iterable[Bucket],
    comm: Communicator,
    *,
    parameters: set[nn.Parameter] | None = None,
    order: float = 2.0,
) -> Tensor:
    """Norm of all averaged gradients as one vector: 0-dim. Collective: every rank.

    Args:
        buckets: Buckets of the engine.
        comm: Communicator of the engine.
        parameters: Parameters whose gradients count; None: all.
        order: p of the p-norm; may be `math.inf`.
    """
    buckets = list(buckets)
    own = (s for bucket in buckets for s in _owned_shards(bucket, comm, parameters, order))
    return norms_over_ranks([own], comm, order, dtype=_dtype(buckets), name=_NAME)[0]


def grad_norms(
    buckets: Iterable[Bucket], comm: Communicator, *, order: float = 2.0
) -> dict[str, Tensor]:
    """Norm of the averaged gradient of each bucket: 0-dim, by name. Collective: every rank.

    It is one small all-reduce for all buckets, without any all-gather. Buckets without a gradient
    are left out. In order 2, the root of the sum of squares is `total_norm`.
    """
    buckets = list(buckets)
    own = [_owned_shards(bucket, comm, None, order) for bucket in buckets]
    norms = norms_over_ranks(own, comm, order, dtype=_dtype(buckets), name=_NAME).unbind()
    return {
        bucket.plan.name: norm
        for bucket, norm in zip(buckets, norms, strict=True)
        if any(parameter.grad is not None for parameter in bucket.parameters)
    }


def clip_by_norm(
    buckets: Iterable[Bucket],
    comm: Communicator,
    max_norm: float,
    *,
    parameters: set[nn.Parameter] | None = None,
    order: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that their total norm is at most `max_norm`; returns the norm before.

    The formula is that of `torch.nn.utils.clip_grad_norm_`. Collective: every rank.
    """
    buckets = list(buckets)
    total = total_norm(buckets, comm, parameters=parameters, order=order)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {order} of the gradients is {total.item()}, and the gradients were "
            "not clipped; error_if_nonfinite=False scales them by it anyway."
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    is_expensive = any(bucket.grads.main.store is not None for bucket in buckets)
    # On a device, reading the scale would wait for it, and scaling is cheap.
    value = scale.item() if is_expensive or scale.device.type == "cpu" else None
    if value == 1.0:
        return total

    def multiply(grad: Tensor) -> None:
        grad.mul_(scale.to(grad.device, grad.dtype))

    for bucket in buckets:
        if value is not None and math.isfinite(value):
            _change(bucket, parameters, multiply)
        elif slots := _fetched(bucket, parameters):  # without padding, which would become NaN
            if value is None:
                bucket.wait_for_step()  # a worker may read them
                slices = [bucket.grads.main.slices[index] for index in slots]
                torch._foreach_mul_(slices, scale.to(slices[0].dtype))
            else:
                bucket.grads.main.apply_(multiply, slots)
    return total


def clip_by_value(
    buckets: Iterable[Bucket], limit: float, *, parameters: set[nn.Parameter] | None = None
) -> None:
    """Clamps every element of the gradients to [-limit, limit]. Local."""
    for bucket in buckets:
        _change(bucket, parameters, lambda grad: grad.clamp_(-limit, limit))


def _dtype(buckets: Iterable[Bucket]) -> torch.dtype:
    """Dtype in which ranks add: the widest of all gradients, also on a rank that owns none."""
    return promoted_dtype(torch.float32, [bucket.grads.main.dtype for bucket in buckets])


def _fetched(bucket: Bucket, parameters: set[nn.Parameter] | None) -> list[int]:
    """Slots of `parameters` that have a gradient. Loads offloaded gradients."""
    return [
        index
        for index, parameter in enumerate(bucket.parameters)
        if (parameters is None or parameter in parameters) and bucket.grads.fetch(index) is not None
    ]


def _owned_shards(
    bucket: Bucket, comm: Communicator, parameters: set[nn.Parameter] | None, order: float
) -> Iterator[Tensor]:
    """Yields 1-D tensors of the elements that this rank owns, for a norm of this order.

    One per bucket, with the zeros of padding, if all slots count; one per slot in a negative order,
    in which zeros count. Some are read from files, so one is used at a time.
    """
    slots = _fetched(bucket, parameters)
    if not slots:
        return
    main, layout, rank = bucket.grads.main, bucket.plan.layout, comm.mesh.shard_rank
    assert main.tensor is not None
    is_unsharded = bucket.shards.replicates_optim
    if len(slots) == len(bucket.parameters) and order >= 0:
        owned = layout.shard(rank)
        yield main.tensor[owned.start : owned.stop] if is_unsharded else main.tensor
        return
    for index in slots:
        owned = layout.owned(layout.slots[index], rank)
        grad = main.slices[index].reshape(-1)
        yield grad[owned.start : owned.stop] if is_unsharded else grad


def _change(
    bucket: Bucket, parameters: set[nn.Parameter] | None, change: Callable[[Tensor], object]
) -> None:
    """Changes the averaged gradients that this rank stores, in place."""
    slots = _fetched(bucket, parameters)
    if slots:
        bucket.grads.main.apply_(change, None if len(slots) == len(bucket.parameters) else slots)
