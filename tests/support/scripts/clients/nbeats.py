"""Trains a model of darts on two ranks: python nbeats.py STRATEGY."""

import sys

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel
from report import report

import lightning_zero  # noqa: F401


def main() -> None:
    rng = np.random.default_rng(0)
    values = np.sin(np.arange(64) / 3) + rng.normal(scale=0.1, size=64)
    series = TimeSeries.from_values(values)
    model = NBEATSModel(
        input_chunk_length=8,
        output_chunk_length=4,
        num_stacks=3,
        num_layers=2,
        layer_widths=16,
        batch_size=8,
        n_epochs=2,
        random_state=7,
        pl_trainer_kwargs={"strategy": sys.argv[1], "accelerator": "cpu", "devices": 2},
    )
    model.fit(series[:40], val_series=series[40:], verbose=False)
    report(model.trainer.callback_metrics["val_loss"], model.model)


if __name__ == "__main__":
    main()
