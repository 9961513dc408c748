"""Callbacks that cannot work where parameters rest as shards, refused by name before training."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning

from lightning_zero.config import ZeroConfig
from lightning_zero.stage import State

__all__ = ["refuse_callbacks"]


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
