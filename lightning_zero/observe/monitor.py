"""Monitoring of the engine for any logger: memory, communication, stragglers and time.

`ZeroMonitor` is the callback of the Trainer. `FitMonitor` monitors one fit: it records steps in
`Windows` and computes their metrics and means.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.pytorch import STEP_OUTPUT, WandbLogger
from lightning_zero._lightning.pytorch import __version__ as lightning_version
from lightning_zero.checkpoint.storage import is_remote
from lightning_zero.engine.consistency import describe_software
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.offload import Tier
from lightning_zero.observe.loggers import WandbPanels
from lightning_zero.observe.metrics import (
    SKEW,
    Sample,
    Speed,
    StepMeans,
    Throughput,
    aggregate_ranks,
    allocated_and_peak_bytes,
    is_summary,
    make_metrics,
    peak_flops,
    recorded_kinds,
)
from lightning_zero.observe.plots import MATPLOTLIB_HINT, has_matplotlib, plot_memory, write_trace
from lightning_zero.observe.recordings import write_recording
from lightning_zero.observe.report import JobReport, TransferStats, memory_reports, zero_strategy
from lightning_zero.observe.windows import MonitorConfig, Window, Windows
from lightning_zero.record import streams
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.strategy.saving import SavingCallback
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["FitMonitor", "RecordedStep", "ZeroMonitor"]


class ZeroMonitor(SavingCallback):
    """Logs memory, compute time, communication and waits of every rank, and prints a report.

    One of `every_n_steps` optimizer steps is recorded, with all of its micro-batches (in manual
    optimization, with all optimizer steps of one batch). With several ranks, each metric is logged
    as `/mean` and `/max` over ranks, to all loggers of the Trainer, at the step at which Lightning
    logs metrics of the same batch. Other steps have no overhead. A step with an evaluation inside
    is not recorded.

    The throughput since the previous logged step is logged with it: samples and tokens per second
    of all ranks, TFLOPS per device, and MFU if Lightning knows the peak of the device. FLOPs are
    those of the model, without recomputation: `LightningModule.flops_per_batch`, or per token 6 for
    each trained and 4 for each frozen parameter except embeddings (Kaplan et al.,
    arXiv:2001.08361, section 2.1).

    A recorded step lasts from its first batch to the first batch of the next step, or to an
    evaluation, a checkpoint or the end of the epoch. It thus includes data loading. If the next
    step is recorded, too, it includes the gathering and logging of the metrics.

    On CUDA the device is synchronized at the start and the end of a recorded step. A traced step
    starts on all ranks within the time of one message, because of a barrier right before it. Rank 0
    writes files into `zero/` in the directory of the run.

    Collective: every rank, in recorded steps and at the end of training.

    Args:
        every_n_steps: Interval of recorded steps. None: the Trainer's `log_every_n_steps`. 0: only
            `trace_steps`.
        trace_steps: Values of `Trainer.global_step` before steps that are recorded in addition, and
            written to `zero/recordings` for `lightning-zero trace`.
        report: Print memory by rank, throughput and communication at the end of training, and write
            them to `zero/`, with plots of memory and of the traced steps.
        detail: Log all metrics. False: log about eight that show whether a job is healthy (step
            and wait time, peak memory, throughput, gradient norm, straggler).
        grad_norms: Log the total gradient norm, and with `detail` that of each bucket, before
            clipping. Without effect if
            gradients are offloaded to NVMe, where all of them would be read once more.
        spread: Also log `/min` and `/max_rank` (the rank with the maximum) of each metric; needs
            `detail`.
        dirpath: Directory of the run. None: that of the first logger, or the Trainer's
            `default_root_dir`; if that is remote, the working directory.

    Raises:
        TypeError: An argument has a wrong type; or, before training, the strategy is not a
            `ZeroStrategy`.
        ValueError: A number of steps is negative, or `spread` is set without `detail`; or, before
            training, there is a second monitor.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        trace_steps: Sequence[int] = (),
        report: bool = True,
        detail: bool = False,
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
        flags = {"report": report, "detail": detail, "grad_norms": grad_norms, "spread": spread}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}.")
        if spread and not detail:
            raise ValueError("spread needs detail=True; set it, or leave spread out.")
        self.every_n_steps = every_n_steps
        self.trace_steps = tuple(trace_steps)
        self.has_report = report
        self.has_detail = detail
        self.has_grad_norms = grad_norms
        self.has_spread = spread
        self.dirpath = None if dirpath is None else Path(dirpath)
        # While training:
        self._fit: FitMonitor | None = None
        self._panels: list[WandbPanels] = []  # of the Weights & Biases runs of rank 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        zero_strategy(trainer, self)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, ZeroMonitor) for callback in callbacks) > 1:
            raise ValueError("expected one ZeroMonitor, got several; remove all but one.")
        self._fit = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        every = self.every_n_steps
        run = self.dirpath or trainer.log_dir or trainer.default_root_dir
        if is_remote(run):
            run = "."  # recordings and plots are local files
        strategy = zero_strategy(trainer, self)
        self._fit = FitMonitor(
            strategy,
            MonitorConfig(
                trainer.log_every_n_steps if every is None else every,  # type: ignore[attr-defined]
                self.trace_steps,
                has_detail=self.has_detail,
                has_grad_norms=self.has_grad_norms,
                has_spread=self.has_spread,
            ),
            folder=Path(run, "zero"),
            progress=_progress(trainer),
        )
        loggers = trainer.loggers if trainer.is_global_zero else []
        self._panels = [WandbPanels(run) for run in loggers if isinstance(run, WandbLogger)]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._log(trainer, self._fit.before_batch(*_progress(trainer)))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._fit is not None:
            self._fit.before_step(optimizer)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._fit is not None:
            self._fit.after_batch(batch, *_progress(trainer))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            self._fit.end_window()  # code between epochs is in no window

    @override
    def before_saving(self) -> None:
        if self._fit is not None:
            self._fit.end_window()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            self._fit.pause()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.windows.stop()

    def _log(self, trainer: pl.Trainer, recorded: RecordedStep | None) -> None:
        if recorded is None or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics(recorded.metrics, step=recorded.num_batches)
        for panels in self._panels if recorded.memory else ():
            with _warn_on_error("a panel was not logged"):
                panels.log_step(recorded.memory, recorded.transfers, recorded.num_batches)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fit, self._fit = self._fit, None
        if fit is None:
            return
        self._log(trainer, fit.last())
        if not self.has_report:
            return
        report = fit.report(trainer)
        if not trainer.is_global_zero:
            return
        timelines: list[Path] = []
        with _warn_on_error("the report was not written"):
            timelines = self._write_report(report, fit)
        for panels in self._panels:
            with _warn_on_error("the report was not logged"):
                panels.log_end(report, timelines, _progress(trainer)[0])

    def _write_report(self, report: JobReport, fit: FitMonitor) -> list[Path]:
        """Prints and writes the report; returns the paths of the plots of traced steps."""
        print("\n" + report.text())
        paths = report.write(fit.folder)
        if has_matplotlib():
            paths.append(fit.folder / "memory.png")
            plot_memory(report.memory, paths[-1])
        for recordings in fit.traced:
            paths += write_trace(recordings, fit.folder)
        if not has_matplotlib():
            print(MATPLOTLIB_HINT)
        if fit.windows.traces:
            print(f"trace_steps that were not reached: {', '.join(map(str, fit.windows.traces))}")
        print("written:", *paths, sep="\n  ")
        return [path for path in paths if path.match("trace_*.png")]


