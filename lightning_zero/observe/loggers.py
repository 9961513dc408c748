"""Loggers that continue after a requeue, and panels for a Weights & Biases run.

Packages of loggers are imported when a logger is created.
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

from typing_extensions import override

from lightning_zero._lightning.fabric import _get_rank, rank_zero_experiment
from lightning_zero._lightning.pytorch import (
    CSVLogger,
    ExperimentWriter,
    TensorBoardLogger,
    WandbLogger,
)
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.observe.report import JobReport, TransferStats

__all__ = ["ContinuedCSVLogger", "WandbPanels", "tensorboard_logger", "wandb_logger"]


class ContinuedCSVLogger(CSVLogger):
    """Lightning's CSVLogger, but it appends to the existing file if SLURM has requeued the job.

    Steps between the last checkpoint and the end of the previous run are in the file twice.
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
    """Lightning's TensorBoardLogger; after a requeue it continues in the directory of the job.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """
    if not any(map(find_spec, ("tensorboard", "tensorboardX"))):
        raise ModuleNotFoundError(
            "logger=tensorboard needs TensorBoard, which is not installed: pip install "
            '"lightning-zero[tensorboard]", or use logger=csv or logger=[csv,wandb].'
        )
    return TensorBoardLogger(save_dir, **settings)


# ------------------------------------------------------------------------ Weights & Biases

_GIB = 1024**3
_MAX_NUM_RANKS = 16
_MAX_NAME_LENGTH = 128  # characters of the name of a run; a tag may have half as many


def wandb_logger(
    save_dir: str | Path,
    *,
    name: str | None = None,
    tags: Sequence[str] | None = None,
    **settings: Any,
) -> WandbLogger:
    """Makes a WandbLogger whose run keeps its id when the job is restarted in `save_dir`.

    Only rank 0 has a run. In a sweep, the run of the previous job of this process is finished
    first.

    Args:
        save_dir: Directory of the job.
        name: Name of the run; at most 128 characters are used. None: chosen by W&B.
        tags: Tags of the run; at most 64 characters of each are used.
        **settings: Arguments of `WandbLogger`. None: not given.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if name:
        given["name"] = name[:_MAX_NAME_LENGTH]
    if tags:
        given["tags"] = [str(tag)[: _MAX_NAME_LENGTH // 2] for tag in tags]
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
    """Bar charts, tables and plots of a W&B run, on rank 0.

    They need only W&B's core package, so they work offline. The engine's metrics are plotted over
    the logger's global step.
    """

    def __init__(self, logger: WandbLogger) -> None:
        self._logger = logger
        logger.experiment.define_metric("zero*", step_metric="trainer/global_step")

    def log_step(
        self, memory: Sequence[MemoryReport], transfers: Sequence[TransferStats], step: int
    ) -> None:
        """Logs memory by rank and state, and communication, at the global step `step`."""
        from wandb import Table

        columns: list[str | int] = [
            "kind",
            "in flight s",
            "overlapped s",
            "exposed s",
            "GiB",
            "GB/s",
        ]
        rows = [
            [row.kind, row.in_flight_s, row.overlapped_s, row.exposed_s, row.gib, row.gb_per_s]
            for row in transfers
        ]
        rows = [[None if cell != cell else cell for cell in row] for row in rows]  # NaN: unknown
        communication = Table(columns=columns, data=rows)
        panels = {"zero_memory/by_rank": _bars(memory), "zero_comm/kinds": communication}
        self._logger.log_metrics(panels, step=step)

    def log_end(self, report: JobReport, timelines: Sequence[Path], step: int) -> None:
        """Logs memory and communication of the entire job, and plots of the traced steps."""
        self.log_step(report.memory, report.transfers, step)
        for path in timelines:
            self._logger.log_image(f"zero_trace/{path.stem}", [str(path)], step=step)


def _bars(memory: Sequence[MemoryReport]) -> Any:
    """Bar chart by rank and state; of many ranks, only those with the fewest and most bytes."""
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
