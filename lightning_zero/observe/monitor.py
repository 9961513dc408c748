"""What the engine does, to any logger: memory, communication, stragglers, and where time goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint.remote import is_remote
from lightning_zero.observe.chrome import chrome_trace
from lightning_zero.observe.plots import HOW_TO_DRAW, has_matplotlib, plot_memory, plot_timeline
from lightning_zero.observe.report import JobReport, zero_strategy
from lightning_zero.observe.watch import Wanted, Watch, Watched, forgiving

__all__ = ["ZeroMonitor"]


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
        self._watch: Watch | None = None
        self._panels: list[Any] = []  # of the Weights & Biases runs of rank 0

    # ---------------------------------------------------------------- the loop

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses a strategy without an engine."""
        zero_strategy(trainer, self)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, ZeroMonitor) for callback in callbacks) > 1:
            raise ValueError("expected one ZeroMonitor, got several; an engine has one recorder.")
        self._watch = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to watch."""
        every = self.every_n_steps
        run = self.dirpath or trainer.log_dir or trainer.default_root_dir
        if is_remote(run):
            run = "."  # recordings and pictures are local files
        strategy = zero_strategy(trainer, self)
        self._watch = Watch(
            strategy,
            Wanted(
                trainer.log_every_n_steps if every is None else every,  # type: ignore[attr-defined]
                self.trace_steps,
                has_grad_norms=self.has_grad_norms,
                has_spread=self.has_spread,
            ),
            folder=Path(run, "zero"),
            progress=_progress(trainer),
        )
        strategy.before_saving = self._watch.cut
        self._panels = _make_panels(trainer) if trainer.is_global_zero else []

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Ends a window, logs it, and begins one."""
        if self._watch is not None:
            self._log(trainer, self._watch.before_batch(*_progress(trainer)))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Looks at states and gradients."""
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
        """Counts the batch."""
        if self._watch is not None:
            self._watch.after_batch(batch, *_progress(trainer))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What comes between epochs is in no window."""
        if self._watch is not None:
            self._watch.cut()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluation is no part of training."""
        if self._watch is not None:
            self._watch.pause()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stops watching."""
        watch = self._stop(trainer)
        if watch is not None:
            watch.windows.abandon()

    def _stop(self, trainer: pl.Trainer) -> Watch | None:
        watch, self._watch = self._watch, None
        if watch is not None:
            zero_strategy(trainer, self).before_saving = None
        return watch

    def _log(self, trainer: pl.Trainer, watched: Watched | None) -> None:
        if watched is None or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics(watched.metrics, step=watched.num_batches)
        for panels in self._panels if watched.memory else ():
            with forgiving("a panel was not shown"):
                panels.log_step(watched.memory, watched.flows, watched.num_batches)

    # ---------------------------------------------------------------- the end

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reports."""
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
        with forgiving("the report was not written"):
            timelines = self._tell(report, watch)
        for panels in self._panels:
            with forgiving("the report was not shown"):
                panels.log_end(report, timelines, _progress(trainer)[0])

    def _tell(self, report: JobReport, watch: Watch) -> list[Path]:
        """Prints and writes all; pictures of traced steps."""
        print("\n" + report.text())
        paths = [*report.write(watch.folder), *_draw(report, watch)]
        if not has_matplotlib():
            print(HOW_TO_DRAW)
        if watch.windows.missed:
            print(f"trace_steps that did not come: {', '.join(map(str, watch.windows.missed))}")
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


def _draw(report: JobReport, watch: Watch) -> Iterator[Path]:
    """Writes traces, and pictures where they can be drawn."""
    if has_matplotlib():
        yield (picture := watch.folder / "memory.png")
        plot_memory(report.memory, picture)
    for recordings in watch.traced:
        path = watch.folder / f"trace_step_{recordings[0].step}.json"
        path.write_text(json.dumps(chrome_trace(recordings)))
        yield path
        if has_matplotlib():
            yield (picture := path.with_suffix(".png"))
            plot_timeline(recordings, picture)


def _make_panels(trainer: pl.Trainer) -> list[Any]:
    """For each Weights & Biases run; its package is imported only where there is one."""
    runs = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
    if not runs:
        return []
    from lightning_zero.observe.wandb_panels import Panels

    return [Panels(run) for run in runs]
