"""Trains under Ray Train, with a checkpoint per epoch, and resumes after a worker has failed.

    pip install "lightning-zero[ray]"
    python examples/ray_train.py --workers 2

A failed worker restarts the training function on all workers, which resume from the newest
checkpoint. A second run with the same `--name` resumes, too, also with another number of workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.ray import RayZeroStrategy


class Regression(pl.LightningModule):
    """Four blocks that learn a sum."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
        self.net = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    pl.seed_everything(0, verbose=False)
    x = torch.randn(2048, 64)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=32)
    strategy = RayZeroStrategy(stage=config["stage"], checkpoint=config["checkpoint"])
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="auto" if ray.train.torch.get_device().type == "cuda" else "cpu",
        devices="auto",
        max_epochs=config["epochs"],
        callbacks=[RayTrainReportCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer)
    newest = ray.train.get_checkpoint()
    if newest is None:
        trainer.fit(Regression(), data)
        return
    with newest.as_directory() as folder:
        path = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        trainer.fit(Regression(), data, ckpt_path=str(path), weights_only=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--checkpoint", choices=["full", "sharded"], default="full")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--name", default="lightning-zero", help="name of the run")
    parser.add_argument("--storage", default="outputs/ray", help="folder that all nodes share")
    options = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=options.name,
            storage_path=str(Path(options.storage).resolve()),
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"loss {result.metrics['loss']:.4f}, checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
