"""Sharded tensors that users hold when an engine closes become full ones.

See [Note: Tensors that outlive their engine] in tensors/live.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.tensors.live import Key, LiveTensors
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = ["lose_held", "unshard_held"]


def unshard_held(live: LiveTensors, comm: Communicator, device: torch.device) -> None:
    """Makes the tensors that all ranks hold plain full ones on `device`. Collective: every rank.

    Tensors that share memory share it afterwards, too. The others cannot be used any more: those
    that some rank does not hold, and all if they would take more than half of the CPU memory.
    """
    held = _held(live)
    own: dict[Key, Tensor] = {}
    reason = "an error interrupted the end of the engine"
    try:
        for key, tensor in held.items():
            with suppress(RuntimeError, OSError):  # a view of a state whose file is deleted
                own[key] = tensor.local
        first: dict[int, Key] = {}  # tensor with each shard; which share one must be agreed, too
        for key in sorted(own):
            first.setdefault(id(held[key].shard), key)
        known = [(key, live.history(key[0]), first[id(held[key].shard)]) for key in own]
        by_rank = comm.control.gather_objects(known)
        common = sorted(key for key, *_ in set(by_rank[0]).intersection(*by_rank[1:]))
        shards = {id(held[key].shard): held[key] for key in common}
        if _fit_in_memory(list(shards.values()), comm, device):
            _swap_for_full(held, own, common, device)
            reason = "some rank does not hold it, or has created other tensors of this parameter"
        else:
            reason = "the full tensors take more than half of the free CPU memory"
    finally:
        _lose({key: tensor for key, tensor in held.items() if key in own}, reason)
        _lose({k: t for k, t in held.items() if k not in own}, "its values were not kept")


def _swap_for_full(
    held: dict[Key, ShardedTensor],
    own: dict[Key, Tensor],
    common: Sequence[Key],
    device: torch.device,
) -> None:
    """Makes the `common` tensors plain full ones, and removes them from `held`. Collective.

    `own`: this rank's elements.
    """
    full: dict[int, Tensor] = {}  # by shard
    for key in reversed(common):  # views first: they refer to their base, which is older
        tensor = held[key]
        shard = id(tensor.shard)
        if shard not in full:
            gathered = tensor.spec.all_gather(own[key], tensor.call_of("full_tensor"))
            full[shard] = gathered.to(device, copy=True)
        del held[key]
        _swap(tensor, full[shard].view(tensor.shape))


def lose_held(live: LiveTensors, reason: str) -> None:
    """Makes all tensors unusable. Local.

    `reason`: as for `EndedShard`.
    """
    _lose(_held(live), reason)


def _held(live: LiveTensors) -> dict[Key, ShardedTensor]:
    return cast("dict[Key, ShardedTensor]", live.end())


def _lose(held: dict[Key, ShardedTensor], reason: str) -> None:
    for tensor in held.values():
        tensor.end(reason)


def _swap(tensor: ShardedTensor, full: Tensor) -> None:
    """Makes `tensor` the plain tensor `full`, which nothing else refers to."""
    full.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        full = nn.Parameter(full, tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, full)
    except RuntimeError:
        tensor.end("torch, or a weak reference, refers to it as well")


def _fit_in_memory(tensors: list[ShardedTensor], comm: Communicator, device: torch.device) -> bool:
    """Whether the full tensors fill at most half of the free CPU memory of a node. Collective."""
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
    if device.type != "cpu" or not nbytes:
        return True  # equal on all ranks
    budget = available_memory_bytes() // (2 * local_world_size())
    return bool(comm.control.min_ints([budget - nbytes])[0] >= 0)
