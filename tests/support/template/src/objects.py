"""Makes the objects of a configuration, for `train.py` and `eval.py`."""

import logging

from hydra.utils import instantiate
from omegaconf import DictConfig

log = logging.getLogger(__name__)


def all_of(group):
    """The objects of a group such as `callbacks`, one for each key with a `_target_`."""
    return [
        instantiate(part)
        for part in (group or {}).values()
        if isinstance(part, DictConfig) and "_target_" in part
    ]


def make(cfg, **keywords):
    loggers = all_of(cfg.get("logger"))
    log.info("making model, data and Trainer")
    trainer = instantiate(cfg.trainer, logger=loggers, **keywords)
    for logger in loggers:
        logger.log_hyperparams({"task_name": cfg.task_name, "seed": cfg.seed})
    return instantiate(cfg.model), instantiate(cfg.data), trainer
