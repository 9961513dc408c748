"""Collectives on WORLD, the process group that Lightning makes and the engine never uses.

They are for code that runs before there is an engine with groups of its own, and for methods that
Lightning requires of a strategy. Without a process group the world is this process alone. WORLD's
timeout limits their waits.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.health.world import has_world

__all__ = ["broadcast_object", "gather_objects", "wait_for_world"]

_T = TypeVar("_T")


def wait_for_world(device: torch.device) -> None:
    """Waits until every rank has called this; `device` is where this rank computes. Collective."""
    if has_world():
        on_nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[device.index] if on_nccl else None)


def broadcast_object(value: _T, source: int = 0) -> _T:
    """Returns the picklable object of rank `source`, on every rank. Collective: every rank."""
    if not has_world():
        return value
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Returns every rank's picklable object, by rank, on every rank. Collective: every rank."""
    if not has_world():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box
