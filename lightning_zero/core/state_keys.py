"""Which of an optimizer's states are elementwise: one number for each element of the parameter."""

from __future__ import annotations

from torch import Tensor

from lightning_zero.tensors.composite import is_composite

__all__ = ["SCALAR_KEYS", "is_elementwise_state"]

# One number for a parameter in torch's optimizers, also where the parameter is one number itself.
SCALAR_KEYS = {"step", "mu_product", "eta", "mu"}


def is_elementwise_state(key: str, value: object, numel: int) -> bool:
    """Whether `value` has one number for each of the `numel` elements of a 1-D slice."""
    if not isinstance(value, Tensor) or is_composite(value) or key in SCALAR_KEYS:
        return False
    return value.dim() > 0 and value.numel() == numel
