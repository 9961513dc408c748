"""Wraps parameters in a bucket, and unwraps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer, promoted_dtype
from lightning_zero.tensors.guarded import (
    ParameterHolder,
    Placement,
    plain_class_of,
    set_placement,
    unguard,
)
from lightning_zero.tensors.meta import drop_parameter

__all__ = ["full_precision_copy", "unwrap_parameters", "wrap_parameters"]


class _Unfinished:
    """Holder of a parameter until its engine is complete; every use of it is an error.

    It stays the holder if the engine cannot be built.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # looked up by Python itself
            raise AttributeError(name)
        self.refuse()

    def refuse(self, _: str = "") -> NoReturn:
        raise RuntimeError(
            f"parameter {self._name} is held by an engine that is being built, or could not be "
            "built. Use it before or after the construction of an engine; after a failed one, make "
            "a new module. reset_parameters() of a module must only set the module's own "
            "parameters."
        )


def full_precision_copy(
    plan: BucketPlan,
    parameters: Sequence[nn.Parameter],
    unsharded: FlatBuffer,
    filled: FlatBuffer | None,
) -> FlatBuffer:
    """The parameters in their own precision; `unsharded` itself if it suffices.

    `filled`: buffer in which some of the parameters are stored already.
    """
    dtype = promoted_dtype(plan.dtype, [parameter.dtype for parameter in parameters])
    copied = unsharded
    if dtype != plan.dtype:
        copied = filled or FlatBuffer(plan.layout, dtype, unsharded.tensor.device)
    for view, parameter in zip(copied.views, parameters, strict=True):
        if view.data_ptr() != parameter.data_ptr():
            view.copy_(parameter.data)
    return copied


def wrap_parameters(
    plan: BucketPlan, parameters: Sequence[nn.Parameter], views: Sequence[Tensor]
) -> None:
    """Points the parameters at `views`, by slot, plain, with placements in the bucket.

    Until the bucket has a `BucketAccess`, uses of guarded parameters are refused.
    """
    for index, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
        slot = plan.layout.slots[index]
        holder = _Unfinished(slot.name, view.device)
        placement = Placement(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=plan.dtype,
            own_class=type(parameter),
            holder=cast("ParameterHolder", holder),
            index=index,
            ensure_unsharded=holder.refuse,
        )
        set_placement(parameter, placement)
        parameter.data = view
        parameter.__class__ = plain_class_of(placement.own_class)
        if plan.dtype.is_floating_point:
            parameter.grad_dtype = None  # gradients may be wider than the parameter


def unwrap_parameters(
    plan: BucketPlan,
    parameters: Sequence[nn.Parameter],
    dtypes: Sequence[torch.dtype],
    views: Sequence[Tensor],
    device: torch.device | None,
) -> None:
    """Makes every parameter a full tensor of its own on `device`: a copy of its view, by slot.

    `dtypes`: those of the parameters before they were wrapped. Without a device, the parameters
    get no values, see tensors/meta.py.
    """
    for index, parameter in enumerate(parameters):
        slot, dtype = plan.layout.slots[index], dtypes[index]
        unguard(parameter)
        set_placement(parameter, None)
        if plan.dtype.is_floating_point:
            parameter.grad_dtype = dtype
        if device is None:
            drop_parameter(parameter, slot.name, dtype, torch.Size(slot.shape))
        else:
            parameter.data = views[index].to(device, dtype, copy=True)
