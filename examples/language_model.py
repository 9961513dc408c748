"""The GPT as a LightningModule, which does not depend on how its state is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from gpt import GPT, GPTConfig
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ByteLanguageModel", "share_of_lr"]


class ByteLanguageModel(pl.LightningModule):
    """Predicts each byte of a text from the previous bytes; logs the loss in bits per byte.

    Args:
        lr: Highest learning rate, reached after `warmup` and then lowered along a cosine.
        warmup: Share of the steps in which the learning rate increases.
        weight_decay: Weight decay of AdamW.
        is_fused: Use the fused AdamW. Lightning's own mixed precision cannot clip gradients with
            it; `ZeroStrategy` can. None: use it unless it is refused.
        optimizer: Makes an optimizer of parameters, in place of AdamW. It is not stored in
            checkpoints, since torch does not load them with it by default.
        shape: Fields of `GPTConfig`.
    """

    def __init__(
        self,
        *,
        lr: float = 3e-3,
        warmup: float = 0.1,
        weight_decay: float = 0.1,
        is_fused: bool | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        **shape: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="optimizer")
        self.make_optimizer = optimizer or self._adamw
        self.lr = lr
        self.warmup = warmup
        self.weight_decay = weight_decay
        self.is_fused = is_fused
        self.gpt = GPT(GPTConfig(**shape))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/bits_per_byte", loss.detach() / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        bits = self._loss(batch) / math.log(2)
        self.log(
            "val/bits_per_byte", bits, prog_bar=True, sync_dist=True, batch_size=batch.shape[0]
        )

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        bits = self._loss(batch) / math.log(2)
        self.log("test/bits_per_byte", bits, sync_dist=True, batch_size=batch.shape[0])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer(self.parameters())
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: share_of_lr(step, num_steps=num_steps, warmup=self.warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        is_refused = isinstance(self.trainer.precision_plugin, MixedPrecision)
        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=(0.9, 0.95),
            weight_decay=self.weight_decay,
            fused=not is_refused if self.is_fused is None else self.is_fused,
        )

    @torch.no_grad()
    def continuation(
        self, prompt: bytes, *, num_bytes: int, temperature: float = 0.6, seed: int = 0
    ) -> bytes:
        """Samples `num_bytes` bytes that follow `prompt`. The parameters must be unsharded.

        No byte is repeated more than 16 times, because a small model can repeat blanks endlessly.
        """
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(num_bytes):
            seen = torch.tensor(text[-self.gpt.config.context :], device=self.device)
            logits = self.gpt(seen[None])[0, -1, :256].float().cpu() / temperature
            if text[-16:] == text[-1:] * 16:
                logits[text[-1]] = -math.inf
            text.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        return bytes(text[len(prompt) :])

    def _loss(self, batch: Tensor) -> Tensor:
        ids = batch.long()
        logits = self.gpt(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def share_of_lr(step: int, *, num_steps: int, warmup: float) -> float:
    """Factor of the learning rate: rises from 1/25 to 1, then falls to 4e-6, along cosines.

    This is the curve of `OneCycleLR`, but a resumed run may have another `num_steps`.
    """
    peak, last = warmup * num_steps - 1, num_steps - 1
    if step <= peak:
        return _between(1 / 25, 1, step / peak if peak else 1)
    return _between(1, 4e-6, min(1, (step - peak) / ((last - peak) or 1)))


def _between(first: float, second: float, done: float) -> float:
    return second + (first - second) * (1 + math.cos(math.pi * done)) / 2
