"""Checkpoints: state dicts of whole tensors from shards, and back; files of many formats."""

from lightning_zero.checkpoint.full import full_state_dict, narrow_masters
from lightning_zero.checkpoint.load import (
    load_masters,
    load_module,
    load_weights,
)
from lightning_zero.checkpoint.optimizer import load_optimizer
from lightning_zero.checkpoint.source import open_checkpoint

__all__ = [
    "full_state_dict",
    "load_masters",
    "load_module",
    "load_optimizer",
    "load_weights",
    "narrow_masters",
    "open_checkpoint",
]
