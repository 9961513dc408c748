"""Progress of a job as lines of text, for logs in files."""

from __future__ import annotations

import time
from typing import Any

from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.pytorch import ProgressBar

__all__ = ["ProgressLines"]


class ProgressLines(ProgressBar):
    """Prints a line of progress on rank 0, in the place of Lightning's progress bar.

    A line has the step, the rate since the last line and the metrics logged with `prog_bar=True`.
    After each validation there is a line, too. Nothing is written over: there are no carriage
    returns, bars or colours, so the lines suit a file such as SLURM's log.

    Args:
        refresh_rate: Optimizer steps from one line to the next.

    Example:
        `Trainer(callbacks=[ProgressLines(refresh_rate=100)])` prints

            step 100 of 2500, 14.1 steps/s: train/loss 2.41
    """

    def __init__(self, refresh_rate: int = 100) -> None:
        super().__init__()
        if refresh_rate < 1:
            raise ValueError(f"refresh_rate must be at least 1, got {refresh_rate}.")
        self.refresh_rate = refresh_rate
        self._is_enabled = True
        self._last_step = 0  # of the last line
        self._since = 0.0  # time of the last line

    @override
    def disable(self) -> None:
        self._is_enabled = False

    @override
    def enable(self) -> None:
        self._is_enabled = True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step, self._since = trainer.global_step, time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step == self._last_step or step % self.refresh_rate:
            return
        now = time.perf_counter()
        rate = (step - self._last_step) / max(now - self._since, 1e-9)
        self._last_step, self._since = step, now
        total = f" of {trainer.max_steps}" if trainer.max_steps > 0 else ""
        self._write(f"step {step}{total}, {rate:.3g} steps/s", trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(f"validation at step {trainer.global_step}", trainer, pl_module)

    def _write(self, text: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._is_enabled:
            return
        metrics = self.get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        shown = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in metrics.items()
        ]
        print(f"{text}: {', '.join(shown)}" if shown else text, flush=True)
