"""`optimizer.state` as users see it: slices appear as sharded tensors.

[Note: State view] Stand-ins are stepped with plain 1-D slices of states (clone.py). Users see
tensors of the parameter's shape, like `p.grad`: reads, elementwise writes and `full_tensor()` act
on the full state. So `optimizer.state` is a `StateView` of the dict with the slices, `raw`, to
which assignments and deletions are applied. A state dict of torch is created from the view, so it
contains sharded tensors.

States of owned full tensors are visible on the owner only, as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of, lockstep_of
from lightning_zero.core.optim_states import is_elementwise_state
from lightning_zero.tensors.composite import is_composite
from lightning_zero.tensors.guarded import Placement, has_placement, placement_of
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = [
    "StateView",
    "before_access",
    "as_plain_dicts",
    "full_state_shape",
    "is_sliced",
    "raw_states",
    "local_part",
    "raise_partial_states",
]

REMEDIES = (
    "save with trainer.save_checkpoint(path), or get the full state from "
    "strategy.optimizer_state(optimizer) or engine.optimizer_state(optimizer), on every rank"
)


def raw_states(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """The plain dict of states, with slices as stand-ins are stepped with them."""
    state: Any = optimizer.state
    plain: defaultdict[Any, Any] = state.raw if isinstance(state, StateView) else state
    return plain


def before_access(optimizer: Optimizer) -> None:
    """Before states are read or replaced from outside of a step: waits for a worker. Local.

    Raises:
        RuntimeError: They are offloaded.
    """
    state: Any = optimizer.state
    if isinstance(state, StateView):
        state.before_access()


def is_sliced(bucket: Bucket) -> bool:
    """Whether states of the bucket's parameters are slices."""
    return not bucket.shards.replicates_optim and not bucket.shards.has_tensor_owners


def full_state_shape(placement: Placement, key: str) -> tuple[int, ...]:
    """Shape of a sharded state: that of the parameter, or its number of blocks."""
    shards = bucket_of(placement).shards
    return shards.states.layouts.of(key).layout.slots[placement.index].shape


def _spec_of(bucket: Bucket, index: int, key: str) -> ShardSpec:
    """Elements of state `key` of slot `index` that each rank has."""
    spec, layout = bucket.shard_specs[index], bucket.shards.states.layouts.of(key).layout
    return dataclasses.replace(spec, slot=layout.slots[index], layout=layout)


def local_part(parameter: Tensor, key: str, value: object, known: object = None) -> object:
    """This rank's slice of a state that is sharded.

    Args:
        parameter: Parameter of an engine.
        key: Key of the state.
        value: Full state, plain or sharded; other values are returned as is.
        known: Previous value of the state, if any: for a 0-dim parameter it shows whether the state
            is elementwise.
    """
    placement = placement_of(parameter)
    bucket = bucket_of(placement)
    if not isinstance(value, Tensor) or is_composite(value) or not is_sliced(bucket):
        return value
    if isinstance(value, ShardedTensor):
        is_own = _spec_of(bucket, placement.index, key).matches(value.spec)
        return value.local.clone() if is_own else _slice(bucket, placement.index, key, value)
    numel = len(bucket.shards.owned(placement.index))
    is_number = not placement.shape and not is_elementwise_state(known, numel)
    if value.shape != full_state_shape(placement, key) or is_number:
        return value
    return _slice(bucket, placement.index, key, value)


def _slice(bucket: Bucket, index: int, key: str, value: Tensor) -> Tensor:
    full = value.full_tensor() if isinstance(value, ShardedTensor) else value
    return bucket.shards.states.slice(index, key, full)


