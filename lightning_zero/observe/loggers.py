"""Loggers that go on where a requeued job stopped: one CSV file, one Weights & Biases run."""

from __future__ import annotations

import csv
import os
import secrets
from pathlib import Path
from typing import Any

import wandb
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

__all__ = ["ContinuedCSVLogger", "wandb_logger"]


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


_ID_FILE = "wandb_id.txt"


def wandb_logger(save_dir: str | Path, **settings: Any) -> WandbLogger:
    """A logger whose run goes on under the same id when the job starts again in `save_dir`.

    Rank 0 alone has a run. That of an earlier job of this process, in a sweep, is finished first.

    Args:
        save_dir: The job's own directory.
        **settings: Of `WandbLogger`.
    """
    if _get_rank() not in (None, 0):
        return WandbLogger(save_dir=save_dir, **settings)
    if wandb.run is not None:
        wandb.finish()
    file = Path(save_dir, _ID_FILE)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    started = {"id": file.read_text().strip(), "resume": "allow"}
    return WandbLogger(save_dir=save_dir, **{**started, **settings})
