"""Small LightningModules, each with one thing that strategies get wrong, on data fixed by index.

Every module computes the loss of each rank's part of a batch by itself, so that one process with
the global batch (`ranks` parts) is an exact reference where DistributedDataParallel raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples.gpt import GPT, Block, GPTConfig

__all__ = [
    "CHECKPOINTING",
    "OPTIMIZERS",
    "SCHEDULERS",
    "BranchModule",
    "ConvModule",
    "FrozenModule",
    "GANModule",
    "GPTModule",
    "L2Module",
    "MLPModule",
    "MethodModule",
    "OddModule",
    "OutsideModule",
    "Recorder",
    "SquareBlocks",
    "TiedModule",
    "TorchLayersModule",
    "UnusedModule",
    "regression_data",
]

# Adam's eps is so large that gradients which are zero but for rounding do not become full-sized
# steps.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3, eps=1e-5),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, eps=1e-5, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-5),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], dict[str, Any]]] = {
    "per step": lambda o: {"scheduler": lr_scheduler.StepLR(o, 2, 0.5), "interval": "step"},
    "per epoch": lambda o: {"scheduler": lr_scheduler.ExponentialLR(o, 0.5), "interval": "epoch"},
    "one cycle": lambda o: {
        "scheduler": lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
        "interval": "step",
    },
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=0),
        "monitor": "rising",
    },
}


def regression_data(num_samples: int, in_features: int = 8, seed: int = 1) -> TensorDataset:
    """Inputs (num_samples, in_features) and targets (num_samples, 3), the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, in_features, generator=generator)
    y = torch.randn(num_samples, 3, generator=generator)
    return TensorDataset(x, y)


