"""Callbacks for any Trainer whose strategy is a `ZeroStrategy`."""

from lightning_zero.callbacks.memory_table import MemoryTable

__all__ = ["MemoryTable"]
