"""What users do to the parameters of a bucket: write to them, assign `.data`, and keep views.

    Fingerprint, WriteDetector   writes to any tensors
    UserWrites                   writes to one bucket, which are copied into its shards
    HeldViews                    views of one bucket, which must keep their values

[Note: Detecting writes] A `WriteDetector` detects a write to a tensor in one of two ways:

- `watch` compares version counters; it reads no values, and does no work on a device. It is for
  parameters that are unsharded only for a use (stage 3), where every parameter is checked in every
  pass. A write to `parameter.data` has no version, so the values of a slot are watched, too, once
  its `.data` was read.
- `watch_values` compares fingerprints, sums over bits; it detects every write. It is for replicated
  parameters whose master is offloaded (stages 1 and 2), and for parameters in `gathered`.

Where a write is detected, values that are still the rounded master leave the master as it is.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from lightning_zero.layout.flat import Slot
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer, views_of
from lightning_zero.tensors.guarded import data_of, set_plain_data
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tensors.shard_spec import DetachableShard
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = [
    "Fingerprint",
    "HeldViews",
    "UserWrites",
    "WriteDetector",
    "WrittenShards",
    "is_same_memory",
    "own_elements",
    "replaced",
    "require_full_shape",
]


_dtype_of, _version_of = attrgetter("dtype"), attrgetter("_version")


class WrittenShards(Protocol):
    """What this module needs of a bucket's `Shards`, whose module imports this one."""

    @property
    def num_views(self) -> int:
        """Number of views of the unsharded buffer that the stores keep."""

    def owned(self, index: int) -> range:
        """Own elements of slot `index`, counted from the slot's first element."""

    def assign(self, index: int, values: Tensor) -> None:
        """Stores own elements of slot `index` that a user has written."""

    def rebind_to_unsharded(self, old: Tensor) -> None:
        """Switches to the new memory of the unsharded buffer; users hold the old memory, `old`."""


class Fingerprint:
    """Sums over the bits of a tensor, by rows and by columns of a square: one pass over it.

    Changed values have equal sums only if the changes cancel in every row and every column.
    """

    def __init__(self, tensor: Tensor) -> None:  # 1-D, on any device, where the sums stay
        self._sums = _sums(tensor)

    def matches(self, tensor: Tensor) -> bool:
        """Whether `tensor` still has those bits. Synchronizes with its device, once."""
        return torch.equal(self._sums, _sums(tensor))

    def digest(self) -> bytes:
        """Digest: equal for equal bits at the same offset of a buffer, on any device and rank.

        Synchronizes with its device.
        """
        return hashlib.sha256(self._sums.cpu().numpy().data).digest()


def _sums(tensor: Tensor) -> Tensor:
    """Sums of 64-bit words, without a wider copy, followed by the bytes before and after them.

    A few kernels for any size. Returns 1-D int64; its length is about 3 times the root of the
    number of words.
    """
    octets = tensor.detach().view(torch.uint8)
    if octets.numel() < 8:
        return octets.to(torch.int64)
    start = -octets.storage_offset() % 8
    num_words = (octets.numel() - start) // 8
    size = 1 << num_words.bit_length() // 2
    rows = num_words // size
    stop = start + 8 * rows * size
    words = octets[start:stop].view(torch.int64).view(rows, size)
    edges = torch.cat([octets[:start], octets[stop:]])
    return torch.cat([words.sum(dim=0), words.sum(dim=1), edges.to(torch.int64)])


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are the same view of the same memory."""
    if one.dtype is not other.dtype or one.is_meta:
        return False
    return one.is_set_to(other)


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


class WriteDetector:
    """Detects in-place writes to tensors. See [Note: Detecting writes].

    Each call gets the tensors, always in the same order; their memory may have been replaced.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []  # at `watch`; a write increments them
        self._fingerprints: dict[int, Fingerprint] = {}  # by index, at `watch_values`

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Starts to detect writes that increment version counters, and no others."""
        self._versions = list(map(_version_of, tensors))
        self._fingerprints = {}

    def watch_values(self, tensors: Sequence[Tensor], *indices: int) -> None:
        """Starts to detect all writes to the tensors `indices`; without arguments, to all tensors.

        Tensors whose values are watched already stay as they are.
        """
        for index in indices or range(len(tensors)):
            if index not in self._fingerprints:
                self._fingerprints[index] = _fingerprint_of(tensors[index])

    def written(self, tensors: Sequence[Tensor]) -> list[int]:
        """Indices of the tensors that were written since they were watched, or the last call."""
        found: list[int] = []
        if self._versions:
            versions = list(map(_version_of, tensors))
            if versions != self._versions:
                pairs = enumerate(zip(self._versions, versions, strict=True))
                found = [index for index, (old, new) in pairs if old != new]
                self._versions = versions
        for index, seen in self._fingerprints.items():
            if not seen.matches(data_of(tensors[index]).reshape(-1)):
                self._fingerprints[index] = _fingerprint_of(tensors[index])
                found.append(index)
        return found

    def digest(self, index: int) -> bytes:
        """`Fingerprint.digest` of a tensor whose values are watched, as of the last `written`."""
        return self._fingerprints[index].digest()


def _fingerprint_of(tensor: Tensor) -> Fingerprint:
    return Fingerprint(data_of(tensor).reshape(-1))


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
        plan: Layout and dtypes of the bucket.
        parameters: The parameters, by slot.
        orig_dtypes: Dtypes of the parameters before the engine wrapped them, by slot.
        unsharded_params: Their unsharded buffer.
        shards: Stores of this rank's shards.
        held_views: Views of the unsharded buffer that others hold.

    Attributes:
        data_shards: Shards that users have got as `parameter.data`, by slot.
        copies: Entries of state dicts: slot, entry, its version counter, and the version at first.
        watch: `WriteDetector.watch` of the parameters; `watch_values`, too.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        orig_dtypes: Sequence[torch.dtype],
        unsharded_params: FlatBuffer,
        shards: WrittenShards,
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
        self.copies: list[tuple[int, ref[Tensor], Tensor, int]] = []

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
                error = RuntimeError(
                    "an entry of state_dict() was changed in place: it is a copy of parameter "
                    f"{self._plan.layout.slots[index].name}, which keeps its values. Write to the "
                    "parameter inside `with lightning_zero.gathered(module, writeback=True):`. To "
                    "load or save changed values, change clones of the entries: value.clone()."
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


class HeldViews:
    """Counts the views of one unsharded buffer, and frees the buffer without harm to them.

    See [Note: Memory that others hold] in tensors/buffer.py.
    """

    def __init__(self, buffer: FlatBuffer, shards: WrittenShards, slots: Sequence[Slot]) -> None:
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
