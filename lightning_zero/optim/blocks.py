"""Optimizers whose states have numbers for blocks of elements, such as scales of 8-bit states.

Such an optimizer has the attributes of `_BlockOptimizer`. With `state_blocks`, every shard begins
with a block, and with `full_numel` a step on a slice knows the size of its full tensor. The methods
convert saved states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.layout.flat import StateBlocks
from lightning_zero.tensors.composite import map_tensors, plain_tensors
from lightning_zero.tensors.guarded import FULL_NUMEL

__all__ = [
    "full_numel",
    "pack_state",
    "state_blocks",
    "state_blocks_of",
    "unpack_state",
    "unpacked_bytes",
]


@runtime_checkable
class _BlockOptimizer(Protocol):
    """The attributes of an optimizer with blocks."""

    state_blocks: StateBlocks

    def pack_state(self, state: Mapping[str, Any], numel: int) -> dict[str, Any]:
        """A state as the optimizer keeps it, from a slice of a full tensor of `numel` elements."""

    def unpack_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state for a full checkpoint, from full tensors."""


def state_blocks_of(optimizer: Optimizer) -> StateBlocks:
    """Blocks of the optimizer's states."""
    return optimizer.state_blocks if isinstance(optimizer, _BlockOptimizer) else StateBlocks()


def state_blocks(optimizers: Sequence[Optimizer]) -> dict[int, StateBlocks]:
    """Blocks of the states of the optimizers that have some, by index, for `make_plan`."""
    blocks = {index: state_blocks_of(optimizer) for index, optimizer in enumerate(optimizers)}
    return {index: found for index, found in blocks.items() if found.keys}


def full_numel(parameter: Tensor) -> int:
    """Elements of the full tensor of a parameter; of a stand-in, those of the user's parameter."""
    numel: int = getattr(parameter, FULL_NUMEL, parameter.numel())
    return numel


def pack_state(optimizer: Optimizer, state: Mapping[str, Any], numel: int) -> dict[str, Any]:
    """Entries of a saved state as the optimizer keeps them. `numel`: of the full tensor."""
    if isinstance(optimizer, _BlockOptimizer):
        return optimizer.pack_state(state, numel)
    return dict(state)


def unpack_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of full tensors as a full checkpoint has it."""
    if isinstance(optimizer, _BlockOptimizer):
        return optimizer.unpack_state(state)
    return dict(state)


def unpacked_bytes(optimizer: Optimizer, state: Mapping[str, Any]) -> int:
    """Bytes that a state takes in a full checkpoint."""
    if isinstance(optimizer, _BlockOptimizer):
        state = unpack_state(optimizer, map_tensors(_on_meta, state))
    return sum(tensor.nbytes for tensor in plain_tensors(state))


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
