"""What users do to the parameters of a bucket: write to them, and assign `.data`.

[Note: Detecting writes] A write by torch to an unsharded parameter, to a view of it or to
`parameter.data` (tensors/guarded.py) increments the version counter of the parameter. Other writes
have no counter: `torch.distributed`, NumPy, the `.data` of a view. So at the next sync this rank's
elements of a parameter whose counter moved, whose `.data` or `.detach()` was taken, or that a
collective was given, are compared with the rounded main parameters; those that differ were written,
and the others leave the main parameters as they are. Before a step all elements of replicated
parameters are compared, where that reads no file (`_compare_replicated`). In stage 3, and where the
main parameters are offloaded, a write without a counter to the `.data` of a view, or by a
collective on a view, is not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.core.shards import Shards
from lightning_zero.layout.flat import Slot
from lightning_zero.layout.offload import Tier
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.guarded import data_of, set_plain_data
from lightning_zero.tensors.lazy import read_flat
from lightning_zero.tensors.shard_spec import DetachableShard
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers.storage import MemoryShardStore

__all__ = [
    "UserWrites",
    "is_same_memory",
    "own_elements",
    "replaced",
    "require_full_shape",
]


_dtype_of, _version_of = attrgetter("dtype"), attrgetter("_version")


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether both tensors are the same view of the same memory."""
    if tensor.dtype is not other.dtype or tensor.is_meta:
        return False
    return tensor.is_set_to(other)


def own_elements(values: Tensor, slot: Slot, owned: range) -> Tensor:
    """This rank's elements of `values`, which a user has assigned to `parameter.data`: 1-D.

    Raises:
        ValueError: `values` have neither the full shape nor that of this rank's shard.
    """
    if tuple(values.shape) == slot.shape:
        return read_flat(values, owned.start, owned.stop)
    if values.dim() == 1 and values.numel() == len(owned):
        return values
    raise ValueError(
        f"the data set on parameter {slot.name} has shape {tuple(values.shape)}; expected the "
        f"full shape {slot.shape}, or this rank's {len(owned)} elements, as `.data` has between "
        "steps."
    )


def require_full_shape(values: Tensor, slot: Slot) -> Tensor:
    """Returns `values`, which a user has assigned to the `.data` of an unsharded parameter.

    Raises:
        ValueError: They do not have the parameter's shape.
    """
    if tuple(values.shape) != slot.shape:
        raise ValueError(
            f"the data set on parameter {slot.name} has shape {tuple(values.shape)}; expected "
            f"{slot.shape}. A parameter keeps its shape while an engine holds it."
        )
    return values


