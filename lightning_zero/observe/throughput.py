"""How fast a job trains: a clock that stands while it does something else."""

from __future__ import annotations

import math
import time
from typing import Any

from lightning.pytorch.utilities.data import _extract_batch_size

__all__ = ["Throughput"]


class Throughput:
    """Counts batches and the time for them, without the first step and evaluation. Local.

    Loading of data counts; what comes between an evaluation and the batch after it does not.

    Attributes:
        num_steps: Batches with an optimizer step.
        num_batches: All batches.
        num_samples: Of this rank; NaN where a batch does not tell how many it has.
        seconds: For all of these.
        is_warm: The first step is over.
    """

    def __init__(self) -> None:
        self.num_steps = self.num_batches = 0
        self.num_samples = self.seconds = 0.0
        self.is_warm = False
        self._since: float | None = None  # None: the clock stands

    def before_batch(self) -> None:
        """Lets the clock run."""
        if self.is_warm and self._since is None:
            self._since = time.perf_counter()

    def after_batch(self, batch: Any, *, has_stepped: bool) -> None:
        """Counts a batch."""
        if self._since is not None:
            now = time.perf_counter()
            self.seconds += now - self._since
            self._since = now
            self.num_steps += has_stepped
            self.num_batches += 1
            self.num_samples += _num_samples(batch)
        self.is_warm |= has_stepped

    def pause(self) -> None:
        """Stops the clock until the next batch."""
        self._since = None


def _num_samples(batch: Any) -> float:
    """As Lightning counts, without its warning where tensors differ: the first one tells."""
    size = next(_extract_batch_size(batch), None)
    return math.nan if size is None else size
