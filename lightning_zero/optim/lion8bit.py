"""Lion with a moment of 8 bits: see [Note: Moments of 8 bits]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from lightning_zero.optim.optimizer8bit import Optimizer8bit, Options, Tensors

__all__ = ["Lion8bit"]


class Lion8bit(Optimizer8bit):
    """Lion whose moment takes a quarter of the memory, like `AdamW8bit`.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the moment, in the update and in the state.
        weight_decay: Decoupled weight decay.
        saves_codes: See `AdamW8bit`; a float32 moment is that of `lion_pytorch.Lion`.
    """

    moments: ClassVar = {"exp_avg": True}
    fixed: ClassVar = {"cautious_factor": 1.0}
    full: ClassVar = "lion_pytorch.Lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        saves_codes: bool = False,
    ) -> None:
        given = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, given, saves_codes)

    def _update(self, values: Tensor, grad: Tensor, moments: Tensors, options: Options) -> Tensors:
        """A step of Lion (X. Chen et al., arXiv 2302.06675, algorithm 2)."""
        (exp_avg,), lr, (beta1, beta2) = moments, float(options["lr"]), options["betas"]
        mean = (exp_avg * beta1).add_(grad * (1 - beta1))
        change = mean.sign().add_(mean.sub_(mean)).mul_(lr)  # `sign` alone would hide NaN
        values.mul_(1 - lr * options["weight_decay"]).sub_(change)
        exp_avg.mul_(beta2).add_(grad * (1 - beta2))
        return moments
