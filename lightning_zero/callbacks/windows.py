"""Which steps are recorded, and when their windows begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_zero.recorder import Recorder
from lightning_zero.recording import Recording

__all__ = ["Windows"]


class Windows:
    """Windows of one fit, each over one step with all of its micro-batches.

    A step begins with the batch after one in which `Trainer.global_step` has grown, and ends with
    the next one in which it grows: one or several batches of accumulation, in manual optimization
    one or several steps of the optimizers. The recorder is on from the step before, so that it sees
    what that has left under way.

    Args:
        recorder: Of the engine.
        every_n_steps: A step is recorded with which a multiple of so many is complete; 0: none.
        trace_steps: And those before which so many optimizer steps were taken; of several steps
            within a batch, any.
        num_batches: Batches that have stepped before this fit.
        num_steps: Optimizer steps before it.
        align: Called right before a traced window begins.

    Attributes:
        is_open: A window is under way.
        is_traced: That window, or the last one, is one of `trace_steps`.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        every_n_steps: int,
        trace_steps: Iterable[int],
        num_batches: int,
        num_steps: int,
        align: Callable[[], object],
    ) -> None:
        self.is_open = self.is_traced = False
        self._recorder = recorder
        self._every = every_n_steps
        self._traces = sorted({step for step in trace_steps if step >= num_steps})
        self._align = align
        self._multiples = num_batches // every_n_steps if every_n_steps else 0  # already recorded
        self._first: int | None = None  # optimizer steps before the present one; None between steps
        self._stride = 1  # optimizer steps in the last one

    def before_batch(self, num_batches: int, num_steps: int) -> None:
        """Begins a window, or makes the recorder ready for the next. Collective if traced."""
        if self._first is not None:
            return  # a further micro-batch
        self._first = num_steps
        if self._is_due(num_batches, num_steps):
            self._start()
            self.is_traced = self._is_to_trace(num_steps)
            if self.is_traced:
                self._align()
            self._recorder.begin(num_steps)
            self.is_open = True
        elif self._is_due(num_batches + 1, num_steps + self._stride):
            self._start()

    def after_batch(self, num_batches: int, num_steps: int) -> Recording | None:
        """Ends the window where the step has ended.

        Args:
            num_batches: That have stepped before this one.
            num_steps: Optimizer steps until now.
        """
        if self._first is None or num_steps == self._first:
            return None
        self._stride, self._first = num_steps - self._first, None
        if not self.is_open:
            return None
        recording = self._recorder.end()
        self.is_open = False
        self._traces = [step for step in self._traces if step >= num_steps]
        if self._every:
            self._multiples = (num_batches + 1) // self._every
        if not self._is_due(num_batches + 1, num_steps):
            self._recorder.stop()
        return recording

    def abandon(self) -> None:
        """Drops the window under way and all that was kept: something else comes in between."""
        self.is_open = False
        if self._recorder.is_on:
            self._recorder.stop()

    @property
    def missed(self) -> list[int]:
        """Steps that were to be traced and have not come."""
        return self._traces

    def _start(self) -> None:
        if not self._recorder.is_on:
            self._recorder.start()

    def _is_due(self, num_batches: int, num_steps: int) -> bool:
        is_sampled = self._every > 0 and (num_batches + 1) // self._every > self._multiples
        return is_sampled or self._is_to_trace(num_steps)

    def _is_to_trace(self, num_steps: int) -> bool:
        return bool(self._traces) and self._traces[0] < num_steps + self._stride
