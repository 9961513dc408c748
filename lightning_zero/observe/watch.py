"""One fit as `ZeroMonitor` sees it: which steps are recorded, means over them, and files."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.offload import Tier
from lightning_zero.observe.files import write_recording
from lightning_zero.observe.metrics import (
    SKEW,
    Sample,
    allocated_and_peak_bytes,
    kinds_of,
    metrics_of,
    over_ranks,
)
from lightning_zero.observe.report import Flow, JobReport, memory_reports
from lightning_zero.observe.throughput import Speed, Throughput, peak_flops
from lightning_zero.record import streams
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["Wanted", "Watch", "Watched", "Window", "Windows", "forgiving"]


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


@dataclass(frozen=True)
class Watched:
    """One recorded step of all ranks.

    Attributes:
        num_batches: That had stepped before its last one, at which Lightning logs.
        metrics: To be logged.
        memory: Model states by rank, before the optimizer stepped; of the first such step only, and
            on rank 0.
        flows: Means over the ranks.
    """

    num_batches: int
    metrics: dict[str, float]
    memory: list[MemoryReport]
    flows: list[Flow]


@dataclass(frozen=True)
class Wanted:
    """What is to be watched.

    Attributes:
        every_n_steps: See `Windows` for this and the next.
        trace_steps: Each of these is written to files.
        has_grad_norms: Measure norms of gradients, unless some rest in files.
        has_spread: See `over_ranks`.
    """

    every_n_steps: int
    trace_steps: Sequence[int] = ()
    has_grad_norms: bool = True
    has_spread: bool = False


class Watch:
    """What a rank keeps of a fit. Every rank makes it, and calls its methods, at the same batches.

    Args:
        strategy: With an engine.
        wanted: The same on every rank.
        folder: For files, on rank 0.
        progress: Batches that have stepped, and optimizer steps, before this fit.

    Attributes:
        folder: For files.
        throughput: Without evaluation.
        windows: Around the steps that are recorded.
        traced: Recordings of all ranks, by step; on rank 0.
    """

    def __init__(
        self,
        strategy: ZeroStrategy,
        wanted: Wanted,
        *,
        folder: Path,
        progress: tuple[int, int],
    ) -> None:
        engine = self._engine = strategy.engine
        self.folder = folder
        assert strategy.lightning_module is not None
        self.throughput = Throughput(strategy.lightning_module)
        self._peak_flops = peak_flops(strategy)
        self.traced: list[list[Recording]] = []
        self.windows = Windows(
            engine.recorder,
            every_n_steps=wanted.every_n_steps,
            trace_steps=wanted.trace_steps,
            num_batches=progress[0],
            num_steps=progress[1],
            align=self._align,
        )
        self._strategy = strategy
        # Each gradient in a file would be read once more.
        in_files = any(bucket.tiers.grad is Tier.NVME for bucket in engine.plan.buckets)
        self._has_grad_norms = wanted.has_grad_norms and not in_files
        self._has_spread = wanted.has_spread
        of_plan: dict[str, Any] = {"is_apart": engine.device.type != "cpu"}
        overlaps = engine.config.overlap_step
        self._metrics = metrics_of(engine.plan, engine.comm.mesh, **of_plan, overlaps_step=overlaps)
        self._kinds = kinds_of(engine.plan, engine.comm.mesh, **of_plan)
        self._kinds += [Kind.STEP] * overlaps
        self._num_steps = progress[1]
        self._memory: MemoryReport | None = None  # of the window under way
        self._norms: dict[str, Tensor] = {}  # likewise
        self._sums: dict[str, float] = {}  # of the means over ranks, without the first step
        self._num_recorded = 0  # in these sums
        self._has_seen = False
        self._is_first = True  # the step under way, or the one that is over

    # ---------------------------------------------------------------- the loop

    def before_batch(self, num_batches: int, num_steps: int) -> Watched | None:
        """Ends a window, and begins one. Collective where either is recorded; see `Windows`."""
        self.throughput.before_batch()
        return self._gather(self.windows.before_batch(num_batches, num_steps))

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are whole means, unscaled and not clipped yet. Collective if recorded."""
        if not self.windows.is_open:
            return
        # Now, for after the step a worker may be at it still, and would be waited for.
        self._memory = self._strategy.memory_report()
        if self._has_grad_norms:
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            stepped = {
                b.plan.name for b in self._engine.buckets if not own.isdisjoint(b.parameters)
            }
            norms = self._engine.grad_norms()
            self._norms |= {name: norm for name, norm in norms.items() if name in stepped}

    def after_batch(self, batch: Any, num_batches: int, num_steps: int) -> None:
        """Counts a batch.

        Args:
            batch: The one that has been trained.
            num_batches: That have stepped before it.
            num_steps: Optimizer steps until now.
        """
        self.windows.after_batch(num_batches, num_steps)
        self._is_first = not self.throughput.is_warm
        self.throughput.after_batch(batch, has_stepped=num_steps > self._num_steps)
        self._num_steps = num_steps

    def _align(self) -> None:
        """Ranks whose devices have nothing left to do meet."""
        if self._engine.device.type == "cuda":
            streams.synchronize(self._engine.device)
        self._engine.lockstep.meet_for("a window of the monitor")

    def cut(self) -> None:
        """Something comes that is in no window: evaluation, a checkpoint, the end of an epoch."""
        if self.windows.is_open:
            # Waits for a worker that steps beside the training: that belongs to this step.
            self._strategy.memory_report()
        if self.windows.close():
            self._memory, self._norms = None, {}

    def pause(self) -> None:
        """Something comes that is in no window and in no throughput."""
        self.cut()
        self.throughput.pause()

    def last(self) -> Watched | None:
        """The window with which training ends. Collective."""
        self.pause()
        return self._gather(self.windows.take())

    # ---------------------------------------------------------------- results

    def report(self) -> JobReport:
        """Of the whole fit; the memory is known on rank 0 alone. Collective: every rank."""
        counts = self._engine.comm.control.gather_floats(self.throughput.warm)
        means = {key: value / self._num_recorded for key, value in self._sums.items()}
        return JobReport(
            world_size=self._engine.comm.size,
            num_steps=self._num_steps,
            memory=memory_reports(self._strategy),
            speed=Speed.of(counts, self._peak_flops),
            num_recorded=self._num_recorded,
            step_s=means.get("zero/time/step_s", 0.0),
            waited_s=means.get("zero/wait/waited_s", 0.0),
            skew_s=means.get(SKEW, 0.0),
            flows=[Flow.of(kind, means) for kind in self._kinds],
            is_on_cpu=self._engine.device.type == "cpu",
        )

    def _gather(self, window: Window | None) -> Watched | None:
        if window is None:
            return None
        # Another rank may have failed, and would never come to the next collective.
        self._engine.lockstep.meet_for("the metrics of the monitor")
        comm = self._engine.comm
        report = self._memory or self._strategy.memory_report()  # a step without Lightning's hooks
        resident = allocated_and_peak_bytes(self._engine.device)
        sample = Sample(window.recording, report, *resident)
        own = [metric(sample) for metric in self._metrics.values()]
        counts = self.throughput.lap()  # exact: a window ends with the device
        everyone = comm.control.gather_floats([*own, *counts])
        measured = [rank[: len(own)] for rank in everyone]
        logged, means = over_ranks(self._metrics, measured, has_spread=self._has_spread)
        logged |= Speed.of([rank[len(own) :] for rank in everyone], self._peak_flops).metrics()
        memory: list[MemoryReport] = []
        if not self._has_seen:
            memory, self._has_seen = comm.control.collect_objects(report), True
        if window.is_traced:
            self._keep(comm.control.collect_objects(window.recording))
        if self._has_grad_norms and self._memory is not None:
            logged |= self._of_gradients()
        self._memory, self._norms = None, {}
        if not self._is_first:
            self._num_recorded += 1
            for key, value in means.items():
                self._sums[key] = self._sums.get(key, 0.0) + value
        flows = [Flow.of(kind, means) for kind in self._kinds]
        return Watched(window.num_batches, logged, memory, flows)

    def _of_gradients(self) -> dict[str, float]:
        """Norms that are the same on every rank; 0 where what is trained has got no gradient."""
        norms = {plan.name: 0.0 for plan in self._engine.plan.buckets if plan.is_trainable}
        norms |= {name: float(norm) for name, norm in self._norms.items()}
        # "root[0]" and "blocks.3/frozen" are no names that every logger takes.
        logged = {re.sub(r"[^\w.-]+", ".", name).strip("."): norm for name, norm in norms.items()}
        logged["total"] = math.hypot(*norms.values())
        return {f"zero/grad_norm/{name}": norm for name, norm in logged.items()}

    def _keep(self, recordings: list[Recording]) -> None:
        if not recordings:
            return  # on the other ranks
        self.traced.append(recordings)
        with forgiving("the recording was not written"):
            for recording in recordings:
                write_recording(self.folder, recording)


@contextmanager
def forgiving(what: str) -> Iterator[None]:
    """Warns of an exception on rank 0, which would end a training or leave other ranks waiting.

    Args:
        what: Failed.
    """
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=3)
