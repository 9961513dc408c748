"""AdamW with moments of 8 bits: see [Note: Moments of 8 bits]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_zero.optim.optimizer8bit import Optimizer8bit, Options, Tensors

__all__ = ["AdamW8bit"]


class AdamW8bit(Optimizer8bit):
    """AdamW whose moments take a quarter of the memory, on any device, with or without an engine.

    The moments of tensors with at most 4,096 elements are float32.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Number that is added to the denominator.
        weight_decay: Decoupled weight decay.
        saves_codes: Whether a full checkpoint of an engine has codes and scales, a quarter of the
            bytes, which only this class can load; else it has moments in float32, as those of
            `torch.optim.AdamW`. Both are lossless.
    """

    moments: ClassVar = {"exp_avg": True, "exp_avg_sq": False}
    counters: ClassVar = ("step",)
    fixed: ClassVar = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    full: ClassVar = "torch.optim.Adam or AdamW, which have both"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        saves_codes: bool = False,
    ) -> None:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given, saves_codes)

    def _check_options(self, group: Options) -> None:
        is_decayed = bool(group["weight_decay"])  # else it may be decoupled or not
        super()._check_options(group if is_decayed else {**group, "decoupled_weight_decay": True})

    def _update(self, values: Tensor, grad: Tensor, moments: Tensors, options: Options) -> Tensors:
        """A step of AdamW (I. Loshchilov, F. Hutter, arXiv 1711.05101, algorithm 2)."""
        (exp_avg, exp_avg_sq), step = moments, options["step"]
        lr, (beta1, beta2) = float(options["lr"]), options["betas"]
        exp_avg.mul_(beta1).add_(grad * (1 - beta1))
        exp_avg_sq.mul_(beta2).add_((grad * grad).mul_(1 - beta2))
        root = exp_avg_sq.sqrt()
        denominator = (root * (1 - beta2**step) ** -0.5).add_(options["eps"])
        change = torch.div(exp_avg, denominator, out=denominator).mul_(lr / (1 - beta1**step))
        values.mul_(1 - lr * options["weight_decay"]).sub_(change)
        return exp_avg, root
