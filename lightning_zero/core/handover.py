"""How parameters come into a bucket, and how they leave it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_zero.core.building import piece_of
from lightning_zero.tensors.buffer import FlatBuffer, widest
from lightning_zero.tensors.guarded import Placement, set_placement, unguard
from lightning_zero.tensors.meta import leave_out

if TYPE_CHECKING:
    from lightning_zero.core.bucket import Bucket

__all__ = ["check_can_be_held", "give_back", "take_in"]


def check_can_be_held(named: Mapping[str, nn.Parameter]) -> None:
    """Before parameters are planned for.

    Raises:
        ValueError: One cannot lie in a flat buffer with others.
    """
    for name, parameter in named.items():
        if parameter.layout is not torch.strided:
            kind = f"layout {parameter.layout}"
        elif parameter.is_floating_point() and parameter.element_size() == 1:
            kind = f"dtype {parameter.dtype}"
        else:
            continue
        raise ValueError(
            f"parameter {name} has {kind}, which has no place among parameters that are sent, cut "
            "and stepped in flat buffers; if it is not trained, make it a buffer: "
            "module.register_buffer(...). Else keep it dense, in at least 16 bits."
        )


def take_in(bucket: Bucket, filled: FlatBuffer | None) -> None:
    """Copies rank 0's values into the flat space and makes the parameters views of it. Collective.

    Args:
        bucket: Its whole buffer is allocated.
        filled: Some of the parameters lie in it already.
    """
    plan, shards = bucket.plan, bucket.shards
    exact = _exact_copy(bucket, filled)
    bucket.comm.broadcast_(exact.tensor)
    if exact is not bucket.whole:
        bucket.whole.tensor.copy_(exact.tensor)
    shards.take_params()
    if shards.has_own_master and _needs_master(bucket):
        rank = bucket.comm.mesh.shard_rank
        shards.take_master(exact.tensor if bucket.steps_whole else exact.shard(rank))
    for index, (slot, parameter) in enumerate(
        zip(plan.layout.slots, bucket.parameters, strict=True)
    ):
        shape = torch.Size(slot.shape)
        own_class = type(parameter)
        placement = Placement(
            name=slot.name,
            shape=shape,
            dtype=plan.dtype,
            own_class=own_class,
            bucket=bucket,
            index=index,
            make_whole=bucket.use,
            put_grad=bucket.grads.put,
        )
        set_placement(parameter, placement)
        parameter.data = bucket.whole.views[index]
        if plan.dtype.is_floating_point:
            parameter.grad_dtype = None  # gradients may be wider than the parameter
    bucket.release()
    shards.mark_written()


def give_back(bucket: Bucket, device: torch.device | None) -> None:
    """Makes every parameter a whole tensor of its own on `device`. Collective.

    Each is in its own dtype. None: without values, see left_out.py.
    """
    bucket.finish_gather()
    bucket.grads.drop()
    views = bucket.masters.exact_views() if device is not None else []
    for index, (slot, parameter) in enumerate(
        zip(bucket.plan.layout.slots, bucket.parameters, strict=True)
    ):
        dtype = bucket.own_dtypes[index]
        unguard(parameter)
        set_placement(parameter, None)
        if bucket.plan.dtype.is_floating_point:
            parameter.grad_dtype = dtype
        if device is None:
            leave_out(parameter, slot.name, dtype, torch.Size(slot.shape))
        else:
            parameter.data = views[index].to(device, dtype, copy=True)
    bucket.shards.drop()
    bucket.whole.free()


def _exact_copy(bucket: Bucket, filled: FlatBuffer | None) -> FlatBuffer:
    """The parameters in their own precision; the whole buffer itself where that suffices."""
    dtype = widest(bucket.plan.dtype, bucket.own_dtypes)
    exact = bucket.whole
    if dtype != bucket.plan.dtype:
        exact = filled or FlatBuffer(bucket.plan.layout, dtype, bucket.device)
    for view, parameter in zip(exact.views, bucket.parameters, strict=True):
        if (piece := piece_of(parameter)) is not None:
            piece.read_into(view)
        elif view.data_ptr() != parameter.data_ptr():
            view.copy_(parameter.data)
    return exact


def _needs_master(bucket: Bucket) -> bool:
    """A master is kept for what is trained, and for what would lose bits without one."""
    is_trained = any(p.requires_grad for p in bucket.parameters)
    return is_trained or any(d.itemsize > bucket.plan.dtype.itemsize for d in bucket.own_dtypes)
