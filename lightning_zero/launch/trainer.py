"""Makes the Trainer of a composed Hydra configuration, and logs all settings to its loggers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

import torch
from hydra.utils import instantiate
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from omegaconf import DictConfig, OmegaConf
from torch import nn
from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.pytorch import LearningRateMonitor, Strategy, StrategyRegistry
from lightning_zero.layout.config import ZeroConfig

__all__ = [
    "RunSettings",
    "make_trainer",
    "num_parameters",
    "optimized_metric",
    "strategy_settings",
]


def make_trainer(
    config: DictConfig, *, strategy_type: type[Strategy], monitor_type: type[pl.Callback]
) -> pl.Trainer:
    """Makes the Trainer of `config.trainer`, with all of `config.callbacks` and `config.logger`.

    Both are mappings whose values may be null. Every logger logs the settings as they were
    composed, with references unresolved, so that no log has a value of the environment (`oc.env`).
    A callback without effect is left out, with a message: a `LearningRateMonitor` without a logger,
    a monitor of ZeRO without its strategy.

    Args:
        config: The composed configuration.
        strategy_type: Class of the strategies that `monitor_type` observes.
        monitor_type: Class of callbacks that need such a strategy.

    Raises:
        ValueError: `config.trainer.strategy` has settings but no `_target_`, or an unknown name of
            ZeRO; or `config.trainer.accelerator` is a GPU, and there is none.
    """
    _check(config)
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    config = deepcopy(config)  # `instantiate` resolves lists and groups that are referred to
    loggers: Any = _members(config, "logger") or False
    logger = OmegaConf.select(config, "trainer.logger")
    if logger is not None:  # trainer.logger=false
        loggers = logger if isinstance(logger, bool) else instantiate(logger)
    callbacks = _members(config, "callbacks")
    if loggers is False:
        callbacks = _without(callbacks, LearningRateMonitor, "there is no logger")
    callbacks.append(RunSettings(unresolved))
    make = instantiate(config.trainer, _partial_=True)
    strategy = make.keywords.get("strategy")
    if not (isinstance(strategy, strategy_type) or str(strategy).startswith("zero")):
        callbacks = _without(callbacks, monitor_type, f"the strategy is {strategy}")
    trainer: pl.Trainer = make(callbacks=callbacks, logger=loggers)
    return trainer


def _check(config: DictConfig) -> None:
    """Raises the errors of `make_trainer`, before anything is built."""
    given = OmegaConf.select(config, "trainer.strategy")
    if isinstance(given, DictConfig) and "_target_" not in given:
        raise ValueError(
            f"trainer.strategy has settings ({', '.join(map(str, given))}) but no strategy; add "
            "zero=..., or remove these settings."
        )
    known = [name for name in StrategyRegistry.available_strategies() if name.startswith("zero")]
    if str(given).startswith("zero") and given not in known:
        near = get_close_matches(str(given), known, n=1) or known[:1]
        raise ValueError(
            f"trainer.strategy must be one of {', '.join(known)}, or a strategy of Lightning, got "
            f"{given!r}; did you mean {near[0]}?"
        )
    accelerator = OmegaConf.select(config, "trainer.accelerator")
    if accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.accelerator={accelerator} needs a GPU, and torch finds none; add trainer=cpu "
            "to run on CPU processes, or install the CUDA build of torch."
        )


def _members(config: DictConfig, name: str) -> list[Any]:
    group = config.get(name)
    return [made for made in instantiate(group).values() if made is not None] if group else []


def _without(callbacks: list[Any], kind: type[pl.Callback], reason: str) -> list[Any]:
    kept = [callback for callback in callbacks if not isinstance(callback, kind)]
    if len(kept) < len(callbacks):
        rank_zero_info(f"{kind.__name__} is left out: {reason}.")
    return kept


def optimized_metric(config: DictConfig, metrics: Any) -> float | None:
    """Value of the metric named by `config.optimized_metric`, for a sweeper; None: not logged."""
    name = config.get("optimized_metric")
    if name is None:
        return None
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        rank_zero_warn(f"optimized_metric={name} was not logged; logged metrics: {known}.")
        return None
    return float(metrics[name])


class RunSettings(pl.Callback):
    """Logs the settings of the run to every logger of the Trainer.

    Logs once, before the first fit, validation, test or prediction, when the model is built and
    the strategy has resolved its settings.

    Args:
        settings: Settings of the run; plain values, lists and mappings.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._is_logged = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        settings = {
            **self._settings,
            **num_parameters(pl_module),
            "strategy": strategy_settings(trainer.strategy),
        }
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)

    on_validation_start = on_test_start = on_predict_start = on_fit_start


def num_parameters(module: nn.Module) -> dict[str, int]:
    """Number of elements of all, trainable and non-trainable parameters, unsharded."""
    parameters = list(module.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    return {
        "model/params/total": total,
        "model/params/trainable": trainable,
        "model/params/non_trainable": total - trainable,
    }


def strategy_settings(strategy: object) -> dict[str, Any]:
    """Class name of a strategy; for one with a `ZeroConfig` also its resolved settings."""
    settings: dict[str, Any] = {"name": type(strategy).__name__}
    config = getattr(strategy, "config", None)
    if isinstance(config, ZeroConfig):
        settings |= {
            field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)
        }
    return settings


def _plain(value: Any) -> Any:
    """Converts a setting to plain values, which every logger can write."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(part) for key, part in dataclasses.asdict(value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.__qualname__ if isinstance(value, type) else str(value)
