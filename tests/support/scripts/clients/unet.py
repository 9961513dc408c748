"""Trains a model of segmentation_models_pytorch on two ranks: python unet.py STRATEGY."""

import sys

import pytorch_lightning as pl
import segmentation_models_pytorch as smp
import torch
from report import report
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401


class Segmentation(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = smp.Unet(
            "timm-mobilenetv3_small_minimal_100",
            encoder_weights=None,
            decoder_channels=(32, 16, 16, 8, 8),
        )
        self.loss = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, masks = batch
        loss = self.loss(self.model(images), masks)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    pl.seed_everything(7)
    images = torch.randn(16, 3, 64, 64)
    data = TensorDataset(images, (images.mean(1, keepdim=True) > 0).float())
    model = Segmentation()
    trainer = pl.Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    report(trainer.callback_metrics["loss"], model)


if __name__ == "__main__":
    main()
