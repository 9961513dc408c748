"""Collectives on WORLD, the process group that Lightning makes and the engine never uses.

They are for code that runs before there is an engine with groups of its own, and for methods that
Lightning requires of a strategy. Without a process group the world is this process alone. WORLD's
timeout limits their waits.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.health.watchdog import Watchdog
from lightning_zero.health.world import has_world, is_nccl

__all__ = [
    "broadcast_object",
    "close_group",
    "gather_objects",
    "new_group",
    "split_world",
    "wait_for_world",
]

_T = TypeVar("_T")


def wait_for_world(device: torch.device) -> None:
    """Waits until every rank has called this; `device` is where this rank computes. Collective."""
    if has_world():
        on_nccl = is_nccl(dist.get_backend())
        dist.barrier(device_ids=[device.index] if on_nccl else None)


def new_group(watchdog: Watchdog, timeout: timedelta | None, backend: str | None = None) -> Any:
    """Returns a new group of all ranks; None without a process group. Collective.

    `backend`: None: that of WORLD.
    """
    if not has_world():
        return None
    make = partial(dist.new_group, timeout=timeout, backend=backend)
    return watchdog.run("a process group", make, timeout)


def split_world(
    watchdog: Watchdog,
    groups: list[list[int]],
    timeout: timedelta | None,
    parent: Any = None,
) -> Any:
    """Returns this rank's new group of `groups`, each rank being in one of them. Collective.

    NCCL splits `parent`, a group of all ranks, once; None: WORLD. The other backends make the
    groups one by one.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id  # None: torch refuses to split
    can_split = device is not None and world._get_backend(device).supports_splitting
    if can_split and is_nccl(dist.get_backend()):
        parent = world if parent is None else parent
        make = partial(dist.split_group, parent, groups, timeout=timeout)
        return watchdog.run("a process group", make, timeout)
    enumerate_groups = partial(dist.new_subgroups_by_enumeration, groups, timeout=timeout)
    own, _ = watchdog.run("process groups", enumerate_groups, timeout)
    return own


def close_group(group: Any) -> None:
    """Ends a group of `split_world`, unless all groups have ended already. Local."""
    if has_world():
        with suppress(ValueError):  # torch knows it no longer: WORLD has ended since
            dist.destroy_process_group(group)


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
