"""Tensors whose values are read, for example from a file, when they are used.

[Note: Lazy tensors] Optimizer states on NVMe and the entries of an opened checkpoint are
`LazyTensor`s: they have a shape and a dtype but no memory, and every torch function that uses one
reads its values at that moment. `read_flat` reads only a flat range: a rank that loads a checkpoint
reads only its own shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["LazyTensor", "arguments_of", "read_flat", "values_reader", "written_by"]

_Read = Callable[[int, int], Tensor]


class LazyTensor(Tensor):
    """A read-only tensor on the CPU without memory. See [Note: Lazy tensors]."""

    _read: _Read

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, read: _Read) -> LazyTensor:
        """Creates a tensor whose row-major elements [start, stop) are `read(start, stop)`.

        Args:
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
            read: Returns a new 1-D CPU tensor of this dtype.
        """
        stored = Tensor._make_wrapper_subclass(LazyTensor, torch.Size(shape), dtype=dtype)
        assert isinstance(stored, LazyTensor)
        stored._read = read
        return stored

    def read(self) -> Tensor:
        """All values, a new plain tensor of this shape."""
        return self._read(0, self.numel()).view(self.shape)

    def tolist(self) -> Any:  # torch refuses `tolist` and `numpy` for wrapper subclasses
        return self.read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.read().numpy(force=force)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, LazyTensor) for value in written_by(func, args, kwargs)):
            raise RuntimeError(
                f"{func.__name__} would write to a tensor whose values are stored in a file; write "
                "to a copy: tensor.clone()."
            )
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.read(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    # mypy drops the names of a dunder's keyword-only arguments, so that even equal ones mismatch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def read_flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Row-major elements [start, stop) of `tensor`, 1-D; a view if `tensor` is plain."""
    if isinstance(tensor, LazyTensor):
        return tensor._read(start, stop)
    if tensor.numel() > 1 and not any(tensor.stride()):
        return tensor.as_strided((stop - start,), (0,))  # an expanded scalar
    return tensor.reshape(-1)[start:stop]


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of a torch operator, by name."""
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors to which a call of a torch operator writes."""
    given = arguments_of(func, args, kwargs)
    aliases = {argument.name: argument.alias_info for argument in func._schema.arguments}
    written = [given.get(name) for name, alias in aliases.items() if alias and alias.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def values_reader(values: Mapping[int, Tensor]) -> Callable[[int, range], Tensor | None]:
    """Returns a function that reads the elements `owned` of slot `index`, for `Masters.load`.

    The function returns None for slots that are not in `values`.
    """

    def read(index: int, owned: range) -> Tensor | None:
        if index not in values:
            return None
        return read_flat(values[index], owned.start, owned.stop)

    return read


def _plain(value: Any) -> Any:
    return value.read() if isinstance(value, LazyTensor) else value