def _check_steps(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}.")


def _progress(trainer: pl.Trainer) -> tuple[int, int]:
    """Number of batches with an optimizer step (Lightning logs at it), and of optimizer steps."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.global_step


@contextmanager
def _warn_on_error(what: str) -> Iterator[None]:
    """Turns an exception into a warning: on rank 0 alone it would leave other ranks waiting."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=3)


# ------------------------------------------------------------------------ fit


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step of all ranks.

    Attributes:
        num_batches: Number of batches with an optimizer step before it, as in `Window`.
        metrics: Metrics to log.
        memory: Memory by rank before the optimizer step; of the first step alone, on rank 0.
        transfers: Statistics by kind of transfer.
    """

    num_batches: int
    metrics: dict[str, float]
    memory: list[MemoryReport]
    transfers: list[TransferStats]


class FitMonitor:
    """Monitor of one fit. Every rank creates it, and calls its methods at the same batches."""

    def __init__(
        self,
        strategy: ZeroStrategy,
        config: MonitorConfig,
        *,
        folder: Path,
        progress: tuple[int, int],
    ) -> None:
        engine = self._engine = strategy.engine
        self.folder = folder  # for files, on rank 0
        assert strategy.lightning_module is not None
        self.throughput = Throughput(strategy.lightning_module)
        self._peak_flops = peak_flops(strategy)
        self.traced: list[list[Recording]] = []  # by step and rank; on rank 0
        self.windows = Windows(engine.recorder, config, progress=progress, align=self._align)
        self._strategy = strategy
        # For norms, each gradient on NVMe would be read once more.
        in_files = any(bucket.tiers.grad is Tier.NVME for bucket in engine.plan.buckets)
        self._config = replace(config, has_grad_norms=config.has_grad_norms and not in_files)
        is_on_cpu, overlaps = engine.device.type == "cpu", engine.config.overlap_step
        self._kinds = recorded_kinds(engine.plan, engine.comm.mesh, has_device_memory=not is_on_cpu)
        self._metrics = make_metrics(engine.plan, self._kinds, overlaps_step=overlaps)
        if overlaps:
            self._kinds.append(Kind.STEP)
        self._num_steps = progress[1]
        self._memory: MemoryReport | None = None  # of the open window
        self._at_step: MemoryReport | None = None  # before the last measured optimizer step
        self._num_measured = 0
        self._norms: dict[str, Tensor] = {}  # gradient norms of the open window
        self._means = StepMeans()  # without the first step
        self._has_logged_memory = False
        self._is_first = True  # whether the current or last step is the first one

    def before_batch(self, num_batches: int, num_steps: int) -> RecordedStep | None:
        """Ends a window and begins the next. Collective if either is recorded; see `Windows`."""
        self.throughput.before_batch()
        return self._gather(self.windows.before_batch(num_batches, num_steps))

    def before_step(self, optimizer: Optimizer) -> None:
        """Measures memory and gradients: reduced, unscaled, not clipped. Collective if recorded."""
        # Short fits record nothing, and optimizers make their states in their first step.
        if self.windows.is_open or self._num_measured < 2:
            # Now, because after the step this would wait for a worker that is still stepping.
            self._at_step = self._strategy.memory_report()
            self._num_measured += 1
        if not self.windows.is_open:
            return
        self._memory = self._at_step
        if self._config.has_grad_norms:
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            stepped = {
                b.plan.name for b in self._engine.buckets if not own.isdisjoint(b.parameters)
            }
            norms = self._engine.grad_norms()
            self._norms |= {name: norm for name, norm in norms.items() if name in stepped}

    def after_batch(self, batch: Any, num_batches: int, num_steps: int) -> None:
        """Counts a batch; `num_batches` had an optimizer step before it."""
        self.windows.after_batch(num_batches, num_steps)
        self._is_first = not self.throughput.is_warm
        self.throughput.after_batch(batch, has_stepped=num_steps > self._num_steps)
        self._num_steps = num_steps

    def _align(self) -> None:
        """Barrier of all ranks, after their devices are idle."""
        if self._engine.device.type == "cuda":
            streams.synchronize(self._engine.device)
        self._engine.lockstep.barrier("a window of the monitor")

    def end_window(self) -> None:
        """Ends the window before an evaluation, a checkpoint or the end of an epoch."""
        if self.windows.is_open:
            # Waits for a worker that still steps: its time belongs to this step.
            self._strategy.memory_report()
        if self.windows.close():
            self._memory, self._norms = None, {}

    def pause(self) -> None:
        """Ends the window, and pauses the throughput."""
        self.end_window()
        self.throughput.pause()

    def last(self) -> RecordedStep | None:
        """Recorded step at the end of training. Collective."""
        self.pause()
        return self._gather(self.windows.take())

    def report(self, trainer: pl.Trainer) -> JobReport:
        """Report of the fit; memory is empty except on rank 0. Collective: every rank."""
        engine = self._engine
        peak = float(allocated_and_peak_bytes(engine.device)[1])
        by_rank = engine.comm.control.gather_floats([*self.throughput.warm, peak])
        means = self._means.by_key()
        return JobReport(
            description=self._description(trainer),
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            peak_bytes=[rank[-1] for rank in by_rank],
            world_size=engine.comm.size,
            num_steps=self._num_steps,
            memory=memory_reports(self._strategy, self._at_step),
            speed=Speed.from_counts([rank[:-1] for rank in by_rank], self._peak_flops),
            num_recorded=self._means.num_steps,
            step_s=means.get("zero_time/step_s", math.nan),
            waited_s=means.get("zero_wait/total_s", math.nan),
            skew_s=means.get(SKEW, math.nan),
            straggler=self._means.straggler,
            transfers=[TransferStats.from_means(kind, means) for kind in self._kinds],
            is_on_cpu=engine.device.type == "cpu",
        )

    def _description(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What ran, on what, with which versions, and when it ended."""
        engine = self._engine
        numels = {True: 0, False: 0}
        for bucket in engine.plan.buckets:
            numels[bucket.is_trainable] += sum(slot.numel for slot in bucket.layout.slots)
        device = engine.device
        on_cuda = device.type == "cuda"
        tiers = {"parameter_tiers": "param", "optimizer_tiers": "optim"}
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "stage": engine.config.stage,
            **{
                key: sorted({getattr(bucket.tiers, name).value for bucket in engine.plan.buckets})
                for key, name in tiers.items()
            },
            "precision": str(trainer.precision),
            "model": type(trainer.lightning_module).__name__,
            "parameters": sum(numels.values()),
            "trainable_parameters": numels[True],
            "device": torch.cuda.get_device_name(device) if on_cuda else device.type,
            "num_nodes": trainer.num_nodes,
            "versions": {
                **describe_software(),
                "Lightning": lightning_version,
                "CUDA": torch.version.cuda,
            },
        }

    def _gather(self, window: Window | None) -> RecordedStep | None:
        if window is None:
            return None
        # Raises if another rank has failed and would not reach the next collective.
        self._engine.lockstep.barrier("the metrics of the monitor")
        comm = self._engine.comm
        report = self._memory or self._strategy.memory_report()  # if `before_step` was not called
        resident = allocated_and_peak_bytes(self._engine.device)
        sample = Sample(window.recording, report, *resident)
        own = [metric(sample) for metric in self._metrics.values()]
        counts = self.throughput.lap()  # exact: the device is idle at the end of a window
        by_rank = comm.control.gather_floats([*own, *counts])
        measured = [rank[: len(own)] for rank in by_rank]
        logged, means = aggregate_ranks(self._metrics, measured, has_spread=self._config.has_spread)
        logged |= Speed.from_counts(
            [rank[len(own) :] for rank in by_rank], self._peak_flops
        ).metrics()
        memory: list[MemoryReport] = []
        if not self._has_logged_memory:
            memory, self._has_logged_memory = comm.control.collect_objects(report), True
        if window.is_traced:
            self._write_recordings(comm.control.collect_objects(window.recording))
        if self._config.has_grad_norms and self._memory is not None:
            logged |= self._grad_norm_metrics()
        self._memory, self._norms = None, {}
        if not self._is_first:
            self._means.add(means)
        transfers = [TransferStats.from_means(kind, means) for kind in self._kinds]
        if not self._config.has_detail:
            logged = {key: value for key, value in logged.items() if is_summary(key)}
        return RecordedStep(window.num_batches, logged, memory, transfers)

    def _grad_norm_metrics(self) -> dict[str, float]:
        """Gradient norms, the same on every rank; 0 for buckets without a gradient."""
        norms = {plan.name: 0.0 for plan in self._engine.plan.buckets if plan.is_trainable}
        norms |= {name: float(norm) for name, norm in self._norms.items()}
        # Not every logger accepts names such as "root[0]" and "blocks.3/frozen".
        logged = {re.sub(r"[^\w.-]+", ".", name).strip("."): norm for name, norm in norms.items()}
        logged["total"] = math.hypot(*norms.values())
        return {f"zero_grad_norm/{name}": norm for name, norm in logged.items()}

    def _write_recordings(self, recordings: list[Recording]) -> None:
        if not recordings:
            return  # not rank 0
        self.traced.append(recordings)
        with _warn_on_error("the recording was not written"):
            for recording in recordings:
                write_recording(self.folder, recording)
