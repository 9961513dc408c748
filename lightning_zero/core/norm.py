"""Norms and clipping of sharded gradients.

Every rank sums over the elements that it owns, one scalar is all-reduced, in which of equal
replicas one counts, and each rank scales its own part: what
`torch.nn.utils.clip_grad_norm_` computes on whole gradients, without gathering any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.tensors.buffer import promoted_dtype

__all__ = ["clip_by_norm", "clip_by_value", "grad_norms", "total_norm"]

_NAME = "a norm of gradients"  # for ranks that wait in vain


def total_norm(
    buckets: Iterable[Bucket],
    comm: Communicator,
    *,
    parameters: set[nn.Parameter] | None = None,
    order: float = 2.0,
) -> Tensor:
    """Norm of all mean gradients seen as one vector: 0-dim. Collective: every rank.

    Of those of `parameters` only, if given. `order`: p of the p-norm; may be `math.inf`.
    """
    buckets = list(buckets)
    norms = [norm for bucket in buckets for norm in _own_norms(bucket, comm, parameters, order)]
    return _over_ranks(_joined(norms, _dtype(buckets), comm, order), comm, order)


def grad_norms(
    buckets: Iterable[Bucket], comm: Communicator, *, order: float = 2.0
) -> dict[str, Tensor]:
    """Norm of the mean gradient of each bucket: 0-dim, by name. Collective: every rank.

    One small all-reduce for all of them; nothing is gathered. Buckets without a gradient are left
    out. In order 2, the root of the sum of squares is `total_norm`.
    """
    buckets = list(buckets)
    dtype = _dtype(buckets)
    own = [
        _joined(list(_own_norms(bucket, comm, None, order)), dtype, comm, order)
        for bucket in buckets
    ]
    norms = _over_ranks(torch.stack(own), comm, order).unbind()
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
) -> Tensor:
    """Scales gradients so that their total norm is at most `max_norm`; returns the norm before.

    The same formula as `torch.nn.utils.clip_grad_norm_`. Collective: every rank.
    """
    buckets = list(buckets)
    total = total_norm(buckets, comm, parameters=parameters, order=order)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    is_dear = any(bucket.grads.store is not None for bucket in buckets)
    if (is_dear or scale.device.type == "cpu") and scale.item() == 1.0:
        return total  # on a device this look would wait for it; there the scaling is cheap

    def multiply(part: Tensor) -> None:
        part.mul_(scale.to(part.device, part.dtype))

    for bucket in buckets:
        _change(bucket, parameters, multiply)
    return total


def clip_by_value(
    buckets: Iterable[Bucket], limit: float, *, parameters: set[nn.Parameter] | None = None
) -> None:
    """Clamps every element of the gradients to [-limit, limit]. Local."""
    for bucket in buckets:
        _change(bucket, parameters, lambda part: part.clamp_(-limit, limit))


def _dtype(buckets: Iterable[Bucket]) -> torch.dtype:
    """In which ranks add: the widest of gradients, also of a rank that owns none of them."""
    return promoted_dtype(torch.float32, [bucket.grads.dtype for bucket in buckets])


def _own_norms(
    bucket: Bucket, comm: Communicator, parameters: set[nn.Parameter] | None, order: float
) -> Iterator[Tensor]:
    """Norms of the parts that this rank owns, one at a time: some are read from a file."""
    for part in _owned_parts(bucket, comm, parameters):
        if part.numel():
            norm = torch.linalg.vector_norm(
                part, order, dtype=promoted_dtype(torch.float32, [part.dtype])
            )
            yield norm.to(comm.device)


def _joined(
    norms: Sequence[Tensor], dtype: torch.dtype, comm: Communicator, order: float
) -> Tensor:
    """What ranks add (order p: the p-th power of the norm) or compare (the infinite one): 0-dim."""
    if not norms:
        return torch.zeros((), dtype=dtype, device=comm.device)
    each = torch.stack([norm.to(dtype) for norm in norms])
    return each.max() if math.isinf(order) else (each**order).sum()


def _over_ranks(joined: Tensor, comm: Communicator, order: float) -> Tensor:
    if math.isinf(order):
        return comm.max_(joined, _NAME)
    return comm.sum_over_shards_(joined, _NAME) ** (1.0 / order)


def _fetched(bucket: Bucket, parameters: set[nn.Parameter] | None) -> list[int]:
    """Slots that have a gradient and were asked for."""
    return [
        index
        for index, parameter in enumerate(bucket.parameters)
        if (parameters is None or parameter in parameters) and bucket.grads.fetch(index) is not None
    ]


def _owned_parts(
    bucket: Bucket, comm: Communicator, parameters: set[nn.Parameter] | None
) -> Iterator[Tensor]:
    """1-D tensors with the elements this rank owns; one for the whole bucket where possible."""
    slots = _fetched(bucket, parameters)
    if not slots:
        return
    grads, layout, rank = bucket.grads, bucket.plan.layout, comm.mesh.shard_rank
    assert grads.main_grad is not None
    is_whole = bucket.replicates_optim
    if len(slots) == len(bucket.parameters):
        owned = layout.shard(rank)
        yield grads.main_grad[owned.start : owned.stop] if is_whole else grads.main_grad
        return
    for index in slots:
        owned = layout.owned(layout.slots[index], rank)
        part = grads.slices[index].reshape(-1)
        yield part[owned.start : owned.stop] if is_whole else part


def _change(
    bucket: Bucket, parameters: set[nn.Parameter] | None, change: Callable[[Tensor], object]
) -> None:
    """Changes the mean gradients that rest on this rank, in place."""
    slots = _fetched(bucket, parameters)
    if slots:
        bucket.grads.apply_(change, None if len(slots) == len(bucket.parameters) else slots)