def replaced(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> list[int]:
    """Indices of the parameters whose `.data` is not their view.

    Called for every bucket in every pass, so it is cheap where there are none.
    """
    if list(map(_dtype_of, parameters)) == list(map(_dtype_of, views)):
        with suppress(NotImplementedError):  # a tensor without memory
            if all(map(Tensor.is_set_to, parameters, views)):
                return []
    pairs = enumerate(zip(parameters, views, strict=True))
    return [index for index, pair in pairs if not is_same_memory(*pair)]


class UserWrites:
    """Writes by the user to the parameters of one bucket, sharded or unsharded.

    Args:
        parameters: The parameters, by slot.
        orig_dtypes: Dtypes of the parameters before the engine wrapped them, by slot.
        unsharded: Their unsharded buffer.
        shards: Stores of this rank's shards.

    Attributes:
        data_shards: Shards that users have got as `parameter.data`, by slot.
        data_read: Slots whose `.data` was read while it was unsharded, since the last sync; also
            those that were detached, or given to a collective.
        copies: Entries of state dicts: slot, entry, its version counter, and the version at first.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        orig_dtypes: Sequence[torch.dtype],
        unsharded: FlatBuffer,
        shards: Shards,
    ) -> None:
        self.data_shards: WeakValueDictionary[int, DetachableShard] = WeakValueDictionary()
        self._parameters = parameters
        self._orig_dtypes = orig_dtypes
        self._unsharded = unsharded
        self._shards = shards
        self.data_read: set[int] = set()
        self._versions: list[int] = []  # version counters when the parameters were last in sync
        # Slots whose `.data` was assigned since the last pass, with the former `.data`.
        self._assigned: dict[int, DetachableShard | None] = {}
        self.copies: list[tuple[int, ref[Tensor], Tensor, int]] = []
        # Old memory of the unsharded buffer that users hold, and the masters it was rounded from.
        self._previous_masters: list[tuple[StorageWeakRef, Tensor]] = []

    # ---------------------------------------------------------------- sharded parameters

    def assign(self, index: int, own: Tensor, given: Tensor) -> None:
        """Writes `own`, this rank's elements of `parameter.data = given`, while sharded. Local."""
        self._note_assigned(index, given)
        self._detach(index)
        self._merge(self._shards.layout.ranges[index], own)

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
        slots = self._shards.plan.layout.slots
        names = [slots[index].name for index in sorted(self._assigned)]
        self._assigned.clear()
        return names

    def watch_copy(self, index: int, values: Tensor) -> None:
        """Watches `values`, a copy of slot `index` in a state dict: writes to it would be lost."""
        counter = values.detach()  # has the version counter of `values`
        counter.data = values.new_empty(0)  # and not their memory
        self.copies.append((index, ref(values), counter, counter._version))

    def find_lost_write(self) -> RuntimeError | None:
        """An error if a copy in a state dict was changed in place, once for each. Local."""
        error: RuntimeError | None = None
        copies, self.copies = self.copies, []
        for index, copied, counter, version in copies:
            if counter._version != version:
                name = self._shards.plan.layout.slots[index].name
                error = RuntimeError(
                    "an entry of state_dict() was changed in place: it is a copy of parameter "
                    f"{name}, which keeps its values. Write to the parameter inside "
                    "`with lightning_zero.gathered(module, writeback=True):`. To load or save "
                    "changed values, change clones of the entries: value.clone()."
                )
            elif copied() is not None:
                self.copies.append((index, copied, counter, version))
        return error

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

    def watch(self) -> None:
        """The parameters have the values of the shards: only later writes are the user's. Local."""
        self._versions = list(map(_version_of, self._parameters))
        self.data_read.clear()

    def counted(self) -> set[int]:
        """Slots that torch has written since the last `watch`. Local."""
        versions = list(map(_version_of, self._parameters))
        if versions == self._versions:
            return set()
        pairs = enumerate(zip(self._versions, versions, strict=True))
        return {index for index, (old, new) in pairs if old != new}

    def _suspects(self) -> set[int]:
        """Slots that may have been written since the last `watch`."""
        if self._unsharded.has_arrays:
            return set(range(len(self._parameters)))
        return self.counted() | self.data_read

    def changed(self) -> list[int]:
        """Slots that were written since the last `watch`, or have other data. Local.

        A write that torch has not counted is found only in the elements of this rank.
        """
        found = {*replaced(self._parameters, self._unsharded.views), *self.counted()}
        for index in set(range(len(self._parameters))) - found:
            if self._differs(index, self._own_part(index)):
                found.add(index)
        return sorted(found)

    def _differs(self, index: int, values: Tensor) -> bool:
        """Whether `values` are other own elements of slot `index` than the rounded stored ones.

        `values`: 1-D, any dtype.
        """
        stored = self._shards.values(index).to(values.device, values.dtype)
        return not torch.equal(values.view(torch.uint8), stored.view(torch.uint8))  # also NaN

    def sync(self, *, reads_all: bool) -> None:
        """Copies writes to the unsharded parameters into the main parameters. Local.

        Args:
            reads_all: Compare all values of replicated parameters, too: some writes have no trace.

        Raises:
            ValueError: Replaced data has another shape or dtype; the parameter then has its own
                again.
        """
        assigned, error = replaced(self._parameters, self._unsharded.views), None
        if assigned:
            error = self._sync_assigned(assigned)
        if suspects := self._suspects():
            for index in suspects.difference(assigned) if self._shards.are_copies else ():
                self._merge(self._shards.layout.ranges[index], self._own_part(index))
            self.watch()
        if error is not None:
            raise error
        if reads_all and self._shards.all_gather_input is None:
            self._compare_replicated()

    def _own_part(self, index: int) -> Tensor:
        own = self._shards.owned(index)
        return self._unsharded.views[index].reshape(-1)[own.start : own.stop]

    def _sync_assigned(self, slots: list[int]) -> ValueError | None:
        """Copies assigned `.data` into the unsharded buffer and the shards.

        Tensors on the former memory, such as the former `.data`, keep their values. All parameters
        point at the buffer then, including those with data of another shape or dtype; returns the
        error about the first of these.
        """
        buffer = self._unsharded
        values = {index: data_of(self._parameters[index]) for index in slots}
        self._keep_master(buffer.replace_memory())
        self._shards.rebind_to_unsharded()
        set_plain_data(self._parameters, buffer.views)
        error = None
        for index, data in values.items():
            slot, owned = self._shards.plan.layout.slots[index], self._shards.owned(index)
            try:
                full = require_full_shape(data, slot)
                self.check_dtype(index, full)
            except ValueError as refused:
                error = error or refused
                continue
            buffer.views[index].copy_(full)
            if self._shards.are_copies:
                self._detach(index)
                own = read_flat(full, owned.start, owned.stop)
                self._merge(self._shards.layout.ranges[index], own)
        return error

    def _compare_replicated(self) -> None:
        """Finds writes to replicated parameters that nothing has counted, in all own elements.

        Only where that reads no file, and copies nothing from a device.
        """
        self._drop_previous_masters()
        master = self._shards.separate_master
        if not isinstance(master, MemoryShardStore):
            return
        own = self._shards.own_slice
        if master.tier is Tier.DEVICE or own.device.type == "cpu":
            self._merge(range(own.numel()), own)

    # ---------------------------------------------------------------- main parameters

    def _merge(self, own: range, values: Tensor) -> None:
        """Writes elements `own` of the shard, which the user has set: 1-D, any dtype.

        Elements that are still the rounded master leave the master as it is, and those that are a
        rounded former master restore that one.
        """
        if not own:
            return
        shards = self._shards
        shards.before_write()
        master = shards.master_or_param.fetch(own.start, own.stop)
        values = values.to(master.device)
        with torch.no_grad():
            is_changed, updated = values != master.to(values.dtype), values.to(master.dtype)
            # On a device, `any` synchronizes, which costs more than writing in every case.
            if master.device.type == "cpu" and not is_changed.any():
                return
            self._drop_previous_masters()
            for _, former in self._previous_masters:
                part = former[own.start : own.stop]
                updated = torch.where(values == part.to(values.dtype), part, updated)
            shards.write(own.start, torch.where(is_changed, updated, master))

    def _keep_master(self, old: Tensor) -> None:
        """Keeps the master from which `old` was rounded, memory that the buffer has left.

        Users may assign `old` back; its master is then restored.
        """
        master = self._shards.separate_master
        if master is not None and self._shards.all_gather_input is None:
            held = StorageWeakRef(old.untyped_storage())
            self._drop_previous_masters()
            self._previous_masters.append((held, master.fetch(0, master.numel).clone()))

    def _drop_previous_masters(self) -> None:
        """Drops copies of former masters for which users hold no memory any more."""
        held = [pair for pair in self._previous_masters if not pair[0].expired()]
        self._previous_masters = held

    def check_dtype(self, index: int, values: Tensor) -> None:
        """Raises a ValueError if `values`, set as the data of slot `index`, have another dtype."""
        expected = self._orig_dtypes[index]
        plan = self._shards.plan
        if values.dtype not in (plan.dtype, plan.master_dtype, expected):
            name = plan.layout.slots[index].name
            raise ValueError(
                f"the data set on parameter {name} has dtype {values.dtype}; expected {expected}. "
                "A parameter keeps its dtype while an engine holds it; convert a copy instead: "
                "copy.deepcopy(module).half()."
            )
