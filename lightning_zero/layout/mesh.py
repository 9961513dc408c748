"""Device mesh of the ranks: shard groups and replica groups.

    world of 6 ranks, shard groups of 2       shard axis: consecutive ranks, one shard each
                                              replica axis: ranks that hold the same shard
                 shard 0   shard 1
    replica 0    rank 0    rank 1
    replica 1    rank 2    rank 3
    replica 2    rank 4    rank 5

Every shard group holds all shards. Parameters are all-gathered within a shard group. Gradients are
reduce-scattered within it; their shards, 1/`num_shards` of the bytes, are then averaged over a
replica group. If a shard group is a node, only gradient shards cross the slow links between nodes.
By default the world is one shard group: plain ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mesh"]


@dataclass(frozen=True)
class Mesh:
    """Position of one rank in the mesh."""

    rank: int  # in the world
    world_size: int
    num_shards: int  # ranks of a shard group; each holds 1/num_shards

    @classmethod
    def of(cls, rank: int, world_size: int, group_size: int | None) -> Mesh:
        """Position of `rank` in shard groups of `group_size` ranks; None: all ranks.

        Raises:
            ValueError: The shard groups would not be of equal size.
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
        """Number of shard groups, each of which holds all shards."""
        return self.world_size // self.num_shards

    @property
    def shard_rank(self) -> int:
        """Index of the shard that this rank holds."""
        return self.rank % self.num_shards

    @property
    def replica_rank(self) -> int:
        """Index of the shard group of this rank."""
        return self.rank // self.num_shards

    def shard_groups(self) -> list[list[int]]:
        """Ranks of each shard group."""
        return [
            list(range(first, first + self.num_shards))
            for first in range(0, self.world_size, self.num_shards)
        ]

    def replica_groups(self) -> list[list[int]]:
        """Ranks of each replica group."""
        return [
            list(range(shard, self.world_size, self.num_shards)) for shard in range(self.num_shards)
        ]
