"""Saves modules and parameters that are entries of a checkpoint, such as hyperparameters.

With `save_hyperparameters()` Lightning puts a module that is an argument into a checkpoint, which
rank 0 writes, while every rank holds a shard of the module. All ranks therefore gather the values
of such modules, and rank 0 writes copies with plain, full parameters. The modules themselves stay
sharded. The same holds for the values that a user of Fabric saves.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import make_plain
from lightning_zero.engine.engine import Engine
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = ["replace_sharded_parameters"]

_SKIPPED_KEYS = {"state_dict", "optimizer_states"}  # large, and without modules


def replace_sharded_parameters(
    checkpoint: dict[str, Any],
    engines: Sequence[Engine],
    skipped: Collection[str] = _SKIPPED_KEYS,
) -> None:
    """Replaces entries with sharded parameters or tensors by copies with plain ones, on rank 0.

    Collective: every rank. Other ranks keep their entries. A value that is also in the state dict
    is stored once.

    Args:
        checkpoint: Entries of a checkpoint.
        engines: Engines that may hold the parameters.
        skipped: Keys of entries that have none.

    Raises:
        ValueError: The entries of ranks have other numbers of sharded tensors.
    """
    found = {key: _find(value) for key, value in checkpoint.items() if key not in skipped}
    named = checkpoint.get("state_dict", {})
    plain: dict[int, Any] = {}
    is_replaced: set[nn.Parameter] = set()
    for engine in engines:
        slots = _slots_of(engine)
        wanted = [slots[p] for finder in found.values() for p in finder.parameters if p in slots]
        first = engine.comm.control.gather_objects(sorted({*wanted}))[0]
        is_replaced |= slots.keys() if first else set()
        plain |= _unshard(first, engine, named if isinstance(named, Mapping) else {})
    sharded = [tensor for finder in found.values() for tensor in finder.sharded]
    counts = engines[0].comm.control.gather_objects(len(sharded))
    if len(set(counts)) > 1:
        raise ValueError(
            f"the entries of a checkpoint have {counts} sharded tensors, in the order of ranks; "
            "put the same tensors into them on every rank."
        )
    for tensor in sharded:
        plain[id(tensor)] = tensor.full_tensor().cpu()
    if engines[0].comm.rank == 0:
        for key, finder in found.items():
            if finder.sharded or not is_replaced.isdisjoint(finder.parameters):
                checkpoint[key] = copy.deepcopy(checkpoint[key], dict(plain))


class _Sink:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _TensorFinder(pickle.Pickler):
    """Finds parameters and sharded tensors anywhere in an object, by pickling it."""

    def __init__(self) -> None:
        super().__init__(_Sink(), protocol=5)  # which copies no large buffer
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
        return "found"  # do not pickle it


def _find(value: Any) -> _TensorFinder:
    finder = _TensorFinder()
    try:
        finder.dump(value)
    except Exception:  # writing the checkpoint raises it again
        return finder
    return finder


def _slots_of(engine: Engine) -> dict[nn.Parameter, tuple[int, int]]:
    """Indices of bucket and slot of every parameter that the engine holds."""
    buckets = [*engine.buckets, *engine.average_buckets]
    return {
        parameter: (number, index)
        for number, bucket in enumerate(buckets)
        for index, parameter in enumerate(bucket.parameters)
    }


def _unshard(
    wanted: list[tuple[int, int]], engine: Engine, state_dict: Mapping[str, Any]
) -> dict[int, Any]:
    """Plain copies of parameters on rank 0, by the id of the parameter. Collective: every rank."""
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
            plain[id(parameter)] = make_plain(parameter, saved)
    return plain


def _has_values(saved: Any, bucket: Bucket, index: int) -> bool:
    """Whether `saved`, the state dict's entry for slot `index`, is its full tensor on the CPU."""
    if type(saved) is not Tensor or saved.device.type != "cpu":
        return False
    shape, dtype = bucket.plan.layout.slots[index].shape, bucket.orig_dtypes[index]
    return tuple(saved.shape) == shape and saved.dtype is dtype
