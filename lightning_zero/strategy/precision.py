"""Precision plugins that support sharded gradients.

They replace Lightning's plugins of the same precision. Clipping uses the norm over all ranks, and
the loss scaler of float16 skips a step on every rank if any rank has found an infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning.fabric import Optimizable
from lightning_zero._lightning.pytorch import (
    DoublePrecision,
    GradClipAlgorithmType,
    HalfPrecision,
    LightningModule,
    MixedPrecision,
    Precision,
)
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.keep_float32 import float32_names_of
from lightning_zero.strategy.float8 import Float8Precision

__all__ = [
    "ZeroDoublePrecision",
    "ZeroHalfPrecision",
    "ZeroMixedPrecision",
    "ZeroPrecision",
    "sharded_precision",
    "without_float32_tensors",
]

EngineGetter = Callable[[], Engine]


class ZeroPrecision(Precision):
    """Full precision ("32-true"), and clipping for all precisions.

    Attributes:
        param_dtype: Dtype in which the module computes. None: its own.
        is_autocast: Whether the module computes under `torch.autocast`.
    """

    param_dtype: torch.dtype | None = None
    is_autocast = False
    _engine: EngineGetter

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # MixedPrecision's method refuses fused optimizers, but here gradients are already unscaled.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self._engine().clip_grad_norm_(clip_val, parameters=self.main_params(optimizer))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self._engine().clip_grad_value_(clip_val, parameters=self.main_params(optimizer))


class ZeroHalfPrecision(ZeroPrecision, HalfPrecision):
    """The module in 16 bits ("bf16-true", "16-true"), with float32 main parameters.

    Parameters that models of transformers keep in float32 stay so: see keep_float32.py.
    """

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        dtype = self._desired_input_dtype
        with without_float32_tensors(module, dtype):
            return super().convert_module(module)


@contextmanager
def without_float32_tensors(root: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which modules lack the parameters and buffers that stay in float32."""
    kept: set[Tensor] = set()
    for module in root.modules():
        named: dict[str, Tensor] = dict(module.named_parameters())
        named.update(module.named_buffers())
        kept.update(named[name] for name in float32_names_of(module, named, dtype))
    places = [
        (held, name, value)
        for module in root.modules()
        for held in (module._parameters, module._buffers)
        for name, value in held.items()
        if value is not None and value in kept
    ]
    for held, name, _ in places:
        held[name] = None
    try:
        yield
    finally:
        for held, name, value in places:
            held[name] = value  # type: ignore[assignment]  # of the same dict


class ZeroDoublePrecision(ZeroPrecision, DoublePrecision):
    """The module in float64 ("64-true")."""


class ZeroMixedPrecision(ZeroPrecision, MixedPrecision):
    """Unsharded parameters in 16 bits under autocast, with float32 main parameters.

    For "bf16-mixed" and "16-mixed". Parameters that autocast does not cast stay in float32: see
    keep_float32.py.
    """

    is_autocast = True

    def __init__(self, plugin: MixedPrecision) -> None:
        precision = cast(Literal["16-mixed", "bf16-mixed"], plugin.precision)  # its only values
        super().__init__(precision, plugin.device, plugin.scaler)
        self._plugin = plugin
        self.param_dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        module = self._plugin.convert_module(module)
        self.device = self._plugin.device  # which Float8Precision learns from the Trainer
        return module

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's own plugins narrow it
        self,
        optimizer: Optimizable,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:
            self._after_closure(model, optimizer)  # training_step returned None: no gradients
            return result
        self._engine().finish_reductions()
        self.scaler.unscale_(optimizer)  # type: ignore[arg-type]
        self._after_closure(model, optimizer)
        # The scaler skips the step if an infinity was found, on all ranks.
        output = self.scaler.step(optimizer, **kwargs)  # type: ignore[arg-type]
        self.scaler.update()
        return output

    # The scaler's state has the key of Lightning's own plugin, so that both load each other's
    # checkpoints.

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[MixedPrecision.__qualname__] = self.scaler.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and MixedPrecision.__qualname__ in checkpoint:
            self.scaler.load_state_dict(checkpoint[MixedPrecision.__qualname__])


def sharded_precision(plugin: Precision, engine: EngineGetter) -> ZeroPrecision:
    """Returns our plugin for the precision of `plugin`.

    Args:
        plugin: A plugin of Lightning, or one of ours.
        engine: Function that returns the engine, once it exists.

    Raises:
        TypeError: `plugin` has another class.
    """
    if isinstance(plugin, ZeroPrecision):
        ours: ZeroPrecision = plugin
    elif type(plugin) in (MixedPrecision, Float8Precision):
        ours = ZeroMixedPrecision(cast(MixedPrecision, plugin))
    elif type(plugin) is HalfPrecision:
        ours = ZeroHalfPrecision(plugin.precision)
    elif type(plugin) is DoublePrecision:
        ours = ZeroDoublePrecision()
    elif type(plugin) is Precision:
        ours = ZeroPrecision()
    else:
        raise TypeError(
            f"ZeroStrategy cannot use the precision plugin {type(plugin).__name__}, which expects "
            "unsharded gradients; use precision='32-true', '64-true', 'bf16-mixed', '16-mixed', "
            "'bf16-true' or '16-true', one of Lightning's own plugins for these, or "
            "Float8Precision, but no subclass of them."
        )
    ours._engine = engine
    return ours
