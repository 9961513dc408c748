"""Trains until it is interrupted: python forever.py STRATEGY FOLDER; each rank leaves its pid."""

import os
import sys
import time
from pathlib import Path

import lightning_zero  # noqa: F401
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule


class ForeverModule(MLPModule):
    """Slow, and marks that it trains."""

    def training_step(self, batch, batch_idx):
        Path(sys.argv[2], f"pid-{os.getpid()}").touch()
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    make_trainer(sys.argv[1], devices=2, max_epochs=-1).fit(ForeverModule(ranks=2))
