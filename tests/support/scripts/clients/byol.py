"""Trains BYOL, as in lightly's documentation, on two ranks: python byol.py STRATEGY."""

import copy
import sys

import pytorch_lightning as pl
import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models import ResNetGenerator
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from report import report
from torch import nn
from torch.utils.data import DataLoader

import lightning_zero  # noqa: F401


class BYOL(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        resnet = ResNetGenerator("resnet-9", width=0.125)
        self.backbone = nn.Sequential(*list(resnet.children())[:-1], nn.AdaptiveAvgPool2d(1))
        self.projection_head = BYOLProjectionHead(64, 32, 16)
        self.prediction_head = BYOLPredictionHead(16, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1)))

    def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
        y = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(y).detach()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        momentum = cosine_schedule(self.global_step, 4, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x0, x1 = batch, batch.flip(-1)
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def main() -> None:
    pl.seed_everything(7)
    model = BYOL()
    trainer = pl.Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(torch.randn(16, 3, 16, 16), batch_size=4))
    report(trainer.callback_metrics["loss"], model)


if __name__ == "__main__":
    main()
