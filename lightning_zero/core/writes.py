"""Detects in-place writes to parameters and replaced `.data`.

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
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter

import torch
from torch import Tensor, nn

from lightning_zero.layout.flat import Slot
from lightning_zero.tensors.guarded import data_of
from lightning_zero.tensors.lazy import read_flat

__all__ = [
    "Fingerprint",
    "WriteDetector",
    "is_same_memory",
    "own_elements",
    "replaced",
    "require_full_shape",
]


_dtype_of, _version_of = attrgetter("dtype"), attrgetter("_version")


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
