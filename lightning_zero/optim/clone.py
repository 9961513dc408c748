"""Copies of the user's optimizer, and steps of slices of parameters with them.

[Note: Stand-ins] An optimizer knows a parameter by its object: as a member of a group and as the
key of its state. To step a slice of it, in memory of our choice, perhaps on a worker's thread, a
*copy* of the optimizer (same class, same attributes, no hooks) gets groups with the same settings
whose members are stand-ins: fresh parameters over the slice, with its gradient and its state. The
user's objects are not touched, so nobody sees a step half done.

[Note: Numbers on their way] A loss scaler, or a rate that is a tensor, rests on the device. torch's
fused steps send such a number to the CPU without waiting, and read it there at once, before it has
come. So whoever steps on the CPU gets numbers that are there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.tensors.guarded import attributes_of

__all__ = [
    "OptimizerClone",
    "Slice",
    "copy_of",
    "enter_training",
    "is_device_scalar",
    "scalars_to_cpu",
    "parameters_of",
    "raw_step",
    "settings_of",
    "probe_state",
]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def copy_of(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    attributes: Mapping[str, Any] | None = None,
) -> Optimizer:
    """One of the same class over `groups`, without state or hooks, to be stepped by `raw_step`.

    `attributes`: of `optimizer`, as they were; None: as they are.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__ if attributes is None else attributes)
    for name in list(copy.__dict__):
        if callable(getattr(type(optimizer), name, None)):
            del copy.__dict__[name]  # a wrapper, a scheduler's of `step` say, around the original
    copy._optimizer_step_pre_hooks = OrderedDict()
    copy._optimizer_step_post_hooks = OrderedDict()
    copy.state = defaultdict(dict)
    copy.param_groups = groups
    return copy


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group; numbers that rest in tensors are copied."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def is_device_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and value.device.type != "cpu"


def scalars_to_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`; 0-dim tensors are on the CPU, and there. See [Note: Numbers on their way]."""
    return {key: value.cpu() if is_device_scalar(value) else value for key, value in values.items()}


def raw_step(optimizer: Optimizer, **arguments: Any) -> None:
    """The step function itself, under the wrapper that torch puts around it to call hooks."""
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    step(optimizer, **arguments)


def enter_training(optimizer: Optimizer) -> None:
    """A schedule-free optimizer is born in evaluation, where it cannot be stepped."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        with suppress(TypeError):  # another kind of `train`, which wants arguments
            train()


def probe_state(optimizer: Optimizer, values: Tensor, group: int = 0) -> dict[str, Any]:
    """The state that a copy of `optimizer` has of a parameter with these values after one step.

    `group`: whose settings it has. Gradients are ones.
    """
    toy = nn.Parameter(values)
    toy.grad = torch.ones_like(toy)
    settings = settings_of(optimizer.param_groups[group])
    copy = copy_of(optimizer, [{**settings, "params": [toy]}])
    with torch.random.fork_rng(devices=[]):  # it may draw
        enter_training(copy)
        try:
            raw_step(copy)
        except TypeError:  # it wants a closure
            raw_step(copy, closure=lambda: 0.0)
    state: dict[str, Any] = copy.state.get(toy, {})
    return state


@dataclass
class Slice:
    """A part of one parameter of the user's."""

    parameter: nn.Parameter
    data: Tensor  # stepped in place: 1-D, or the whole parameter, n-D
    grad: Tensor  # like `data`
    state: dict[str, Any]  # the optimizer's; replaced by what it knows after the step


class OptimizerClone:
    """An optimizer as it is now, to be stepped later: a scheduler may change the rate meanwhile.

    Attributes:
        optimizer: The user's.
        group_of: Index of the group of every member.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.group_of: dict[nn.Parameter, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            self.group_of.update(dict.fromkeys(group["params"], index))
        self._groups = [settings_of(group) for group in optimizer.param_groups]
        self._attributes = dict(optimizer.__dict__)

    @cached_property
    def _on_cpu(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Settings and attributes for steps on the CPU."""
        groups = [scalars_to_cpu(settings) for settings in self._groups]
        return groups, scalars_to_cpu(self._attributes)

    def step(self, slices: Sequence[Slice]) -> None:
        """One step on `slices`, of one device. See [Note: Stand-ins]."""
        is_on_cpu = slices[0].data.device.type == "cpu"
        all_settings, attributes = self._on_cpu if is_on_cpu else (self._groups, self._attributes)
        groups: list[dict[str, Any]] = [{**settings, "params": []} for settings in all_settings]
        copy = copy_of(self.optimizer, groups, attributes)
        stand_ins = [_stand_in(part) for part in slices]
        for part, stand_in in zip(slices, stand_ins, strict=True):
            if part.state:
                copy.state[stand_in] = part.state
            groups[self.group_of[part.parameter]]["params"].append(stand_in)
        raw_step(copy)
        for part, stand_in in zip(slices, stand_ins, strict=True):
            part.state = copy.state.get(stand_in, {})
            if stand_in.data_ptr() != part.data.data_ptr():  # `p.data = p.data - update`
                part.data.copy_(stand_in.data)


def _stand_in(part: Slice) -> nn.Parameter:
    stand_in = nn.Parameter(part.data)
    if len(part.parameter.__dict__) > 1:  # what a user has written on it
        stand_in.__dict__.update(attributes_of(part.parameter))
    stand_in.grad_dtype = None  # gradients may have another dtype
    stand_in.grad = part.grad
    return stand_in
