"""What the engine does, to any logger: memory, communication, stragglers, and where time goes.

`ZeroMonitor` is told of a training by the Trainer, and shows it; `FitMonitor` has what is seen of one
fit: `Windows` around the steps that are recorded, numbers and means of them.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint.remote import is_remote
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.offload import Tier
from lightning_zero.observe.loggers import WandbPanels
from lightning_zero.observe.metrics import (
    SKEW,
    Sample,
    Speed,
    Throughput,
    aggregate_ranks,
    allocated_and_peak_bytes,
    make_metrics,
    peak_flops,
    recorded_kinds,
)
from lightning_zero.observe.plots import MATPLOTLIB_HINT, has_matplotlib, plot_memory, write_trace
from lightning_zero.observe.recordings import write_recording
from lightning_zero.observe.report import JobReport, TransferStats, memory_reports, zero_strategy
from lightning_zero.record import streams
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["MonitorConfig", "FitMonitor", "RecordedStep", "Window", "Windows", "ZeroMonitor"]


class ZeroMonitor(pl.Callback):
    """Logs what every rank keeps, computes, sends and waits for, and reports on it at the end.

    Every `every_n_steps` optimizer steps one is recorded, with all of its micro-batches: in manual
    optimization all that is stepped in one batch. Its numbers, each as `/mean` and `/max` over the
    ranks where there are several, go to all loggers of the Trainer, at the step at which Lightning
    logs those of the same batch. Other steps cost nothing. Evaluation within a step takes it out of
    the record.

    With them goes the throughput since the step that was logged before: samples and tokens per
    second of all ranks, TFLOPS per device, and MFU where Lightning knows the device's peak. FLOPs
    are the model's, not those of activation checkpointing: `LightningModule.flops_per_batch`, or
    else, for each token, 6 for each trained and 4 for each frozen parameter but embeddings (Kaplan
    et al., arXiv:2001.08361, section 2.1).

    A step is recorded from its first batch to that of the next one, or to an evaluation, a
    checkpoint or the end of the epoch: loading of data is in it. Where the next step is recorded,
    too, the numbers are gathered and logged within that.

    On CUDA a recorded step begins and ends when the device has done what was asked of it. All
    windows of a traced step begin within the time of one message, for the ranks agree right before
    it. Files are written by rank 0, into `zero/` of the run's directory.

    Collective: every rank, in recorded steps and when training ends.

    Args:
        every_n_steps: None: the Trainer's `log_every_n_steps`. 0: only `trace_steps`.
        trace_steps: Record also the steps before which `Trainer.global_step` is one of these, and
            write them to `zero/recordings`, for `lightning-zero trace`.
        report: When training ends, print memory by rank, throughput and communication, and write
            them to `zero/` with pictures of the memory and of the traced steps.
        grad_norms: Log the norm of the gradients of each bucket, before clipping. Not where some
            rest in files, for all of these would be read once more.
        spread: Log of each number over the ranks `/min` too, and `/max_rank`, the rank of the
            greatest.
        dirpath: The run's directory. None: the first logger's, or else the Trainer's
            `default_root_dir`; the working directory where that is remote.

    Raises:
        TypeError: An argument of the wrong type; or, before anything is trained, a strategy that is
            not a `ZeroStrategy`.
        ValueError: A negative number of steps; or a second monitor, before anything is trained.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        trace_steps: Sequence[int] = (),
        report: bool = True,
        grad_norms: bool = True,
        spread: bool = False,
        dirpath: str | os.PathLike[str] | None = None,
    ) -> None:
        if every_n_steps is not None:
            _check_steps("every_n_steps", every_n_steps)
        if not isinstance(trace_steps, Sequence):
            raise TypeError(f"trace_steps must be a list of integers, got {trace_steps!r}.")
        for step in trace_steps:
            _check_steps("each of trace_steps", step)
        flags = {"report": report, "grad_norms": grad_norms, "spread": spread}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}.")
        self.every_n_steps = every_n_steps
        self.trace_steps = tuple(trace_steps)
        self.has_report = report
        self.has_grad_norms = grad_norms
        self.has_spread = spread
        self.dirpath = None if dirpath is None else Path(dirpath)
        # While training:
        self._watch: FitMonitor | None = None
        self._panels: list[WandbPanels] = []  # of the Weights & Biases runs of rank 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        zero_strategy(trainer, self)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, ZeroMonitor) for callback in callbacks) > 1:
            raise ValueError("expected one ZeroMonitor, got several; an engine has one recorder.")
        self._watch = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        every = self.every_n_steps
        run = self.dirpath or trainer.log_dir or trainer.default_root_dir
        if is_remote(run):
            run = "."  # recordings and pictures are local files
        strategy = zero_strategy(trainer, self)
        self._watch = FitMonitor(
            strategy,
            MonitorConfig(
                trainer.log_every_n_steps if every is None else every,  # type: ignore[attr-defined]
                self.trace_steps,
                has_grad_norms=self.has_grad_norms,
                has_spread=self.has_spread,
            ),
            folder=Path(run, "zero"),
            progress=_progress(trainer),
        )
        strategy.before_saving = self._watch.end_window
        loggers = trainer.loggers if trainer.is_global_zero else []
        self._panels = [WandbPanels(run) for run in loggers if isinstance(run, WandbLogger)]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is not None:
            self._log(trainer, self._watch.before_batch(*_progress(trainer)))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._watch is not None:
            self._watch.before_step(optimizer)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._watch is not None:
            self._watch.after_batch(batch, *_progress(trainer))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watch is not None:
            self._watch.end_window()  # what comes between epochs is in no window

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watch is not None:
            self._watch.pause()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        watch = self._stop(trainer)
        if watch is not None:
            watch.windows.stop()

    def _stop(self, trainer: pl.Trainer) -> FitMonitor | None:
        watch, self._watch = self._watch, None
        if watch is not None:
            zero_strategy(trainer, self).before_saving = None
        return watch

    def _log(self, trainer: pl.Trainer, watched: RecordedStep | None) -> None:
        if watched is None or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics(watched.metrics, step=watched.num_batches)
        for panels in self._panels if watched.memory else ():
            with _forgiving("a panel was not shown"):
                panels.log_step(watched.memory, watched.transfers, watched.num_batches)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        watch = self._stop(trainer)
        if watch is None:
            return
        self._log(trainer, watch.last())
        if not self.has_report:
            return
        report = watch.report()
        if not trainer.is_global_zero:
            return
        timelines: list[Path] = []
        with _forgiving("the report was not written"):
            timelines = self._tell(report, watch)
        for panels in self._panels:
            with _forgiving("the report was not shown"):
                panels.log_end(report, timelines, _progress(trainer)[0])

    def _tell(self, report: JobReport, watch: FitMonitor) -> list[Path]:
        """Prints and writes all; pictures of traced steps."""
        print("\n" + report.text())
        paths = report.write(watch.folder)
        if has_matplotlib():
            paths.append(watch.folder / "memory.png")
            plot_memory(report.memory, paths[-1])
        for recordings in watch.traced:
            paths += write_trace(recordings, watch.folder)
        if not has_matplotlib():
            print(MATPLOTLIB_HINT)
        if watch.windows.traces:
            print(f"trace_steps that did not come: {', '.join(map(str, watch.windows.traces))}")
        print("written:", *paths, sep="\n  ")
        return [path for path in paths if path.match("trace_*.png")]


