"""What somebody has written to a parameter, or put in the place of its data; and equality.

[Note: Two ways to see a write]

    WriteDetector     version counters and addresses: no look at values, nothing to do on a device.
                  Of parameters that are whole for a use only (stage 3), where it is asked of every
                  parameter in every pass. A write to `parameter.data` has no version: where that
                  was handed out, and only there, fingerprints are compared.
    Fingerprint   sums over bits: sees every write. Of what rests whole between steps while its
                  master is elsewhere (stages 1 and 2), and of what `gathered` shows.

Where either has seen one, values that are still the rounded master stay what the master is.

`torch.equal` of parameters is how Lightning's fine-tuning callbacks find out what an optimizer has
already. Most pairs differ in shape or in their sums of bits, so that nothing is gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

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

    Equal sums of changed values would need changes that cancel in every row and every column.
    """

    def __init__(self, tensor: Tensor) -> None:  # 1-D, on any device; the sums stay there
        self._sums = _sums(tensor)

    def matches(self, tensor: Tensor) -> bool:
        """Whether `tensor` still has those bits. Waits for its device, once."""
        return torch.equal(self._sums, _sums(tensor))

    def digest(self) -> bytes:
        """The same for the same bits at the same place of a buffer, on any device and rank.

        Waits for its device.
        """
        return hashlib.sha256(self._sums.cpu().numpy().data).digest()


def _sums(tensor: Tensor) -> Tensor:
    """Of words of 64 bits, which are summed without a wider copy, and the octets beside them.

    A few kernels, whatever the size. 1-D, int64, some 24 bytes for the root of the number of words.
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
    beside = torch.cat([octets[:start], octets[stop:]])
    return torch.cat([words.sum(dim=0), words.sum(dim=1), beside.to(torch.int64)])


def sum_of_bits(values: Tensor) -> Tensor:
    """Of `values`, 1-D, as integers of their size: 0-dim, int64."""
    return values.view(_WORDS[values.element_size()]).sum(dtype=torch.int64)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both show the same elements of the same memory in the same way.

    In a few calls: this is asked of every parameter in every pass.
    """
    if one.dtype is not other.dtype or one.is_meta:
        return False
    return one.is_set_to(other)


def own_elements(values: Tensor, slot: Slot, owned: range) -> Tensor:
    """This rank's elements of what was put in the place of a parameter's data: 1-D.

    It must have the shape of the whole or that of this rank's part.
    """
    if tuple(values.shape) == slot.shape:
        return read_flat(values, owned.start, owned.stop)
    if values.dim() == 1 and values.numel() == len(owned):
        return values
    raise ValueError(
        f"the data set on parameter {slot.name} has shape {tuple(values.shape)}; expected the "
        f"whole shape {slot.shape}, or this rank's {len(owned)} elements, which `.data` is between "
        "steps."
    )


def require_full_shape(values: Tensor, slot: Slot) -> Tensor:
    """What was put in the place of a whole parameter's data, if it is of the same shape."""
    if tuple(values.shape) != slot.shape:
        raise ValueError(
            f"the data set on parameter {slot.name} has shape {tuple(values.shape)}; expected "
            f"{slot.shape}: a parameter that an engine holds keeps its shape."
        )
    return values


class WriteDetector:
    """Finds out which whole parameters of a bucket have new values."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []  # by slot, since `watch`: a write counts them up
        self._prints: dict[int, Fingerprint] = {}  # by slot whose `.data` was handed out

    def watch(self) -> None:
        """From now on, what is written to the parameters in place is found too."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._prints = {}

    def hand_out(self, index: int) -> None:
        """The `.data` of a slot is about to be handed out; what is written to it has no version."""
        if self._versions and index not in self._prints:
            self._prints[index] = Fingerprint(data_of(self._parameters[index]).reshape(-1))

    def replaced(self, views: Sequence[Tensor]) -> list[int]:
        """Slots that show other memory than `views`."""
        pairs = zip(self._parameters, views, strict=True)
        if all(map(is_same_memory, self._parameters, views)):
            return []
        return [index for index, pair in enumerate(pairs) if not is_same_memory(*pair)]

    def written(self) -> list[int]:
        """Slots to which was written in place since the last look."""
        found = []
        if self._versions:
            versions = [parameter._version for parameter in self._parameters]
            if versions != self._versions:
                pairs = enumerate(zip(self._versions, versions, strict=True))
                found = [index for index, (old, new) in pairs if old != new]
                self._versions = versions
        for index, seen in self._prints.items():
            flat = data_of(self._parameters[index]).reshape(-1)
            if not seen.matches(flat):
                self._prints[index] = Fingerprint(flat)
                found.append(index)
        return found


def equal(one: Tensor, other: Tensor, comm: Communicator) -> bool:
    """`torch.equal`, in full precision. Collective: every rank, with the same pair.

    `one` is a parameter that an engine holds, `other` another, or any whole tensor of its shape.
    """
    if has_placement(other):
        difference = _own_bits(one) - _own_bits(other)
        if int(comm.sum_over_shards_(difference)) != 0:
            return False
    whole = [_whole(tensor) for tensor in (one, other)]
    return torch.equal(whole[0], whole[1].to(whole[0].device, whole[0].dtype))


def _own_bits(parameter: Tensor) -> Tensor:
    """Of this rank's elements, where there is one owner of each: the same sums for equal values."""
    placement = placement_of(parameter)
    bucket: Any = placement.bucket
    part = bucket.masters.shard_views()[placement.index]
    values = part.read() if isinstance(part, LazyTensor) else part.detach()
    return sum_of_bits(values + 0).reshape(1).to(bucket.device)  # + 0: there are two zeros


def _whole(tensor: Tensor) -> Tensor:
    if not has_placement(tensor):
        return tensor.detach()
    placement = placement_of(tensor)
    bucket: Any = placement.bucket
    views: list[Tensor] = bucket.masters.full_tensors()
    return views[placement.index].clone()
