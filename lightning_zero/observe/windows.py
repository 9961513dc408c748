"""Windows: which steps of a fit are recorded, and where their recordings begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Recording

__all__ = ["MonitorConfig", "Window", "Windows"]


@dataclass(frozen=True)
class MonitorConfig:
    """Settings of a monitor, the same on every rank.

    Attributes:
        every_n_steps: Interval of recorded steps: those that complete a multiple of it; 0: none.
        trace_steps: Numbers of optimizer steps before the traced steps, which are also written to
            files. If a batch has several optimizer steps, any of them matches.
        has_detail: Whether to log all metrics; otherwise those of `is_summary`.
        has_grad_norms: Whether to measure gradient norms, unless gradients are offloaded to NVMe.
        has_spread: See `aggregate_ranks`.
    """

    every_n_steps: int
    trace_steps: Sequence[int] = ()
    has_detail: bool = False
    has_grad_norms: bool = True
    has_spread: bool = False


@dataclass(frozen=True)
class Window:
    """Recording of one step.

    Attributes:
        recording: Spans of the step.
        num_batches: Number of batches with an optimizer step before it; Lightning logs at it.
        is_traced: Whether the step is one of `trace_steps`.
    """

    recording: Recording
    num_batches: int
    is_traced: bool


class Windows:
    """Windows of one fit, each with the recording of one step and all of its micro-batches.

    A step ends with a batch that increases `Trainer.global_step`: the last of one or several
    batches of accumulation, or in manual optimization a batch with one or several optimizer steps.
    Its window ends at the start of the next batch, or right before other code, such as an
    evaluation. All-gathers and optimizer steps that overlap with the next forward are in one of the
    two windows, and so is data loading. The recorder starts one step earlier, so that it sees what
    that step leaves in flight.

    Args:
        recorder: Recorder of the engine.
        config: Steps to record.
        progress: Number of batches with an optimizer step, and of optimizer steps, before this fit.
        align: Function called right before a traced window begins.

    Attributes:
        is_open: Whether a window is being recorded.
        traces: Steps to trace that are not reached yet.
    """

    def __init__(
        self,
        recorder: Recorder,
        config: MonitorConfig,
        *,
        progress: tuple[int, int],
        align: Callable[[], object],
    ) -> None:
        num_batches, num_steps = progress
        self._recorder = recorder
        self._align = align
        self._every = config.every_n_steps
        self._multiples = num_batches // self._every if self._every else 0  # already recorded
        self.traces = sorted({step for step in config.trace_steps if step >= num_steps})
        self.is_open = self._is_traced = False
        # Batches before the one that ended the step of the open window; None: it has not ended.
        self._end_batch: int | None = None
        self._ended_window: Window | None = None  # by `close`
        # Optimizer steps before the current step; None between steps.
        self._first_step: int | None = None
        self._stride = 1  # optimizer steps in the last step

    def before_batch(self, num_batches: int, num_steps: int) -> Window | None:
        """Ends a window and begins the next, if due. Collective if the next one is traced.

        Args:
            num_batches: Number of batches with an optimizer step so far.
            num_steps: Number of optimizer steps so far.

        Returns:
            The window that ended, here or in `close`.
        """
        if self._first_step is not None:
            return None  # a further micro-batch
        self._first_step = num_steps
        window = self.take()
        if self._is_due(num_batches, num_steps):
            self._is_traced = self._is_to_trace(num_steps)
            self._start()
            if self._is_traced:
                self._align()
            self._recorder.begin(num_steps)
            self.is_open = True
        elif self._is_due(num_batches + 1, num_steps + self._stride):
            self._start()
        else:
            self.stop()
        return window

    def after_batch(self, num_batches: int, num_steps: int) -> None:
        """Checks whether the step has ended; `num_batches` had a step before this batch."""
        if self._first_step is None or num_steps == self._first_step:
            return
        self._stride, self._first_step = num_steps - self._first_step, None
        if self.is_open:
            self._end_batch = num_batches
            self.traces = [step for step in self.traces if step >= num_steps]
            if self._every:
                self._multiples = (num_batches + 1) // self._every

    def close(self) -> bool:
        """Ends or drops the open window before code other than training, and stops recording.

        Returns:
            Whether a window was dropped because its step had not ended.
        """
        if self._end_batch is not None:
            self._ended_window = self.take()
        is_dropped, self.is_open = self.is_open, False
        self.stop()
        return is_dropped

    def take(self) -> Window | None:
        """Returns the window whose step has ended, and ends it unless `close` has."""
        window, self._ended_window = self._ended_window, None
        if self._end_batch is not None:
            window = Window(self._recorder.end(), self._end_batch, self._is_traced)
            self.is_open, self._end_batch = False, None
        return window

    def stop(self) -> None:
        """Stops recording spans."""
        if self._recorder.is_on:
            self._recorder.stop()

    def _start(self) -> None:
        if not self._recorder.is_on:
            self._recorder.start()

    def _is_due(self, num_batches: int, num_steps: int) -> bool:
        is_sampled = self._every > 0 and (num_batches + 1) // self._every > self._multiples
        return is_sampled or self._is_to_trace(num_steps)

    def _is_to_trace(self, num_steps: int) -> bool:
        return bool(self.traces) and self.traces[0] < num_steps + self._stride
