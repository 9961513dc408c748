"""Trains on pictures and words in stage 3; a rank without pictures does not run the vision tower.

    python examples/multimodal.py --devices 2

Each rank draws its own batches: pictures of shapes, or words alone. In most steps only some ranks
run the vision tower, and in some steps none does. No rank runs it on an empty picture, and nothing
is declared. The script trains with DDP and with `zero3`, and prints how far they differ.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from vit import CLASSES, Shapes

import lightning_zero  # noqa: F401  registers the strategies

WIDTH, NUM_WORDS = 64, 30
Batch = tuple[Tensor | None, Tensor, Tensor]  # pictures or None, words, answers


def encoder(depth: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


class VisionTower(nn.Module):
    """Maps each picture of 24 x 24 to 9 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=8, stride=8)
        self.places = nn.Parameter(0.02 * torch.randn(9, WIDTH))
        self.encoder = encoder(depth=2)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.encoder(self.patches(pictures).flatten(2).transpose(1, 2) + self.places)


class Answerer(pl.LightningModule):
    """Answers with a class; the tokens of a picture precede those of the words."""

    def __init__(self, steps: int, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.vision = VisionTower()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.text = encoder(depth=2)
        self.head = nn.Linear(WIDTH, len(CLASSES))
        self.looked: list[int] = []  # steps in which this rank ran the vision tower

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pictures, words, answers = batch
        tokens = self.words(words)
        if pictures is not None:
            tokens = torch.cat([self.vision(pictures), tokens], dim=1)
            self.looked.append(batch_idx)
        loss = F.cross_entropy(self.head(self.text(tokens).mean(dim=1)), answers)
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def train_dataloader(self) -> DataLoader:
        """Batches of this rank, in which half have pictures."""
        rank, size = self.trainer.global_rank, self.hparams.batch_size
        generator = torch.Generator().manual_seed(rank)
        batches: list[Batch] = []
        for step in range(self.hparams.steps):
            if torch.rand((), generator=generator) < 0.5:
                first = (rank * self.hparams.steps + step) * size
                pictures, kinds = zip(*Shapes(first, size, size=24), strict=True)
                question = torch.zeros(size, 1, dtype=torch.long)  # "what is this?"
                batches.append((torch.stack(pictures), question, torch.tensor(kinds)))
            else:
                words = torch.randint(NUM_WORDS, (size, 2), generator=generator)
                batches.append((None, words, words.amax(dim=1) % len(CLASSES)))
        return DataLoader(batches, batch_size=None)


def train(model: pl.LightningModule, strategy: object, devices: str) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="batch size per rank")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()

    for strategy in ("ddp_find_unused_parameters_true", "zero3"):
        pl.seed_everything(0, verbose=False)
        model = Answerer(args.steps, args.batch_size)
        trainer = train(model, strategy, args.devices)
        if trainer.is_global_zero:
            print(f"{strategy}: loss {trainer.callback_metrics['loss']:.6f}")
    print(f"rank {trainer.global_rank} ran the vision tower in steps {model.looked}")


if __name__ == "__main__":
    main()
