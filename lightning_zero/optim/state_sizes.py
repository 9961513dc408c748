"""States of an optimizer, found by one step of a copy of it on a small probe tensor.

[Note: Probe shapes] The sizes of a probe tensor are all different. The sizes of a state that is not
shaped like its parameter then show which of the parameter's sizes it has: Adafactor's (7, 1) and
(1, 5) have one number for each row and for each column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optim.clone import probe_state

__all__ = [
    "OptimizerStates",
    "StateSpec",
    "data_parallel_bytes",
    "full_checkpoint_bytes",
]

_Shape = tuple[int, ...]
_SMALL = (7, 5, 3, 2, 4)  # sizes of a probe tensor; 1 for further dims
_LARGE = (131, 137)  # probe of a large matrix: some optimizers factor matrices from 128 on


@dataclass(frozen=True)
class StateSpec:
    """States that an optimizer keeps for one parameter after its first step.

    Attributes:
        elementwise: Bytes per element of the states with the parameter's shape, by key.
        others: Shape and itemsize of each other tensor, such as a step counter.
        probe_shape: Shape of the probed tensor. See [Note: Probe shapes].
    """

    elementwise: dict[str, int] = field(default_factory=dict)
    others: tuple[tuple[_Shape, int], ...] = ()
    probe_shape: _Shape = ()

    @property
    def element_bytes(self) -> int:
        """Bytes of all elementwise states per element."""
        return sum(self.elementwise.values())

    @property
    def other_bytes(self) -> int:
        """Bytes of the other states for a shard of a parameter, independent of its length."""
        return sum(math.prod(shape) * itemsize for shape, itemsize in self.others)

    def full_bytes(self, shape: _Shape) -> int:
        """Bytes of all states of a parameter of `shape` that is stepped as a full tensor."""
        sizes = zip(self.probe_shape, shape, strict=False)
        size_of = {size: own for size, own in sizes if size > 1}
        others = sum(
            math.prod(size_of.get(size, size) for size in other) * itemsize
            for other, itemsize in self.others
        )
        return math.prod(shape) * self.element_bytes + others


class OptimizerStates:
    """States of every parameter of the given optimizers.

    Args:
        optimizers: Optimizers of the engine; their parameters may be on the meta device.
        fallback: States assumed for an optimizer that cannot be probed; None: raise an error.
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

    def of(
        self, parameter: nn.Parameter, dtype: torch.dtype, shape: _Shape | None = None
    ) -> StateSpec:
        """States of `parameter`, stepped in `dtype`; none if no optimizer has the parameter.

        `shape`: full shape of a parameter that an engine holds.

        Raises:
            ValueError: The optimizer cannot be probed, and there is no fallback.
        """
        member = self._member.get(parameter)
        if member is None or not parameter.requires_grad:
            return StateSpec()
        optimizer, group = member
        # States may depend on the number of dims: Adafactor factors matrices only.
        shape = _probe_shape(tuple(parameter.shape) if shape is None else shape)
        key = (id(optimizer), group, shape, dtype)
        if key not in self._known:
            self._known[key] = self._find(optimizer, group, shape, dtype)
        return self._known[key]

    def _find(
        self, optimizer: Optimizer, group: int, shape: _Shape, dtype: torch.dtype
    ) -> StateSpec:
        try:
            return _probe(optimizer, group, shape, dtype)
        except Exception as error:
            if self._fallback is not None:
                return self._fallback
            raise ValueError(
                f"the states of {type(optimizer).__name__} are unknown: it cannot step a single "
                f"tensor ({type(error).__name__}: {error}); plan with an optimizer such as AdamW."
            ) from error


def data_parallel_bytes(named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> int:
    """Bytes of model states that DistributedDataParallel holds on every rank, with gradients.

    Args:
        named: Parameters of the module, each once, in their own dtypes.
        optimizers: Optimizers of these parameters.
    """
    gradients = (p.numel() * p.dtype.itemsize for p in named.values() if p.requires_grad)
    return full_checkpoint_bytes(named, optimizers) + sum(gradients)


def full_checkpoint_bytes(
    named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> int:
    """Bytes of parameters and optimizer states in a full checkpoint.

    Rank 0 holds them in CPU memory while it saves. Arguments are those of `data_parallel_bytes`.
    """
    states, nbytes = OptimizerStates(optimizers, StateSpec()), 0
    for parameter in named.values():
        nbytes += parameter.numel() * parameter.dtype.itemsize
        nbytes += states.of(parameter, parameter.dtype).full_bytes(tuple(parameter.shape))
    return nbytes


def _probe_shape(shape: _Shape) -> _Shape:
    if len(shape) == len(_LARGE) and min(shape) >= min(_LARGE):
        return _LARGE
    num_dims = len(shape) or 1  # a shard has one dim
    return (*_SMALL[:num_dims], *[1] * (num_dims - len(_SMALL)))


def _probe(optimizer: Optimizer, index: int, shape: _Shape, dtype: torch.dtype) -> StateSpec:
    """Steps a copy of `optimizer` once, with the settings of group `index`, on a CPU tensor."""
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
