"""Trains a model of pytorch_tabular on two ranks: python tabular.py STRATEGY."""

import sys

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from report import report

import lightning_zero  # noqa: F401

FEATURES = list("abcd")


def main() -> None:
    values = np.random.default_rng(0).normal(size=(64, len(FEATURES))).astype("float32")
    frame = pd.DataFrame(values, columns=FEATURES)
    frame["y"] = frame.sum(axis=1)
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=FEATURES),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="16-8", seed=7),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=8,
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            early_stopping=None,
            checkpoints=None,
            load_best=False,
            progress_bar="none",
            seed=7,
            trainer_kwargs={"strategy": sys.argv[1]},
        ),
    )
    model.fit(train=frame, validation=frame, seed=7)
    assert "lightning" not in sys.modules
    report(model.trainer.callback_metrics["valid_loss"], model.model)


if __name__ == "__main__":
    main()
