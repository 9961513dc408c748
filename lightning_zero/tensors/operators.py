"""Which operators of torch are elementwise, and which functions write in place."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FOREACH", "is_elementwise_operator", "is_writing"]

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
_NO_OPERATORS = {"__init__", "__invert__", "__index__", "__int__"}
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
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def is_writing(name: str) -> bool:
    """Whether a function writes in place: by torch's convention, `name_` and `__iadd__`."""
    if name == "__setitem__":
        return True
    is_operator = name.startswith("__i") and name.endswith("__") and name not in _NO_OPERATORS
    return is_operator or (name.endswith("_") and not name.endswith("__"))
