"""Model and data of the project, which do not depend on Hydra."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Dense(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def forward(self, x):
        return self.layers(x)


class Classifier(L.LightningModule):
    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        self.save_hyperparameters(logger=False)  # classes, which torch does not load by default
        self.net = net
        self.train_loss = MeanMetric()
        self.val_acc, self.test_acc = MulticlassAccuracy(4), MulticlassAccuracy(4)
        self.val_acc_best = MaxMetric()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.train_loss(loss)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_acc(self.net(batch[0]), batch[1])
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.test_acc(self.net(batch[0]), batch[1])
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val/acc"},
        }


class Points(L.LightningDataModule):
    def __init__(self, num, batch_size):
        super().__init__()
        points = torch.randn(num, 16, generator=torch.Generator().manual_seed(0))
        self.points = TensorDataset(points, points[:, :4].argmax(1))
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.points, self.batch_size // self.trainer.world_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.points[:64]), self.batch_size)

    test_dataloader = val_dataloader
