"""`.grad` of the parameters of one bucket, and this rank's elements of one mean gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_zero.core.step_worker import OverlappedStep
from lightning_zero.layout.flat import Slot
from lightning_zero.tensors.guarded import data_of
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["GradShard", "ParamGrads"]


class ParamGrads:
    """`.grad` of the parameters of one bucket, read and set without unsharding them."""

    def __init__(self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot]) -> None:
        self._parameters = parameters
        self._slots = slots
        self._placeholders: dict[int, Tensor] = {}  # by slot: same shape, no memory

    def read(self) -> list[Tensor | None]:
        """`.grad` of every parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # guarded parameters would be slow
            return [parameter.grad for parameter in self._parameters]

    def restore(self, grads: Sequence[Tensor | None]) -> None:
        """Sets `.grad` to `grads`, an earlier result of `read`."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, grad in enumerate(grads):
                if grad is not None:
                    self.set(index, grad)

    def set(self, index: int, grad: Tensor) -> None:
        """Sets `.grad`, wherever `.data` points; inside `DisableTorchFunctionSubclass`.

        torch compares sizes and devices with `.data`, so `.data` points at a placeholder of the
        full shape during the assignment.
        """
        parameter = self._parameters[index]
        data = data_of(parameter)
        if data.shape == grad.shape and data.device == grad.device:
            parameter.grad = grad
            return
        placeholder = self._placeholders.get(index)
        if (
            placeholder is None
            or placeholder.dtype != data.dtype
            or placeholder.device != grad.device
        ):
            one = torch.empty((), dtype=data.dtype, device=grad.device)
            placeholder = self._placeholders[index] = one.expand(self._slots[index].shape)
            placeholder.untyped_storage().resize_(0)
        parameter.data = placeholder
        parameter.grad = grad
        parameter.data = data

    def assign(self, index: int, grad: Tensor) -> None:
        """Implements `parameter.grad = grad` of slot `index` while it is guarded. Local.

        Every rank should set an equal gradient.

        Args:
            index: The slot.
            grad: Gradient of the full shape: plain, from which this rank takes its elements when it
                steps, or sharded.

        Raises:
            ValueError: `grad` has another shape.
        """
        slot = self._slots[index]
        if tuple(grad.shape) != slot.shape:
            raise ValueError(
                f"the gradient set on parameter {slot.name} has shape {tuple(grad.shape)}; expected"
                f" the full shape {slot.shape}, plain or sharded as parameter.grad is."
            )
        with torch._C.DisableTorchFunctionSubclass():
            self.set(index, grad)

    def zero(self, *, set_to_none: bool) -> None:
        """As `Optimizer.zero_grad`."""
        for parameter, grad in zip(self._parameters, self.read(), strict=True):
            if grad is not None and set_to_none:
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None
            elif grad is not None:
                grad.zero_()


class MeanGrads(Protocol):
    """The part of `Gradients` that its shards use."""

    @property
    def slices(self) -> list[Tensor]: ...

    def apply_(
        self, change: Callable[[Tensor], object], indices: Sequence[int] | None = None
    ) -> None: ...


@dataclass(eq=False)
class GradShard:
    """This rank's elements of one mean gradient; a copy after it has been zeroed as `.grad`.

    Implements `DetachableShard` of tensors/shard_spec.py.
    """

    means: MeanGrads
    overlapped: OverlappedStep
    index: int
    values: Tensor
    version: int = 0  # full views of a gradient are not cached

    def check_memory(self, call: str, num_bytes: int) -> None:
        """Does nothing. See `full_grad`."""

    def read(self) -> Tensor:
        return self.values.read() if isinstance(self.values, LazyTensor) else self.values

    def detach(self) -> None:
        """Reads the values before their file is written."""
        if isinstance(self.values, LazyTensor):
            self.values = self.values.read()

    def change(self, write: Callable[[Tensor], object]) -> None:
        self.overlapped.wait()
        if self.means.slices and self.means.slices[self.index] is self.values:
            self.means.apply_(write, [self.index])
        else:
            write(self.values)
