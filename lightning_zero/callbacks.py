"""Callbacks for any Trainer whose strategy is a `ZeroStrategy`."""

from lightning_zero.observe.fingerprints import Fingerprints
from lightning_zero.observe.monitor import ZeroMonitor
from lightning_zero.observe.progress import ProgressLines
from lightning_zero.observe.report import MemoryTable

__all__ = [
    "Fingerprints",
    "MemoryTable",
    "ProgressLines",
    "ZeroMonitor",
]
