"""Which operators of torch are elementwise, and which functions may write without torch's notice.

[Note: Functions that may write] Torch's own operators increment the version counter of what they
write, except for those of fused optimizers. Operators of extensions need not, so they are judged by
their schema: an argument with an alias annotation may be written, now or through a result that is a
view of it. The schemas of collectives (`c10d`) annotate nothing. Nothing is known about a Python
function of another package.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = [
    "FOREACH",
    "is_elementwise_operator",
    "is_writing",
    "may_write",
    "reads_only",
    "repoints",
]

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
_UNCOUNTED = "_fused_"  # prefix of optimizers' operators, which increment no version counter
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
    return any(torch.Tag.pointwise in getattr(packet, one).tags for one in packet.overloads())


def is_writing(name: str) -> bool:
    """Whether a function writes in place: by torch's convention, `name_` and `__iadd__`."""
    if name == "__setitem__":
        return True
    is_operator = name.startswith("__i") and name.endswith("__") and name not in _NO_OPERATORS
    return is_operator or (name.endswith("_") and not name.endswith("__"))


def may_write(func: Any) -> bool:
    """Whether a function may write to a plain tensor without incrementing its version counter.

    See [Note: Functions that may write].
    """
    if hasattr(func, "overloads"):  # an operator, of which no overload is chosen
        return any(may_write(getattr(func, name)) for name in func.overloads())
    if getattr(func, "namespace", "aten") != "aten":
        return any(argument.alias_info for argument in func._schema.arguments)
    if func.__name__.startswith(_UNCOUNTED):
        return True
    package, *rest = (getattr(func, "__module__", None) or "torch").split(".")
    return package not in ("torch", "builtins") or rest[:1] == ["distributed"]


def reads_only(func: Any, name: str) -> bool:
    """Whether an operator that is not torch's only reads argument `name`, and on every rank.

    `send` and `scatter` read on one rank: the others would not take part in an all-gather.
    """
    if func.namespace == "c10d":
        return name.startswith("input") and func.overloadpacket.__name__ != "scatter_"
    return not any(a.alias_info for a in func._schema.arguments if a.name == name)


@cache
def repoints(name: str) -> bool:
    """Whether an in-place function makes its tensor one of other memory or of another shape."""
    packet = getattr(torch.ops.aten, name, None) if name.endswith("_") else None
    if packet is None or name.startswith("__") or name == "detach_":
        return False
    return any(torch.Tag.inplace_view in getattr(packet, one).tags for one in packet.overloads())
