"""Trains a model of neuralforecast on two ranks: python nhits.py STRATEGY."""

import sys

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from report import report

import lightning_zero  # noqa: F401

STEPS = 48


def main() -> None:
    rng = np.random.default_rng(0)
    time = pd.date_range("2024-01-01", periods=STEPS, freq="D")
    frame = pd.DataFrame({"unique_id": np.repeat(list("abcd"), STEPS), "ds": np.tile(time, 4)})
    frame["y"] = np.sin(np.arange(len(frame)) / 3) + rng.normal(scale=0.1, size=len(frame))
    model = NHITS(
        h=4,
        input_size=8,
        mlp_units=3 * [[16, 16]],
        max_steps=6,
        val_check_steps=3,
        batch_size=2,
        windows_batch_size=8,
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_progress_bar=False,
    )
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(frame, val_size=8)
    (trained,) = forecast.models
    report(trained.metrics["ptl/val_loss"], trained)


if __name__ == "__main__":
    main()
