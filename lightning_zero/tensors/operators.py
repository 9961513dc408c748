"""Which operators of torch are elementwise."""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero.tensors.full_view import is_writing

__all__ = ["FOREACH", "is_elementwise_operator"]

FOREACH = "_foreach_"  # prefix of operators on lists of tensors
# Elementwise operators that torch does not tag.
_UNTAGGED = {
    "_to_copy",
    "copy",
    "empty_like",
    "fill",
    "floor_divide",
    "full_like",
    "isclose",
    "masked_fill",
    "ones_like",
    "zero",
    "zeros_like",
}
_REDUCTIONS = {"max", "min"}  # although their overloads of two tensors are elementwise


def is_elementwise_operator(func: Any) -> bool:
    """Whether an operator of torch is elementwise; also for operators on lists of tensors."""
    name = func.overloadpacket.__name__
    if name.startswith(FOREACH):
        return _has_elementwise_overload(name.removeprefix(FOREACH))
    if torch.Tag.data_dependent_output in func.tags:
        return False
    if torch.Tag.pointwise in func.tags or name in _UNTAGGED:
        return True
    return is_writing(name) and _has_elementwise_overload(name)


def _has_elementwise_overload(name: str) -> bool:
    """Whether torch tags an overload of `name`, without the in-place underscore, as pointwise."""
    name = name.removesuffix("_")
    if name in _UNTAGGED:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _REDUCTIONS:
        return False
    return any(torch.Tag.pointwise in getattr(packet, one).tags for one in packet.overloads())
