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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.tensors.guarded import attributes_of

__all__ = [
    "Brought",
    "OptimizerClone",
    "Slice",
    "copy_of",
    "is_number_elsewhere",
    "numbers_on_cpu",
    "raw_step",
    "settings_of",
]


def copy_of(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    attributes: Mapping[str, Any] | None = None,
) -> Optimizer:
    """One of the same class over `groups`, without state or hooks, to be stepped by `raw_step`.

    Args:
        optimizer: The user's.
        groups: Become the copy's.
        attributes: Of `optimizer`, as they were; None: as they are.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__ if attributes is None else attributes)
    copy.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the original
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


def is_number_elsewhere(value: Any) -> bool:
    """Whether it is a 0-dim tensor of a device."""
    return isinstance(value, Tensor) and not value.dim() and value.device.type != "cpu"


def numbers_on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`; 0-dim tensors are on the CPU, and there. See [Note: Numbers on their way]."""
    return {
        key: value.cpu() if is_number_elsewhere(value) else value for key, value in values.items()
    }


@dataclass(frozen=True)
class Brought:
    """A setting of a group that is on the CPU for one step. See [Note: Numbers on their way].

    Attributes:
        group: Of the user's optimizer.
        key: Of the setting.
        number: The user's own tensor.
        copy: What took its place.
    """

    group: dict[str, Any]
    key: str
    number: Tensor
    copy: Tensor

    def give_back(self) -> None:
        """The user's tensor takes its place again, with what the step has written to it."""
        if self.group.get(self.key) is not self.copy:
            return  # the step has set it anew
        if self.copy._version:
            self.number.copy_(self.copy)
        self.group[self.key] = self.number


def raw_step(optimizer: Optimizer) -> None:
    """The step function itself, under the wrapper that torch puts around it to call hooks."""
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    step(optimizer)


@dataclass
class Slice:
    """A part of one parameter.

    Attributes:
        parameter: The user's.
        data: Stepped in place: 1-D, or the whole parameter, n-D.
        grad: Like `data`.
        state: What the optimizer knows of it; replaced by what it knows after the step.
    """

    parameter: nn.Parameter
    data: Tensor
    grad: Tensor
    state: dict[str, Any] = field(default_factory=dict)


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
        return [numbers_on_cpu(settings) for settings in self._groups], numbers_on_cpu(
            self._attributes
        )

    def step(self, slices: Sequence[Slice]) -> None:
        """One step on `slices`, of one device. See [Note: Stand-ins]."""
        is_on_cpu = slices[0].data.device.type == "cpu"
        all_settings, attributes = self._on_cpu if is_on_cpu else (self._groups, self._attributes)
        groups: list[dict[str, Any]] = [{**settings, "params": []} for settings in all_settings]
        copy = copy_of(self.optimizer, groups, attributes)
        stand_ins = []
        for part in slices:
            stand_in = _stand_in(part)
            if part.state:
                copy.state[stand_in] = part.state
            copy.param_groups[self.group_of[part.parameter]]["params"].append(stand_in)
            stand_ins.append(stand_in)
        raw_step(copy)
        for part, stand_in in zip(slices, stand_ins, strict=True):
            part.state = copy.state.get(stand_in, {})


def _stand_in(part: Slice) -> nn.Parameter:
    stand_in = nn.Parameter(part.data)
    if len(part.parameter.__dict__) > 1:  # what a user has written on it
        stand_in.__dict__.update(attributes_of(part.parameter))
    stand_in.grad_dtype = None  # gradients may have another dtype
    stand_in.grad = part.grad
    return stand_in
