"""What users see as `optimizer.state`: slices as the sharded tensors that they are parts of.

[Note: State view] The optimizer itself must see plain slices, 1-D, beside the slices that it
steps. Everybody else sees tensors of the parameter's shape, as `p.grad` is: reads, elementwise
writes and `full_tensor()` mean the whole. So `optimizer.state` is a `StateView` between steps,
and the plain dict, `raw`, inside of them (`without_state_view`).
Assigning, deleting and clearing reach
that dict. A state dict of torch's is made from what is shown, so it holds sharded tensors.

States that one rank owns whole are shown by that rank, as they are; another rank cannot show them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.shards import is_elementwise_state
from lightning_zero.tensors.composite import is_composite
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = [
    "StateView",
    "as_plain_dicts",
    "is_sliced",
    "raw_states",
    "local_part",
    "without_state_view",
    "raise_partial_states",
]

REMEDIES = (
    "save by trainer.save_checkpoint(path), or take the whole state from "
    "strategy.optimizer_state(optimizer) or engine.optimizer_state(optimizer), on every rank"
)


def raw_states(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """The plain dict of states: slices, as the optimizer steps them."""
    state: Any = optimizer.state
    plain: defaultdict[Any, Any] = state.raw if isinstance(state, StateView) else state
    return plain


@contextmanager
def without_state_view(optimizer: Optimizer) -> Iterator[None]:
    """Inside, `optimizer.state` is the plain dict, as the optimizer itself needs it."""
    shown: Any = optimizer.state
    if not isinstance(shown, StateView):
        yield
        return
    optimizer.state = shown.raw
    try:
        yield
    finally:
        shown.raw = optimizer.state  # loading puts another dict there
        optimizer.state = cast("Any", shown)


def is_sliced(bucket: Bucket) -> bool:
    """Whether states of its parameters are slices."""
    return not bucket.replicates_optim and not bucket.shards.has_tensor_owners


def local_part(parameter: Tensor, value: object, known: object = None) -> object:
    """What this rank keeps of a state that has been given for the whole parameter.

    Args:
        parameter: Of an engine.
        value: Of the parameter's shape, plain or sharded; anything else is returned as it is.
        known: What the optimizer has had in its place, if anything: of a parameter without
            dimensions it says whether the value is one for each element.
    """
    placement = placement_of(parameter)
    bucket = bucket_of(placement)
    if not isinstance(value, Tensor) or is_composite(value) or not is_sliced(bucket):
        return value
    if isinstance(value, ShardedTensor):
        is_own = bucket.shard_specs[placement.index].matches(value.spec)
        return value.local.clone() if is_own else _slice(bucket, placement.index, value)
    numel = len(bucket.owned(placement.index))
    is_number = not placement.shape and not is_elementwise_state(known, numel)
    if value.shape != placement.shape or is_number:
        return value
    return _slice(bucket, placement.index, value)


def _slice(bucket: Bucket, index: int, value: Tensor) -> Tensor:
    whole = value.full_tensor() if isinstance(value, ShardedTensor) else value
    return bucket.shards.slice_state(index, whole)


class StateView(MutableMapping[Any, Any]):
    """`optimizer.state` between steps. See [Note: State view].

    Attributes:
        own: The optimizer's own dict, with slices.
        drain: Called before values are looked at: a worker may be changing them.
    """

    def __init__(self, own: defaultdict[Any, Any], drain: Callable[[], object]) -> None:
        self.raw = own
        self.drain = drain

    def __getitem__(self, parameter: Any) -> Any:
        self.drain()
        if not isinstance(parameter, Tensor) or not has_placement(parameter):
            return self.raw[parameter]
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        if not bucket.shards.is_stepped[placement.index]:
            raise_partial_states(f"optimizer.state of {placement.name}")
        own = self.raw[parameter]
        return _ParameterStateView(own, parameter) if is_sliced(bucket) else own

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self.drain()
        is_held = isinstance(parameter, Tensor) and has_placement(parameter)
        if is_held and isinstance(state, Mapping):
            known = self.raw.get(parameter, {})
            state = {
                key: local_part(parameter, value, known.get(key)) for key, value in state.items()
            }
        self.raw[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        self.drain()
        del self.raw[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.raw

    def __iter__(self) -> Iterator[Any]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict, like the following: makes no state where there is none."""
        return default if key not in self.raw else self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return self.raw.pop(key, *default)
        state = self[key]
        del self[key]
        return state

    def copy(self) -> dict[Any, Any]:
        """As of a dict: another one with the same states."""
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        """Whole states, as the deep copy of a parameter is whole. Collective."""

        def whole(value: Any) -> Any:
            is_sharded = isinstance(value, ShardedTensor)
            return value.full_tensor() if is_sharded else copy.deepcopy(value, memo)

        copied: dict[Any, Any] = defaultdict(dict)
        for parameter, state in self.items():
            copied[copy.deepcopy(parameter, memo)] = {k: whole(v) for k, v in state.items()}
        return copied

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "an optimizer cannot be pickled while an engine holds it: this rank has a part of its "
            f"states; {REMEDIES}."
        )

    def __repr__(self) -> str:
        return f"StateView({dict(self.items())!r})"


