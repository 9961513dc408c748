"""Hydra's config groups, for any application: `hydra.searchpath: [pkg://lightning_zero.conf]`.

Importing it registers the schema and the resolvers of the files, also for an application that has
copied them. `apply_extras(config)` applies the group `extras`, `make_trainer(config)` builds the
Trainer with callbacks and loggers, and `optimized_metric` is the value that `main` returns to a
sweeper.

Torch and Lightning are imported only by these functions, so that `--help` and `--cfg job` are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lightning_zero.launch.extras import apply_extras
from lightning_zero.launch.options import ZeroStrategySettings
from lightning_zero.launch.schema import register

if TYPE_CHECKING:
    from lightning_zero._lightning import pytorch as pl

__all__ = ["ZeroStrategySettings", "apply_extras", "make_trainer", "optimized_metric"]

register(ZeroStrategySettings)


def make_trainer(config: DictConfig) -> pl.Trainer:
    """Makes the Trainer of a composed configuration; see `launch.trainer.make_trainer`."""
    from lightning_zero.launch import trainer
    from lightning_zero.observe.monitor import ZeroMonitor
    from lightning_zero.strategy.strategy import ZeroStrategy

    return trainer.make_trainer(config, strategy_type=ZeroStrategy, monitor_type=ZeroMonitor)


def optimized_metric(config: DictConfig, metrics: Any) -> float | None:
    """Value of the metric named by `config.optimized_metric`; see `launch.trainer`."""
    from lightning_zero.launch import trainer

    return trainer.optimized_metric(config, metrics)
