"""A step of all slots of a bucket at once, for optimizers that step every slice in one call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_zero.core.gradients import Gradients
from lightning_zero.core.shards import Shards
from lightning_zero.tensors.guarded import unguard
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["JointStep"]


class JointStep:
    """Points `.data` at the master and `.grad` at the main gradient, and stores what was stepped.

    A master that is in a file is read into memory for the step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shards: Shards, grads: Gradients
    ) -> None:
        self._parameters = parameters
        self._shards = shards
        self._grads = grads
        self._master: Tensor | None = None  # 1-D, own elements, master dtype; inside the step
        # `.grad` of all parameters, inside a step without gradients.
        self._saved_grads: list[Tensor | None] | None = None

    def read(self, *, has_grads: bool) -> tuple[Tensor, list[Tensor | None]]:
        """What a step needs: the master, and the main gradients by slot. Changes no parameter.

        Reads, copies between devices and allocations happen here, so `begin` does not fail.

        Returns:
            The master, 1-D; and for each slot its gradient in the shape and on the device of the
            stepped slice, or None, without `has_grads` everywhere.
        """
        shards = self._shards
        means: list[Tensor | None] = [None] * len(self._parameters)
        if has_grads:
            means = self._grads.fetch_all(shards.plan.master_dtype)
        shards.before_write()
        store = shards.ensure_master()
        master = store.fetch(0, store.numel)
        grads: list[Tensor | None] = []
        for index, mean in enumerate(means):
            if mean is None or not shards.layout.is_stepped[index]:
                grads.append(None)
                continue
            mean = mean.read() if isinstance(mean, LazyTensor) else mean
            grads.append(mean.to(master.device).view(shards.layout.shapes[index]))
        return master, grads

    def begin(self, master: Tensor, grads: Sequence[Tensor | None], *, has_grads: bool) -> None:
        """Points the parameters at their slices of `master`, and `.grad` at `grads`, by slot.

        Without `has_grads`, `.grad` is None, and its value is restored after the step.
        """
        self._saved_grads = None if has_grads else self._grads.param_grads.read()
        parts = self._shards.layout.split(master)
        shapes = self._shards.layout.shapes
        for parameter, part, shape, grad in zip(
            self._parameters, parts, shapes, grads, strict=True
        ):
            unguard(parameter)
            parameter.grad = None
            parameter.data = part.view(shape)
            parameter.grad = grad
        self._master = master  # `store` reads the parameters only if all of them are slices

    def store(self, *, is_changed: bool) -> None:
        """Ends the step: stores changed slices, and drops the gradients of the step."""
        for parameter in self._parameters:
            parameter.grad = None
        if is_changed and self._master is not None:
            parts = self._shards.layout.split(self._master)
            for parameter, part in zip(self._parameters, parts, strict=True):
                if parameter.data_ptr() != part.data_ptr():  # `p.data = p.data - update`
                    part.copy_(parameter.data.reshape(-1))
            self._shards.store_master(self._master)
        self._master = None

    def restore_grads(self) -> None:
        """Sets `.grad` as it is between steps, once the parameters have left the step."""
        hidden, self._saved_grads = self._saved_grads, None
        if hidden is None:
            self._grads.set_param_grads()
        else:
            self._grads.param_grads.restore(hidden)
