"""From a composed configuration to its Trainer, with callbacks and loggers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from omegaconf import DictConfig, OmegaConf

from lightning_zero.observe.monitor import ZeroMonitor
from lightning_zero.observe.run_settings import RunSettings
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["make_trainer", "optimized_metric"]


def make_trainer(config: DictConfig) -> pl.Trainer:
    """The Trainer of `config.trainer`, with all of `config.callbacks` and `config.logger`.

    Both are mappings of which a value may be null. Every logger is given the settings, resolved.
    Left out, and said so, are callbacks of the package that have nothing to do: a
    `LearningRateMonitor` without a logger, a `ZeroMonitor` without a `ZeroStrategy`.

    Raises:
        ValueError: `config.trainer.strategy` says nothing of what it is a strategy.
    """
    _check_strategy(config)
    loggers: Any = _members(config, "logger") or False
    given = OmegaConf.select(config, "trainer.logger")
    if given is not None:  # trainer.logger=false
        loggers = given if isinstance(given, bool) else instantiate(given)
    callbacks = _members(config, "callbacks")
    if loggers is False:
        callbacks = _without(callbacks, LearningRateMonitor, "there is no logger")
    settings: Any = OmegaConf.to_container(config, resolve=True)
    callbacks.append(RunSettings(settings))
    make = instantiate(config.trainer, _partial_=True)
    strategy = make.keywords.get("strategy")
    if not (isinstance(strategy, ZeroStrategy) or str(strategy).startswith("zero")):
        callbacks = _without(callbacks, ZeroMonitor, f"the strategy is {strategy}")
    trainer: pl.Trainer = make(callbacks=callbacks, logger=loggers)
    return trainer


def _check_strategy(config: DictConfig) -> None:
    strategy = OmegaConf.select(config, "trainer.strategy")
    if isinstance(strategy, DictConfig) and "_target_" not in strategy:
        raise ValueError(
            f"trainer.strategy has settings of ZeroStrategy ({', '.join(map(str, strategy))}) and "
            "none that makes it one; add zero=..., or leave out what sets them."
        )


def _members(config: DictConfig, name: str) -> list[Any]:
    """Instances of a group's members, in order."""
    group = config.get(name)
    return [made for made in instantiate(group).values() if made is not None] if group else []


def _without(callbacks: list[Any], kind: type[pl.Callback], reason: str) -> list[Any]:
    kept = [callback for callback in callbacks if not isinstance(callback, kind)]
    if len(kept) < len(callbacks):
        rank_zero_info(f"{kind.__name__} is left out: {reason}.")
    return kept


def optimized_metric(config: DictConfig, metrics: Any) -> float | None:
    """The metric that `config.optimized_metric` names, for a sweeper; None where there is none.

    Args:
        config: As composed.
        metrics: `Trainer.callback_metrics`.
    """
    name = config.get("optimized_metric")
    if name is None:
        return None
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        rank_zero_warn(f"optimized_metric={name} was not logged; what was: {known}.")
        return None
    return float(metrics[name])
