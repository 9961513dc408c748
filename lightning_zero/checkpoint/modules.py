"""Modules among what is saved: `save_hyperparameters()` with a module as an argument.

Lightning puts the arguments themselves into a checkpoint, and rank 0 alone writes it, while every
rank holds a part of the module. So what is found there is gathered before, and rank 0 writes a copy
in which parameters are plain and full, as they would be without sharding.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.engine import Engine
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = ["replace_sharded_parameters"]

_OWN_FORM = {"state_dict", "optimizer_states"}  # they have none, and are large


def replace_sharded_parameters(checkpoint: dict[str, Any], engine: Engine) -> None:
    """Replaces entries with held parameters by copies with plain ones, on rank 0. Collective.

    Other ranks keep theirs. Values that the state dict has too are in the file once.
    """
    found = {key: _find(value) for key, value in checkpoint.items() if key not in _OWN_FORM}
    slots = _slots_of(engine)
    wanted = [slots[p] for one in found.values() for p in one.parameters if p in slots]
    everyone = engine.comm.control.gather_objects(sorted({*wanted}))
    if not everyone[0]:
        return
    named = checkpoint.get("state_dict", {})
    plain = _gather(everyone[0], engine, named if isinstance(named, Mapping) else {})
    for sharded in [one for held in found.values() for one in held.sharded]:
        plain[id(sharded)] = sharded.full_tensor().cpu()
    if engine.comm.rank == 0:
        for key, held in found.items():
            if held.sharded or any(p in slots for p in held.parameters):
                checkpoint[key] = copy.deepcopy(checkpoint[key], dict(plain))


class _Held(pickle.Pickler):
    """Finds parameters and sharded tensors wherever a pickle would have them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.parameters: dict[nn.Parameter, None] = {}
        self.sharded: list[ShardedTensor] = []

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, nn.Module):
            self.parameters |= dict.fromkeys(value.parameters())
        elif isinstance(value, nn.Parameter):
            self.parameters[value] = None
        elif isinstance(value, ShardedTensor):
            self.sharded.append(value)
        elif not isinstance(value, Tensor):
            return None
        return "found"  # nothing of it is pickled


def _find(value: Any) -> _Held:
    held = _Held()
    try:
        held.dump(value)
    except Exception:  # writing the checkpoint raises it
        return held
    return held


def _slots_of(engine: Engine) -> dict[nn.Parameter, tuple[int, int]]:
    """The number of the bucket, and the slot there, of all parameters that the engine holds."""
    buckets = [*engine.buckets, *engine.average_buckets]
    return {
        parameter: (number, index)
        for number, bucket in enumerate(buckets)
        for index, parameter in enumerate(bucket.parameters)
    }


def _gather(
    wanted: list[tuple[int, int]], engine: Engine, state_dict: Mapping[str, Any]
) -> dict[int, Any]:
    """By the id of a parameter, a plain copy of it; on rank 0. Collective."""
    buckets = [*engine.buckets, *engine.average_buckets]
    plain: dict[int, Any] = {}
    for number in sorted({number for number, _ in wanted}):
        bucket = buckets[number]
        views = bucket.masters.full_tensors()
        if engine.comm.rank:
            continue
        for index in [index for other, index in wanted if other == number]:
            dtype, parameter = bucket.orig_dtypes[index], bucket.parameters[index]
            saved = state_dict.get(bucket.plan.layout.slots[index].name)
            if number >= len(engine.buckets) or not _has_values(saved, bucket, index):
                saved = views[index].to("cpu", dtype, copy=True)
            assert isinstance(saved, Tensor)
            plain[id(parameter)] = bucket.make_plain(index, saved)
    return plain


def _has_values(saved: Any, bucket: Bucket, index: int) -> bool:
    """Whether an entry of a state dict, under the name of slot `index`, has its values."""
    if type(saved) is not Tensor or saved.device.type != "cpu":
        return False
    shape, dtype = bucket.plan.layout.slots[index].shape, bucket.orig_dtypes[index]
    return tuple(saved.shape) == shape and saved.dtype is dtype
