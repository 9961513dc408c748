"""Transforms of torch.func, in which parameters cannot be unsharded or resharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["active_transforms", "check_outside_transform"]

# Active transforms of torch.func, the innermost last; None if there are none.
active_transforms: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack


def check_outside_transform(name: str) -> None:
    """Raises inside a transform of torch.func that differentiates, about parameter `name`."""
    kinds = torch._C._functorch.TransformType
    if any(one.key() in (kinds.Grad, kinds.Jvp) for one in active_transforms() or ()):
        raise RuntimeError(
            "a transform of torch.func (grad, vjp, jvp, jacrev or similar) uses parameter "
            f"{name}, or one of the same bucket, which is sharded; run the transform inside `with "
            "lightning_zero.gathered(module):`."
        )
