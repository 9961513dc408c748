"""Methods of an optimizer's class other than `step`: `train` and `eval` of a schedule-free one.

[Note: Methods of optimizers] Such a method reads and writes parameters and their states, so it must
run under the conditions of `step`: parameters are views of the elements that this rank steps. The
methods that do so are not known in advance. So all public methods of the class that torch's
`Optimizer` does not have are wrapped, and every rank must call them: the ranks first exchange the
name of the method. Within a step or another wrapped method, they are called directly.
`load_state_dict` is wrapped, too: it takes full states, of which each rank keeps its own elements.

A method must be elementwise on slices: a norm would be that of this rank's slice. Every operator
that it runs on slices is checked (`ElementwiseOnly`), and a method that is not elementwise is
refused before that operator has changed anything.

A wrapper is an attribute of the object, like those of learning rate schedulers around `step`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.tensors.operators import is_elementwise_operator

__all__ = ["ElementwiseOnly", "NoGradientAccess", "wrap_methods"]

_SAME_ELEMENTS = {"alias", "clone", "copy_", "detach", "lift_fresh", "reshape", "view"}
# Operators that combine several tensors or return a Python number; refused on owned full tensors.
_COMBINING = {"_local_scalar_dense", "cat", "equal", "stack"}


def methods_of(optimizer: Optimizer) -> list[str]:
    """Names of the public methods of its class that torch's `Optimizer` does not have."""
    names: dict[str, None] = {}
    for one in type(optimizer).__mro__:
        if one is Optimizer:
            break
        for name, member in vars(one).items():
            is_own = not name.startswith("_") and not hasattr(Optimizer, name)
            if is_own and inspect.isfunction(member):
                names.setdefault(name)
    return list(names)


def wrap_methods(optimizer: Optimizer, run: Callable[..., Any]) -> list[str]:
    """Wraps the methods of `optimizer`, so that calls become `run(name, method, args, kwargs)`.

    Returns:
        The names of the methods.
    """
    names = methods_of(optimizer)
    for name in names:
        method = getattr(optimizer, name)

        def wrapped(
            *args: Any, _name: str = name, _method: Callable[..., Any] = method, **kwargs: Any
        ) -> Any:
            return run(_name, _method, args, kwargs)

        optimizer.__dict__[name] = functools.wraps(method)(wrapped)
    return names


class NoGradientAccess(TorchFunctionMode):
    """Refuses access to `.grad` of parameters: only `step` sets the gradients of slices.

    Args:
        parameters: Parameters of the optimizer.
        call: Name of the method, for errors.
    """

    def __init__(self, parameters: Iterable[Tensor], call: str) -> None:
        super().__init__()
        self._ids = {id(parameter) for parameter in parameters}
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _GRAD and id(args[0]) in self._ids:
            raise RuntimeError(
                f"{self._call} uses parameter.grad, which is available for slices of parameters "
                "in step() only; use it in step(), or in the training loop before the call."
            )
        return func(*args, **(kwargs or {}))


_GRAD = {
    Tensor.grad.__get__,  # type: ignore[union-attr]  # a descriptor, typed as its value
    Tensor.grad.__set__,  # type: ignore[union-attr]
    Tensor.grad.__delete__,  # type: ignore[union-attr]
}


class ElementwiseOnly(TorchDispatchMode):
    """Refuses operators that would use a slice of a parameter or state like the full tensor.

    Args:
        slices: Slices, 1-D; only elementwise operators are allowed on them.
        full: Full tensors, of which this rank owns some; they may not be combined.
        call: Name of the method, for errors.
    """

    def __init__(self, slices: Iterable[Tensor], full: Iterable[Tensor], call: str) -> None:
        super().__init__()
        self._call = call
        self._kept: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique
        self._slices: set[int] = set()
        self._full: set[int] = set()
        self._add(slices, self._slices)
        self._add(full, self._full)

    def _add(self, tensors: Iterable[Tensor], numbers: set[int]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._kept.append(tensor)
                numbers.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        numbers = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        is_sliced = not numbers.isdisjoint(self._slices)
        is_full = not numbers.isdisjoint(self._full)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_wrong = is_sliced and not (name in _SAME_ELEMENTS or is_elementwise_operator(func))
        if is_wrong or (is_full and name in _COMBINING) or (is_random and self._kept):
            raise RuntimeError(
                f"{self._call} runs {name!r} on this rank's shard of parameters or states, where "
                "only elementwise operators are allowed: each rank would get another result. Use "
                "stage 0, or an optimizer whose methods are elementwise."
            )
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if is_sliced:
            self._add(results, self._slices)
        if is_full:
            self._add(results, self._full)
        return result
