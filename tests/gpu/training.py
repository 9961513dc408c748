"""What the GPU tests share: groups on one GPU, the model, a few steps of training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_zero
from examples.gpt import GPT, GPTConfig

__all__ = ["DEVICE", "SMALL", "batch", "build", "form_group", "loss_of", "optimizer_of", "train"]

DEVICE = torch.device("cuda", 0)  # of every rank: gloo lets ranks share a GPU, NCCL does not
SMALL = GPTConfig(vocab_size=512, context=32, width=128, num_layers=3, num_heads=4)


def form_group(backend: str, rank: int, world_size: int) -> None:
    """Forms WORLD. "fake" makes this process rank `rank` of a group without other processes."""
    torch.cuda.set_device(DEVICE)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend, rank=rank, world_size=world_size)


def batch(index: int, rank: int, config: GPTConfig = SMALL, size: int = 4) -> Tensor:
    """Token ids of one rank in one step, (size, context)."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    ids = torch.randint(config.vocab_size, (size, config.context), generator=generator)
    return ids.to(DEVICE)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross entropy of the next token, in fp32."""
    logits = model(ids)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with a large eps.

    The gradient of a key's bias is nothing but rounding; with a small eps Adam steps by its sign.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)


def train(
    engine: lightning_zero.Engine, model: nn.Module, rank: int, steps: int
) -> Iterator[Tensor]:
    """Yields the loss of every step."""
    for index in range(steps):
        engine.zero_grad()
        loss = loss_of(model, batch(index, rank))
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def build(config: GPTConfig = SMALL) -> GPT:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return GPT(config).to(DEVICE)
