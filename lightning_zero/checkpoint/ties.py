"""Tensors that are the same one under several names, and what they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_zero.tensors.lazy import StoredTensor

__all__ = ["identity", "nbytes", "tensors_in", "total_nbytes"]


def identity(tensor: Tensor) -> object:
    """Equal for two tensors that are the same one; both must be alive."""
    if isinstance(tensor, StoredTensor) or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor, wherever they are."""
    return tensor.numel() * tensor.element_size()


def tensors_in(tree: object) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples; one that is there twice comes once."""
    seen: set[object] = set()
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            if (key := identity(value)) not in seen:
                seen.add(key)
                yield value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)


def total_nbytes(tree: object) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples; tied ones count once."""
    return sum(map(nbytes, tensors_in(tree)))
