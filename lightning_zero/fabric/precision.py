"""Fabric's precision plugins on parameters of an engine."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from lightning_zero._lightning.fabric import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning_zero.strategy.precision import without_float32_tensors

__all__ = ["ZeroHalfPrecision", "autocast_dtype", "checked_precision"]


class ZeroHalfPrecision(HalfPrecision):
    """The module in 16 bits, except what models of transformers keep in float32."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        with without_float32_tensors(module, self._desired_input_dtype):
            return super().convert_module(module)


def checked_precision(plugin: Precision | None) -> Precision | None:
    """Returns `plugin`, or ours of the same precision.

    Raises:
        TypeError: `plugin` expects unsharded parameters.
    """
    if type(plugin) is HalfPrecision:
        return ZeroHalfPrecision(plugin.precision)
    known = (Precision, DoublePrecision, MixedPrecision, ZeroHalfPrecision)
    if plugin is not None and type(plugin) not in known:
        raise TypeError(
            f"ZeroStrategy cannot use the precision plugin {type(plugin).__name__}, which expects "
            "unsharded parameters; use precision='32-true', '64-true', 'bf16-mixed', '16-mixed', "
            "'bf16-true' or '16-true'."
        )
    return plugin


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """Dtype in which the module computes under `torch.autocast`; None without it."""
    return plugin._desired_input_dtype if isinstance(plugin, MixedPrecision) else None
