"""Trains a model of gluonts on two ranks, with its ModelCheckpoint: python deepar.py STRATEGY."""

import sys

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from lightning.pytorch import seed_everything
from report import report

import lightning_zero  # noqa: F401


def main() -> None:
    seed_everything(7)
    rng = np.random.default_rng(0)
    series = [np.sin(np.arange(96) / 4) + rng.normal(scale=0.1, size=96) for _ in range(4)]
    entries = [{"start": "2024-01-01", "target": values} for values in series]
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=4,
        context_length=8,
        hidden_size=8,
        batch_size=8,
        num_batches_per_epoch=3,
        trainer_kwargs={
            "strategy": sys.argv[1],
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
        },
    )
    data = ListDataset(entries, freq="D")
    trained = estimator.train_model(data, data)
    report(trained.trainer.callback_metrics["val_loss"], trained.trained_net)


if __name__ == "__main__":
    main()
