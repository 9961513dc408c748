"""Six models of different kinds, each with a batch and a loss, to plan and to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from examples.gpt import GPT, GPTConfig
from lightning_zero import Engine, OffloadConfig, ZeroConfig
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.optim import AdamW8bit, Lion8bit, SGD8bit
from lightning_zero.planner import Decoder, DecoderShape, make_optimizers
from tests.support.full_tensors import ADAFACTOR, Lamb, Rows

__all__ = ["MODELS", "OFFLOADS", "OPTIMIZERS", "Model", "TrainedModel", "choices", "train"]

WIDTH = 32


class ViT(nn.Module):
    """Patches of an image through an encoder of torch; a class token and learned positions."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        layer = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(layer(width, 4, 2 * width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class ConvNet(nn.Module):
    """Stages of convolutions with BatchNorm, whose statistics are buffers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 5),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank adapter."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted_gpt(width: int = WIDTH) -> nn.Module:
    gpt = a_gpt(width).requires_grad_(False)
    for block in gpt.blocks:
        block.qkv, block.proj = Adapted(block.qkv, 3), Adapted(block.proj, 3)
    return gpt


def a_gpt(width: int = WIDTH, is_tied: bool = False) -> nn.Module:
    shape = {"vocab_size": 67, "context": 8, "num_layers": 3, "num_heads": 4}
    return GPT(GPTConfig(width=width, is_tied=is_tied, **shape))


def a_llama(width: int = WIDTH) -> nn.Module:
    shape = DecoderShape(width, 3, 4, 67, num_kv_heads=2, hidden=3 * width, is_gated=True)
    return Decoder(shape)


@dataclass(frozen=True)
class Model:
    """A model: how to build it, and the kind of its inputs."""

    build: Callable[..., nn.Module]
    reads_tokens: bool

    def batch(self) -> tuple[Tensor, Tensor]:
        if self.reads_tokens:
            return torch.arange(16).view(2, 8), torch.arange(16).view(2, 8)
        return torch.ones(2, 3, 8, 8), torch.tensor([1, 3])


def loss_of(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(module(x).flatten(0, -2).float(), y.flatten())


MODELS = {
    "gpt": Model(a_gpt, True),
    "llama": Model(a_llama, True),
    "vit": Model(ViT, False),
    "conv": Model(ConvNet, False),
    "lora": Model(adapted_gpt, True),
    "tied": Model(partial(a_gpt, is_tied=True), True),
}
BUFFERS = {"nvme_path": "swap", "buffer_count": 2, "buffer_size": 2**16}
NVME = {"device": "nvme", **BUFFERS}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu optimizer": {"offload_optimizer": "cpu"},
    "cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "nvme optimizer": {"offload_optimizer": NVME},
    "nvme": {"offload_optimizer": NVME, "offload_param": NVME},
    "nvme gradients": {"offload_optimizer": {**NVME, "max_in_cpu_bytes": 0}},
    "half": {"offload_optimizer": OffloadConfig("cpu", ratio=0.5)},
}


def choices() -> list[ZeroConfig]:
    """Every stage with every offload it supports."""
    found = [ZeroConfig(stage=0, reduce_bucket_size=4000)]
    for stage in (1, 2, 3):
        for offload in OFFLOADS.values():
            if "offload_param" not in offload or stage == 3:
                found.append(ZeroConfig(stage=stage, reduce_bucket_size=4000, **offload))
    return found


def _over_all(build: Callable[..., Optimizer]) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda module: [build([p for p in module.parameters() if p.requires_grad])]


def _muon_and_adamw(module: nn.Module) -> list[Optimizer]:
    blocks = [f"blocks.{number}" for number in range(3)]
    return make_optimizers("muon", parameters_by_name(module), blocks)


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adamw": _over_all(torch.optim.AdamW),
    "fused adamw": _over_all(partial(torch.optim.AdamW, fused=True)),
    "adamw8bit": _over_all(AdamW8bit),  # with blocks in the model "conv"
    "lion8bit": _over_all(Lion8bit),
    "sgd8bit": _over_all(SGD8bit),
    "sgd": _over_all(partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adagrad": _over_all(torch.optim.Adagrad),
    "rmsprop": _over_all(torch.optim.RMSprop),
    # These step full tensors.
    "adafactor": _over_all(ADAFACTOR),
    "lamb": _over_all(Lamb),
    "rows": _over_all(Rows),
    "muon and adamw": _muon_and_adamw,
}


@dataclass(frozen=True)
class TrainedModel:
    """A module after some steps under an engine."""

    module: nn.Module
    optimizers: list[Optimizer]
    engine: Engine


def train(
    name: str,
    config: ZeroConfig,
    optimizer: str = "fused adamw",
    num_steps: int = 2,
    num_micro_batches: int = 1,
) -> TrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]
    module = model.build()
    optimizers = OPTIMIZERS[optimizer](module)
    engine = Engine(module, optimizers, config)
    is_narrow = config.param_dtype is not None
    for _ in range(num_steps):
        engine.zero_grad()
        for micro_batch in range(num_micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
                loss = loss_of(module, model.batch())
            if micro_batch < num_micro_batches - 1:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
        engine.step()
    return TrainedModel(module, optimizers, engine)
