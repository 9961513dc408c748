"""Language models by their shape alone: what a plan needs of a model whose code is not at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SHAPES", "Decoder", "DecoderShape"]


@dataclass(frozen=True)
class DecoderShape:
    """A decoder-only transformer.

    Attributes:
        width: Size of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads; divides `width`.
        vocab_size: Number of token ids.
        context: Longest sequence that has learned positions; 0: rotary positions, which have no
            parameters.
        num_kv_heads: Heads of keys and values; None: `num_heads`.
        hidden: Width of the feed-forward layers; None: four times `width`.
        is_gated: Three matrices in a feed-forward layer instead of two, RMSNorm instead of
            LayerNorm, no biases: as in Llama.
    """

    width: int
    num_layers: int
    num_heads: int
    vocab_size: int = 256
    context: int = 0
    num_kv_heads: int | None = None
    hidden: int | None = None
    is_gated: bool = False


# Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), and "The Llama 3
# Herd of Models" (2024), table 3.
SHAPES = {
    "llama2_7b": DecoderShape(4096, 32, 32, 32000, hidden=11008, is_gated=True),
    "llama2_13b": DecoderShape(5120, 40, 40, 32000, hidden=13824, is_gated=True),
    "llama2_70b": DecoderShape(8192, 80, 64, 32000, 0, num_kv_heads=8, hidden=28672, is_gated=True),
    "llama3_8b": DecoderShape(4096, 32, 32, 128256, 0, num_kv_heads=8, hidden=14336, is_gated=True),
}
# Of the example, which `conf/model` describes; on bytes, GPTs with learned positions.
SHAPES |= {
    "tiny": DecoderShape(128, 3, 4, context=64),
    "llama_mini": DecoderShape(128, 3, 4, hidden=344, is_gated=True),
    "gpt_25m": DecoderShape(512, 8, 8, context=512),
    "gpt_125m": DecoderShape(768, 12, 12, context=1024),
    "gpt_1b": DecoderShape(2048, 24, 16, context=1024),
    "llama_7b": SHAPES["llama2_7b"],
    "llama_70b": SHAPES["llama2_70b"],
}


class Decoder(nn.Module):
    """Token ids of shape (batch, time) to logits of shape (batch, time, vocab_size)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.context else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for the token after each position."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads or shape.num_heads
        self.head_width = shape.width // shape.num_heads
        hidden = shape.hidden or 4 * shape.width
        has_bias = not shape.is_gated
        kv_width = self.num_kv_heads * self.head_width
        self.norm_1 = _norm(shape)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * kv_width, bias=has_bias)
        self.proj = nn.Linear(shape.width, shape.width, bias=has_bias)
        self.norm_2 = _norm(shape)
        self.gate = nn.Linear(shape.width, hidden, bias=False) if shape.is_gated else None
        self.up = nn.Linear(shape.width, hidden, bias=has_bias)
        self.down = nn.Linear(hidden, shape.width, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        x = x + self.proj(self._attend(self.norm_1(x)))
        y = self.norm_2(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        down: Tensor = self.down(hidden)
        return x + down

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        kv_width = self.num_kv_heads * self.head_width
        q, k, v = self.qkv(x).split([width, kv_width, kv_width], dim=-1)

        def by_head(part: Tensor, num_heads: int) -> Tensor:
            return part.view(batch, time, num_heads, self.head_width).transpose(1, 2)

        repeats = self.num_heads // self.num_kv_heads
        q, k, v = by_head(q, self.num_heads), *(by_head(p, self.num_kv_heads) for p in (k, v))
        if repeats > 1:
            k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


def _norm(shape: DecoderShape) -> nn.Module:
    return nn.RMSNorm(shape.width) if shape.is_gated else nn.LayerNorm(shape.width)
