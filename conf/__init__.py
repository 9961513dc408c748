"""Hydra's config groups, for any application: `hydra.searchpath: [pkg://lightning_zero.conf]`.

Importing it registers the schema and the resolvers of the files, also for an application that has
copied them. `apply_extras(config)` applies the group `extras`, `make_trainer(config)` builds the
Trainer with callbacks and loggers, and `optimized_metric` is the value that `main` returns to a
sweeper.
"""

from omegaconf import DictConfig

from lightning_zero._lightning import pytorch as pl
from lightning_zero.launch import trainer
from lightning_zero.launch.extras import apply_extras
from lightning_zero.launch.schema import register, schema
from lightning_zero.launch.trainer import optimized_metric
from lightning_zero.observe.monitor import ZeroMonitor
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["ZeroStrategySettings", "apply_extras", "make_trainer", "optimized_metric"]

ZeroStrategySettings = schema(ZeroStrategy, "lightning_zero.ZeroStrategy", module=__name__)
register(ZeroStrategySettings)


def make_trainer(config: DictConfig) -> pl.Trainer:
    """Makes the Trainer of a composed configuration; see `launch.trainer.make_trainer`."""
    return trainer.make_trainer(config, strategy_type=ZeroStrategy, monitor_type=ZeroMonitor)
