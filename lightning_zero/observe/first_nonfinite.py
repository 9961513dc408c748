"""Finds the module in which finite values become non-finite, in a forward and its backward.

[Note: First module] In forward, the origin is the first module that returns a kind of non-finite
value (NaN, infinity, -infinity) that none of its inputs has: inner modules return before the
modules that contain them. Masks of -infinity are no origin: if the loss is finite, what forward has
found is dropped, and an input with -infinity does not hide a NaN in the output.

In backward, gradients are looked at in the order in which autograd computes them, and the first
that is not finite decides. Each module gets a view of its inputs, so that the gradient of the view
is what this module alone has computed. If the first one is the gradient of an input or of a
parameter, it was computed in that module; if it is that of an output, outside of all modules, as by
a loss function in `training_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.layout.names import saved_name

__all__ = ["FirstNonfinite", "Origin", "nonfinite_kinds"]

_KINDS = {"NaN": torch.isnan, "infinity": torch.isposinf, "-infinity": torch.isneginf}


@dataclass(frozen=True)
class Origin:
    """Where a value was not finite for the first time.

    Attributes:
        phase: "forward" or "backward".
        module: Name of the module; None: outside of all modules.
        text: What is not finite there.
    """

    phase: str
    module: str | None
    text: str

    def __str__(self) -> str:
        where = "outside of all modules" if self.module is None else f"in module {self.module}"
        return f"{self.phase}, {where}: {self.text}"


class FirstNonfinite:
    """Looks at every module's values in one forward and backward. See [Note: First module].

    It waits for the device at each value, so the forward and backward take longer.

    Args:
        module: The module whose submodules are looked at.

    Attributes:
        origin: The first non-finite value; None: there was none.
    """

    def __init__(self, module: nn.Module) -> None:
        self.origin: Origin | None = None
        self._module = module
        self._handles: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of one forward and its backward."""
        for name, module in self._module.named_modules():
            own_name = saved_name(f"{name}.").removesuffix(".")
            words = f"{own_name or 'itself'} ({type(module).__name__})"
            before, after = partial(self._before, words), partial(self._after, words)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    text = f"the gradient of its parameter {own} is not finite"
                    self._look_at_grad(parameter, words, text)
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def look_at_loss(self, loss: Tensor) -> None:
        """Looks at the loss and at its gradient."""
        if _is_finite(loss):
            self.origin = None  # masks of -infinity do not spread
        else:
            self._found("forward", None, "the loss is not finite")
        self._look_at_grad(loss, None, "the gradient of the loss is not finite")

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def view(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            own = value.view_as(value)
            text = "the gradient of its input is not finite; those of its outputs are"
            self._look_at_grad(own, name, text)
            return own

        return tuple(tree_map(view, args)), tree_map(view, kwargs)

    def _after(self, words: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.origin is None and not _is_finite(output):
            of_inputs = nonfinite_kinds((args, kwargs))
            if nonfinite_kinds(output) - of_inputs:
                own = module.named_parameters(recurse=False)
                bad = [name for name, parameter in own if not _is_finite(parameter)]
                what = f"its parameter {bad[0]}" if bad else "its output"
                inputs = "its inputs are"
                if of_inputs:
                    inputs = f"its inputs have {' and '.join(sorted(of_inputs))}"
                self._found("forward", words, f"{what} is not finite; {inputs}")
        for tensor in _tensors(output):
            text = f"the gradient of the output of {words} is not finite"
            self._look_at_grad(tensor, None, text)

    def _look_at_grad(self, tensor: Tensor, module: str | None, text: str) -> None:
        def look(grad: Tensor) -> None:
            if self.origin is None and not _is_finite(grad):
                self._found("backward", module, text)

        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(look))

    def _found(self, phase: str, module: str | None, text: str) -> None:
        if self.origin is None:
            self.origin = Origin(phase, module, text)


def _is_finite(tree: Any) -> bool:
    """Whether all floating-point values in nested containers are finite. Waits for the device."""
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in _tensors(tree))


def nonfinite_kinds(tree: Any) -> set[str]:
    """Kinds of non-finite values in nested containers. Waits for the device."""
    kinds: set[str] = set()
    for tensor in _tensors(tree):
        value = tensor.detach()
        parts = torch.view_as_real(value) if value.is_complex() else value
        kinds.update(kind for kind, is_kind in _KINDS.items() if bool(is_kind(parts).any()))
    return kinds


def _tensors(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
