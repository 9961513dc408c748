"""Activations rest in CPU memory between forward and backward.

[Note: Offloaded activations] Autograd hands each tensor that an operation saves for its backward to
a hook. Large ones are copied to CPU memory and dropped from the device; backward asks for them in
about the reverse order, so the ones saved before are brought back ahead. What is left alone:

* Views of whole parameters. The engine frees and gathers those itself, in place, under the views
  that autograd holds; a copy would outlive the release and double the traffic.
* Small tensors, tensor subclasses and sparse tensors.
* Views whose elements overlap (`expand`), for which a copy would be larger.

A tensor that several operations save is copied once, unless it has changed in between (as far as
autograd knows: `x.data` changes unseen). With hooks autograd no longer notices that a saved tensor
is changed in place before backward, so that is checked here; a tensor whose copy is complete may
change.

On CUDA both directions use one side stream, so a tensor comes back after it has left. A source is
kept until its copy is done, or until the compute stream waits for it: at most `_MAX_LEAVING`
tensors. What comes back is allocated on the stream that uses it and written by the side stream,
which the allocator is told.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.record import streams
from lightning_zero.tensors.buffer import is_flat_buffer_view

__all__ = ["OffloadedActivations", "offload_activations"]

_MAX_LEAVING = 4  # copies under way whose sources are kept


def offload_activations(
    *, min_bytes: int = 2**20, num_prefetched: int = 2, pin_memory: bool = True
) -> OffloadedActivations:
    """A context: what operations inside save for backward waits for it in CPU memory.

    Around all of a forward or some blocks, with or without activation checkpointing, in every
    stage and also without an engine; values are bit-equal. It may be entered again and again. On a
    CPU accelerator it makes copies and saves nothing. Local.

    Args:
        min_bytes: Smaller tensors stay.
        num_prefetched: How many tensors are brought back ahead of their use.
        pin_memory: Copy to pinned memory, asynchronously, on CUDA.

    Returns:
        The context; its `nbytes` counts what was copied.

    Raises:
        ValueError: A negative number.
    """
    for name, value in (("min_bytes", min_bytes), ("num_prefetched", num_prefetched)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}.")
    return OffloadedActivations(min_bytes, num_prefetched, pin_memory)


class OffloadedActivations(saved_tensors_hooks):
    """See `offload_activations`.

    Attributes:
        nbytes: Copied to CPU memory so far.
    """

    def __init__(self, min_bytes: int, num_prefetched: int, pin_memory: bool) -> None:
        super().__init__(self._pack, self._unpack)
        self.nbytes = 0
        self._min_bytes = min_bytes
        self._num_prefetched = num_prefetched
        self._pins = pin_memory
        self._leaving: deque[weakref.ref[_Offloaded]] = deque()
        self._last: weakref.ref[_Offloaded] | None = None
        # By storage and view; an entry goes with its tensor's graph.
        self._known: weakref.WeakValueDictionary[Any, _Offloaded] = weakref.WeakValueDictionary()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int] | _Offloaded:
        if not self._is_worth_it(tensor):
            return tensor.detach(), tensor._version  # without its graph, of which this is a part
        storage = StorageWeakRef(tensor.untyped_storage())
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage.cdata, tensor._version, *view)
        known = self._known.get(key)
        if known is not None:
            known.num_uses += 1
            return known
        offloaded = _Offloaded(tensor, storage, previous=self._last, pins=self._pins)
        self.nbytes += tensor.nbytes
        self._known[key] = offloaded
        self._last = weakref.ref(offloaded)
        self._leaving.append(self._last)
        self._drop_sources()
        return offloaded

    def _drop_sources(self) -> None:
        while self._leaving:
            first = self._leaving[0]()
            if first is not None:
                if not first.has_arrived and len(self._leaving) <= _MAX_LEAVING:
                    return
                first.drop_source()
            self._leaving.popleft()

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        if isinstance(tensor._base, nn.Parameter) or is_flat_buffer_view(tensor):
            return False
        return tensor.nbytes >= max(self._min_bytes, 1) and not _overlaps(tensor)

    def _unpack(self, packed: tuple[Tensor, int] | _Offloaded) -> Tensor:
        if isinstance(packed, tuple):
            return _unchanged(*packed)
        tensor = packed.take()
        previous = packed.previous
        for _ in range(self._num_prefetched):
            ahead = previous() if previous is not None else None
            if ahead is None:
                break
            ahead.fetch()
            previous = ahead.previous
        return tensor


class _Offloaded:
    """A saved tensor in CPU memory."""

    def __init__(
        self,
        tensor: Tensor,
        storage: StorageWeakRef,
        *,
        previous: weakref.ref[_Offloaded] | None,
        pins: bool,
    ) -> None:
        self._source: Tensor | None = None
        self._left: streams.Event | None = None
        self.previous = previous  # the one that was saved before
        self.num_uses = 1  # operations that saved it
        # While this lives, no other storage has the same address: see `_known`.
        self._storage = storage
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._device = tensor.device
        self._stream = _side_stream(tensor.device)
        self._home = streams.current(tensor.device) if self._stream is not None else None
        self._source = tensor.detach()
        self._version = tensor._version
        self._is_changed = False
        self._here: Tensor | None = None  # back on the device, until the last use
        self._fetched: streams.Event | None = None
        self._num_taken = 0
        is_pinned = pins and self._stream is not None
        with torch.no_grad():
            # A view with gaps is stored without them.
            self._copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned
            )
            with self._beside():
                self._copy.copy_(self._source, non_blocking=is_pinned)
            self._left = self._stream.record_event() if self._stream is not None else None

    def __del__(self) -> None:
        self.drop_source()  # a graph may go before its last copies are made

    @property
    def has_arrived(self) -> bool:
        """The copy is complete."""
        return self._left is None or self._left.query()

    def drop_source(self) -> None:
        """Frees the tensor on the device, as far as this holds it."""
        if self._source is None:
            return
        # Changed while the copy was made of it, perhaps.
        self._is_changed = self._source._version != self._version
        if self._left is not None and self._home is not None:
            # Whatever takes its memory next, on the stream it came from, comes after the copy.
            self._home.wait_event(self._left)
        self._source = None

    def fetch(self) -> None:
        """Begins to bring the tensor back, unless it is there."""
        if self._here is not None or self._source is not None:
            return
        with torch.no_grad():
            tensor = torch.empty_strided(
                self._shape, self._stride, dtype=self._copy.dtype, device=self._device
            )
            with self._beside():
                tensor.copy_(self._copy, non_blocking=True)
            if self._stream is not None:
                tensor.record_stream(self._stream)
                self._fetched = self._stream.record_event()
        self._here = tensor

    def take(self) -> Tensor:
        """The tensor on its device, for the current stream; an error if it was changed in place."""
        if self._source is not None:
            return _unchanged(self._source, self._version)
        if self._is_changed:
            raise _changed(self._copy)
        self.fetch()
        tensor = self._here
        assert tensor is not None
        if self._fetched is not None:
            current = streams.current(self._device)
            current.wait_event(self._fetched)
            tensor.record_stream(current)
        self._num_taken += 1
        if self._num_taken == self.num_uses:
            self._here, self._num_taken = None, 0
        return tensor

    def _beside(self) -> AbstractContextManager[Any]:
        """On the side stream, after all that the current one has to do."""
        if self._stream is not None:
            self._stream.wait_stream(streams.current(self._device))
        return streams.on(self._stream)


def _overlaps(tensor: Tensor) -> bool:
    """Whether an element of memory may occur twice in the view."""
    end = 0  # of what the dims so far cover
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += (size - 1) * stride
    return False


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if tensor._version != version:
        raise _changed(tensor)
    return tensor


def _changed(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, saved inside "
        "offload_activations(), was changed before backward used it."
    )


@cache
def _side_stream(device: torch.device) -> streams.Stream | None:
    return streams.make_stream(device)
