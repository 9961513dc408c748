"""The memory that each kind of state of an engine takes on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State
from lightning_zero.optim.state_view import raw_states
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.composite import plain_tensors
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tiers.storage import MemoryShardStore

__all__ = ["as_states", "device_memory"]


def as_states(names: Iterable[str] | str | None) -> list[State]:
    """Kinds of state by their names; None: all. A ValueError for another name."""
    given = [names] if isinstance(names, str) else names
    known = [state.value for state in State]
    for name in given or ():
        if name not in known:
            raise ValueError(f"states must be among {', '.join(known)}, got {name!r}.")
    return [state for state in State if given is None or state.value in given]


def device_memory(
    state: State, buckets: Sequence[Bucket], optimizers: Iterable[Optimizer]
) -> Iterator[Tensor | FlatBuffer]:
    """Yields what holds this rank's memory of `state` on the device, between steps.

    Several tensors may share a storage. Optimizer states include main parameters that are tensors
    of their own, but not single numbers.
    """
    for bucket in buckets:
        if state is State.PARAM and not bucket.params.are_sharded:
            yield bucket.params.unsharded
        if state is State.GRAD:
            yield from bucket.grads.device_memory()
        for tier, kind, store in bucket.shards.stores():
            if kind is state and tier is Tier.DEVICE and isinstance(store, MemoryShardStore):
                yield store.tensor
    for optimizer in optimizers if state is State.OPTIM else ():
        for parameter, own in raw_states(optimizer).items():
            if not isinstance(parameter, Tensor) or not has_placement(parameter):
                continue  # a key of the optimizer's own
            bucket = bucket_of(placement_of(parameter))
            if bucket.plan.tiers.optim is not Tier.DEVICE:
                continue
            yield from (t for t in plain_tensors(own) if t.dim() and t.device == bucket.device)
