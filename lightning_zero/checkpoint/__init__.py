"""Checkpoints: state dicts of whole tensors from shards, and back; files of many formats."""

from lightning_zero.checkpoint.full import (
    full_state_dict,
    load_full_state_dict,
    load_masters,
    narrow_masters,
)
from lightning_zero.checkpoint.source import open_checkpoint

__all__ = [
    "full_state_dict",
    "load_full_state_dict",
    "load_masters",
    "narrow_masters",
    "open_checkpoint",
]
