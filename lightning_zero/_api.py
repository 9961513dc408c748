"""Public names of `lightning_zero`, and what its import registers; see `lightning_zero`."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.activations import offload_activations
from lightning_zero.checkpoint import (
    full_state_dict,
    load_checkpoint,
    load_weights,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from lightning_zero.core.access import before_collective, full_grad, gathered, uneven_calls
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.strategy.saving import patch_load_from_checkpoint
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = [
    "Engine",
    "MemoryReport",
    "OffloadConfig",
    "ZeroConfig",
    "ZeroStrategy",
    "before_collective",
    "full_grad",
    "full_state_dict",
    "gathered",
    "load_checkpoint",
    "load_weights",
    "newest_checkpoint",
    "offload_activations",
    "open_checkpoint",
    "save_checkpoint",
    "uneven_calls",
]

ZeroStrategy.register_strategies(StrategyRegistry)
patch_load_from_checkpoint()