def raise_partial_states(what: str) -> NoReturn:
    """Raises where a rank has only the states of tensors that it owns."""
    raise RuntimeError(
        f"{what} is not all on this rank: each rank steps some tensors and has their states alone; "
        f"{REMEDIES}."
    )


def as_plain_dicts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook on torch's state dicts: its entries are dicts as of any optimizer."""
    if isinstance(state_dict.get("state"), dict):
        state_dict["state"] = {
            key: dict(state) if isinstance(state, _ParameterStateView) else state
            for key, state in state_dict["state"].items()
        }
    return state_dict


class _ParameterStateView(dict[str, Any]):
    """The state of one parameter, as shown; what is written to it reaches the optimizer's own."""

    def __init__(self, own: dict[str, Any], parameter: Tensor) -> None:
        super().__init__({key: _shown(parameter, key, value) for key, value in own.items()})
        self._own = own
        self._parameter = parameter

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = local_part(self._parameter, value, self._own.get(key))
        super().__setitem__(key, _shown(self._parameter, key, self._own[key]))

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self._own[key]

    def clear(self) -> None:
        """As of a dict, like the following."""
        super().clear()
        self._own.clear()

    def pop(self, key: str, *default: Any) -> Any:
        self._own.pop(key, None)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        key, value = super().popitem()
        del self._own[key]
        return key, value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **values: Any) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> _ParameterStateView:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)


def _shown(parameter: Tensor, key: str, value: object) -> object:
    placement = placement_of(parameter)
    bucket = bucket_of(placement)
    if not is_elementwise_state(value, len(bucket.owned(placement.index))):
        return value
    assert isinstance(value, Tensor)
    part = _StatePart(bucket, placement.index, key, value)
    return ShardedTensor.of(part, bucket.shard_specs[placement.index], "optimizer.state", value)


@dataclass(frozen=True, eq=False)
class _StatePart:
    """This rank's elements of one state."""

    bucket: Bucket
    index: int
    key: str
    value: Tensor  # in memory, or what reads a file
    version: int = 0  # nothing that is gathered of it is kept

    def check_memory(self, call: str, num_bytes: int) -> None:
        if self.bucket.device.type == "cpu":
            self.bucket.lockstep.check_cpu_memory(call, num_bytes)

    def read(self) -> Tensor:
        self.bucket.wait_for_all_steps()
        value = self.value
        return value.read() if isinstance(value, LazyTensor) else value.detach().reshape(-1)

    def change(self, write: Callable[[Tensor], object]) -> None:
        values = self.read()
        with torch.no_grad():
            write(values)
        if isinstance(self.value, LazyTensor):
            self.bucket.shards.adopt_state(self.index, {self.key: values})
