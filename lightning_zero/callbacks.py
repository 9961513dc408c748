"""Callbacks for any Trainer whose strategy is a `ZeroStrategy`."""

from lightning_zero.engine.fingerprints import AuditError
from lightning_zero.observe.audit import Audit
from lightning_zero.observe.monitor import ZeroMonitor
from lightning_zero.observe.nonfinite_trace import NonfiniteTrace
from lightning_zero.observe.progress import ProgressLines
from lightning_zero.observe.report import MemoryTable

__all__ = [
    "Audit",
    "AuditError",
    "MemoryTable",
    "NonfiniteTrace",
    "ProgressLines",
    "ZeroMonitor",
]
