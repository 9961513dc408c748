"""Hydra's config groups, for any application: `hydra.searchpath: [pkg://lightning_zero.conf]`.

Importing it registers the schema and the resolvers of the files, also for an application that has
copied them. `make_trainer(config)` builds the Trainer with callbacks and loggers;
`optimized_metric` is the value that `main` returns to a sweeper.
"""

from lightning_zero.launch.schema import register
from lightning_zero.launch.trainer import make_trainer, optimized_metric

__all__ = ["make_trainer", "optimized_metric"]

register()
