"""Trains a mixture of experts in stage 3; each rank runs only the experts that its tokens choose.

    python examples/moe.py --devices 2

In a batch, an expert may get tokens on one rank and none on another, so ranks run different
modules, in different number. An expert is unsharded when a rank runs it. No expert has to be called
with empty input. The script prints the experts that every rank ran in the last step.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero


class Expert(nn.Sequential):
    """A feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Mixture(nn.Module):
    """Layer that sends each token only to the expert that the router prefers."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))
        self.ran: list[int] = []  # experts of the last forward
        self.balance = torch.zeros(())  # loss; 1 if experts get equally many tokens

    def forward(self, x: Tensor) -> Tensor:
        """Maps (tokens, width) to the same shape."""
        normed = self.norm(x)
        shares = self.router(normed).softmax(dim=-1)
        share, chosen = shares.max(dim=-1)
        counts = chosen.bincount(minlength=len(self.experts))
        self.ran = counts.nonzero().flatten().tolist()
        self.balance = len(self.experts) * (counts / len(x)) @ shares.mean(dim=0)
        y = torch.zeros_like(x)
        for number in self.ran:
            there = (chosen == number).nonzero().flatten()
            mixed = self.experts[number](normed[there]) * share[there, None]
            y = y.index_add(0, there, mixed)
        return x + y


class Model(pl.LightningModule):
    """Classifies points of 8 coordinates by their cluster, with layers of experts."""

    def __init__(self, width: int, depth: int, num_experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.mixtures = nn.ModuleList(Mixture(width, num_experts) for _ in range(depth))
        self.last = nn.Linear(width, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, kinds = batch
        x = self.first(points)
        for mixture in self.mixtures:
            x = mixture(x)
        loss = F.cross_entropy(self.last(x), kinds)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss + 0.01 * sum(mixture.balance for mixture in self.mixtures)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Points(pl.LightningDataModule):
    """Points in eight clusters: four of them on even ranks, the other four on odd ranks."""

    def __init__(self, num: int, batch_size: int) -> None:
        super().__init__()
        self.num, self.batch_size = num, batch_size

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        generator = torch.Generator().manual_seed(rank)
        clusters = torch.randint(4, (self.num,), generator=generator) + 4 * (rank % 2)
        points = torch.eye(8)[clusters] + 0.2 * torch.randn(self.num, 8, generator=generator)
        return DataLoader(TensorDataset(points, clusters), self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32, help="batch size per rank")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=lightning_zero.ZeroStrategy(stage=3, unit_classes={Expert}),
        devices=args.devices,
        max_steps=args.steps,
        use_distributed_sampler=False,
    )
    model = Model(args.width, args.depth, args.experts)
    trainer.fit(model, Points(args.steps * args.batch_size, args.batch_size))
    ran = [mixture.ran for mixture in model.mixtures]
    loss = trainer.callback_metrics["train/loss"]
    print(f"rank {trainer.global_rank}: loss {loss:.3f}, experts of each layer {ran}")
    if trainer.is_global_zero:
        print(f"checkpoint: {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()
