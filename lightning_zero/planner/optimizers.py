"""What an optimizer keeps for a parameter, found out by one step of a copy of it on a toy."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["KeptStates", "OPTIMIZER_NAMES", "States", "make_optimizer"]

_TOY_SIZES = (7, 5, 3, 2)  # of its dimensions: no state that is one number has such a shape
_FACTORIES: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
OPTIMIZER_NAMES = tuple(sorted([*_FACTORIES, "sgd_momentum"]))


@dataclass(frozen=True)
class States:
    """What an optimizer keeps for one parameter after its first step.

    Attributes:
        elementwise: By key, bytes for each element.
        scalar_bytes: Of states that are one number for the parameter, as its step counter.
    """

    elementwise: dict[str, int] = field(default_factory=dict)
    scalar_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        """Of all elementwise states, for each element."""
        return sum(self.elementwise.values())


class KeptStates:
    """The states of every parameter of some optimizers.

    Args:
        optimizers: As the engine gets them; their parameters may be on the meta device.
        fallback: What those are taken to keep that cannot step a toy; None: they are refused.
    """

    def __init__(self, optimizers: Sequence[Optimizer], fallback: States | None = None) -> None:
        self._fallback = fallback
        self._member = {
            parameter: (optimizer, index)
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._known: dict[tuple[int, int, int, torch.dtype], States] = {}

    def of(self, parameter: nn.Parameter, dtype: torch.dtype) -> States:
        """What is kept for `parameter`, stepped in `dtype`; nothing where no optimizer has it."""
        member = self._member.get(parameter)
        if member is None or not parameter.requires_grad:
            return States()
        optimizer, group = member
        # Adafactor, say, keeps another state for a matrix than for a vector.
        num_dims = len(parameter.shape)
        key = (id(optimizer), group, num_dims, dtype)
        if key not in self._known:
            self._known[key] = self._find(optimizer, group, num_dims, dtype)
        return self._known[key]

    def _find(self, optimizer: Optimizer, group: int, num_dims: int, dtype: torch.dtype) -> States:
        try:
            return _try(optimizer, group, num_dims, dtype)
        except Exception as error:
            if self._fallback is not None:
                return self._fallback
            raise ValueError(
                f"{type(optimizer).__name__} cannot step a tensor by itself "
                f"({type(error).__name__}: {error}), so what it keeps cannot be told; plan with an "
                "optimizer such as AdamW."
            ) from error


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """One of torch's optimizers with its default settings; "sgd_momentum" is SGD that has one.

    Raises:
        ValueError: There is none of this name; says which there are.
    """
    key = name.lower()
    if key == "sgd_momentum":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if key not in _FACTORIES:
        known = ", ".join(OPTIMIZER_NAMES)
        raise ValueError(f"there is no optimizer {name!r}; torch has {known}.")
    return _FACTORIES[key](parameters, lr=0.1)  # type: ignore[call-arg]


def _try(optimizer: Optimizer, index: int, num_dims: int, dtype: torch.dtype) -> States:
    """Steps a copy of `optimizer` once, with the settings of one group, on a small CPU tensor."""
    shape = [*_TOY_SIZES[:num_dims], *[1] * (num_dims - len(_TOY_SIZES))]
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the original
    copy.state = defaultdict(dict)
    copy._optimizer_step_pre_hooks = OrderedDict()
    copy._optimizer_step_post_hooks = OrderedDict()
    toy = nn.Parameter(torch.ones(shape, dtype=dtype))
    toy.grad = torch.ones_like(toy)
    settings = {k: v for k, v in optimizer.param_groups[index].items() if k != "params"}
    copy.param_groups = [{**settings, "params": [toy]}]
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    with torch.random.fork_rng(devices=[]):  # it may draw
        step(copy)
    elementwise, scalar_bytes = {}, 0
    for key, value in copy.state.get(toy, {}).items():
        if isinstance(value, Tensor) and value.shape == toy.shape:
            elementwise[key] = value.element_size()
        elif isinstance(value, Tensor):
            scalar_bytes += value.numel() * value.element_size()
    return States(elementwise, scalar_bytes)
