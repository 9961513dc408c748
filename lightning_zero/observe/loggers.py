"""Loggers that go on where a requeued job stopped, and what a Weights & Biases run shows.

What they write with is imported when one is made.
"""

from __future__ import annotations

import csv
import os
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.observe.report import JobReport, TransferStats

__all__ = ["ContinuedCSVLogger", "WandbPanels", "tensorboard_logger", "wandb_logger"]


class ContinuedCSVLogger(CSVLogger):
    """Lightning's own, which deletes what it finds; this one appends where SLURM requeued the job.

    Steps that a run had logged and not saved before it was killed are there twice.
    """

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _Appending(self.log_dir)
        experiment: ExperimentWriter = super().experiment
        return experiment


class _Appending(ExperimentWriter):
    @override
    def _check_log_dir_exists(self) -> None:
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])


def tensorboard_logger(save_dir: str | Path, **settings: Any) -> TensorBoardLogger:
    """Lightning's own, which goes on in the same directory, the job's own.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """
    if not any(map(find_spec, ("tensorboard", "tensorboardX"))):
        raise ModuleNotFoundError(
            "logger=tensorboard needs a package that is not installed: pip install "
            '"lightning-zero[tensorboard]"; or choose logger=csv or logger=[csv,wandb].'
        )
    return TensorBoardLogger(save_dir, **settings)


# ------------------------------------------------------------------------ Weights & Biases

_GIB = 1024**3
_MAX_NUM_RANKS = 16
_LONGEST_NAME = 128  # of a run, in letters; a tag may have half as many


def wandb_logger(
    save_dir: str | Path,
    *,
    name: str | None = None,
    tags: Sequence[str] | None = None,
    **settings: Any,
) -> WandbLogger:
    """A logger whose run goes on under the same id when the job starts again in `save_dir`.

    Rank 0 alone has a run. That of an earlier job of this process, in a sweep, is finished first.

    Args:
        save_dir: The job's own directory.
        name: Of the run, of which Weights & Biases takes 128 letters. None: one of its own.
        tags: Of the run, of which it takes 64 letters each.
        **settings: Of `WandbLogger`. None: as if not given.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if name:
        given["name"] = name[:_LONGEST_NAME]
    if tags:
        given["tags"] = [str(tag)[: _LONGEST_NAME // 2] for tag in tags]
    if _get_rank() not in (None, 0):
        return WandbLogger(save_dir=save_dir, **given)
    import wandb

    if wandb.run is not None:
        wandb.finish()
    file = Path(save_dir, "wandb_id.txt")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    started = {"id": file.read_text().strip(), "resume": "allow"}
    return WandbLogger(save_dir=save_dir, **{**started, **given})


class WandbPanels:
    """Bars, tables and pictures of one run beside its curves, on rank 0.

    All of it is of the core package, so that it works offline. Metrics of the engine are drawn over
    the steps that the logger counts.
    """

    def __init__(self, logger: WandbLogger) -> None:
        self._logger = logger
        logger.experiment.define_metric("zero/*", step_metric="trainer/global_step")

    def log_step(
        self, memory: Sequence[MemoryReport], transfers: Sequence[TransferStats], step: int
    ) -> None:
        """Memory by rank and state, and communication, at the step at which Lightning logs it."""
        from wandb import Table

        columns: list[str | int] = ["kind", "in flight s", "hidden s", "exposed s", "GiB", "GiB/s"]
        rows = [
            [flow.kind, flow.in_flight_s, flow.hidden_s, flow.exposed_s, flow.gib, flow.gib_per_s]
            for flow in transfers
        ]
        communication = Table(columns=columns, data=rows)
        panels = {"zero/memory_by_rank": _bars(memory), "zero/communication": communication}
        self._logger.log_metrics(panels, step=step)

    def log_end(self, report: JobReport, timelines: Sequence[Path], step: int) -> None:
        """The same of the whole job, and pictures of the steps that were traced."""
        self.log_step(report.memory, report.transfers, step)
        for path in timelines:
            self._logger.log_image(f"zero/{path.stem}", [str(path)], step=step)


def _bars(memory: Sequence[MemoryReport]) -> Any:
    """A bar for each rank and state; of many ranks, for those that keep the least and the most."""
    import wandb

    if len(memory) > _MAX_NUM_RANKS:
        by_size = attrgetter("total_bytes")
        memory = [min(memory, key=by_size), max(memory, key=by_size)]
    rows = [
        [f"rank {report.rank} {state.value} ({tier})", nbytes / _GIB]
        for report in memory
        for tier, states in report.tiers.items()
        for state, nbytes in states.items()
    ]
    rows += [
        [f"data parallel {state.value}", nbytes / _GIB]
        for state, nbytes in memory[0].data_parallel.items()
    ]
    table = wandb.Table(columns=["state", "GiB"], data=rows)
    return wandb.plot.bar(table, "state", "GiB", title="Model states by rank, GiB")
