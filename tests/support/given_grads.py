"""A module whose gradients a test gives, the same bits on any number of ranks."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["SIZES", "GivenGrads"]

# Uneven sizes; two have at most 4,096 elements.
SIZES = [(70, 61), (5001,), (64, 64), (3, 5), (2, 3, 1025), (37, 257)]


class GivenGrads(nn.Module):
    """Parameters, and a forward whose gradients are random numbers of 8 bits, by step."""

    def __init__(self, sizes=SIZES):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(size, generator=generator) for size in sizes]
        self.parts = nn.ParameterList([nn.Parameter(values) for values in drawn])

    def forward(self, step):
        generator = torch.Generator().manual_seed(1 + step)
        total = torch.zeros(())
        for parameter in self.parts:
            grad = torch.randn(parameter.shape, generator=generator) * 0.1
            total = total + (parameter * grad.bfloat16().to(parameter.dtype)).sum().float()
        return total