def _check_steps(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}.")


def _progress(trainer: pl.Trainer) -> tuple[int, int]:
    """Batches that have stepped, at which Lightning logs; and steps of all optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.global_step


@contextmanager
def _forgiving(what: str) -> Iterator[None]:
    """Warns of an exception on rank 0, which would end a training or leave other ranks waiting."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=3)


# ------------------------------------------------------------------------ which steps


@dataclass(frozen=True)
class MonitorConfig:
    """What is to be watched, the same on every rank.

    Attributes:
        every_n_steps: A step is recorded with which a multiple of so many is complete; 0: none.
        trace_steps: And those before which so many optimizer steps were taken; of several steps
            within a batch, any. They are written to files.
        has_grad_norms: Measure norms of gradients, unless some rest in files.
        has_spread: See `aggregate_ranks`.
    """

    every_n_steps: int
    trace_steps: Sequence[int] = ()
    has_grad_norms: bool = True
    has_spread: bool = False


@dataclass(frozen=True)
class Window:
    """One that has ended."""

    recording: Recording
    num_batches: int  # that had stepped before its last one, at which Lightning logs
    is_traced: bool  # it is one of `trace_steps`


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
        wanted: Which steps.
        progress: Batches that have stepped, and optimizer steps, before this fit.
        align: Called right before a traced window begins.

    Attributes:
        is_open: A window is under way.
        traces: Steps that are to be traced and have not come.
    """

    def __init__(
        self,
        recorder: Recorder,
        wanted: MonitorConfig,
        *,
        progress: tuple[int, int],
        align: Callable[[], object],
    ) -> None:
        num_batches, num_steps = progress
        self._recorder = recorder
        self._align = align
        self._every = wanted.every_n_steps
        self._multiples = num_batches // self._every if self._every else 0  # already recorded
        self.traces = sorted({step for step in wanted.trace_steps if step >= num_steps})
        self.is_open = self._is_traced = False
        # Batches before the one that has ended the open window's step.
        self._over: int | None = None
        self._ended: Window | None = None  # by `close`
        self._first: int | None = None  # optimizer steps before the present one; None between steps
        self._stride = 1  # optimizer steps in the last one

    def before_batch(self, num_batches: int, num_steps: int) -> Window | None:
        """Ends a window and begins one, each where it is due. Collective if the latter is traced.

        Given are the batches that have stepped until now, and the optimizer steps. The window that
        has ended is returned, also if `close` has ended it.
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
            self.stop()
        return window

    def after_batch(self, num_batches: int, num_steps: int) -> None:
        """Looks whether the step is over; `num_batches` have stepped before this one."""
        if self._first is None or num_steps == self._first:
            return
        self._stride, self._first = num_steps - self._first, None
        if self.is_open:
            self._over = num_batches
            self.traces = [step for step in self.traces if step >= num_steps]
            if self._every:
                self._multiples = (num_batches + 1) // self._every

    def close(self) -> bool:
        """Something else than training comes: no window goes on, and no spans are kept.

        Says whether the step was not over, so that its window is dropped.
        """
        if self._over is not None:
            self._ended = self.take()
        is_dropped, self.is_open = self.is_open, False
        self.stop()
        return is_dropped

    def take(self) -> Window | None:
        """Ends the window whose step is over; at once, if `close` has not done so."""
        window, self._ended = self._ended, None
        if self._over is not None:
            window = Window(self._recorder.end(), self._over, self._is_traced)
            self.is_open, self._over = False, None
        return window

    def stop(self) -> None:
        """Keeps no spans any more."""
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


