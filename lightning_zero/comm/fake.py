"""One process as a rank of a group whose other ranks do not exist, for counts of memory.

torch's fake process group moves no data. `FakeCommunicator` issues the collectives of a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.backends import Backend, DeviceBackend, GlooBackend
from lightning_zero.comm.communicator import Communicator
from lightning_zero.health.world import has_world

__all__ = ["FakeCommunicator", "FakeDeviceCommunicator", "fake_world", "skip_collective"]


_WITHOUT_TENSORS = ("send", "recv_", "barrier", "alltoall_base_")  # they return their work alone


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Context in which WORLD is a fake process group with this process as `rank` of `size`.

    Raises:
        RuntimeError: There is a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if has_world():
        raise RuntimeError("a process group exists; a fake one needs a process of its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeCommunicator(Communicator):
    """Issues the collectives of gloo on a fake process group."""

    def _make_backend(self, group: Any, rank: int, size: int, gather_group: Any = None) -> Backend:
        return GlooBackend(group, rank, size)


class FakeDeviceCommunicator(Communicator):
    """Issues the collectives of a device on a fake process group; tensors are on the CPU."""

    def _make_backend(self, group: Any, rank: int, size: int, gather_group: Any = None) -> Backend:
        return DeviceBackend(gather_group, group, rank, size, self.device, self.recorder)


def skip_collective(name: str, args: tuple[Any, ...]) -> Any:
    """Result of the operator `name` of c10d, which is not run: its first argument, and no work."""
    work = torch._C._distributed_c10d.FakeWork().boxed()
    return work if name in _WITHOUT_TENSORS else (args[0], work)
