"""Tensors made of tensors, such as the quantized states of torchao's optimizers.

Such a tensor holds codes, scales and other inner tensors, which torch's protocol for wrapper
subclasses (`__tensor_flatten__`) lists. Copying it into a plain tensor would dequantize it, so code
that moves, counts or stores optimizer states works on the inner tensors.
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

_SPEC_KEY = "__tensor__"  # next to the inner tensors: class, context, shape and strides

_T = TypeVar("_T")


def is_composite(value: object) -> bool:
    """Whether `value` is a tensor made of tensors (a traceable wrapper subclass)."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def flatten_composites(tree: Any) -> Any:
    """Replaces every composite tensor of a tree by a dict of its plain inner tensors."""
    return tree_map(_flattened, tree)


def unflatten_composites(tree: Any) -> Any:
    """The inverse of `flatten_composites`."""
    return tree_map(_unflattened, tree, is_leaf=_is_flattened)


def plain_tensors(tree: Any) -> list[Tensor]:
    """All plain tensors of a tree, including those inside composite tensors."""
    return [leaf for leaf in tree_leaves(flatten_composites(tree)) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: _T) -> _T:
    """Applies `function` to every plain tensor of a tree, including those inside composites."""
    mapped: _T = unflatten_composites(tree_map_only(Tensor, function, flatten_composites(tree)))
    return mapped


def _flattened(value: Any) -> Any:
    if not is_composite(value):
        return value
    names, context = value.__tensor_flatten__()
    spec = (type(value), context, value.size(), value.stride())
    return {**{name: _flattened(getattr(value, name)) for name in names}, _SPEC_KEY: spec}


def _is_flattened(value: object) -> bool:
    return isinstance(value, dict) and _SPEC_KEY in value


def _unflattened(value: Any) -> Any:
    if not _is_flattened(value):
        return value
    kind, context, size, stride = value[_SPEC_KEY]
    inner = {name: _unflattened(part) for name, part in value.items() if name != _SPEC_KEY}
    return kind.__tensor_unflatten__(inner, context, size, stride)
