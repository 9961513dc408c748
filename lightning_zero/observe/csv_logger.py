"""Metrics of a job in one CSV file, through all runs that requeueing makes of it."""

from __future__ import annotations

import csv
import os

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

__all__ = ["ContinuedCSVLogger"]


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
