"""What a run was, for every logger: its settings, those of the strategy, the size of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["RunSettings", "num_parameters", "strategy_settings"]


class RunSettings(pl.Callback):
    """Gives every logger of the Trainer what it takes to tell this run from others.

    Before the first fit, validation, test or prediction, when the model is built and the strategy
    has decided what was left to it.

    Args:
        settings: Of the run, as composed; plain values, lists and mappings.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._is_logged = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs them, once."""
        if self._is_logged:
            return
        self._is_logged = True
        told = {
            **self._settings,
            **num_parameters(pl_module),
            "strategy": strategy_settings(trainer.strategy),
        }
        for logger in trainer.loggers:
            logger.log_hyperparams(told)

    on_validation_start = on_test_start = on_predict_start = on_fit_start


def num_parameters(module: nn.Module) -> dict[str, int]:
    """Elements of whole parameters, in all and those that are trained."""
    counted = {
        "model/params/total": list(module.parameters()),
        "model/params/trainable": [p for p in module.parameters() if p.requires_grad],
    }
    sums = {name: sum(p.numel() for p in found) for name, found in counted.items()}
    frozen = sums["model/params/total"] - sums["model/params/trainable"]
    return {**sums, "model/params/non_trainable": frozen}


def strategy_settings(strategy: object) -> dict[str, Any]:
    """The class of a strategy; of ours, all settings of the engine too, as they are now."""
    told: dict[str, Any] = {"name": type(strategy).__name__}
    if isinstance(strategy, ZeroStrategy):
        config = strategy.config
        told |= {
            field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)
        }
    return told


def _plain(value: Any) -> Any:
    """What every logger can write."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(part) for key, part in dataclasses.asdict(value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.__qualname__ if isinstance(value, type) else str(value)
