"""Tensors made of tensors, such as the quantised states of torchao's optimizers.

Such a tensor has codes, scales and the like inside, which torch's protocol for tensor subclasses
(`__tensor_flatten__`) tells. Copying one into a plain tensor would dequantise it, so whoever moves,
counts or stores states looks at what is inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "is_composite",
    "map_tensors",
    "plain_tensors",
    "unflatten_composites",
    "flatten_composites",
]

_HOW = "__tensor__"  # beside the parts: class, context, shape and strides

_T = TypeVar("_T")


def is_composite(value: object) -> bool:
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def flatten_composites(tree: Any) -> Any:
    """The same tree with a dict of plain tensors in the place of every tensor made of tensors."""
    return tree_map(_parts_of, tree)


def unflatten_composites(tree: Any) -> Any:
    """The inverse of `flatten_composites`."""
    return tree_map(_whole_of, tree, is_leaf=_is_taken_apart)


def plain_tensors(tree: Any) -> list[Tensor]:
    """All plain tensors in a tree, and in its tensors made of tensors."""
    return [leaf for leaf in tree_leaves(flatten_composites(tree)) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: _T) -> _T:
    """The same tree with `function` applied to every plain tensor, also inside of others."""
    mapped: _T = unflatten_composites(tree_map_only(Tensor, function, flatten_composites(tree)))
    return mapped


def _parts_of(value: Any) -> Any:
    if not is_composite(value):
        return value
    names, context = value.__tensor_flatten__()
    how = (type(value), context, value.size(), value.stride())
    return {**{name: _parts_of(getattr(value, name)) for name in names}, _HOW: how}


def _is_taken_apart(value: object) -> bool:
    return isinstance(value, dict) and _HOW in value


def _whole_of(value: Any) -> Any:
    if not _is_taken_apart(value):
        return value
    kind, context, size, stride = value[_HOW]
    parts = {name: _whole_of(part) for name, part in value.items() if name != _HOW}
    return kind.__tensor_unflatten__(parts, context, size, stride)
