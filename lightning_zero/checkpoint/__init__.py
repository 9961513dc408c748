"""Checkpoints: state dicts of whole tensors from shards, and back."""

from lightning_zero.checkpoint.full import (
    full_state_dict,
    load_full_state_dict,
    load_masters,
    narrow_masters,
)

__all__ = ["full_state_dict", "load_full_state_dict", "load_masters", "narrow_masters"]
