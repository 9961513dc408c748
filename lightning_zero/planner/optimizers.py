"""What an optimizer keeps for a parameter, found out by one step of a copy of it on a toy.

[Note: Sizes of toys] The sizes of a toy are all different, so that a state that is not shaped like
its parameter tells by its own sizes which of the parameter's it has: Adafactor's (7, 1) and (1, 5)
are one number for each row and each column.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optim.clone import probe_state

__all__ = [
    "OPTIMIZER_NAMES",
    "OptimizerStates",
    "StateSpec",
    "data_parallel_bytes",
    "full_checkpoint_bytes",
    "make_optimizers",
]

_Shape = tuple[int, ...]
_SMALL = (7, 5, 3, 2, 4)  # sizes of a toy; 1 beyond
_LARGE = (131, 137)  # of matrices: some optimizers factor these from 128 on
_FACTORIES: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
OPTIMIZER_NAMES = tuple(sorted([*_FACTORIES, "sgd_momentum"]))


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps for one parameter after its first step.

    Attributes:
        elementwise: By key, bytes for each element.
        others: Shape and bytes of an element of each other tensor, as a step counter.
        toy: Shape of the parameter that it was tried on. See [Note: Sizes of toys].
    """

    elementwise: dict[str, int] = field(default_factory=dict)
    others: tuple[tuple[_Shape, int], ...] = ()
    toy: _Shape = ()

    @property
    def element_bytes(self) -> int:
        """Of all elementwise states, for each element."""
        return sum(self.elementwise.values())

    @property
    def other_bytes(self) -> int:
        """Of other states, for a slice of a parameter, whatever its length."""
        return sum(math.prod(shape) * itemsize for shape, itemsize in self.others)

    def full_bytes(self, shape: _Shape) -> int:
        """Of all states of a parameter that is stepped whole."""
        size_of = {size: own for size, own in zip(self.toy, shape, strict=False) if size > 1}
        others = sum(
            math.prod(size_of.get(size, size) for size in other) * itemsize
            for other, itemsize in self.others
        )
        return math.prod(shape) * self.element_bytes + others


class OptimizerStates:
    """The states of every parameter of some optimizers.

    Args:
        optimizers: As the engine gets them; their parameters may be on the meta device.
        fallback: What those are taken to keep that cannot step a toy; None: they are refused.
    """

    def __init__(self, optimizers: Sequence[Optimizer], fallback: StateSpec | None = None) -> None:
        self._fallback = fallback
        self._member = {
            parameter: (optimizer, index)
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._known: dict[tuple[int, int, _Shape, torch.dtype], StateSpec] = {}

    def of(self, parameter: nn.Parameter, dtype: torch.dtype) -> StateSpec:
        """What is kept for `parameter`, stepped in `dtype`; nothing where no optimizer has it."""
        member = self._member.get(parameter)
        if member is None or not parameter.requires_grad:
            return StateSpec()
        optimizer, group = member
        # Adafactor, say, keeps another state for a matrix than for a vector.
        toy = _toy_like(tuple(parameter.shape))
        key = (id(optimizer), group, toy, dtype)
        if key not in self._known:
            self._known[key] = self._find(optimizer, group, toy, dtype)
        return self._known[key]

    def _find(self, optimizer: Optimizer, group: int, toy: _Shape, dtype: torch.dtype) -> StateSpec:
        try:
            return _try(optimizer, group, toy, dtype)
        except Exception as error:
            if self._fallback is not None:
                return self._fallback
            raise ValueError(
                f"{type(optimizer).__name__} cannot step a tensor by itself "
                f"({type(error).__name__}: {error}), so what it keeps cannot be told; plan with an "
                "optimizer such as AdamW."
            ) from error


def data_parallel_bytes(named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> int:
    """Bytes of states that DistributedDataParallel holds on every rank, gradients among them.

    Args:
        named: The module's parameters, each once, in the dtypes in which they are given.
        optimizers: Over them.
    """
    gradients = (p.numel() * p.dtype.itemsize for p in named.values() if p.requires_grad)
    return full_checkpoint_bytes(named, optimizers) + sum(gradients)


def full_checkpoint_bytes(
    named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> int:
    """Bytes of parameters and optimizer states in a checkpoint of the full form.

    Rank 0 holds them in CPU memory while it saves one. Arguments are as in `data_parallel_bytes`.
    """
    states, nbytes = OptimizerStates(optimizers, StateSpec()), 0
    for parameter in named.values():
        nbytes += parameter.numel() * parameter.dtype.itemsize
        nbytes += states.of(parameter, parameter.dtype).full_bytes(tuple(parameter.shape))
    return nbytes


def make_optimizers(
    name: str, named: Mapping[str, nn.Parameter], blocks: Collection[str] = ()
) -> list[Optimizer]:
    """Optimizers of torch with their default settings, over all parameters that are trained.

    "sgd_momentum" is SGD that has one. Muon steps matrices only, and gets those of the blocks;
    AdamW gets the rest.

    Args:
        name: Of the optimizer's class, in whatever case.
        named: Parameters by name.
        blocks: Qualified names of a model's repeated blocks.

    Raises:
        ValueError: There is none of this name, which says which there are; or nothing for it.
    """
    key = name.lower()
    trained = {n: p for n, p in named.items() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model is trained.")
    if key not in OPTIMIZER_NAMES:
        known = ", ".join(OPTIMIZER_NAMES)
        raise ValueError(f"there is no optimizer {name!r}; torch has {known}.")
    if key == "sgd_momentum":
        return [torch.optim.SGD(trained.values(), lr=0.1, momentum=0.9)]
    if key != "muon":
        return [_FACTORIES[key](trained.values(), lr=0.1)]  # type: ignore[call-arg]
    prefixes = tuple(f"{block}." for block in blocks)
    matrices = [n for n, p in trained.items() if p.dim() == 2 and n.startswith(prefixes)]
    if not matrices:
        raise ValueError("Muon steps the matrices of repeated blocks, and the model has none.")
    rest = [p for n, p in trained.items() if n not in matrices]
    muon = torch.optim.Muon([trained[n] for n in matrices])
    return [muon, torch.optim.AdamW(rest)] if rest else [muon]


def _toy_like(shape: _Shape) -> _Shape:
    if len(shape) == len(_LARGE) and min(shape) >= min(_LARGE):
        return _LARGE
    num_dims = len(shape) or 1  # a slice has one
    return (*_SMALL[:num_dims], *[1] * (num_dims - len(_SMALL)))


def _try(optimizer: Optimizer, index: int, shape: _Shape, dtype: torch.dtype) -> StateSpec:
    """Steps a copy of `optimizer` once, with the settings of one group, on a small CPU tensor."""
    state = probe_state(optimizer, torch.ones(shape, dtype=dtype), index)
    elementwise: dict[str, int] = {}
    others: list[tuple[_Shape, int]] = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            elementwise[key] = value.element_size()
        else:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            others += [(tuple(leaf.shape), leaf.element_size()) for leaf in tensors]
    return StateSpec(elementwise, tuple(others), shape)
