"""Loggers that go on where a requeued job stopped: one CSV file, one Weights & Biases run.

What they write with is imported when one is made.
"""

from __future__ import annotations

import csv
import os
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

__all__ = ["ContinuedCSVLogger", "tensorboard_logger", "wandb_logger"]


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
    file = Path(save_dir, _ID_FILE)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    started = {"id": file.read_text().strip(), "resume": "allow"}
    return WandbLogger(save_dir=save_dir, **{**started, **given})


def tensorboard_logger(save_dir: str | Path, **settings: Any) -> TensorBoardLogger:
    """Lightning's own, which goes on in the same directory.

    Args:
        save_dir: The job's own directory.
        **settings: Of `TensorBoardLogger`.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """
    if not any(map(find_spec, ("tensorboard", "tensorboardX"))):
        raise ModuleNotFoundError(
            "logger=tensorboard needs a package that is not installed: pip install "
            '"lightning-zero[tensorboard]"; or choose logger=csv or logger=[csv,wandb].'
        )
    return TensorBoardLogger(save_dir, **settings)
