"""Detects in-place writes to parameters and replaced `.data`; compares parameters for equality.

[Note: Two ways to detect a write]

    WriteDetector   Compares version counters and addresses; reads no values, does no work on a
                    device. For parameters that are unsharded only for a use (stage 3), where every
                    parameter is checked in every pass. A write to `parameter.data` has no version:
                    fingerprints are compared, but only for slots whose `.data` was read.
    Fingerprint     Compares sums over bits; detects every write. For replicated parameters whose
                    master is offloaded (stages 1 and 2), and for parameters in `gathered`.

Where a write is detected, values that are still the rounded master leave the master as it is.

Lightning's fine-tuning callbacks use `torch.equal` of parameters to find out which ones an
optimizer already has. Most pairs differ in shape or in their sums of bits, so that nothing is
all-gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.layout.flat import Slot
from lightning_zero.tensors.guarded import data_of, has_placement, placement_of
from lightning_zero.tensors.lazy import LazyTensor, read_flat

__all__ = [
    "Fingerprint",
    "WriteDetector",
    "equal",
    "is_same_memory",
    "own_elements",
    "sum_of_bits",
    "require_full_shape",
]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def sum_of_bits(values: Tensor) -> Tensor:
    """Sum of `values`, 1-D, read as integers of the same size: 0-dim, int64."""
    return values.view(_WORDS[values.element_size()]).sum(dtype=torch.int64)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are the same view of the same memory.

    Called for every parameter in every pass, so it must be cheap.
    """
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
    """Detects which unsharded parameters of a bucket have new values."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []  # by slot, at `watch`; a write increments them
        self._fingerprints: dict[int, Fingerprint] = {}  # by slot whose `.data` was read

    def watch(self) -> None:
        """Starts to detect in-place writes."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._fingerprints = {}

    def before_data_read(self, index: int) -> None:
        """Before `.data` of a slot is returned to the user: writes to it will have no version."""
        if self._versions and index not in self._fingerprints:
            self._fingerprints[index] = Fingerprint(data_of(self._parameters[index]).reshape(-1))

    def replaced(self, views: Sequence[Tensor]) -> list[int]:
        """Slots whose parameters do not point at `views`."""
        pairs = zip(self._parameters, views, strict=True)
        if all(map(is_same_memory, self._parameters, views)):
            return []
        return [index for index, pair in enumerate(pairs) if not is_same_memory(*pair)]

    def written(self) -> list[int]:
        """Slots that were written in place since the last call."""
        found = []
        if self._versions:
            versions = [parameter._version for parameter in self._parameters]
            if versions != self._versions:
                pairs = enumerate(zip(self._versions, versions, strict=True))
                found = [index for index, (old, new) in pairs if old != new]
                self._versions = versions
        for index, seen in self._fingerprints.items():
            flat = data_of(self._parameters[index]).reshape(-1)
            if not seen.matches(flat):
                self._fingerprints[index] = Fingerprint(flat)
                found.append(index)
        return found


def equal(one: Tensor, other: Tensor, comm: Communicator) -> bool:
    """`torch.equal` in full precision. Collective: every rank, with the same pair.

    `one` is a parameter that an engine holds; `other` is another one, or any full tensor of its
    shape.
    """
    if has_placement(other):
        difference = _own_bits(one) - _own_bits(other)
        if int(comm.sum_over_shards_(difference)) != 0:
            return False
    full = [_full_tensor(tensor) for tensor in (one, other)]
    return torch.equal(full[0], full[1].to(full[0].device, full[0].dtype))


def _own_bits(parameter: Tensor) -> Tensor:
    """Sum of bits of the elements that only this rank owns: equal for equal values."""
    placement = placement_of(parameter)
    bucket: Any = cast(Any, placement.holder).bucket
    part = bucket.masters.shard_views()[placement.index]
    values = part.read() if isinstance(part, LazyTensor) else part.detach()
    return sum_of_bits(values + 0).reshape(1).to(bucket.device)  # + 0: -0.0 equals 0.0


def _full_tensor(tensor: Tensor) -> Tensor:
    if not has_placement(tensor):
        return tensor.detach()
    placement = placement_of(tensor)
    bucket: Any = cast(Any, placement.holder).bucket
    views: list[Tensor] = bucket.masters.full_tensors()
    return views[placement.index].clone()
