"""The full form: the state dict of the same module without sharding, on rank 0.

Buckets are gathered one at a time, and only rank 0 keeps a copy, on the CPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_zero.core.bucket import bucket_of
from lightning_zero.engine.engine import Engine
from lightning_zero.tensors.guarded import has_placement, placement_of

__all__ = ["full_state_dict", "narrow_masters"]


def full_state_dict(engine: Engine, module: nn.Module | None = None) -> dict[str, Any]:
    """Keys, order, dtypes and shapes of `module.state_dict()` before sharding. Collective.

    Parameters that share memory (tied weights) share it in the result.

    Args:
        engine: Holds the module.
        module: A shadow of it; None: the module itself.

    Returns:
        The state dict on rank 0. Elsewhere the same keys, with parameters on the meta device: hooks
        that rename or delete entries work on every rank.
    """
    is_recipient = engine.comm.rank == 0
    module = engine.module if module is None else module
    # With keep_vars the module hands out the parameter objects, of which nothing is read here.
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    wanted: dict[nn.Parameter, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter) and has_placement(value):
            wanted.setdefault(value, []).append(key)
        elif isinstance(value, Tensor):
            state[key] = value.detach()
    buckets = dict.fromkeys(bucket_of(placement_of(p)) for p in wanted)
    for bucket in buckets:
        views = bucket.masters.exact_views()
        for index, parameter in enumerate(bucket.parameters):
            if parameter in wanted:
                target = "cpu" if is_recipient else "meta"
                whole = views[index].to(target, bucket.own_dtypes[index], copy=True)
                for key in wanted[parameter]:
                    state[key] = whole
    return state


def narrow_masters(engine: Engine) -> dict[str, Tensor]:
    """Masters that a state dict in the module's own dtype would round: by name, whole, on rank 0.

    Empty unless the module itself is 16-bit (precision "bf16-true"). Collective.
    """
    masters: dict[str, Tensor] = {}
    for bucket in engine.buckets:
        dtype = bucket.plan.master_dtype
        if not any(own.itemsize < dtype.itemsize for own in bucket.own_dtypes):
            continue
        if not any(p.requires_grad for p in bucket.parameters):
            continue
        views = bucket.masters.gather_whole().views
        if engine.comm.rank == 0:
            for slot, view in zip(bucket.plan.layout.slots, views, strict=True):
                masters[slot.name] = view.to("cpu", copy=True)
    return masters
