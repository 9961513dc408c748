"""Steps slices of parameters with a copy of the user's optimizer.

[Note: Stand-ins] An optimizer knows a parameter by its object: as a member of a group and as the
key of its state. To step a slice of it, in memory of our choice, perhaps on a worker's thread, a
*copy* of the optimizer (same class, same attributes, no hooks) gets groups with the same settings
whose members are stand-ins: fresh parameters over the slice, with its gradient and its state. The
user's objects are not touched, so nobody sees a step half done.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optim.trial import raw_step
from lightning_zero.tensors.guarded import attributes_of

__all__ = ["Slice", "OptimizerClone"]


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
        self._groups: list[dict[str, Any]] = []
        for index, group in enumerate(optimizer.param_groups):
            self.group_of.update(dict.fromkeys(group["params"], index))
            settings = {key: value for key, value in group.items() if key != "params"}
            for key, value in settings.items():
                if isinstance(value, Tensor):
                    settings[key] = value.clone()
            self._groups.append(settings)
        self._attributes = dict(optimizer.__dict__)
        self._attributes.pop("step", None)  # a scheduler's wrapper is bound to the original

    def step(self, slices: Sequence[Slice]) -> None:
        """One step on `slices`. See [Note: Stand-ins]."""
        copy: Optimizer = object.__new__(type(self.optimizer))
        copy.__dict__.update(self._attributes)
        copy._optimizer_step_pre_hooks = OrderedDict()
        copy._optimizer_step_post_hooks = OrderedDict()
        copy.state = defaultdict(dict)
        copy.param_groups = [{**settings, "params": []} for settings in self._groups]
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
