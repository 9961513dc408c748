"""Trains a model of pytorch_forecasting on two ranks: python tft.py STRATEGY."""

import sys

import numpy as np
import pandas as pd
from lightning.pytorch import Trainer, seed_everything
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from report import report

import lightning_zero  # noqa: F401

STEPS = 24


def main() -> None:
    seed_everything(7)
    rng = np.random.default_rng(0)
    series = np.repeat(["a", "b", "c", "d"], STEPS)
    time = np.tile(np.arange(STEPS), 4)
    frame = pd.DataFrame({"series": series, "time": time})
    frame["y"] = np.sin(time / 3) + rng.normal(scale=0.1, size=len(frame))
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="y",
        group_ids=["series"],
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["y"],
        max_encoder_length=8,
        max_prediction_length=2,
    )
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, learning_rate=0.01
    )
    trainer = Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        model,
        data.to_dataloader(train=True, batch_size=8),
        data.to_dataloader(train=False, batch_size=8),
    )
    report(trainer.callback_metrics["val_loss"], model)


if __name__ == "__main__":
    main()
