"""Copies of the user's optimizer, and steps of slices of parameters with them.

[Note: Stand-ins] An optimizer identifies a parameter by its object: as a member of a group and as
the key of its state. To step what this rank has of a parameter, perhaps in a worker thread, a
*copy* of the optimizer (same class, same attributes, no hooks) gets groups with the same settings
whose members are stand-ins: new parameters over a slice or a full tensor, with its gradient and its
state. So the user's parameters never point at what is stepped.

Every call sees the settings and attributes of the beginning of the step. What it sets in groups and
attributes is copied back. An optimizer that counts its calls there gets one call for all.

[Note: Asynchronous copies of scalars] The scale of a loss scaler, or a learning rate that is a
tensor, is on the device. The fused steps of torch copy such a scalar to the CPU asynchronously and
read it there before the copy has finished. So steps on the CPU get scalars that are already there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optim.known import unhooked
from lightning_zero.optim.state_view import raw_states
from lightning_zero.tensors.guarded import (
    ENGINE_ATTRIBUTES,
    FULL_NUMEL,
    attributes_of,
    placement_of,
)

__all__ = [
    "OptimizerClone",
    "Slice",
    "copy_of",
    "dropped_gradients",
    "enter_training",
    "fresh_copy",
    "other_states",
    "parameters_of",
    "probe_state",
    "raw_step",
    "settings_of",
    "copy_back",
]

# Attributes that a copy has for itself.
_HOOKS = {
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
}
_OWN = {"state", "param_groups", *_HOOKS}


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def copy_of(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    attributes: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Copies an optimizer without its state and hooks, to be stepped by `raw_step`.

    Args:
        optimizer: The optimizer to copy.
        groups: Parameter groups of the copy.
        attributes: Attributes of the copy; None: those of `optimizer`.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__ if attributes is None else attributes)
    for name, value in list(copy.__dict__.items()):
        if callable(getattr(type(optimizer), name, None)):
            # a wrapper, such as a scheduler's `step`, bound to the original
            del copy.__dict__[name]
        elif isinstance(value, MethodType) and value.__self__ is optimizer:
            copy.__dict__[name] = MethodType(value.__func__, copy)
    for name in _HOOKS:
        setattr(copy, name, OrderedDict())
    copy.state = defaultdict(dict)
    copy.param_groups = groups
    return copy


def fresh_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """As `copy_of`, with copies of all attributes, such as counters: its steps leave no trace.

    An attribute that cannot be copied is shared; parameters are.
    """
    made = copy_of(optimizer, groups)
    shared: dict[int, Any] = {id(p): p for p in parameters_of(optimizer)}
    shared[id(optimizer)] = shared[id(made)] = made
    for name, value in list(vars(made).items()):
        if name not in _OWN:
            with suppress(Exception), torch.no_grad():
                vars(made)[name] = deepcopy(value, shared)
    return made


def settings_of(group: Mapping[str, Any], *, copies: bool = True) -> dict[str, Any]:
    """Settings of a parameter group; `copies`: those that are tensors are copied."""
    return {
        key: value.clone() if copies and isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def other_states(optimizer: Optimizer) -> dict[Any, Any]:
    """States that belong to no parameter, by key."""
    states = raw_states(optimizer)
    return {key: value for key, value in states.items() if not isinstance(key, Tensor)}


def copy_back(
    optimizer: Optimizer,
    copy: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    attributes: Mapping[str, Any],
) -> None:
    """Copies back what a copy has changed in settings, attributes and other states.

    Args:
        optimizer: The user's optimizer.
        copy: A copy of it, after a call.
        groups: Settings of each group of the copy before the call.
        attributes: Attributes of the copy before the call.
    """
    for own, changed, given in zip(optimizer.param_groups, copy.param_groups, groups, strict=True):
        _copy_back(own, {k: v for k, v in changed.items() if k != "params"}, given)
    _copy_back(vars(optimizer), {k: v for k, v in vars(copy).items() if k not in _OWN}, attributes)
    raw_states(optimizer).update(other_states(copy))


def _copy_back(own: dict[str, Any], changed: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for key, value in changed.items():
        if key not in given or value is not given[key]:
            own[key] = value
        elif isinstance(value, Tensor) and value._version:
            scalar = own.get(key)  # a loss scaler deletes its scale after `step`
            if scalar is not None and scalar is not value:  # `value` is a copy on the CPU
                scalar.copy_(value)


def scalars_to_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies device scalars to the CPU. See [Note: Asynchronous copies of scalars]."""
    return {
        key: value.cpu() if isinstance(value, Tensor) and not value.dim() else value
        for key, value in values.items()
    }


def raw_step(optimizer: Optimizer, **arguments: Any) -> Any:
    """Calls the step function of the class without torch's wrapper, which calls hooks."""
    return unhooked(type(optimizer).step)(optimizer, **arguments)


def dropped_gradients(optimizer: Optimizer) -> str:
    """Error text for a step that sets gradients to None or zero: the module's would stay."""
    name = type(optimizer).__name__
    return (
        f"optimizer {name} cannot be stepped, in any stage: its step() sets gradients to None or "
        "zero, but it steps copies of the parameters, and the gradients of the module would stay. "
        "Remove that from step(), and call optimizer.zero_grad() after it, as Lightning does."
    )


