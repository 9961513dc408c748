"""A GAN in stage 3: two optimizers, manual optimization, each with its own gradient clipping.

    python examples/gan.py --devices 2

The generator learns points on a ring of eight clusters. The script trains with DDP and `zero3`,
and prints how many clusters the generator reaches, and how far both runs differ. A GAN enlarges
rounding from step to step, so both run in float64.
"""

import argparse
import math

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_zero  # noqa: F401  registers the strategies

NUM_CLUSTERS, NOISE = 8, 16


def ring(num: int) -> Tensor:
    """Points close to the corners of an octagon."""
    angles = torch.randint(NUM_CLUSTERS, (num,)) * (2 * math.pi / NUM_CLUSTERS)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(num, 2)


def network(num_inputs: int, num_outputs: int, width: int = 128) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(3)]
    first = nn.Sequential(nn.Linear(num_inputs, width), nn.SiLU())
    return nn.Sequential(first, *layers, nn.Linear(width, num_outputs))


class GAN(pl.LightningModule):
    """A generator of points, and a critic that separates them from those of the ring."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = network(NOISE, 2)
        self.critic = network(2, 1)

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        critic_optimizer, generator_optimizer = self.optimizers()
        noise = torch.randn(len(real), NOISE, device=self.device)

        fake = self.generator(noise).detach()
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        self.step(critic_optimizer, loss, max_norm=1.0)

        loss = F.softplus(-self.critic(self.generator(noise))).mean()
        self.step(generator_optimizer, loss, max_norm=0.5)
        self.log("generator_loss", loss.detach())

    def step(self, optimizer, loss: Tensor, max_norm: float) -> None:
        self.toggle_optimizer(optimizer)  # gradients for this network alone
        self.manual_backward(loss)
        self.clip_gradients(optimizer, max_norm, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.critic, self.generator)
        return [torch.optim.AdamW(n.parameters(), lr=2e-3, betas=(0.5, 0.99)) for n in networks]


def clusters(generator: nn.Module, num: int = 2000) -> int:
    """Number of clusters that get at least half of their share of the points."""
    with torch.no_grad():
        points = generator(torch.randn(num, NOISE, dtype=torch.float64))
    is_close = (points.norm(dim=1) - 1).abs() < 0.25
    angle = torch.atan2(points[:, 1], points[:, 0])[is_close]
    nearest = (angle * NUM_CLUSTERS / (2 * math.pi)).round().long() % NUM_CLUSTERS
    counts = nearest.bincount(minlength=NUM_CLUSTERS)
    return int((counts > num / NUM_CLUSTERS / 2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=256, help="batch size per rank")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()

    generators = []
    for strategy in ("ddp_find_unused_parameters_true", "zero3"):
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            strategy=strategy,
            devices=args.devices,
            precision="64-true",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        gan = GAN()
        trainer.fit(
            gan,
            DataLoader(ring(args.steps * args.batch_size * trainer.world_size), args.batch_size),
        )
        generators.append(gan.generator)
        if trainer.is_global_zero:
            reached = clusters(gan.generator)
            loss = trainer.callback_metrics["generator_loss"]
            print(f"{strategy}: generator's loss {loss:.5f}, {reached} of {NUM_CLUSTERS} clusters")
    if trainer.is_global_zero:
        pairs = zip(*(g.parameters() for g in generators), strict=True)
        print(
            f"largest difference of a parameter: {max((a - b).abs().max() for a, b in pairs):.0e}"
        )


if __name__ == "__main__":
    main()
