"""Reductions over all elements of sharded tensors: sums, extremes and norms.

Every rank reduces its own elements. The results, one small tensor, are all-reduced over the shards
of one replica, since replicas are equal; nothing is all-gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.tensors.buffer import promoted_dtype
from lightning_zero.tensors.shard_spec import ShardComm

__all__ = ["REDUCTIONS", "norms", "norms_over_ranks", "sum_of_bits"]


class Reducible(Protocol):
    """The part of `ShardedTensor` that reductions use."""

    @property
    def local(self) -> Tensor: ...

    @property
    def comm(self) -> ShardComm: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...

    def call_of(self, name: str) -> str: ...


# ---------------------------------------------------------------- sums and extremes

_Arguments = Mapping[str, Any]  # of a call of the operator, by name
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _wide(tensor: Tensor) -> torch.dtype:
    """Dtype in which shards are summed."""
    is_float = tensor.dtype.is_floating_point
    return torch.promote_types(tensor.dtype, torch.float32) if is_float else tensor.dtype


def _sum(sharded: Reducible, given: _Arguments, name: str = "sum") -> Tensor:
    dtype = given.get("dtype") or sharded.dtype
    local = sharded.local.to(dtype)
    own = local.sum(dtype=_wide(local)) if dtype.is_floating_point else local.sum()
    total = sharded.comm.sum_over_shards_(own, sharded.call_of(name))
    return total.to(dtype) if dtype.is_floating_point else total


def _mean(sharded: Reducible, given: _Arguments) -> Tensor:
    dtype = given.get("dtype") or sharded.dtype
    wide = torch.promote_types(dtype, torch.float32)
    return (_sum(sharded, {"dtype": wide}, "mean") / sharded.numel()).to(dtype)


def _extreme(sign: int, name: str, dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    """Reduction to the largest element (`sign` 1) or the smallest (-1), as `dtype`."""

    def extreme(sharded: Reducible, given: _Arguments) -> Tensor:
        local = sharded.local if dtype is None else sharded.local.to(dtype)
        is_float = local.dtype.is_floating_point
        signed = sign * local.to(_wide(local) if is_float else torch.int64)
        lowest = -math.inf if is_float else torch.iinfo(torch.int64).min
        if dtype is torch.bool:
            lowest = min(0, sign)  # `any` of nothing is False, `all` is True
        best = signed.max() if signed.numel() else signed.new_full((), lowest)
        return (sign * sharded.comm.max_(best, sharded.call_of(name))).to(local.dtype)

    return extreme


def sum_of_bits(values: Tensor) -> Tensor:
    """Sum of `values`, 1-D, read as integers of the same size: 0-dim, int64."""
    return values.view(_WORDS[values.element_size()]).sum(dtype=torch.int64)


# ---------------------------------------------------------------- norms


def _norm(sharded: Reducible, given: _Arguments) -> Tensor:
    order = given.get("ord", given.get("p"))
    dtype = given.get("dtype") or sharded.dtype
    (norm,) = norms([sharded], 2.0 if order is None else float(order))
    return norm.to(dtype.to_real())


def norms(tensors: Sequence[Reducible], order: float) -> list[Tensor]:
    """Norm of each tensor, 0-dim, in float32 or wider, in one all-reduce. Collective."""
    first = tensors[0]
    dtype = promoted_dtype(torch.float32, [tensor.dtype.to_real() for tensor in tensors])
    groups = ([tensor.local] for tensor in tensors)
    name = first.call_of("norm")
    found = norms_over_ranks(groups, first.comm, order, dtype=dtype, name=name)
    return [norm.to(tensor.device) for norm, tensor in zip(found, tensors, strict=True)]


def norms_over_ranks(
    groups: Iterable[Iterable[Tensor]],
    comm: ShardComm,
    order: float,
    *,
    dtype: torch.dtype,
    name: str,
) -> Tensor:
    """Norm of the elements of each group on all ranks, as one vector. Collective: every rank.

    It is one all-reduce for all groups.

    Args:
        groups: This rank's elements of each group, as plain tensors, which are read one at a time;
            there may be none of a group on this rank.
        comm: Communicator of the ranks that have a shard.
        order: p of the p-norm; may be 0, or plus or minus `math.inf`.
        dtype: Dtype in which ranks add, the same on every rank.
        name: Name of the all-reduce in reports of long waits.

    Returns:
        1-D, one norm for each group, on the device of `comm`.
    """
    own = torch.stack([_reducible(parts, comm.device, order, dtype) for parts in groups])
    if order == -math.inf:
        return -comm.max_(-own, name)
    if order == math.inf:
        return comm.max_(own, name)
    total = comm.sum_over_shards_(own, name)
    return total if order == 0 else total ** (1.0 / order)


def _reducible(
    parts: Iterable[Tensor], device: torch.device, order: float, dtype: torch.dtype
) -> Tensor:
    """Value that ranks add (order p: the p-th power of the norm) or compare (order inf): 0-dim."""
    norms = [_local_norm(part, order).to(device) for part in parts if part.numel()]
    if not norms:
        lowest = math.inf if order == -math.inf else 0.0
        return torch.full((), lowest, dtype=dtype, device=device)
    each = torch.stack([norm.to(dtype) for norm in norms])
    if math.isinf(order):
        return each.max() if order > 0 else each.min()
    return each.sum() if order == 0 else (each**order).sum()


def _local_norm(part: Tensor, order: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(
        part, order, dtype=promoted_dtype(torch.float32, [part.dtype])
    )
    return norm


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "all": _extreme(-1, "all", torch.bool),
    "amax": _extreme(1, "max"),
    "amin": _extreme(-1, "min"),
    "any": _extreme(1, "any", torch.bool),
    "linalg_vector_norm": _norm,
    "max": _extreme(1, "max"),
    "mean": _mean,
    "min": _extreme(-1, "min"),
    "norm": _norm,
    "sum": _sum,
}
