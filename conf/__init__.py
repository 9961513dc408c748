"""Hydra's config groups, for any application: `hydra.searchpath: [pkg://lightning_zero.conf]`.

Importing it makes known what the files refer to, for an application that has them in a folder.
`make_trainer(config)` builds the Trainer with callbacks and loggers; `optimized_metric` is what
`main` returns to a sweeper.
"""

from lightning_zero.observe.hydra_trainer import make_trainer, optimized_metric
from lightning_zero.strategy.schema import register

__all__ = ["make_trainer", "optimized_metric"]

register()
