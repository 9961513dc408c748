"""Values that users write to the parameters of one bucket, or set as their `.data`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_zero.core.held_views import HeldViews
from lightning_zero.core.shards import Shards
from lightning_zero.core.writes import WriteDetector, replaced, require_full_shape
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.guarded import data_of, set_plain_data
from lightning_zero.tensors.shard_spec import DetachableShard
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = ["UserWrites"]


class UserWrites:
    """Writes by the user to the parameters of one bucket, sharded or unsharded.

    Args:
        plan: Layout and dtypes of the bucket.
        parameters: The parameters, by slot.
        orig_dtypes: Dtypes of the parameters before the engine wrapped them, by slot.
        unsharded_params: Their unsharded buffer.
        shards: Stores of this rank's shards.
        held_views: Views of the unsharded buffer that others hold.

    Attributes:
        data_shards: Shards that users have got as `parameter.data`, by slot.
        watch: `WriteDetector.watch` of the parameters; `watch_values`, too.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        orig_dtypes: Sequence[torch.dtype],
        unsharded_params: FlatBuffer,
        shards: Shards,
        held_views: HeldViews,
    ) -> None:
        self.data_shards: WeakValueDictionary[int, DetachableShard] = WeakValueDictionary()
        self._plan = plan
        self._parameters = parameters
        self._orig_dtypes = orig_dtypes
        self._unsharded_params = unsharded_params
        self._shards = shards
        self._held_views = held_views
        self._detector = WriteDetector()
        self.watch = partial(self._detector.watch, parameters)
        self.watch_values = partial(self._detector.watch_values, parameters)
        # Slots whose `.data` was assigned since the last pass, with the former `.data`.
        self._assigned: dict[int, DetachableShard | None] = {}

    # ---------------------------------------------------------------- sharded parameters

    def assign(self, index: int, own: Tensor, given: Tensor) -> None:
        """Writes `own`, this rank's elements of `parameter.data = given`, while sharded. Local."""
        self._note_assigned(index, given)
        self._detach(index)
        self._shards.assign(index, own)

    def _note_assigned(self, index: int, values: Tensor) -> None:
        """Notes an assignment to `.data` until the next pass.

        Assigning the former `.data` again removes the note, if every rank can see that it is the
        same.
        """
        if index not in self._assigned:
            self._assigned[index] = self.data_shards.get(index)
        elif isinstance(values, ShardedTensor) and values.is_view_of(self._assigned[index]):
            del self._assigned[index]

    def take_assigned(self) -> list[str]:
        """Names of the parameters whose `.data` was assigned since the last call, in slot order."""
        if not self._assigned:
            return []
        slots = self._plan.layout.slots
        names = [slots[index].name for index in sorted(self._assigned)]
        self._assigned.clear()
        return names

    def _detach(self, index: int) -> None:
        """Before slot `index` gets new values: its former `.data` keeps the old ones."""
        shard = self.data_shards.pop(index, None)
        if shard is not None:
            shard.detach()

    def detach_all(self) -> None:
        """Before the shards are dropped: what users have got as `.data` keeps its values."""
        for index in list(self.data_shards):
            self._detach(index)

    # ---------------------------------------------------------------- unsharded parameters

    def sync(self, *, shards_params: bool) -> None:
        """Syncs writes that are detected without reading values into the masters.

        `shards_params`: whether parameters are sharded when idle; else only replaced data is
        detected.

        Raises:
            ValueError: Replaced data has another shape or dtype; the parameter then has its own
                again.
        """
        assigned, error = replaced(self._parameters, self._unsharded_params.views), None
        if assigned:
            assigned, error = self._sync_assigned(assigned)
        if shards_params:
            for index in {*assigned, *self._detector.written(self._parameters)}:
                if index in assigned:
                    self._detach(index)
                own, view = self._shards.owned(index), self._unsharded_params.views[index]
                self._shards.assign(index, view.reshape(-1)[own.start : own.stop])
        if error is not None:
            raise error

    def _sync_assigned(self, slots: list[int]) -> tuple[list[int], ValueError | None]:
        """Copies assigned `.data` into the unsharded buffer; returns valid slots, the first error.

        Tensors that are views of the old values keep them. All parameters point at the buffer then,
        including those with data of another shape or dtype, which is the error.
        """
        buffer = self._unsharded_params
        values = {index: data_of(self._parameters[index]) for index in slots}
        if self._held_views.num_holders(num_params=len(self._parameters) - len(slots)):
            old = buffer.tensor
            buffer.replace_memory(copies=True)
            self._shards.rebind_to_unsharded(old)
        set_plain_data(self._parameters, buffer.views)
        synced, error = [], None
        for index, data in values.items():
            try:
                full = require_full_shape(data, self._plan.layout.slots[index])
                self.check_dtype(index, full)
            except ValueError as refused:
                error = error or refused
                continue
            buffer.views[index].copy_(full)
            synced.append(index)
        return synced, error

    def check_dtype(self, index: int, values: Tensor) -> None:
        """Raises a ValueError if `values`, set as the data of slot `index`, have another dtype."""
        expected = self._orig_dtypes[index]
        if values.dtype not in (self._plan.dtype, self._plan.master_dtype, expected):
            name = self._plan.layout.slots[index].name
            raise ValueError(
                f"the data set on parameter {name} has dtype {values.dtype}; expected {expected}. "
                "A parameter keeps its dtype while an engine holds it; convert a copy instead: "
                "copy.deepcopy(module).half()."
            )