def enter_training(optimizer: Optimizer) -> None:
    """Calls `optimizer.train()`, if it exists: schedule-free optimizers start in eval mode."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        with suppress(TypeError):  # an unrelated `train` that requires arguments
            train()


def probe_state(
    optimizer: Optimizer, values: Tensor, group: int = 0, full_numel: int | None = None
) -> dict[str, Any]:
    """Steps a copy of `optimizer` once on a small parameter, and returns its state.

    Args:
        optimizer: The optimizer to copy.
        values: Values of the parameter. Its gradient is one.
        group: Index of the parameter group whose settings are used.
        full_numel: Elements of the tensor for which the small parameter stands.
    """
    parameter = nn.Parameter(values)
    vars(parameter)[FULL_NUMEL] = values.numel() if full_numel is None else full_numel
    parameter.grad = torch.ones_like(parameter)
    settings = settings_of(optimizer.param_groups[group])
    copy = fresh_copy(optimizer, [{**settings, "params": [parameter]}])
    with torch.random.fork_rng(devices=[]):  # the step may use random numbers
        enter_training(copy)
        try:
            raw_step(copy)
        except TypeError:  # the step needs a closure
            raw_step(copy, closure=lambda: 0.0)
    state: dict[str, Any] = copy.state.get(parameter, {})
    return state


@dataclass
class Slice:
    """What this rank steps of one parameter of the user.

    Attributes:
        parameter: The user's parameter.
        data: Values, stepped in place: 1-D, or n-D if the slice is the full parameter.
        grad: Gradient, of the shape of `data`; None: it has none.
        state: State of the optimizer for the slice; replaced after the step.
    """

    parameter: nn.Parameter
    data: Tensor
    grad: Tensor | None
    state: dict[str, Any]

    def replace_state(self, state: dict[str, Any]) -> None:
        """Sets another state, after the step."""
        self.state = state


class OptimizerClone:
    """An optimizer's settings, to step slices with them. See [Note: Stand-ins].

    Args:
        optimizer: The user's optimizer.
        call: Steps a copy of it, or calls another method.
        is_joint: Whether one call gets all slices, and may change settings. Else they are copied
            now: a scheduler may change them before the step has finished.

    Attributes:
        optimizer: The user's optimizer.
        is_joint: See above.
        group_of: Index of the parameter group, by parameter.
        result: What `call` has returned.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        call: Callable[[Optimizer], Any] = raw_step,
        *,
        is_joint: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.is_joint = is_joint
        self.result: Any = None
        self.group_of: dict[nn.Parameter, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            self.group_of.update(dict.fromkeys(group["params"], index))
        self._call = call
        # The last copy, with its settings and attributes before the call.
        self._stepped: tuple[Optimizer, list[dict[str, Any]], dict[str, Any]] | None = None
        self._groups = [settings_of(group, copies=not is_joint) for group in optimizer.param_groups]
        self._attributes = dict(optimizer.__dict__)

    @cached_property
    def _on_cpu(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Settings and attributes for steps on the CPU."""
        groups = [scalars_to_cpu(settings) for settings in self._groups]
        return groups, scalars_to_cpu(self._attributes)

    def step(self, slices: Sequence[Slice]) -> None:
        """Steps `slices`."""
        if slices or self.is_joint:
            self._step(slices)

    def finish(self) -> None:
        """After the last call: copies back what it has set in groups and attributes."""
        stepped, self._stepped = self._stepped, None
        if stepped is not None:
            copy_back(self.optimizer, *stepped)

    def _completed(self, slices: Sequence[Slice]) -> list[Slice]:
        """One slice for each parameter, in the order of the groups; empty if it is not stepped."""
        empty = slices[0].data.new_empty(0) if slices else torch.empty(0)
        given = {part.parameter: part for part in slices}
        return [
            given[parameter] if parameter in given else Slice(parameter, empty, None, {})
            for parameter in self.group_of
        ]

    def _step(self, slices: Sequence[Slice]) -> None:
        is_on_cpu = any(part.data.device.type == "cpu" for part in slices)
        all_settings, attributes = self._on_cpu if is_on_cpu else (self._groups, self._attributes)
        groups: list[dict[str, Any]] = [{**settings, "params": []} for settings in all_settings]
        copy = copy_of(self.optimizer, groups, attributes)
        stand_ins: list[nn.Parameter] = []
        if self.is_joint:
            slices = self._completed(slices)
        for part in slices:
            stand_in = nn.Parameter(part.data)
            if not part.parameter.__dict__.keys() <= ENGINE_ATTRIBUTES:
                stand_in.__dict__.update(attributes_of(part.parameter))
            vars(stand_in)[FULL_NUMEL] = placement_of(part.parameter).shape.numel()
            stand_in.grad_dtype = None  # gradients may have another dtype
            stand_in.grad = part.grad
            stand_ins.append(stand_in)
            if part.state:
                copy.state[stand_in] = part.state
            groups[self.group_of[part.parameter]]["params"].append(stand_in)
        if self.is_joint:
            copy.state.update(other_states(self.optimizer))
        given = dict(vars(copy))
        result = self._call(copy)
        self.result = self.optimizer if result is copy else result
        for part, stand_in in zip(slices, stand_ins, strict=True):
            state = copy.state.get(stand_in, {})
            if state is not part.state:
                part.replace_state(state)
            if stand_in.grad is None and part.grad is not None:
                raise ValueError(dropped_gradients(self.optimizer))
            if not stand_in.__dict__.keys() <= ENGINE_ATTRIBUTES:  # the step may have set some
                part.parameter.__dict__.update(attributes_of(stand_in))
            if stand_in.data_ptr() != part.data.data_ptr():  # `p.data = p.data - update`
                part.data.copy_(stand_in.data)
        if not self.is_joint:  # the memory of the slices is freed before others are loaded
            copy.state.clear()
            for group in copy.param_groups:
                group["params"] = []
        self._stepped = copy, all_settings, given
