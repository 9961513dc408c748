"""Shapes of language models, to plan for a model without its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SHAPES", "Decoder", "DecoderShape", "shape_of_hugging_face"]

_GPT_BIASES = ("qkv", "proj", "up", "down")


@dataclass(frozen=True)
class DecoderShape:
    """A decoder-only transformer.

    Attributes:
        width: Size of the residual stream.
        num_layers: Number of blocks.
        num_heads: Number of attention heads; divides `width`.
        vocab_size: Number of token ids.
        context: Number of learned positions; 0: rotary positions, which have no parameters.
        num_kv_heads: Number of key and value heads; None: `num_heads`.
        hidden: Width of the feed-forward layers; None: four times `width`.
        is_gated: Whether a feed-forward layer has three matrices instead of two, and norms are
            RMSNorm instead of LayerNorm, as in Llama.
        biases: Layers with a bias, of `qkv`, `proj`, `gate`, `up` and `down`; None: all, or none
            if `is_gated`.
        head_width: Width of an attention head; None: `width` divided by `num_heads`.
        has_qk_norm: Whether queries and keys have an RMSNorm per head.
        is_tied: Whether the output layer shares the weights of the embedding.
    """

    width: int
    num_layers: int
    num_heads: int
    vocab_size: int = 256
    context: int = 0
    num_kv_heads: int | None = None
    hidden: int | None = None
    is_gated: bool = False
    biases: tuple[str, ...] | None = None
    head_width: int | None = None
    has_qk_norm: bool = False
    is_tied: bool = False

    def linear(self, name: str, in_width: int, out_width: int) -> nn.Linear:
        """Makes the layer `name` of a block."""
        biases = self.biases
        if biases is None:
            biases = () if self.is_gated else _GPT_BIASES
        return nn.Linear(in_width, out_width, bias=name in biases)


# Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), and "The Llama 3
# Herd of Models" (2024), table 3.
SHAPES = {
    "llama2_7b": DecoderShape(4096, 32, 32, 32000, hidden=11008, is_gated=True),
    "llama2_13b": DecoderShape(5120, 40, 40, 32000, hidden=13824, is_gated=True),
    "llama2_70b": DecoderShape(8192, 80, 64, 32000, 0, num_kv_heads=8, hidden=28672, is_gated=True),
    "llama3_8b": DecoderShape(4096, 32, 32, 128256, 0, num_kv_heads=8, hidden=14336, is_gated=True),
    "llama3.1_405b": DecoderShape(
        16384, 126, 128, 128256, num_kv_heads=8, hidden=53248, is_gated=True
    ),
}
# Further models of `conf/model`; their tokens are bytes, GPTs have learned positions.
SHAPES |= {
    "tiny": DecoderShape(128, 3, 4, context=64),
    "llama_mini": DecoderShape(128, 3, 4, hidden=344, is_gated=True),
    "gpt_25m": DecoderShape(512, 8, 8, context=512),
    "gpt_125m": DecoderShape(768, 12, 12, context=1024),
    "gpt_1b": DecoderShape(2048, 24, 16, context=1024),
}


_FAMILY = ("llama", "mistral", "phi3", "granite", "qwen2", "qwen3")
_NUMBERS = {
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "hidden",
    "head_dim": "head_width",
}
_MLP = ("gate", "up", "down")
_MAX = {"num_hidden_layers": 10_000}  # every layer is built
_MAX_NUMBER = 10**7
_OPTIONAL = ("num_key_value_heads", "head_dim")


def shape_of_hugging_face(config: Mapping[str, Any]) -> DecoderShape:
    """Shape of a transformers model of the Llama family.

    Args:
        config: Content of its `config.json`.

    Raises:
        ValueError: The model is of another family, or a number is missing or invalid.
    """
    kind = config.get("model_type")
    if kind not in _FAMILY:
        raise ValueError(
            f"model_type must be one of {', '.join(_FAMILY)}, got {kind!r}; use --module with a "
            "class or function that builds the model."
        )
    numbers = {}
    for key, name in _NUMBERS.items():
        number = config.get(key)
        if number is None and key in _OPTIONAL:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{key} must be an integer of at least 1, got {number!r}.")
        if number > _MAX.get(key, _MAX_NUMBER):
            raise ValueError(f"{key} must be at most {_MAX.get(key, _MAX_NUMBER)}, got {number}.")
        numbers[name] = number
    heads, kv_heads = numbers["num_heads"], numbers.get("num_kv_heads", numbers["num_heads"])
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads must divide {heads} heads, got {kv_heads}.")
    attention = ("qkv",) if kind == "qwen2" else ("qkv", "proj")
    has_bias = kind == "qwen2" or config.get("attention_bias")
    biases = [*(attention if has_bias else ()), *(_MLP if config.get("mlp_bias") else ())]
    return DecoderShape(
        **numbers,
        is_gated=True,
        biases=tuple(biases),
        has_qk_norm=kind == "qwen3",
        is_tied=bool(config.get("tie_word_embeddings")),
    )


class Decoder(nn.Module):
    """Maps token ids of shape (batch, time) to logits of shape (batch, time, vocab_size)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.context else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        if shape.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Computes the logits of the token after each position."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads or shape.num_heads
        self.head_width = shape.head_width or shape.width // shape.num_heads
        width, hidden = shape.width, shape.hidden or 4 * shape.width
        q_width, kv_width = (n * self.head_width for n in (self.num_heads, self.num_kv_heads))
        self.norm_1 = _norm(shape)
        self.qkv = shape.linear("qkv", width, q_width + 2 * kv_width)
        self.q_norm = nn.RMSNorm(self.head_width) if shape.has_qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_width) if shape.has_qk_norm else nn.Identity()
        self.proj = shape.linear("proj", q_width, width)
        self.norm_2 = _norm(shape)
        self.gate = shape.linear("gate", width, hidden) if shape.is_gated else None
        self.up = shape.linear("up", width, hidden)
        self.down = shape.linear("down", hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        x = x + self.proj(self._attend(self.norm_1(x)))
        y = self.norm_2(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        down: Tensor = self.down(hidden)
        return x + down

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q_width, kv_width = (n * self.head_width for n in (self.num_heads, self.num_kv_heads))
        q, k, v = self.qkv(x).split([q_width, kv_width, kv_width], dim=-1)

        def by_head(part: Tensor, num_heads: int) -> Tensor:
            return part.view(batch, time, num_heads, self.head_width).transpose(1, 2)

        repeats = self.num_heads // self.num_kv_heads
        q, k, v = by_head(q, self.num_heads), *(by_head(p, self.num_kv_heads) for p in (k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        if repeats > 1:
            k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, q_width)


def _norm(shape: DecoderShape) -> nn.Module:
    return nn.RMSNorm(shape.width) if shape.is_gated else nn.LayerNorm(shape.width)
