"""Trains a vision transformer in stage 2, on generated pictures.

    python examples/vit.py

The model classifies shapes of one colour on noise. The script prints the accuracy. To use your own
pictures, pass a dataset of (picture, class), such as torchvision's ImageFolder, to the loaders, and
the sizes of the pictures to the module.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightning_zero  # noqa: F401  registers the strategies

CLASSES = ("square", "disc", "cross")


class Shapes(Dataset):
    """Pictures of shape (3, size, size) with the number of their class; each has its own seed."""

    def __init__(self, first: int, num: int, size: int) -> None:
        self.first, self.num, self.size = first, num, size

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.num:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first + index)
        kind = int(torch.randint(len(CLASSES), (), generator=generator))
        place, colour = torch.rand(2, 1, 1, generator=generator), torch.rand(3, generator=generator)
        grid = torch.linspace(-1, 1, self.size)
        y, x = (torch.stack(torch.meshgrid(grid, grid, indexing="ij")) - place + 0.5).abs()
        inside = (
            torch.maximum(x, y) < 0.4,
            x.square() + y.square() < 0.2,
            (torch.minimum(x, y) < 0.12) & (torch.maximum(x, y) < 0.45),
        )[kind]
        noise = 0.2 * torch.randn(3, self.size, self.size, generator=generator)
        return noise + inside * (0.5 + colour[:, None, None]), kind


class ViT(pl.LightningModule):
    """Patches, a class token, a transformer encoder and a linear layer."""

    def __init__(self, size: int, patch: int, width: int, depth: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CLASSES))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.encoder(x)[:, 0])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures, kinds = batch
        loss = F.cross_entropy(self(pictures), kinds)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pictures, kinds = batch
        accuracy = (self(pictures).argmax(dim=1) == kinds).float().mean()
        self.log("val/accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=32, help="height and width of the pictures")
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=32, help="batch size per rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()

    pl.seed_everything(0)
    trained = Shapes(0, args.pictures, args.size)
    others = Shapes(args.pictures, args.pictures // 8, args.size)
    trainer = pl.Trainer(strategy="zero2", devices=args.devices, max_epochs=args.epochs)
    trainer.fit(
        ViT(args.size, args.patch, args.width, args.depth, args.lr),
        DataLoader(trained, args.batch_size, shuffle=True, drop_last=True),
        DataLoader(others, args.batch_size),
    )
    if trainer.is_global_zero:
        print(f"accuracy: {trainer.callback_metrics['val/accuracy']:.1%}, by chance 33.3%")
        print(f"checkpoint: {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()