class StateView(MutableMapping[Any, Any]):
    """`optimizer.state` of the user's optimizer. See [Note: State view].

    Attributes:
        raw: The optimizer's own dict, with slices.
        before_access: Called before states are read or replaced.
    """

    def __init__(self, raw: defaultdict[Any, Any], before_access: Callable[[], object]) -> None:
        self.raw = raw
        self.before_access = before_access

    def show(self, raw: defaultdict[Any, Any]) -> None:
        """Makes this the view of another dict, with slices."""
        self.raw = raw

    def __getitem__(self, parameter: Any) -> Any:
        self.before_access()
        if not isinstance(parameter, Tensor) or not has_placement(parameter):
            return self.raw[parameter]
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        if not bucket.shards.step_layout.is_stepped[placement.index]:
            raise_partial_states(f"optimizer.state of {placement.name}")
        own = self.raw[parameter]
        return _ParameterStateView(own, parameter) if is_sliced(bucket) else own

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self.before_access()
        is_held = isinstance(parameter, Tensor) and has_placement(parameter)
        if is_held and isinstance(state, Mapping):
            known = self.raw.get(parameter, {})
            state = {
                key: local_part(parameter, key, value, known.get(key))
                for key, value in state.items()
            }
        self.raw[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        self.before_access()
        del self.raw[parameter]

    def __contains__(self, parameter: object) -> bool:
        self.before_access()
        return parameter in self.raw

    def __iter__(self) -> Iterator[Any]:
        self.before_access()
        return iter(self.raw)

    def __len__(self) -> int:
        self.before_access()
        return len(self.raw)

    def get(self, key: Any, default: Any = None) -> Any:
        """Like `dict.get`, as are the following methods; creates no missing state."""
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
        """Like `dict.copy`: a new dict with the same states."""
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        """Copies the full states, like the deep copy of a parameter. Collective: every rank."""

        def full(value: Any) -> Any:
            is_sharded = isinstance(value, ShardedTensor)
            return value.full_tensor() if is_sharded else copy.deepcopy(value, memo)

        copied: dict[Any, Any] = defaultdict(dict)
        for parameter, state in self.items():
            copied[copy.deepcopy(parameter, memo)] = {k: full(v) for k, v in state.items()}
        return copied

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "an optimizer cannot be pickled while it is attached to an engine: this rank has only "
            f"a shard of its states; {REMEDIES}."
        )

    def __repr__(self) -> str:
        return f"StateView({dict(self.items())!r})"


def raise_partial_states(what: str) -> NoReturn:
    """Raises because this rank has only the states of tensors that it owns."""
    raise RuntimeError(
        f"{what} is not complete on this rank: each rank has only the states of the tensors that "
        f"it steps; {REMEDIES}."
    )


def as_plain_dicts(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Makes the states in a result of `state_dict` plain dicts, as in any optimizer."""
    if isinstance(state_dict.get("state"), dict):
        state_dict["state"] = {
            key: dict(state) if isinstance(state, _ParameterStateView) else state
            for key, state in state_dict["state"].items()
        }
    return state_dict


class _ParameterStateView(MutableMapping[str, Any]):
    """View of the state of one parameter; writes are applied to `raw`, the stepped state."""

    def __init__(self, raw: dict[str, Any], parameter: Tensor) -> None:
        self._raw = raw
        self._parameter = parameter

    def __getitem__(self, key: str) -> Any:
        return _view_of(self._parameter, key, self._raw[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self._raw[key] = local_part(self._parameter, key, value, self._raw.get(key))

    def __delitem__(self, key: str) -> None:
        del self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __ior__(self, other: Any) -> _ParameterStateView:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)


def _view_of(parameter: Tensor, key: str, value: object) -> object:
    """A sharded tensor for a sharded state; other values as they are."""
    placement = placement_of(parameter)
    bucket, index = bucket_of(placement), placement.index
    if not bucket.shards.states.is_shard(index, key, value):
        return value
    assert isinstance(value, Tensor)
    shard = _StateShard(bucket, index, key, value)
    return ShardedTensor.of(shard, _spec_of(bucket, index, key), "optimizer.state", value)


@dataclass(frozen=True, eq=False)
class _StateShard:
    """Access to this rank's elements of one state.

    Attributes:
        bucket: Bucket of the parameter.
        index: Slot of the parameter.
        key: Key of the state.
        value: The elements, in memory or as a LazyTensor.
    """

    bucket: Bucket
    index: int
    key: str
    value: Tensor

    def check_memory(self, call: str, num_bytes: int) -> None:
        if self.bucket.device.type == "cpu":
            lockstep = lockstep_of(self.bucket.parameters[self.index])
            lockstep.check_cpu_memory(call, num_bytes)

    def read(self) -> Tensor:
        self.bucket.wait_for_all_steps()
        value = self.value
        return value.read() if isinstance(value, LazyTensor) else value.detach().reshape(-1)

    def change(self, write: Callable[[Tensor], object]) -> None:
        values = self.read()
        with torch.no_grad():
            write(values)
        if isinstance(self.value, LazyTensor):
            self.bucket.shards.states.adopt(self.index, {self.key: values})
