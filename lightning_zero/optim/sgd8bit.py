"""SGD with a momentum buffer of 8 bits: see [Note: Moments of 8 bits]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from lightning_zero.optim.optimizer8bit import Optimizer8bit, Options, Tensors

__all__ = ["SGD8bit"]


class SGD8bit(Optimizer8bit):
    """SGD whose momentum buffer takes a quarter of the memory, like `AdamW8bit`.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay, which is added to the gradient.
        nesterov: Whether momentum is Nesterov's.
        saves_codes: See `AdamW8bit`; a float32 buffer is that of `torch.optim.SGD`.
    """

    moments: ClassVar = {"momentum_buffer": True}
    fixed: ClassVar = {"dampening": 0, "maximize": False}
    full: ClassVar = "torch.optim.SGD"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        saves_codes: bool = False,
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, given, saves_codes)

    def _check_options(self, group: Options) -> None:
        super()._check_options(group)
        if not group["momentum"] > 0:
            raise ValueError(
                f"momentum must be positive, got {group['momentum']}; else use torch.optim.SGD."
            )

    def _update(self, values: Tensor, grad: Tensor, moments: Tensors, options: Options) -> Tensors:
        """A step of `torch.optim.SGD`."""
        (buffer,), momentum = moments, options["momentum"]
        if options["weight_decay"]:
            grad = grad + values * options["weight_decay"]
        buffer.mul_(momentum).add_(grad)
        change = grad + buffer * momentum if options["nesterov"] else buffer
        values.sub_(change * float(options["lr"]))
        return moments
