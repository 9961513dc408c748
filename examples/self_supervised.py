"""Self-supervised training in stage 3: two forwards of the student, an EMA teacher, one backward.

    python examples/self_supervised.py --devices 2

The student sees one part of each picture, and predicts what the teacher, its moving average, makes
of another part (BYOL, arXiv:2006.07733). Between the steps the teacher is changed in place. The
script trains with DDP and `zero3`, without labels, and prints how far they differ.
"""

import argparse
from copy import deepcopy

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from vit import Shapes, ViT

import lightning_zero  # noqa: F401  registers the strategies


class Backbone(ViT):
    """Vision transformer without its classifier."""

    def __init__(self) -> None:
        super().__init__(size=24, patch=8, width=64, depth=3, lr=1e-3)
        self.head = nn.Identity()


def part_of(pictures: Tensor, size: int = 24) -> Tensor:
    """The same random part of all pictures, with noise and other colours."""
    y, x = (int(torch.randint(pictures.shape[-1] - size + 1, ())) for _ in range(2))
    part = pictures[:, :, y : y + size, x : x + size]
    colours = 0.5 + torch.rand(len(part), 3, 1, 1, device=part.device)
    return colours * part + 0.1 * torch.randn_like(part)


class SelfDistilled(pl.LightningModule):
    """A student, a predictor after it, and a teacher that follows the student."""

    def __init__(self, momentum: float = 0.98) -> None:
        super().__init__()
        self.momentum = momentum
        self.student = Backbone()
        self.teacher = deepcopy(self.student).requires_grad_(requires_grad=False)
        self.predictor = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def training_step(self, pictures: Tensor, batch_idx: int) -> Tensor:
        parts = part_of(pictures), part_of(pictures)
        guesses = [self.predictor(self.student(part)) for part in parts]
        with torch.no_grad():
            targets = [self.teacher(part) for part in reversed(parts)]
        pairs = zip(guesses, targets, strict=True)
        loss = sum(1 - F.cosine_similarity(*pair).mean() for pair in pairs)
        self.log("loss", loss.detach())
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *_) -> None:
        student = dict(self.student.named_parameters())
        for name, teacher in self.teacher.named_parameters():  # in stage 3, of its shards
            teacher.lerp_(student[name], 1 - self.momentum)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.05)


def train(
    model: pl.LightningModule, strategy: object, pictures: Tensor, args: argparse.Namespace
) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=strategy,
        devices=args.devices,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(pictures, args.batch_size, shuffle=True))
    return trainer


@torch.no_grad()
def accuracy(backbone: nn.Module, pictures: Tensor, kinds: Tensor) -> Tensor:
    """How often the most similar picture is of the same class."""
    features = F.normalize(backbone(pictures[:, :, 4:28, 4:28]))
    similarity = (features @ features.T).fill_diagonal_(-1)
    return (kinds[similarity.argmax(dim=1)] == kinds).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=64, help="batch size per rank")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()

    pictures, kinds = zip(*Shapes(0, args.pictures, size=32), strict=True)
    pictures, kinds = torch.stack(pictures), torch.tensor(kinds)
    models = []
    for strategy in ("ddp", "zero3"):
        pl.seed_everything(0, verbose=False)
        models.append(SelfDistilled())
        trainer = train(models[-1], strategy, pictures, args)
        if trainer.is_global_zero:
            right = accuracy(models[-1].teacher, pictures, kinds)
            print(f"{strategy}: loss {trainer.callback_metrics['loss']:.6f}, accuracy {right:.1%}")
    if trainer.is_global_zero:
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        difference = max((a - b).abs().max() for a, b in pairs)
        print(f"largest difference of a parameter: {difference:.0e}")


if __name__ == "__main__":
    main()