class Recorder(LightningModule):
    """Trains on `num_batches` batches of `batch_size` samples for each of `ranks` ranks.

    Args:
        ranks: Ranks among which the global batch is divided, whatever the number of processes.
        num_batches: Batches of an epoch.
        batch_size: Samples of one rank's batch.
        optimizer: Key of `OPTIMIZERS`.
        scheduler: Key of `SCHEDULERS`, or None.
    """

    def __init__(
        self,
        ranks: int = 1,
        num_batches: int = 4,
        batch_size: int = 2,
        optimizer: str = "adamw",
        scheduler: str | None = None,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_batches = num_batches
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.losses: list[float] = []

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        """Loss of the samples of one rank."""
        raise NotImplementedError

    def dataset(self, num_samples: int) -> TensorDataset:
        """The samples, in order."""
        return regression_data(num_samples)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean over the parts of this process."""
        processes = self.trainer.world_size
        here = self.ranks // processes
        parts = [[t[i::here] for t in batch] for i in range(here)]
        losses = [self.part_loss(part, self.global_rank * here + i) for i, part in enumerate(parts)]
        return torch.stack(losses).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("rising", float(self.global_step), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.groups())
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[self.scheduler](optimizer)}

    def groups(self) -> Iterable[Any]:
        """What the optimizer gets."""
        return self.parameters()

    def train_dataloader(self) -> DataLoader[Any]:
        processes = self.trainer.world_size
        dataset = self.dataset(self.num_batches * self.batch_size * self.ranks)
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, processes, self.trainer.global_rank, shuffle=False
        )  # the one that Lightning injects shuffles
        batch_size = self.batch_size * self.ranks // processes
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler)

    val_dataloader = test_dataloader = train_dataloader


class GPTModule(Recorder):
    """The example's GPT, tiny.

    Args:
        is_tied: The embedding is the output layer too.
        checkpointing: Key of `CHECKPOINTING`, or None.
        **kwargs: Arguments of `Recorder`.
    """

    def __init__(self, is_tied: bool = False, checkpointing: str | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        shape = {"vocab_size": 64, "context": 8, "width": 32, "num_layers": 3, "num_heads": 4}
        gpt = GPT if checkpointing is None else CHECKPOINTING[checkpointing]
        self.gpt = gpt(GPTConfig(**shape, is_tied=is_tied))

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        (ids,) = part
        return F.cross_entropy(self.gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def dataset(self, num_samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randint(64, (num_samples, 9), generator=generator))


class CheckpointedGPT(GPT):
    """Each block runs entirely inside a checkpoint.

    Args:
        config: Configuration of the GPT.
        is_reentrant: Which of the two implementations.
    """

    def __init__(self, config: GPTConfig, is_reentrant: bool) -> None:
        super().__init__(config)
        self.is_reentrant = is_reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(self.norm(x))


class CheckpointedBlock(Block):
    """A checkpoint runs inside the block's forward."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.is_reentrant)


class InnerCheckpointedGPT(GPT):
    """Each block runs a checkpoint of its own inside."""

    def __init__(self, config: GPTConfig, is_reentrant: bool) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.__class__ = CheckpointedBlock
            block.is_reentrant = is_reentrant


CHECKPOINTING = {
    "reentrant": partial(CheckpointedGPT, is_reentrant=True),
    "non-reentrant": partial(CheckpointedGPT, is_reentrant=False),
    "reentrant in the block": partial(InnerCheckpointedGPT, is_reentrant=True),
    "non-reentrant in the block": partial(InnerCheckpointedGPT, is_reentrant=False),
}


class ConvModule(Recorder):
    """Convolutions with BatchNorm, of which each rank has statistics of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 7, 3, stride=2, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(63, 3),
        )

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        return F.mse_loss(self.net(x.view(-1, 3, 8, 8)), y)

    def dataset(self, num_samples: int) -> TensorDataset:
        return regression_data(num_samples, in_features=192)


class MLPModule(Recorder):
    """Two layers; weights and biases are parameter groups of their own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        return F.mse_loss(self(x), y)

    def groups(self) -> Iterable[Any]:
        weights = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for p in self.parameters() if p.ndim == 1]
        return [{"params": weights}, {"params": biases, "lr": 1e-2, "weight_decay": 0.0}]

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class TiedModule(Recorder):
    """One weight used by two layers, with another layer between them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.out = nn.Linear(8, 3)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        return F.mse_loss(self.out(self.last(self.middle(self.first(x)).tanh())), y)


class FrozenModule(Recorder):
    """A frozen layer below and one in the middle; the optimizer gets all parameters or the others.

    Args:
        is_given_frozen: The optimizer's groups contain the frozen parameters.
        **kwargs: Arguments of `Recorder`.
    """

    def __init__(self, is_given_frozen: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_given_frozen = is_given_frozen
        self.net = nn.Sequential(
            nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 10), nn.Linear(10, 9), nn.Linear(9, 3)
        )
        self.net[0].requires_grad_(False)
        self.net[3].requires_grad_(False)
        self.net[4].bias.requires_grad_(False)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        return F.mse_loss(self.net(x), y)

    def groups(self) -> Iterable[Any]:
        return [p for p in self.parameters() if p.requires_grad or self.is_given_frozen]


class UnusedModule(Recorder):
    """A layer that never runs, and one that runs in every second batch only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = nn.Linear(8, 9)
        self.never = nn.Linear(9, 9)
        self.sometimes = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)
        self.num_calls = 0

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        x = self.first(x).tanh()
        if (self.num_calls // (self.ranks // self.trainer.world_size)) % 2:
            x = self.sometimes(x)
        self.num_calls += 1
        return F.mse_loss(self.last(x), y)


class BranchModule(Recorder):
    """Even ranks run one layer and odd ranks the other; three layers run in an order by rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = nn.Linear(8, 9)
        self.even = nn.Linear(9, 9)
        self.odd = nn.Linear(9, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.last = nn.Linear(9, 3)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        x = self.first(x).tanh()
        x = self.odd(x) if rank % 2 else self.even(x)
        for i in range(3):
            x = self.blocks[(rank + i) % 3](x).tanh()
        return F.mse_loss(self.last(x), y)


class OutsideModule(Recorder):
    """Parameters used where their module's forward does not run: at the root and from outside."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.w = nn.Parameter(torch.randn(8, 9) * 0.1)
        self.inner = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        x = (x @ self.w).tanh()
        x = F.linear(x, self.inner.weight) + self.inner.bias
        return F.mse_loss(self.last(x), y)


class MethodModule(Recorder):
    """Calls a method of each block instead of its forward."""

    class _Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(9, 9)
            self.scale = nn.Parameter(torch.ones(9))

        def encode(self, x: Tensor) -> Tensor:
            return x + self.inner(x).tanh() * self.scale

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = nn.Linear(8, 9)
        self.blocks = nn.ModuleList(self._Block() for _ in range(3))
        self.last = nn.Linear(9, 3)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        x = self.first(x)
        for block in self.blocks:
            x = block.encode(x)
        return F.mse_loss(self.last(x), y)


class TorchLayersModule(Recorder):
    """Layers of torch which read the parameters of other modules, or keep lists of their own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lstm = nn.LSTM(8, 5, num_layers=2, batch_first=True)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7))
        self.lists = nn.ParameterList(torch.full((7,), 0.5) for _ in range(2))
        self.last = nn.Linear(7, 3)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        x = self.encoder(x.view(-1, 4, 8))
        x = self.norm(self.lstm(x)[0][:, -1]).tanh()
        return F.mse_loss(self.last(x * self.lists[0] + self.lists[1]), y)

    def dataset(self, num_samples: int) -> TensorDataset:
        return regression_data(num_samples, in_features=32)


class OddModule(Recorder):
    """Parameters of odd shapes, strides and dtypes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.transposed = nn.Parameter((torch.randn(9, 8) * 0.3).t())
        self.codes = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(9 + 8, 3)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        image = x.view(-1, 2, 2, 2).repeat(1, 1, 2, 2).contiguous(memory_format=torch.channels_last)
        features = self.conv(image).flatten(1)[:, :8]
        x = (x @ self.transposed * self.scalar + self.single + self.empty.sum()).tanh()
        return F.mse_loss(self.last(torch.cat([x, features], 1)) + self.codes, y)


class SquareBlocks(nn.Module):
    """Square layers without biases, 4 MiB each, made one at a time; each may be a unit."""

    WIDTH = 1024

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        layers = (nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(num_blocks))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class L2Module(MLPModule):
    """A penalty over `self.parameters()` beside the loss."""

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return super().part_loss(part, rank) + 0.1 * penalty


class GANModule(Recorder):
    """Manual optimization: two toggled optimizers, two backwards for each discriminator step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, real = batch
        noise = x[:, :5]
        optimizer_g, optimizer_d = self.optimizers()
        with self.toggled_optimizer(optimizer_g):
            loss_g = F.softplus(-self.discriminator(self.generator(noise))).mean()
            optimizer_g.zero_grad()
            self.manual_backward(loss_g)
            optimizer_g.step()
        with self.toggled_optimizer(optimizer_d):
            optimizer_d.zero_grad()
            loss_real = F.softplus(-self.discriminator(real)).mean()
            self.manual_backward(loss_real)
            loss_fake = F.softplus(self.discriminator(self.generator(noise).detach())).mean()
            self.manual_backward(loss_fake)
            optimizer_d.step()
        self.losses.append(float(loss_g.detach()) + float((loss_real + loss_fake).detach()))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            OPTIMIZERS[self.optimizer](self.generator.parameters()),
            OPTIMIZERS[self.optimizer](self.discriminator.parameters()),
        ]
