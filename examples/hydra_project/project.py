"""The model and the data of the project; they do not depend on Hydra or on sharding."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    """Predicts the norm of points with 16 coordinates."""

    def __init__(self, width: int, num_layers: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.first = nn.Linear(16, width)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers))
        )
        self.last = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.last(self.layers(self.first(points))).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, norms = batch
        loss = nn.functional.mse_loss(self(points), norms)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, norms = batch
        self.log("val/loss", nn.functional.mse_loss(self(points), norms), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Points(pl.LightningDataModule):
    """Random points and their norms."""

    def __init__(self, num: int, batch_size: int) -> None:
        super().__init__()
        points = torch.randn(num, 16, generator=torch.Generator().manual_seed(0))
        self.points = TensorDataset(points, points.norm(dim=1))
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.points, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.points[:1024]), self.batch_size)
