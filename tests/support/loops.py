"""A small GPT, its optimizer and its batches, for loops that are written by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from examples.gpt import GPT, GPTConfig
from lightning_zero import Engine, ZeroConfig

__all__ = ["LossModule", "assert_same_state", "batch", "build", "engine_for"]


class LossModule(nn.Module):
    """The example's GPT, which returns its loss."""

    def __init__(self, width=32):
        super().__init__()
        self.gpt = GPT(GPTConfig(vocab_size=64, context=8, width=width, num_layers=3, num_heads=4))

    def forward(self, ids):
        return F.cross_entropy(self.gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def build(width=32):
    """The module and its AdamW, the same on every rank."""
    torch.manual_seed(0)
    module = LossModule(width)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-5)


def batch(rank, step):
    """The ids of one micro-batch, (2, 9)."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(64, (2, 9), generator=generator)


def engine_for(module, optimizers, stage, **options):
    return Engine(module, optimizers=optimizers, config=ZeroConfig(stage=stage, **options))


def assert_same_state(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
