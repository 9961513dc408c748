"""Methods of an optimizer's class other than `step`: `train` and `eval` of a schedule-free one.

[Note: Methods of optimizers] Such a method reads and writes parameters with their states, so it
must run where `step` runs: parameters point at what this rank steps. Which methods these are cannot
be found out in advance, so all public ones count that the class has beyond torch's `Optimizer`,
and every rank must call them: the ranks meet by the name of the method first. Inside of a step, or
of each other, they are called as they are. The class's `load_state_dict` is one of them, which
takes whole states and leaves each rank its own.

What a method may not see is more than one element of a slice at a time: a norm would be that of
this rank's part. Every operator that it runs on slices is looked at (`_OnSlices`), so that such a
method is refused before it has changed anything by that operator.

A wrapper is an attribute of the object, as those of learning rate schedulers are around `step`.
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

from lightning_zero.tensors.sharded import is_elementwise_operator

__all__ = ["ElementwiseOnly", "NoGradientAccess", "wrap_methods"]

_SAME_ELEMENTS = {"alias", "clone", "copy_", "detach", "lift_fresh", "reshape", "view"}
# Of whole tensors that one rank has: what mixes several, or becomes a number of Python's.
_MIXING = {"_local_scalar_dense", "cat", "equal", "stack"}


def methods_of(optimizer: Optimizer) -> list[str]:
    """Public methods that its class has beyond those of torch's `Optimizer`."""
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
    """Calls of the methods of `optimizer` become `run(name, method, args, kwargs)`; their names."""
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
    """Refuses looks at `.grad` of parameters, which only a step shows as parts.

    Args:
        parameters: Of the optimizer.
        call: What is called, for the text.
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
                f"{self._call} looks at parameter.grad, which only step() is shown beside its part "
                "of the parameter; do so in step(), or in the loop before the call."
            )
        return func(*args, **(kwargs or {}))


_GRAD = {
    Tensor.grad.__get__,  # type: ignore[union-attr]  # a descriptor, typed as its value
    Tensor.grad.__set__,  # type: ignore[union-attr]
    Tensor.grad.__delete__,  # type: ignore[union-attr]
}


class ElementwiseOnly(TorchDispatchMode):
    """Refuses operators that would see a part of a parameter or state as if it were the whole.

    Args:
        slices: 1-D, of which this rank has some elements: only what is elementwise may be done.
        whole: Whole tensors, of which this rank has some: they may not be mixed.
        call: What is called, for the text.
    """

    def __init__(self, slices: Iterable[Tensor], whole: Iterable[Tensor], call: str) -> None:
        super().__init__()
        self._call = call
        self._kept: list[Tensor] = []  # so that no other storage gets the number of one
        self._slices: set[int] = set()
        self._whole: set[int] = set()
        self._add(slices, self._slices)
        self._add(whole, self._whole)

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
        is_whole = not numbers.isdisjoint(self._whole)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_wrong = is_sliced and not (name in _SAME_ELEMENTS or is_elementwise_operator(func))
        if is_wrong or (is_whole and name in _MIXING) or (is_random and self._kept):
            raise RuntimeError(
                f"{self._call} runs {name!r} on this rank's part of parameters or states, which is "
                "elementwise only: each rank would get another result. Use stage 0, or an "
                "optimizer whose methods treat every element by itself."
            )
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if is_sliced:
            self._add(made, self._slices)
        if is_whole:
            self._add(made, self._whole)
        return result
