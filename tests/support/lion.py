"""Lion with a float32 moment, as in the paper."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

__all__ = ["Lion"]


class Lion(Optimizer):
    """Algorithm 2 of X. Chen et al., arXiv 2302.06675, with every operation rounded by itself."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m, g = state["exp_avg"], p.grad
                sign = (m * beta1 + g * (1 - beta1)).sign()
                p.copy_(p * (1 - lr * decay) - sign * lr)
                m.copy_(m * beta2 + g * (1 - beta2))
