"""This rank's gradients of one bucket in one buffer, where gradients are not sharded.

See [Note: Local gradients] in gradients.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_zero.core.main_grad import MainGrad
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer

__all__ = ["LocalGrads"]


class LocalGrads:
    """The unsharded gradients of one bucket.

    Attributes:
        buffer: Flat buffer with a view for each slot, which `.grad` shows; None before the first
            backward, and after its memory was left to others.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        main: MainGrad,
    ) -> None:
        self._layout, self._parameters, self._device = plan.layout, parameters, device
        self._mean_dtype = main.dtype
        self._dtype = main.dtype if main.is_full else plan.dtype
        self.buffer: FlatBuffer | None = None

    def prepare(self, *, outlives_backward: bool, is_empty: bool) -> None:
        """Before a backward. `is_empty`: the buffer holds no gradient that is not reduced."""
        if outlives_backward:
            self._dtype = self._mean_dtype  # for the rest of the run: dtypes do not alternate
        buffer = self.buffer
        if buffer is None or not is_empty:
            return
        if buffer.tensor.dtype != self._dtype or buffer.num_holders(0) > 0:
            self.abandon()  # users hold views of gradients that they have zeroed

    def abandon(self) -> None:
        """Leaves the buffer to others, who hold views of it."""
        self.buffer = None

    def open(self) -> FlatBuffer:
        """The buffer."""
        if self.buffer is None:
            self.buffer = FlatBuffer(self._layout, self._dtype, self._device)
        return self.buffer

    def take(self, index: int, grad: Tensor) -> None:
        """Moves `grad`, the `.grad` of slot `index`, into the buffer, whose view it becomes.

        It is the view already if autograd has added to it, and another tensor if it is the first
        gradient, or if the user has set it.
        """
        view = self.open().views[index]
        if grad is not view:
            view.copy_(grad.to_dense() if grad.is_sparse else grad)
            self._parameters[index].grad = view
