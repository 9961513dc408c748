"""Activation offload: saved tensors are in CPU memory between forward and backward.

[Note: Offloaded activations] Autograd passes each tensor that an operation saves for its backward
to a hook. The hook copies large tensors to CPU memory and frees them on the device. Backward
unpacks tensors in about the reverse order, so that the tensors saved before one are prefetched with
it. Not offloaded are:

* Views of unsharded parameters. The engine reshards and unshards these in place, under the views
  that autograd holds; a copy would outlive the reshard and double the traffic.
* Small tensors, tensor subclasses and sparse tensors.
* Views whose elements overlap (`expand`), for which a copy would be larger.

A tensor that several operations save is copied once, unless it has changed in between (as far as
autograd knows: changes of `x.data` are not seen). With hooks autograd no longer detects that a
saved tensor is changed in place before backward, so that this module checks it. A tensor whose copy
is complete may change.

On CUDA both directions use one side stream, so that a copy to the device follows the copy to the
CPU. A source is kept until its copy is done, or until the compute stream waits for it: at most
`_MAX_OFFLOADING` tensors. A prefetched tensor is allocated on the stream that uses it and written
by the side stream, which `record_stream` reports to the allocator.
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

_MAX_OFFLOADING = 4  # copies in flight whose sources are kept


def offload_activations(
    *, min_bytes: int = 2**20, num_prefetched: int = 2, pin_memory: bool = True
) -> OffloadedActivations:
    """Context in which tensors saved for backward are offloaded to CPU memory.

    Use it around a forward or some blocks, with or without activation checkpointing, in every stage
    and also without an engine. Values are bit-equal. The context can be entered repeatedly. On a
    CPU accelerator it makes copies and saves no memory. Local.

    Args:
        min_bytes: Minimum size in bytes of a tensor that is offloaded.
        num_prefetched: Number of tensors that are copied back before their use.
        pin_memory: Use pinned memory and asynchronous copies on CUDA.

    Returns:
        The context. Its `nbytes` is the number of bytes copied to CPU memory.

    Raises:
        ValueError: An argument is negative.
    """
    for name, value in (("min_bytes", min_bytes), ("num_prefetched", num_prefetched)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}.")
    return OffloadedActivations(min_bytes, num_prefetched, pin_memory)


class OffloadedActivations(saved_tensors_hooks):
    """Hooks of `offload_activations`.

    Attributes:
        nbytes: Bytes copied to CPU memory so far.
    """

    def __init__(self, min_bytes: int, num_prefetched: int, pin_memory: bool) -> None:
        super().__init__(self._pack, self._unpack)
        self.nbytes = 0
        self._min_bytes = min_bytes
        self._num_prefetched = num_prefetched
        self._pin_memory = pin_memory
        self._offloading: deque[weakref.ref[_Offloaded]] = deque()
        self._last: weakref.ref[_Offloaded] | None = None
        # By storage and view. An entry lives as long as its tensor's graph.
        self._known: weakref.WeakValueDictionary[Any, _Offloaded] = weakref.WeakValueDictionary()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int] | _Offloaded:
        if not self._should_offload(tensor):
            # The graph must not refer to itself; `tensor.detach()` of a parameter is a read.
            return Tensor.detach(tensor), tensor._version
        storage = StorageWeakRef(tensor.untyped_storage())
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage.cdata, tensor._version, *view)
        known = self._known.get(key)
        if known is not None:
            return known.use_again()
        offloaded = _Offloaded(tensor, storage, previous=self._last, pin_memory=self._pin_memory)
        self.nbytes += tensor.nbytes
        self._known[key] = offloaded
        self._last = weakref.ref(offloaded)
        self._offloading.append(self._last)
        self._drop_sources()
        return offloaded

    def _drop_sources(self) -> None:
        while self._offloading:
            first = self._offloading[0]()
            if first is not None:
                if not first.is_copied and len(self._offloading) <= _MAX_OFFLOADING:
                    return
                first.drop_source()
            self._offloading.popleft()

    def _should_offload(self, tensor: Tensor) -> bool:
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
    """A saved tensor that is offloaded to CPU memory."""

    def __init__(
        self,
        tensor: Tensor,
        storage: StorageWeakRef,
        *,
        previous: weakref.ref[_Offloaded] | None,
        pin_memory: bool,
    ) -> None:
        self._source: Tensor | None = None
        self._copy_done: streams.Event | None = None
        self.previous = previous  # tensor that was saved before this one
        self._num_uses = 1  # operations that saved it
        # As long as this reference lives, no other storage has the same address: see `_known`.
        self._storage = storage
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._device = tensor.device
        self._stream = _side_stream(tensor.device)
        self._source_stream = streams.current(tensor.device) if self._stream is not None else None
        self._source = tensor.detach()
        self._version = tensor._version
        self._is_changed = False
        self._fetched: Tensor | None = None  # on the device, until the last use
        self._fetch_done: streams.Event | None = None
        self._num_taken = 0
        is_pinned = pin_memory and self._stream is not None
        with torch.no_grad():
            # A view with gaps is stored without them.
            self._copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned
            )
            with self._on_side_stream():
                self._copy.copy_(self._source, non_blocking=is_pinned)
            self._copy_done = self._stream.record_event() if self._stream is not None else None

    def __del__(self) -> None:
        self.drop_source()  # a graph may be freed before its last copies are made

    def use_again(self) -> _Offloaded:
        """Counts another operation that saved the tensor."""
        self._num_uses += 1
        return self

    @property
    def is_copied(self) -> bool:
        """Whether the copy to CPU memory is complete."""
        return self._copy_done is None or self._copy_done.query()

    def drop_source(self) -> None:
        """Drops this object's reference to the tensor on the device."""
        if self._source is None:
            return
        # It may have changed while it was copied.
        self._is_changed = self._source._version != self._version
        if self._copy_done is not None and self._source_stream is not None:
            # The next use of its memory, on the same stream, must follow the copy.
            self._source_stream.wait_event(self._copy_done)
        self._source = None

    def fetch(self) -> None:
        """Starts to copy the tensor back to the device, unless it is there."""
        if self._fetched is not None or self._source is not None:
            return
        with torch.no_grad():
            tensor = torch.empty_strided(
                self._shape, self._stride, dtype=self._copy.dtype, device=self._device
            )
            with self._on_side_stream():
                tensor.copy_(self._copy, non_blocking=True)
            if self._stream is not None:
                tensor.record_stream(self._stream)
                self._fetch_done = self._stream.record_event()
        self._fetched = tensor

    def take(self) -> Tensor:
        """Returns the tensor on its device, for use on the current stream.

        Raises:
            RuntimeError: The tensor was changed in place.
        """
        if self._source is not None:
            return _unchanged(self._source, self._version)
        if self._is_changed:
            raise _changed(self._copy)
        self.fetch()
        tensor = self._fetched
        assert tensor is not None
        if self._fetch_done is not None:
            current = streams.current(self._device)
            current.wait_event(self._fetch_done)
            tensor.record_stream(current)
        self._num_taken += 1
        if self._num_taken == self._num_uses:
            self._fetched, self._num_taken = None, 0
        return tensor

    def _on_side_stream(self) -> AbstractContextManager[Any]:
        """Context on the side stream, after all work queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(streams.current(self._device))
        return streams.on(self._stream)


def _overlaps(tensor: Tensor) -> bool:
    """Whether an element of memory may occur twice in the view."""
    end = 0  # offset after the elements that the dims so far cover
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
