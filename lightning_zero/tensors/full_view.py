"""Gathered values of a sharded tensor, to be read and written.

[Note: Full views] `p[0]`, `p.t()` and the entries of `state_dict()` are views of a parameter's
memory in torch, and users write through them, for example to average weights. A sharded parameter
has no such memory between steps. A view of it is a `FullTensorView` of gathered values. Writes to
it increment its version counter, and are written back to the shard; they are collective, and every
rank must write the same values. Functions that may write without incrementing the counter, and
those that give a tensor another memory, are errors (operators.py). Results computed from it are
plain tensors. After the parameter has changed in another way, for example by an optimizer step, the
values are outdated and using them is an error. (In plain torch, such a view would show the new
values.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.tensors.operators import may_write, repoints

__all__ = ["MAY_WRITE", "REPOINTS", "FullTensorView", "ShardedOrigin", "without_gradient"]

# Reasons of errors.
MAY_WRITE = "it may write to its arguments, and a write to a copy of them would be lost"
REPOINTS = "it would give this tensor another memory or shape, and not the parameter"


class ShardedOrigin(Protocol):
    """The sharded tensor whose values a `FullTensorView` has."""

    @property
    def title(self) -> str:
        """Name for errors, such as "p.data of parameter head.weight"."""

    @property
    def version(self) -> int:
        """Number of changes of the values so far."""

    def write_back(self, values: Tensor) -> None:
        """Writes this rank's elements of `values`, n-D and plain, to the shard."""

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raises the error of function `name`, with the reason."""


@dataclass
class _Source:
    """State shared by all views of one gathered tensor."""

    origin: ShardedOrigin
    values: Tensor  # full, plain
    version: int  # of `origin` when the values were gathered or written back
    # Raised by the backward of a result; None: no gradient is required.
    no_gradient: Exception | None = None

    def check(self) -> None:
        if self.origin.version != self.version:
            raise RuntimeError(
                f"these values of {self.origin.title} are outdated: since they were gathered, an "
                "optimizer step or a write has changed it, or its engine was closed. Gather them "
                "again, or copy the values that you want to keep before the change: "
                "values.clone(), or copy.deepcopy(module.state_dict())."
            )

    def write_back(self) -> None:
        if self.no_gradient is not None:
            raise RuntimeError(
                f"{self.origin.title} requires a gradient, and a view of it was changed in place; "
                "change it under torch.no_grad()."
            )
        self.origin.write_back(self.values)
        self.version = self.origin.version


class FullTensorView(Tensor):
    """View of the gathered values of a sharded tensor. See [Note: Full views]."""

    _source: _Source

    @staticmethod
    def of(values: Tensor, origin: ShardedOrigin) -> FullTensorView:
        """Wraps new plain `values`, the full values of `origin`; memory is shared."""
        return FullTensorView._view(values, _Source(origin, values, origin.version))

    @staticmethod
    def _view(values: Tensor, source: _Source) -> FullTensorView:
        with torch._C.DisableTorchFunctionSubclass():
            return values.as_subclass(FullTensorView)._with_source(source)

    def _with_source(self, source: _Source) -> FullTensorView:
        self._source = source
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        used = {
            id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, FullTensorView)
        }
        for one in used.values():
            one._source.check()
        name = getattr(func, "__name__", str(func))
        origin = next(iter(used.values()))._source.origin
        if func == _SET_DATA or repoints(name):
            origin.refuse(name, REPOINTS)
        if may_write(func):
            origin.refuse(name, MAY_WRITE)
        sources = list({id(one._source): one._source for one in used.values()}.values())
        versions = [source.values._version for source in sources]
        plain = {key: one._plain() for key, one in used.items()}
        given = {id(one): used[key] for key, one in plain.items()}
        memory = {_storage(one): used[key]._source for key, one in plain.items()}
        args, kwargs = tree_map(
            lambda value: plain.get(id(value), value), (tuple(args), dict(kwargs))
        )
        result = func(*args, **kwargs)
        for source, version in zip(sources, versions, strict=True):
            if source.values._version != version:
                source.write_back()
        if func in _ARRAYS:
            result.flags.writeable = False  # writes to it could not be written back
            return result
        errors = [one.no_gradient for one in memory.values() if one.no_gradient is not None]
        is_tracked = bool(errors) and torch.is_grad_enabled() and func not in _DETACHING

        def as_given(value: Any) -> Any:
            if type(value) is not Tensor:
                return value
            if id(value) in given:
                return given[id(value)]
            source = memory.get(_storage(value))
            if source is not None:
                shown = source if is_tracked else replace(source, no_gradient=None)
                return FullTensorView._view(value, shown)
            if not is_tracked or not value.is_floating_point():
                return value
            return without_gradient(value, errors[0])

        return tree_map(as_given, result)

    def tracked(self, error: Exception) -> FullTensorView:
        """The same view, for an origin that requires a gradient; backward raises `error`."""
        return FullTensorView._view(self._plain(), replace(self._source, no_gradient=error))

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def plain(self) -> Tensor:
        """The values as a plain tensor; memory is shared."""
        self._source.check()
        return self._plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        result = copy.deepcopy(self.plain())
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    # mypy drops the names of a dunder's keyword-only arguments, so that even equal ones mismatch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())


def without_gradient(value: Tensor, error: Exception) -> Tensor:
    """A copy of `value` that requires a gradient, and whose backward raises `error`."""
    copied: Tensor = _NoGradient.apply(value, torch.zeros((), requires_grad=True), error)
    return copied


class _NoGradient(torch.autograd.Function):
    """Identity whose backward raises. See [Note: No gradient] in sharded.py."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, error: Exception) -> Any:
        ctx.error = error
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.error


def _storage(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ARRAYS: set[Any] = {Tensor.numpy, Tensor.__array__}
_DETACHING = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
# Allowed for outdated values, too.
_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn")
    ),
    *(getattr(Tensor, name).__get__ for name in ("is_leaf", "is_cpu", "is_cuda", "is_meta")),
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.dim,
    Tensor.__len__,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.__hash__,
}
