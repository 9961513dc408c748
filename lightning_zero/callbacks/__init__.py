"""Callbacks for any Trainer whose strategy is a `ZeroStrategy`."""

from lightning_zero.callbacks.memory_table import MemoryTable
from lightning_zero.callbacks.monitor import ZeroMonitor

__all__ = ["MemoryTable", "ZeroMonitor"]
