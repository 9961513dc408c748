"""Which steps are recorded, and when their windows begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Recording

__all__ = ["Window", "Windows"]


@dataclass(frozen=True)
class Window:
    """One that has ended.

    Attributes:
        recording: Of it.
        num_batches: That had stepped before its last one, at which Lightning logs.
        is_traced: It is one of `trace_steps`.
    """

    recording: Recording
    num_batches: int
    is_traced: bool


class Windows:
    """Windows of one fit, each over one step with all of its micro-batches.

    A step is over with a batch in which `Trainer.global_step` has grown: the last of one or several
    batches of accumulation, in manual optimization one or several steps of the optimizers. Its
    window ends where the next batch begins, or right before something else does, such as an
    evaluation: what a step leaves under way, gathers or a step beside the next forward, is in one
    window or the next, and so is loading of data. The recorder is on from the step before, so that
    it sees what that has left under way.

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
        self.is_open = self._is_traced = False
        self._over: int | None = (
            None  # batches before the one that has ended the open window's step
        )
        self._ended: Window | None = None  # by `close`
        self._recorder = recorder
        self._every = every_n_steps
        self._traces = sorted({step for step in trace_steps if step >= num_steps})
        self._align = align
        self._multiples = num_batches // every_n_steps if every_n_steps else 0  # already recorded
        self._first: int | None = None  # optimizer steps before the present one; None between steps
        self._stride = 1  # optimizer steps in the last one

    def before_batch(self, num_batches: int, num_steps: int) -> Window | None:
        """Ends a window and begins one, each where it is due. Collective if the latter is traced.

        Args:
            num_batches: That have stepped until now.
            num_steps: Optimizer steps until now.

        Returns:
            The window that has ended, also if `close` has ended it.
        """
        if self._first is not None:
            return None  # a further micro-batch
        self._first = num_steps
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
            self._stop()
        return window

    def after_batch(self, num_batches: int, num_steps: int) -> None:
        """Looks whether the step is over.

        Args:
            num_batches: That have stepped before this one.
            num_steps: Optimizer steps until now.
        """
        if self._first is None or num_steps == self._first:
            return
        self._stride, self._first = num_steps - self._first, None
        if self.is_open:
            self._over = num_batches
            self._traces = [step for step in self._traces if step >= num_steps]
            if self._every:
                self._multiples = (num_batches + 1) // self._every

    def close(self) -> bool:
        """Something else than training comes: no window goes on, and no spans are kept.

        Returns:
            Whether the step was not over, so that its window is dropped.
        """
        if self._over is not None:
            self._ended = self.take()
        is_dropped, self.is_open = self.is_open, False
        self._stop()
        return is_dropped

    def take(self) -> Window | None:
        """Ends the window whose step is over; at once, if `close` has not done so."""
        window, self._ended = self._ended, None
        if self._over is not None:
            window = Window(self._recorder.end(), self._over, self._is_traced)
            self.is_open, self._over = False, None
        return window

    def abandon(self) -> None:
        """Drops the window under way, and one that nobody has taken."""
        self.is_open, self._over, self._ended = False, None, None
        self._stop()

    @property
    def missed(self) -> list[int]:
        """Steps that were to be traced and have not come."""
        return self._traces

    def _stop(self) -> None:
        if self._recorder.is_on:
            self._recorder.stop()

    def _start(self) -> None:
        if not self._recorder.is_on:
            self._recorder.start()

    def _is_due(self, num_batches: int, num_steps: int) -> bool:
        is_sampled = self._every > 0 and (num_batches + 1) // self._every > self._multiples
        return is_sampled or self._is_to_trace(num_steps)

    def _is_to_trace(self, num_steps: int) -> bool:
        return bool(self._traces) and self._traces[0] < num_steps + self._stride
