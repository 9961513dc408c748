"""Gradients of one bucket as `.grad` of its parameters, as a flat tensor, and as shards.

[Note: Hidden gradients] While torch.compile traces a graph, it describes the parameters that the
graph uses, and `.grad` of each of them, which Lightning zeroes only after the forward. It cannot
describe a sharded tensor, nor a gradient of another dtype or device than the parameter. So while it
traces, such a gradient is replaced by a sparse tensor without elements. torch.compile can describe
that, but does not trace code that reads it: a forward that reads `.grad` runs uncompiled, and sees
the gradient. None would be traced, as if there were no gradient. Compiled graphs do not depend on
`.grad`, so nothing is compiled again because of it.

Alternatives considered: a sharded tensor that torch.compile describes by its shard
(`__tensor_flatten__`). It would read shards of offloaded gradients, and gradients of another dtype
or device would still end every graph or raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_zero.comm.backends import Unfilled
from lightning_zero.core.step_worker import OverlappedStep
from lightning_zero.layout.flat import Slot
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.guarded import data_of, raw_data
from lightning_zero.tensors.lazy import LazyTensor

__all__ = [
    "GradShard",
    "HiddenGrad",
    "ParamGrads",
    "graph_error",
    "outside_engine_error",
    "unfilled",
]


def graph_error(name: str) -> RuntimeError:
    """Error for the gradient of parameter `name` that has a graph of its own."""
    return RuntimeError(
        f"the gradient of {name} has a graph, because backward was called with create_graph=True; "
        "`.grad` is the mean over ranks, which has none. Call torch.autograd.grad(..., "
        "create_graph=True) for what you differentiate twice, and backward without it."
    )


def outside_engine_error(name: str) -> RuntimeError:
    """Error for a backward that reaches parameter `name` without the engine."""
    return RuntimeError(
        f"backward reached parameter {name} outside the engine; replace loss.backward() by "
        "engine.backward(loss), fabric.backward(loss), or self.manual_backward(loss) in a "
        "LightningModule."
    )


def unfilled(plan: BucketPlan, local: Mapping[int, Tensor]) -> Unfilled:
    """The flat gradients of a bucket, for a reduction: `local`, by slot, and zeros in the rest."""

    def fill(flat: Tensor) -> None:
        views = FlatBuffer(plan.layout, flat.dtype, flat.device, memory=flat).views
        for index, view in enumerate(views):
            if index not in local:
                view.zero_()
        if local:
            torch._foreach_copy_([views[index] for index in local], list(local.values()))

    return Unfilled(plan.layout.numel, plan.dtype, fill, tuple(local.values()))


@dataclass(frozen=True, eq=False)
class HiddenGrad:
    """A gradient that is not `.grad` of its parameter. See [Note: Hidden gradients]."""

    index: int
    grad: Tensor
    stand_in: Tensor


class ParamGrads:
    """`.grad` of the parameters of one bucket, read and set without unsharding them."""

    def __init__(self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot]) -> None:
        self._parameters = parameters
        self._slots = slots
        # Tensors of the full shapes, by slot, without memory.
        self._placeholders: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def read(self) -> list[Tensor | None]:
        """`.grad` of every parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # guarded parameters would be slow
            return [parameter.grad for parameter in self._parameters]

    def hide(self, dtype: torch.dtype, device: torch.device) -> list[HiddenGrad]:
        """Replaces gradients that torch.compile cannot describe. See [Note: Hidden gradients].

        Args:
            dtype: Dtype of the unsharded parameters.
            device: Device of the unsharded parameters.
        """
        hidden: list[HiddenGrad] = []
        for index, grad in enumerate(self.read()):
            if grad is None:
                continue
            data = data_of(self._parameters[index])
            if type(grad) is Tensor and (grad.dtype, grad.device) == (data.dtype, data.device):
                continue
            shape = self._slots[index].shape
            stand_in = torch.empty(shape, dtype=dtype, device=device, layout=torch.sparse_coo)
            hidden.append(HiddenGrad(index, grad, stand_in))
        self.set([entry.index for entry in hidden], [entry.stand_in for entry in hidden])
        return hidden

    def unhide(self, hidden: Sequence[HiddenGrad]) -> None:
        """Undoes `hide`, except for gradients that were set or dropped since."""
        now = self.read()
        kept = [entry for entry in hidden if now[entry.index] is entry.stand_in]
        self.set([entry.index for entry in kept], [entry.grad for entry in kept])

    def set(self, slots: Iterable[int], grads: Iterable[Tensor]) -> None:
        """Sets `.grad` of `slots`, wherever `.data` points.

        torch compares sizes and devices with `.data`, so `.data` points at a placeholder of the
        full shape during the assignment.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for index, grad in zip(slots, grads, strict=True):
                parameter = self._parameters[index]
                data = raw_data(parameter)
                if data.shape == grad.shape and data.device == grad.device:
                    parameter.grad = grad
                    continue
                key = data.dtype, grad.device
                if key not in self._placeholders:
                    self._placeholders[key] = self._make_placeholders(*key)
                parameter.data = self._placeholders[key][index]
                parameter.grad = grad
                parameter.data = data

    def _make_placeholders(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        element = torch.empty((), dtype=dtype, device=device)
        made = [element.expand(slot.shape) for slot in self._slots]
        element.untyped_storage().resize_(0)
        return made

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
        self.set([index], [grad])

    def zero(self, *, set_to_none: bool) -> None:
        """As `Optimizer.zero_grad`."""
        if set_to_none:
            self.drop()
            return
        for grad in self.read():
            if grad is not None:
                grad.zero_()

    def drop(self) -> None:
        """Sets `.grad` of every parameter to None."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.grad = None


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
