"""Callbacks for any Trainer whose strategy is a `ZeroStrategy`."""

from lightning_zero.observe.memory_table import MemoryTable
from lightning_zero.observe.monitor import ZeroMonitor

__all__ = ["MemoryTable", "ZeroMonitor"]
