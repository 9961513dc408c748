"""Views of a bucket's unsharded parameters that users and autograd graphs hold."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.core.shards import Shards
from lightning_zero.layout.flat import Slot
from lightning_zero.tensors.buffer import FlatBuffer, views_of
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["HeldViews"]


class HeldViews:
    """Counts the views of one unsharded buffer, and frees the buffer without harm to them.

    See [Note: Memory that others hold] in tensors/buffer.py.
    """

    def __init__(self, buffer: FlatBuffer, shards: Shards, slots: Sequence[Slot]) -> None:
        self._buffer = buffer
        self._shards = shards
        self._slots = slots
        self._warned_names: set[str] = set()  # parameters whose memory users hold
        self._num_scans = 0  # searches for such parameters

    def num_holders(self, *, num_params: int) -> int:
        """Number of views of the unsharded buffer, without those of `num_params` parameters."""
        return self._buffer.num_holders(self._shards.num_views + num_params)

    def aliases(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of the unsharded buffer."""
        if tensor.layout is not torch.strided or isinstance(tensor, LazyTensor):
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        storage = self._buffer.tensor.untyped_storage()
        return bool(tensor.untyped_storage()._cdata == storage._cdata)

    def free_buffer(self, num_holders_before: int | None, *, is_saved_for_backward: bool) -> None:
        """Frees the buffer, which no parameter points at; views that users hold keep its memory.

        Args:
            num_holders_before: `num_holders` when the user was given the parameters: the user may
                keep views that were taken since. None: no views are expected.
            is_saved_for_backward: Whether a graph may hold views.
        """
        # Graphs hold no more views than there were before.
        num_graphs = 0
        if is_saved_for_backward and num_holders_before is not None:
            num_graphs = num_holders_before
        may_be_graphs = is_saved_for_backward and num_holders_before is None
        if self.num_holders(num_params=0) > num_graphs and not may_be_graphs:
            if num_holders_before is None:
                self._warn()
            self._buffer.replace_memory(copies=False)
        self._buffer.free()

    def _warn(self) -> None:
        """Warns about views of unsharded parameters that users keep, except those in graphs.

        Warns at most twice, because it searches all Python objects.
        """
        if self._num_scans == 2:
            return
        time.sleep(0.001)  # a gloo thread releases sent tensors shortly after the end
        if not self.num_holders(num_params=0):
            return
        self._num_scans += 1
        own = {id(self._buffer.tensor), *map(id, self._buffer.views)}
        offsets = [start for one, start in views_of(self._buffer.tensor) if id(one) not in own]
        held = {
            slot.name
            for slot in self._slots
            if any(slot.start <= start < slot.stop for start in offsets)
        }
        for name in sorted(held - self._warned_names):
            self._warned_names.add(name)
            warnings.warn(
                f"a view of parameter {name} outlives the step in which it was taken. It keeps the "
                "values of that step, while a view of a plain module's parameter follows later "
                "steps. Keep a copy, parameter.detach().clone(), or take a new view before each "
                "use.",
                stacklevel=2,
            )
