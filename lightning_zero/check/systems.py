"""What the checks train, and how: by DDP, by FSDP2 and by the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from lightning_zero.check.ranks import Rank
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.planner.shapes import Decoder, DecoderShape

__all__ = ["DDP", "FSDP2", "Experts", "Loss", "Zero", "as_loss", "decoder", "materialized"]
__all__ += ["micro_batches"]

Loss = Callable[[nn.Module], Tensor]  # of one micro-batch
TINY = DecoderShape(64, 2, 4, 128)
# With a large eps a wrong scale of a gradient changes the step, and rounding hardly does.
_ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}
_MAX_NORM = 0.1


def decoder(at: Rank, shape: DecoderShape = TINY) -> nn.Module:
    """A language model, with the same values on every rank."""
    torch.manual_seed(0)
    with at.device:
        return Decoder(shape)


def materialized(module: nn.Module, device: torch.device) -> nn.Module:
    """A module from the meta device, with random values that are the same on every rank."""
    module.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
        for buffer in module.buffers():
            buffer.zero_()
    return module


def as_loss(at: Rank, step: int, samples: slice, *size: int, vocab_size: int = 128) -> Loss:
    """Cross entropy of the next token, on some samples of a batch of `size`."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab_size, size, generator=generator)[samples].to(at.device)

    def loss(model: nn.Module) -> Tensor:
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    return loss


def micro_batches(at: Rank, step: int) -> list[Loss]:
    """This rank's two micro-batches of a batch that is the same on any number of ranks."""
    size = 4 * at.of.size * max(1, at.of.size // 2)
    own = size // at.size // 2
    starts = [2 * own * at.rank, 2 * own * at.rank + own]
    return [as_loss(at, step, slice(start, start + own), size, 17) for start in starts]


class Experts(nn.Module):
    """Two experts, of which a rank uses one in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        out: Tensor = self.experts[expert](self.stem(x).relu())
        return out.square().mean()


class DDP:
    """DistributedDataParallel, and base of the other systems."""

    def __init__(self, at: Rank, module: nn.Module) -> None:
        may_be_unused = not isinstance(module, Decoder)
        model = DistributedDataParallel(module, find_unused_parameters=may_be_unused)
        self._begin(module, model)

    def _begin(self, module: nn.Module, model: Any) -> None:
        self.module, self.model = module, model
        self.optimizer = AdamW(module.parameters(), **_ADAMW)
        self.clips = itertools.cycle((False, True))

    def step(self, losses: Sequence[Loss]) -> None:
        """Takes a step on these micro-batches; every second one clips the gradients."""
        self.optimizer.zero_grad()
        for loss in losses:
            with nullcontext() if loss is losses[-1] else self.model.no_sync():
                (loss(self.model) / len(losses)).backward()
        if next(self.clips):
            nn.utils.clip_grad_norm_(self.module.parameters(), _MAX_NORM)
        self.optimizer.step()

    def close(self) -> None:
        """Leaves full parameters in the module."""


class FSDP2(DDP):
    """torch's `fully_shard` on every block and on the root; on a GPU in bfloat16."""

    def __init__(self, at: Rank, module: nn.Module) -> None:
        dtype = torch.bfloat16 if at.of.on_cuda else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(at.device.type, (at.size,))
        shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
        for block in module.get_submodule("blocks").children():
            shard(block)
        self._begin(module, shard(module))


class Zero(DDP):
    """The engine."""

    def __init__(self, at: Rank, module: nn.Module, **settings: Any) -> None:
        self._begin(module, module)
        self.engine = Engine(module, [self.optimizer], ZeroConfig(**settings))

    def step(self, losses: Sequence[Loss]) -> None:
        self.engine.zero_grad()
        for loss in losses:
            with nullcontext() if loss is losses[-1] else self.engine.no_sync():
                self.engine.backward(loss(self.module) / len(losses))
        if next(self.clips):
            self.engine.clip_grad_norm_(_MAX_NORM)
        self.engine.step()

    def close(self) -> None:
        self.engine.close()
