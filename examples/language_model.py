"""The GPT as a LightningModule: nothing in it knows how its state is sharded."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from gpt import GPT, GPTConfig
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ByteLanguageModel"]


class ByteLanguageModel(pl.LightningModule):
    """Tells each byte of a text from those before it; the loss is logged in bits per byte.

    Args:
        lr: Highest learning rate, reached after `warmup` and then lowered along a cosine.
        warmup: Share of the steps until then.
        weight_decay: Of AdamW.
        is_fused: Step with one kernel. Lightning's own mixed precision refuses to clip with it;
            `ZeroStrategy` does not.
        shape: Fields of `GPTConfig`.
    """

    def __init__(
        self,
        *,
        lr: float = 3e-3,
        warmup: float = 0.1,
        weight_decay: float = 0.1,
        is_fused: bool = True,
        **shape: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
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

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self.lr,
            betas=(0.9, 0.95),
            weight_decay=self.weight_decay,
            fused=self.is_fused,
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=self.warmup,
            cycle_momentum=False,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @torch.no_grad()
    def continuation(
        self, prompt: bytes, *, num_bytes: int, temperature: float = 0.8, seed: int = 0
    ) -> bytes:
        """`num_bytes` sampled bytes that follow `prompt`. The parameters must be whole."""
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(num_bytes):
            seen = torch.tensor(text[-self.gpt.config.context :], device=self.device)
            logits = self.gpt(seen[None])[0, -1, :256].float().cpu() / temperature
            text.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        return bytes(text[len(prompt) :])

    def _loss(self, batch: Tensor) -> Tensor:
        ids = batch.long()
        logits = self.gpt(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