# ------------------------------------------------------------------------ one fit


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step of all ranks."""

    num_batches: int  # as `Window` has it
    metrics: dict[str, float]
    memory: list[
        MemoryReport
    ]  # by rank, before the optimizer stepped; of the first step, on rank 0
    transfers: list[TransferStats]


class FitMonitor:
    """What a rank keeps of a fit; every rank makes it and calls its methods at the same batches."""

    def __init__(
        self,
        strategy: ZeroStrategy,
        wanted: MonitorConfig,
        *,
        folder: Path,
        progress: tuple[int, int],
    ) -> None:
        engine = self._engine = strategy.engine
        self.folder = folder  # for files, on rank 0
        assert strategy.lightning_module is not None
        self.throughput = Throughput(strategy.lightning_module)
        self._peak_flops = peak_flops(strategy)
        self.traced: list[list[Recording]] = []  # by step, of all ranks; on rank 0
        self.windows = Windows(engine.recorder, wanted, progress=progress, align=self._align)
        self._strategy = strategy
        # Each gradient in a file would be read once more.
        in_files = any(bucket.tiers.grad is Tier.NVME for bucket in engine.plan.buckets)
        self._has_grad_norms = wanted.has_grad_norms and not in_files
        self._has_spread = wanted.has_spread
        is_on_cpu, overlaps = engine.device.type == "cpu", engine.config.overlap_step
        self._kinds = recorded_kinds(engine.plan, engine.comm.mesh, has_device_memory=not is_on_cpu)
        self._metrics = make_metrics(engine.plan, self._kinds, overlaps_step=overlaps)
        self._kinds += [Kind.STEP] * overlaps
        self._num_steps = progress[1]
        self._memory: MemoryReport | None = None  # of the window under way
        self._norms: dict[str, Tensor] = {}  # likewise
        self._sums: dict[str, float] = {}  # of the means over ranks, without the first step
        self._num_recorded = 0  # in these sums
        self._has_seen = False
        self._is_first = True  # the step under way, or the one that is over

    def before_batch(self, num_batches: int, num_steps: int) -> RecordedStep | None:
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
        """Counts a batch, before which `num_batches` have stepped."""
        self.windows.after_batch(num_batches, num_steps)
        self._is_first = not self.throughput.is_warm
        self.throughput.after_batch(batch, has_stepped=num_steps > self._num_steps)
        self._num_steps = num_steps

    def _align(self) -> None:
        """Ranks whose devices have nothing left to do meet."""
        if self._engine.device.type == "cuda":
            streams.synchronize(self._engine.device)
        self._engine.lockstep.barrier("a window of the monitor")

    def end_window(self) -> None:
        """Something comes that is in no window: evaluation, a checkpoint, the end of an epoch."""
        if self.windows.is_open:
            # Waits for a worker that steps beside the training: that belongs to this step.
            self._strategy.memory_report()
        if self.windows.close():
            self._memory, self._norms = None, {}

    def pause(self) -> None:
        """Something comes that is in no window and in no throughput."""
        self.end_window()
        self.throughput.pause()

    def last(self) -> RecordedStep | None:
        """The window with which training ends. Collective."""
        self.pause()
        return self._gather(self.windows.take())

    def report(self) -> JobReport:
        """Of the whole fit; the memory is known on rank 0 alone. Collective: every rank."""
        counts = self._engine.comm.control.gather_floats(self.throughput.warm)
        means = {key: value / self._num_recorded for key, value in self._sums.items()}
        return JobReport(
            world_size=self._engine.comm.size,
            num_steps=self._num_steps,
            memory=memory_reports(self._strategy),
            speed=Speed.from_counts(counts, self._peak_flops),
            num_recorded=self._num_recorded,
            step_s=means.get("zero/time/step_s", 0.0),
            waited_s=means.get("zero/wait/total_s", 0.0),
            skew_s=means.get(SKEW, 0.0),
            transfers=[TransferStats.from_means(kind, means) for kind in self._kinds],
            is_on_cpu=self._engine.device.type == "cpu",
        )

    def _gather(self, window: Window | None) -> RecordedStep | None:
        if window is None:
            return None
        # Another rank may have failed, and would never come to the next collective.
        self._engine.lockstep.barrier("the metrics of the monitor")
        comm = self._engine.comm
        report = self._memory or self._strategy.memory_report()  # a step without Lightning's hooks
        resident = allocated_and_peak_bytes(self._engine.device)
        sample = Sample(window.recording, report, *resident)
        own = [metric(sample) for metric in self._metrics.values()]
        counts = self.throughput.lap()  # exact: a window ends with the device
        everyone = comm.control.gather_floats([*own, *counts])
        measured = [rank[: len(own)] for rank in everyone]
        logged, means = aggregate_ranks(self._metrics, measured, has_spread=self._has_spread)
        logged |= Speed.from_counts(
            [rank[len(own) :] for rank in everyone], self._peak_flops
        ).metrics()
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
        transfers = [TransferStats.from_means(kind, means) for kind in self._kinds]
        return RecordedStep(window.num_batches, logged, memory, transfers)

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
        with _forgiving("the recording was not written"):
            for recording in recordings:
                write_recording(self.folder, recording)
