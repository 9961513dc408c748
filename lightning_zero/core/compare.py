"""Whether two parameters that rest as shards have equal values.

`torch.equal` of parameters is how Lightning's fine-tuning callbacks find out what an optimizer has
already. Most pairs differ in shape or in their sums of bits, so that nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tensors.lazy import StoredTensor

__all__ = ["equal"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal(one: Tensor, other: Tensor, comm: Communicator) -> bool:
    """`torch.equal`, in full precision. Collective: every rank, with the same pair.

    Args:
        one: A parameter that an engine holds.
        other: Another, of the same shape, or any whole tensor.
        comm: The engine's.
    """
    if has_placement(other):
        difference = _sum_of_bits(one) - _sum_of_bits(other)
        if int(comm.sum_over_shards_(difference)) != 0:
            return False
    whole = [_whole(tensor) for tensor in (one, other)]
    return torch.equal(whole[0], whole[1].to(whole[0].device, whole[0].dtype))


def _sum_of_bits(parameter: Tensor) -> Tensor:
    """Of this rank's elements, where there is one owner of each: the same sums for equal values."""
    placement = placement_of(parameter)
    bucket: Any = placement.bucket
    part = bucket.masters.exact_parts()[placement.index]
    values = part.read() if isinstance(part, StoredTensor) else part.detach()
    words = (values + 0).view(_WORDS[values.element_size()])  # + 0: there are two zeros
    return words.sum(dtype=torch.int64).reshape(1).to(bucket.device)


def _whole(tensor: Tensor) -> Tensor:
    if not has_placement(tensor):
        return tensor.detach()
    placement = placement_of(tensor)
    views: list[Tensor] = placement.bucket.masters.exact_views()
    return views[placement.index].clone()
