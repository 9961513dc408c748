"""States of an optimizer, found by one step of a copy of it on a small probe tensor.

[Note: Probe shapes] The sizes of a probe tensor are all different. The sizes of a state that is not
shaped like its parameter then show which of the parameter's sizes it has: Adafactor's (7, 1) and
(1, 5) have one number for each row and for each column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.layout.flat import StateBlocks
from lightning_zero.optim.blocks import state_blocks_of, unpack_state
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
        elementwise: Bytes per element of the states with the parameter's shape, by key. They are in
            files where states of a shard are.
        others: Shape and itemsize of each other tensor, such as a step counter.
        probe_shape: Shape of the probed tensor. See [Note: Probe shapes].
        block_numel: Elements of a block.
        block_bytes: Bytes per block of the states with `StateBlocks.memory_keys`.
    """

    elementwise: dict[str, int] = field(default_factory=dict)
    others: tuple[tuple[_Shape, int], ...] = ()
    probe_shape: _Shape = ()
    block_numel: int = 1
    block_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        """Bytes of all elementwise states per element."""
        return sum(self.elementwise.values())

    def memory_bytes(self, numel: int) -> int:
        """Bytes of the states of a slice of `numel` elements without `elementwise`."""
        others = sum(math.prod(shape) * itemsize for shape, itemsize in self.others)
        return -(-numel // self.block_numel) * self.block_bytes + others

    def slice_bytes(self, numel: int) -> int:
        """Bytes of all states of a slice of `numel` elements."""
        return numel * self.element_bytes + self.memory_bytes(numel)

    def full_bytes(self, shape: _Shape) -> int:
        """Bytes of all states of a parameter of `shape` that is stepped as a full tensor."""
        sizes = zip(self.probe_shape, shape, strict=False)
        size_of = {size: own for size, own in sizes if size > 1}
        others = sum(
            math.prod(size_of.get(size, size) for size in other) * itemsize
            for other, itemsize in self.others
        )
        numel = math.prod(shape)
        return self.slice_bytes(numel) - self.slice_bytes(0) + others


class OptimizerStates:
    """States of every parameter of the given optimizers.

    Args:
        optimizers: Optimizers of the engine; their parameters may be on the meta device.
        fallback: States assumed for an optimizer that cannot be probed; None: raise an error.
        are_unpacked: Whether states are those of a full checkpoint.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        fallback: StateSpec | None = None,
        *,
        are_unpacked: bool = False,
    ) -> None:
        self._fallback = fallback
        self._are_unpacked = are_unpacked
        self._member = {
            parameter: (optimizer, index)
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._known: dict[tuple[int, int, _Shape, int, torch.dtype], StateSpec] = {}

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
        shape = tuple(parameter.shape) if shape is None else shape
        # Whether states have blocks depends on the size of the tensor.
        numel = math.prod(shape) if state_blocks_of(optimizer).keys else 0
        key = (id(optimizer), group, _probe_shape(shape), numel, dtype)
        if key not in self._known:
            self._known[key] = self._find(optimizer, *key[1:])
        return self._known[key]

    def _find(
        self, optimizer: Optimizer, group: int, shape: _Shape, numel: int, dtype: torch.dtype
    ) -> StateSpec:
        try:
            values = torch.ones(shape, dtype=dtype)
            state = probe_state(optimizer, values, group, full_numel=numel or None)
            if self._are_unpacked:
                state = unpack_state(optimizer, state)
            return _spec_of(state, shape, state_blocks_of(optimizer))
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
    return _full_bytes(named, OptimizerStates(optimizers, StateSpec())) + sum(gradients)


def full_checkpoint_bytes(
    named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> int:
    """Bytes of parameters and optimizer states in a full checkpoint.

    Rank 0 holds them in CPU memory while it saves. Arguments are those of `data_parallel_bytes`.
    """
    return _full_bytes(named, OptimizerStates(optimizers, StateSpec(), are_unpacked=True))


def _full_bytes(named: Mapping[str, nn.Parameter], states: OptimizerStates) -> int:
    nbytes = 0
    for parameter in named.values():
        nbytes += parameter.numel() * parameter.dtype.itemsize
        nbytes += states.of(parameter, parameter.dtype).full_bytes(tuple(parameter.shape))
    return nbytes


def _probe_shape(shape: _Shape) -> _Shape:
    if len(shape) == len(_LARGE) and min(shape) >= min(_LARGE):
        return _LARGE
    num_dims = len(shape) or 1  # a shard has one dim
    return (*_SMALL[:num_dims], *[1] * (num_dims - len(_SMALL)))


def _spec_of(state: Mapping[str, Any], shape: _Shape, blocks: StateBlocks) -> StateSpec:
    """States like those of a parameter of `shape` after a step."""
    elementwise: dict[str, int] = {}
    others: list[tuple[_Shape, int]] = []
    block_bytes = 0
    for key, value in state.items():
        if key in blocks.memory_keys:
            block_bytes += value.element_size()
        elif isinstance(value, Tensor) and value.shape == shape:
            elementwise[key] = value.element_size()
        else:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            others += [(tuple(leaf.shape), leaf.element_size()) for leaf in tensors]
    block_numel = 1 if blocks.keys.isdisjoint(state) else blocks.numel
    return StateSpec(elementwise, tuple(others), shape, block_numel, block_bytes)
