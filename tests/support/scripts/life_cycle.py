"""Fits, resumes, validates, tests and predicts: python life_cycle.py PACKAGE STRATEGY FOLDER.

PACKAGE is `lightning.pytorch` or `pytorch_lightning`, of whose Trainer there are two ranks. Rank 0
writes what it saw to FOLDER/saw.json.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero

PACKAGE = sys.argv[1]
pl = importlib.import_module(PACKAGE)
OTHER = {"lightning", "pytorch_lightning", "lightning_fabric"} - (
    {"lightning"} if PACKAGE == "lightning.pytorch" else {"pytorch_lightning", "lightning_fabric"}
)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def _loss(self, batch, name):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log(name, loss, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._loss(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self._loss(batch, "val_loss")

    def test_step(self, batch, batch_idx):
        self._loss(batch, "test_loss")

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def make_trainer(strategy, folder, epochs):
    callbacks = [pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True, monitor="val_loss")]
    if strategy.startswith("zero"):
        from lightning_zero.callbacks import Fingerprints, MemoryTable, ZeroMonitor

        callbacks += [ZeroMonitor(every_n_steps=1), MemoryTable(), Fingerprints()]
        strategy = lightning_zero.ZeroStrategy(int(strategy.removeprefix("zero")))
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=pl.loggers.CSVLogger(folder),
        enable_progress_bar=False,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )


def main():
    strategy, folder = sys.argv[2], Path(sys.argv[3])
    pl.seed_everything(7)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    loader = DataLoader(data, batch_size=4)
    trainer = make_trainer(strategy, folder, epochs=1)
    trainer.fit(Model(), loader, loader)
    trainer = make_trainer(strategy, folder, epochs=2)
    model = Model()
    trainer.fit(model, loader, loader, ckpt_path=str(folder / "last.ckpt"))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    values["weights"] = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    (tested,) = trainer.test(model, loader)
    predicted = trainer.predict(model, loader)
    seen = set(sys.modules) & OTHER
    assert not seen, f"both distributions of Lightning are imported: {seen}"
    if trainer.global_rank == 0:
        ours = {name: values[name] for name in ("val_loss", "train_loss", "weights")}
        saw = ours | tested | {"predicted": float(predicted[0][0])}
        (folder / "saw.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    main()
