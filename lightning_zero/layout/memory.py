"""Bytes per rank, by state and tier, beside what plain data parallel needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero.layout.stage import State

__all__ = ["MemoryReport"]


@dataclass(frozen=True)
class MemoryReport:
    """What one rank holds at one moment.

    Attributes:
        rank: The rank that counted.
        world_size: Number of shards.
        tiers: Bytes by tier ("device", "cpu", "nvme"), then by state. Masters that are tensors of
            their own count as optimizer state, and so do averages of weights.
        data_parallel: Bytes by state that DistributedDataParallel would take on every rank for the
            same model and optimizer: parameters, gradients and moments in the dtypes in which the
            parameters were given, without masters.
        buffer_bytes: CPU memory of the buffers through which shards in files travel.
        nvme_read_bytes: Read from NVMe since the engine was made.
        nvme_written_bytes: Written to NVMe since then: what wears a disk.
        average_bytes: Of averages of weights, among the optimizer state in `tiers`.
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
        """Bytes of all states under plain data parallel."""
        return sum(self.data_parallel.values())

    def state_bytes(self, state: State) -> int:
        """Bytes of one state in all tiers."""
        return sum(states.get(state, 0) for states in self.tiers.values())
