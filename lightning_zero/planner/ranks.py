"""Bytes at rest of one rank, and of all.

[Note: Ranks that differ] Where an optimizer looks at whole tensors, shards are as long as the
tensors that their ranks own. Counts are then of one rank, and `Ranks` has those of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State

__all__ = ["Ranks", "Resting"]


@dataclass(frozen=True)
class Resting:
    """Bytes of one rank.

    Attributes:
        tiers: By tier and state, as `MemoryReport.tiers`.
        pool_bytes: CPU memory of the buffers through which files travel.
        module_buffer_bytes: Of the module's buffers, which every rank has whole on the device.
        average_bytes: Of averages of weights, among the optimizer state.
    """

    tiers: Mapping[Tier, Mapping[State, int]]
    pool_bytes: int
    module_buffer_bytes: int
    average_bytes: int = 0

    def tier_bytes(self, tier: Tier) -> int:
        """Of all states in `tier`."""
        return sum(self.tiers.get(tier, {}).values())


@dataclass(frozen=True)
class Ranks:
    """What rests on every rank that holds another shard.

    Attributes:
        resting: By rank; rank 0 alone where all have as many elements, some of them padding on the
            last ranks. See [Note: Ranks that differ].
    """

    resting: tuple[Resting, ...]

    @property
    def largest(self) -> int:
        """The rank with most on its device, and among equals the one with most in all."""

        def size(rank: int) -> tuple[int, int]:
            own = self.resting[rank]
            return own.tier_bytes(Tier.DEVICE), sum(map(own.tier_bytes, Tier))

        return max(range(len(self.resting)), key=size)

    def span(self, tier: Tier) -> tuple[int, int]:
        """Bytes in `tier` of the ranks with least and most."""
        sums = [resting.tier_bytes(tier) for resting in self.resting]
        return min(sums), max(sums)

    def machine_bytes(self, tier: Tier, ranks_per_node: int) -> int:
        """Bytes in `tier` of the ranks of one machine, of the one with most."""
        count = len(self.resting)
        sums = [resting.tier_bytes(tier) for resting in self.resting]
        firsts = {first % count for first in range(0, count * ranks_per_node, ranks_per_node)}
        return max(sum(sums[(f + i) % count] for i in range(ranks_per_node)) for f in firsts)
