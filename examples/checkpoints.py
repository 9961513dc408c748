"""Train, resume with other settings, and export: `python examples/checkpoints.py runs/checkpoints`.

The first fit saves a sharded checkpoint in stage 3. The second resumes from it in stage 1. Then the
weights are written as safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from lightning_zero.cli import main as lightning_zero_command


class Regression(pl.LightningModule):
    """Predicts the sum of 32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, sums = batch
        loss = torch.nn.functional.mse_loss(self.net(points), sums)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: lightning_zero.ZeroStrategy, epochs: int, path: str | None, args) -> pl.Trainer:
    points = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(points, points.sum(dim=1, keepdim=True)), batch_size=32)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=args.devices,
        max_epochs=epochs,
        default_root_dir=args.out,
        log_every_n_steps=8,
    )
    trainer.fit(Regression(), data, ckpt_path=path)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()

    path = str(args.out / "sharded.ckpt")  # a directory that all ranks write
    first = fit(lightning_zero.ZeroStrategy(stage=3, checkpoint="sharded"), 2, None, args)
    first.save_checkpoint(path)
    second = fit(lightning_zero.ZeroStrategy(stage=1), 4, path, args)
    if second.is_global_zero:
        weights = str(args.out / "weights.safetensors")
        lightning_zero_command(["export", path, weights, "--force"])
        print(f"epochs: {first.current_epoch}, resumed to {second.current_epoch}")
        print(f"checkpoint: {path}\nweights of {len(load_file(weights))} tensors: {weights}")


if __name__ == "__main__":
    main()
