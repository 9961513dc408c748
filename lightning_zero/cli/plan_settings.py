"""What a composed configuration says of strategy and Trainer, as far as a plan needs it."""

from __future__ import annotations

import inspect
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_zero.layout.config import ZeroConfig

__all__ = ["strategy_settings", "trainer_settings"]


def strategy_settings(config: DictConfig) -> ZeroConfig:
    """Those of `trainer.strategy`, of whichever stage they are.

    Raises:
        ValueError: Settings that no stage takes together.
    """
    strategy = OmegaConf.select(config, "trainer.strategy")
    given: dict[str, Any] = {}
    for name in inspect.signature(ZeroConfig).parameters:
        if name != "stage" and isinstance(strategy, DictConfig) and name in strategy:
            value = strategy[name]
            given[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    for stage in (3, 2, 0):
        try:
            return ZeroConfig(stage=stage, **given)
        except ValueError as error:
            failure = error
    raise failure


def trainer_settings(config: DictConfig) -> dict[str, Any]:
    """`ranks`, `ranks_per_node`, `precision` and `micro_batches`; None where it is not said."""
    devices = OmegaConf.select(config, "trainer.devices", throw_on_resolution_failure=False)
    nodes = OmegaConf.select(config, "trainer.num_nodes") or 1
    return {
        "ranks": devices * nodes if isinstance(devices, int) else None,
        "ranks_per_node": devices if isinstance(devices, int) else None,
        "precision": OmegaConf.select(config, "trainer.precision"),
        "micro_batches": OmegaConf.select(config, "trainer.accumulate_grad_batches"),
    }
