"""One Weights & Biases run for one job, whatever ranks, sweeps and requeues it has."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import wandb
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import WandbLogger

__all__ = ["wandb_logger"]

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
