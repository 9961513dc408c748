"""Modules and callbacks that cannot be trained in shards, refused by name before training."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.stage import State
from lightning_zero.tensors.dropped import is_left_out
from lightning_zero.tensors.guarded import has_placement

__all__ = ["refuse_callbacks", "refuse_module"]


def refuse_module(module: LightningModule, *, is_ours: bool) -> None:
    """Raises where there is nothing to train here.

    Args:
        module: As it is given to the Trainer.
        is_ours: The strategy's own engine may hold it.

    Raises:
        ValueError: Another engine holds it, or it has no parameters and will have none.
    """
    for name, parameter in module.named_parameters():
        is_held = has_placement(parameter) and not is_left_out(parameter)
        if is_held and not is_ours:
            raise ValueError(
                f"parameter {name} is already held by another engine; one module trains under one "
                "strategy at a time: let the other fit end first."
            )
    builds_later = any(is_overridden(hook, module) for hook in ("setup", "configure_model"))
    if not builds_later and not any(True for _ in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has no parameters, so there is nothing to shard; build "
            "its layers in __init__, setup() or configure_model()."
        )


def refuse_callbacks(callbacks: Iterable[Callback], config: ZeroConfig) -> None:
    """Raises where a callback would fail in the middle of training.

    Raises:
        ValueError: Pruning, where no rank has the whole parameters whose least elements it seeks.
    """
    if not config.states.has_shard(State.PARAM):
        return
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} ranks the elements of whole parameters and replaces "
                f"parameters by masked ones, and in {config.states} they rest as shards; use stage "
                "1 or 2, where they rest whole."
            )
