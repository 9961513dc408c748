"""Shard groups and replica groups of a mesh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.layout.mesh import Mesh


@given(num_shards=st.integers(1, 9), num_replicas=st.integers(1, 9), data=st.data())
def test_every_rank_is_in_the_intersection_of_its_two_groups(num_shards, num_replicas, data):
    world_size = num_shards * num_replicas
    rank = data.draw(st.integers(0, world_size - 1))
    mesh = Mesh.of(rank, world_size, num_shards)
    assert mesh.num_replicas == num_replicas
    group, replicas = mesh.shard_groups()[mesh.replica_rank], mesh.replica_groups()[mesh.shard_rank]
    assert set(group) & set(replicas) == {rank}
    assert group == list(range(group[0], group[0] + num_shards))  # a node's ranks are consecutive
    assert group.index(rank) == mesh.shard_rank
    assert replicas.index(rank) == mesh.replica_rank
    for axis in (mesh.shard_groups(), mesh.replica_groups()):
        assert sorted(member for ranks in axis for member in ranks) == list(range(world_size))


def test_without_a_group_size_all_ranks_are_one_group():
    mesh = Mesh.of(2, 4, None)
    assert (mesh.num_shards, mesh.num_replicas, mesh.shard_rank, mesh.replica_rank) == (4, 1, 2, 0)


@pytest.mark.parametrize(("world_size", "group_size"), [(4, 3), (2, 4), (6, 4)])
def test_groups_that_do_not_divide_the_world_are_refused(world_size, group_size):
    fitting = {4: "1 or 2 or 4", 2: "1 or 2", 6: "1 or 2 or 3 or 6"}[world_size]
    with pytest.raises(ValueError, match=f"got {group_size} with {world_size} rank.*use {fitting}"):
        Mesh.of(0, world_size, group_size)
