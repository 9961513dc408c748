"""`MemoryReport`: bytes of a rank by state and tier, and those of plain data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero.layout.stage import State

__all__ = ["MemoryReport"]


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank at one moment.

    Attributes:
        rank: Rank of this report.
        world_size: Number of shards.
        tiers: Bytes by tier ("device", "cpu", "nvme"), then by state. Main parameters that are
            separate tensors, and averages of weights, count as optimizer state.
        data_parallel: Bytes by state that DistributedDataParallel would need on every rank for the
            same model and optimizer: parameters, gradients and moments in the original dtypes of
            the parameters, without main parameters.
        buffer_bytes: Bytes of the CPU buffers for transfers from and to NVMe.
        nvme_read_bytes: Bytes read from NVMe since the engine was made.
        nvme_written_bytes: Bytes written to NVMe since then, which wear the disk.
        average_bytes: Bytes of averages of weights, included in the optimizer state of `tiers`.
    """

    rank: int
    world_size: int
    tiers: Mapping[str, Mapping[State, int]]
    data_parallel: Mapping[State, int]
    buffer_bytes: int = 0
    nvme_read_bytes: int = 0
    nvme_written_bytes: int = 0
    average_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all states in all tiers."""
        return sum(sum(states.values()) for states in self.tiers.values())

    @property
    def data_parallel_bytes(self) -> int:
        """Bytes of all states under plain data parallelism."""
        return sum(self.data_parallel.values())

    def state_bytes(self, state: State) -> int:
        """Bytes of one state in all tiers."""
        return sum(states.get(state, 0) for states in self.tiers.values())
