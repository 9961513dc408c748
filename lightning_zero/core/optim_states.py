"""Optimizer states of one bucket on this rank: which elements it has, and their files.

States in memory belong to the optimizer (`optimizer.state`); those in files are stored here, and
the optimizer has LazyTensors of them. See [Note: States in files] in optim/chunks.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.layout.flat import OwnedLayout, ShardLayout, StateLayouts
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.composite import is_composite
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tiers.storage import ShardStore, Storage

__all__ = ["OptimStates", "is_elementwise_state"]


def is_elementwise_state(value: object, numel: int) -> bool:
    """Whether `value` has one number for each of the `numel` elements of a 1-D slice.

    A single number for the parameter, such as a step counter, has no dimensions.
    """
    if not isinstance(value, Tensor) or is_composite(value):
        return False
    return value.dim() > 0 and value.numel() == numel


class OptimStates:
    """Shards of one bucket's optimizer states.

    Args:
        plan: Dtypes, tiers and state blocks of the bucket.
        layout: Own elements.
        step_layout: Elements that this rank steps: own ones, or the full tensors that it owns.
        storage: Makes the files.

    Attributes:
        layouts: Layouts of this rank's shards, by key of the state.
        are_in_files: Whether elementwise states move to files.
        stores: Files, by key of the state.
    """

    def __init__(
        self,
        plan: BucketPlan,
        layout: ShardLayout,
        step_layout: ShardLayout | OwnedLayout,
        storage: Storage,
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._step_layout = step_layout
        self._storage = storage
        self.layouts = StateLayouts(layout, plan.blocks)
        self.are_in_files = False
        self.stores: dict[str, ShardStore] = {}

    def keep_in_files(self, is_kept: bool) -> None:
        """Sets `are_in_files`, once the optimizer is known. Local."""
        self.are_in_files = is_kept

    def is_shard(self, index: int, key: str, value: object) -> bool:
        """Whether `value` is this rank's shard of state `key` of slot `index`."""
        return is_elementwise_state(value, len(self.layouts.of(key).owned(index)))

    def slice(self, index: int, key: str, full: Tensor) -> Tensor:
        """A copy of what this rank steps of the full state `key` of slot `index`.

        The copy has the master dtype, except for quantization codes, which are integers, and
        numbers of blocks.
        """
        device = self._storage.step_device(self._plan.tiers.optim)
        is_in_blocks = self.layouts.is_in_blocks(key)
        layout = self.layouts.of(key) if is_in_blocks else self._step_layout
        owned = layout.owned(index)
        part = read_flat(full, owned.start, owned.stop).view(layout.shapes[index])
        is_cast = part.is_floating_point() and not is_in_blocks
        return part.to(device, self._plan.master_dtype if is_cast else part.dtype, copy=True)

    def ensure_store(self, key: str, dtype: torch.dtype) -> ShardStore:
        """Returns the file of state `key`, with the length of the shard; initially zeros."""
        if key not in self.stores:
            name = f"{self._plan.name}.{key}"
            self.stores[key] = self._storage.make_optim_store(name, self._layout.numel, dtype)
        return self.stores[key]

    def view(self, index: int, key: str) -> Tensor:
        """State `key` of slot `index`, 1-D; reads its file when it is used."""
        own = self._layout.ranges[index]
        return self.stores[key].view(own.start, own.stop)

    def adopt(self, index: int, state: dict[str, Any]) -> None:
        """Moves states of slot `index` that are in memory, such as loaded ones, to their files."""
        own = self._layout.ranges[index]
        for key, value in state.items():
            if key in self._plan.blocks.memory_keys or isinstance(value, LazyTensor):
                continue
            if is_elementwise_state(value, len(own)):
                self.ensure_store(key, value.dtype).write(own.start, value)
                state[key] = self.view(index, key)
