"""A small GPT in plain PyTorch: pre-norm blocks, causal attention, output weights tied or not."""

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
        num_heads: Attention heads; divides `width`.
        is_tied: Use the embedding as output weights.
    """

    vocab_size: int = 256
    context: int = 256
    width: int = 192
    num_layers: int = 4
    num_heads: int = 6
    is_tied: bool = False


class Block(nn.Module):
    """Attention and a feed-forward layer of four times the width, each behind a LayerNorm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        x = x + self.proj(self._attend(self.norm_1(x)))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """Token ids of shape (batch, time) to logits of shape (batch, time, vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(self._init)
        if config.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for the token after each position."""
        time = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(time)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
