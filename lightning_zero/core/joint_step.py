"""A step of all slots of a bucket at once, for optimizers that step every slice in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_zero.core.gradients import Gradients
from lightning_zero.core.shards import Shards
from lightning_zero.tensors.guarded import unguard
from lightning_zero.tensors.lazy import read_flat

__all__ = ["JointStep", "StepTensors"]


@dataclass(frozen=True)
class StepTensors:
    """What a step of one bucket reads and writes.

    Attributes:
        master: 1-D, own elements, master dtype.
        values: 1-D, the elements of `Shards.step_layout`: the master itself or, with tensor
            owners, the full tensors of this rank.
        grads: Gradients by slot, in the shape and on the device of what is stepped, or None.
    """

    master: Tensor
    values: Tensor
    grads: list[Tensor | None]


class JointStep:
    """Points `.data` at what is stepped and `.grad` at its gradient, and stores the new values.

    A master that is in a file is read into memory for the step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shards: Shards, grads: Gradients
    ) -> None:
        self._parameters = parameters
        self._shards = shards
        self._grads = grads
        self._tensors: StepTensors | None = None  # inside the step
        # `.grad` of all parameters, inside a step without gradients.
        self._saved_grads: list[Tensor | None] | None = None

    def read(self, *, has_grads: bool, has_values: bool) -> StepTensors:
        """Returns what a step needs. Changes no parameter. Collective with tensor owners.

        Reads, copies, allocations and collectives are here, so `begin` does not fail.

        Args:
            has_grads: Whether there are gradients; else they are None.
            has_values: Whether full tensors have values; else they are uninitialized, and the call
                is local.
        """
        shards, full = self._shards, self._shards.full_tensors
        means: list[Tensor | None] = [None] * len(self._parameters)
        if has_grads and full is None:
            means = self._grads.fetch_all(shards.plan.master_dtype)
        shards.before_write()
        store = shards.ensure_master()
        values = master = store.fetch(0, store.numel)
        if full is not None:
            empty = master.new_empty(full.layout.numel)
            values = full.collect(master).wait() if has_values else empty
            if has_grads:
                has_mean = [self._grads.fetch(index) is not None for index in range(len(means))]
                mean = read_flat(self._grads.mean(), 0, store.numel)
                own = full.collect(mean).wait()
                parts = full.layout.split(own.to(master.dtype))
                means = [part if has else None for part, has in zip(parts, has_mean, strict=True)]
        grads: list[Tensor | None] = []
        for index, part in enumerate(means):
            if part is None or not shards.step_layout.is_stepped[index]:
                grads.append(None)
                continue
            part = read_flat(part, 0, part.numel())
            grads.append(part.to(master.device).view(shards.step_layout.shapes[index]))
        return StepTensors(master, values, grads)

    def begin(self, tensors: StepTensors, *, has_grads: bool) -> None:
        """Points the parameters at what is stepped, and `.grad` at its gradients.

        Without `has_grads`, `.grad` is None, and its value is restored after the step.
        """
        self._saved_grads = None if has_grads else self._grads.param_grads.read()
        layout = self._shards.step_layout
        for parameter, part, shape, grad in zip(
            self._parameters,
            layout.split(tensors.values),
            layout.shapes,
            tensors.grads,
            strict=True,
        ):
            unguard(parameter)
            parameter.grad = None
            parameter.data = part.view(shape)
            parameter.grad = grad
        self._tensors = tensors  # `store` reads the parameters only if all of them are stepped

    def store(self, *, is_changed: bool) -> None:
        """Ends the step: stores changed values, and drops the gradients of the step.

        Collective with tensor owners, if `is_changed`.
        """
        for parameter in self._parameters:
            parameter.grad = None
        tensors, self._tensors = self._tensors, None
        if not is_changed or tensors is None:
            return
        parts = self._shards.step_layout.split(tensors.values)
        for parameter, part in zip(self._parameters, parts, strict=True):
            if parameter.data_ptr() != part.data_ptr():  # `p.data = p.data - update`
                part.copy_(parameter.data.reshape(-1))
        if self._shards.full_tensors is not None:
            self._shards.full_tensors.distribute(tensors.values, tensors.master).wait()
        self._shards.store_master(tensors.master)

    def restore_grads(self) -> None:
        """Sets `.grad` as it is between steps, once the parameters have left the step."""
        hidden, self._saved_grads = self._saved_grads, None
        if hidden is None:
            self._grads.set_param_grads()
        else:
            self._grads.param_grads.restore(hidden)
