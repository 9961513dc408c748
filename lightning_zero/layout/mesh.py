"""Which ranks share one set of shards, and which hold the same ones.

    world of 6 ranks, groups of 2             shard axis: the ranks of a group, consecutive
                                              replica axis: the ranks that hold the same shard
                 shard 0   shard 1
    replica 0    rank 0    rank 1
    replica 1    rank 2    rank 3
    replica 2    rank 4    rank 5

Every group holds all shards. Parameters are gathered within a group; gradients are
reduce-scattered within it, and their shards, 1/`num_shards` of the bytes, are averaged over
replicas. Where a group is a node, only these cross the slow links between nodes. Without groups the
world is one group, and everything is plain ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mesh"]


@dataclass(frozen=True)
class Mesh:
    """The place of one rank."""

    rank: int  # in the world
    world_size: int
    num_shards: int  # ranks of a group; each holds 1/num_shards

    @classmethod
    def of(cls, rank: int, world_size: int, group_size: int | None) -> Mesh:
        """The place of `rank` where groups have `group_size` ranks; None: all.

        Raises:
            ValueError: The groups would not be of equal size.
        """
        if group_size is not None and world_size % group_size:
            fitting = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
            raise ValueError(
                f"sharding_group_size must divide the number of ranks, got {group_size} with "
                f"{world_size} rank(s); use {' or '.join(fitting)}, or leave it out to shard over "
                "all ranks."
            )
        return cls(rank, world_size, group_size or world_size)

    @property
    def num_replicas(self) -> int:
        """Groups, each of which holds all shards."""
        return self.world_size // self.num_shards

    @property
    def shard_rank(self) -> int:
        """Which shard this rank holds."""
        return self.rank % self.num_shards

    @property
    def replica_rank(self) -> int:
        """Which group this rank is in."""
        return self.rank // self.num_shards

    def shard_groups(self) -> list[list[int]]:
        """Ranks along the shard axis, by replica."""
        return [
            list(range(first, first + self.num_shards))
            for first in range(0, self.world_size, self.num_shards)
        ]

    def replica_groups(self) -> list[list[int]]:
        """Ranks along the replica axis, by shard."""
        return [
            list(range(shard, self.world_size, self.num_shards)) for shard in range(self.num_shards)
        ]
