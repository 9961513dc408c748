"""A small GPT or Llama in plain PyTorch, with pre-norm blocks and causal attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model.

    Attributes:
        vocab_size: Number of token ids; 256 for bytes.
        context: Longest sequence, in tokens.
        width: Size of the residual stream.
        num_layers: Number of blocks.
        num_heads: Number of attention heads; divides `width`.
        is_tied: Use the embedding matrix as output weights.
        is_llama: Use RMSNorm, rotary positions, a gated feed-forward layer and no biases.
        num_kv_heads: Number of key and value heads; divides `num_heads`. None: `num_heads`.
        hidden: Width of the feed-forward layers; None: four times `width`.
    """

    vocab_size: int = 256
    context: int = 256
    width: int = 192
    num_layers: int = 4
    num_heads: int = 6
    is_tied: bool = False
    is_llama: bool = False
    num_kv_heads: int | None = None
    hidden: int | None = None


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, has_bias = config.width, not config.is_llama
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_width = width // config.num_heads
        hidden = config.hidden or 4 * width
        self.norm_1 = _norm(config)
        self.qkv = nn.Linear(width, width + 2 * self.kv_width, bias=has_bias)
        self.proj = nn.Linear(width, width, bias=has_bias)
        self.norm_2 = _norm(config)
        self.gate = nn.Linear(width, hidden, bias=False) if config.is_llama else None
        self.up = nn.Linear(width, hidden, bias=has_bias)
        self.down = nn.Linear(hidden, width, bias=has_bias)

    @property
    def kv_width(self) -> int:
        """Total width of the keys of a token, which is also that of its values."""
        return self.num_kv_heads * self.head_width

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        x = x + self.proj(self._attend(self.norm_1(x)))
        y = self.norm_2(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(hidden)

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(x).split([width, self.kv_width, self.kv_width], dim=-1)
        q, k, v = (p.view(batch, time, -1, self.head_width).transpose(1, 2) for p in parts)
        if self.gate is not None:
            q, k = rotated(q), rotated(k)
        if self.num_kv_heads < self.num_heads:
            k, v = (p.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for p in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """Maps token ids of shape (batch, time) to logits of shape (batch, time, vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = None if config.is_llama else nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(self._init)
        if config.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits of the next token at each position."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def rotated(x: Tensor) -> Tensor:
    """Applies rotary positions: rotates pairs of values by angles proportional to the position.

    The product of a query and a key then depends only on their distance (Su et al., "RoFormer",
    2021, section 3.2.2). The halves of a head are paired, as in Llama's published weights.

    Args:
        x: Queries or keys of shape (batch, heads, time, head_width).
    """
    time, width = x.shape[-2:]
    rates = 10_000 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(time, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _norm(config: GPTConfig) -> nn.Module:
    return nn.RMSNorm(config.width) if config.is_llama else nn.LayerNorm(config.width)
