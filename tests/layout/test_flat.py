"""Every element of every parameter is owned by exactly one rank."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.layout.flat import ALIGN_NUMEL, FlatLayout, OwnedLayout, assign_owners
from lightning_zero.tensors.buffer import FlatBuffer

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
WORLDS = st.integers(1, 9)


def lay_out(shapes, world_size):
    return FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size)


@given(SHAPES, WORLDS)
def test_each_rank_owns_an_equal_part_and_each_element_has_one_owner(shapes, world_size):
    layout = lay_out(shapes, world_size)
    assert layout.numel == world_size * layout.shard_numel
    for slot in layout.slots:
        owned = [i for rank in range(world_size) for i in layout.owned(slot, rank)]
        assert owned == list(range(slot.numel))


@given(SHAPES, WORLDS)
def test_slots_are_aligned_and_do_not_overlap(shapes, world_size):
    layout = lay_out(shapes, world_size)
    stop = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.numel == math.prod(shape)
        assert slot.start % ALIGN_NUMEL == 0
        assert slot.start >= stop
        stop = slot.stop
    assert layout.shard_numel % ALIGN_NUMEL == 0


@given(SHAPES, WORLDS, st.sampled_from([1, 3, 64]))
def test_slices_begin_with_a_block_and_have_their_part_of_its_numbers(shapes, world_size, numel):
    named = [(f"p{i}", shape) for i, shape in enumerate(shapes)]
    layout = FlatLayout.of(named, world_size, block_numel=numel)
    in_blocks = layout.in_blocks(numel)
    for slot, blocks in zip(layout.slots, in_blocks.slots, strict=True):
        assert blocks.shape == (math.ceil(slot.numel / numel),)
        for rank in range(world_size):
            owned, own_blocks = layout.owned(slot, rank), in_blocks.owned(blocks, rank)
            assert list(own_blocks) == sorted({element // numel for element in owned})
            assert not owned or owned.start % numel == 0


@given(SHAPES, WORLDS)
def test_gaps_and_slots_together_are_the_flat_space(shapes, world_size):
    layout = lay_out(shapes, world_size)
    gaps = sum(len(gap) for gap in layout.gaps)
    assert gaps + sum(slot.numel for slot in layout.slots) == layout.numel


def slices_of_shards(unsharded, world_size):
    """By rank, the slice of each parameter in its shard."""
    ranks = range(world_size)
    return [unsharded.layout.of_rank(rank).split(unsharded.shard(rank)) for rank in ranks]


@given(SHAPES, WORLDS)
def test_slices_of_all_shards_joined_are_the_parameters(shapes, world_size):
    layout = lay_out(shapes, world_size)
    unsharded = FlatBuffer(layout, torch.float32, torch.device("cpu"))
    for index, view in enumerate(unsharded.views):
        view.copy_(torch.arange(view.numel()).reshape(view.shape) + 1000 * index)
    parts = slices_of_shards(unsharded, world_size)
    for index, view in enumerate(unsharded.views):
        joined = torch.cat([part[index] for part in parts])
        assert torch.equal(joined, view.reshape(-1))


@given(SHAPES, WORLDS)
def test_memory_comes_back_with_zero_padding(shapes, world_size):
    buffer = FlatBuffer(lay_out(shapes, world_size), torch.float32, torch.device("cpu"))
    buffer.free()
    assert buffer.allocated_bytes == 0
    buffer.allocate()
    for view in buffer.views:
        view.fill_(1)
    assert buffer.tensor.sum() == sum(slot.numel for slot in buffer.layout.slots)


def lay_out_owned(shapes, world_size):
    owners = assign_owners([math.prod(shape) for shape in shapes], world_size)
    named = [(f"p{i}", shape) for i, shape in enumerate(shapes)]
    return FlatLayout.of(named, world_size, owners), owners


@given(SHAPES, WORLDS)
def test_an_owned_tensor_is_stepped_by_its_owner_alone_and_sharded_like_others(shapes, world_size):
    layout, owners = lay_out_owned(shapes, world_size)
    assert layout.has_tensor_owners
    plain = lay_out(shapes, world_size)
    for index, (shape, owner) in enumerate(zip(shapes, owners, strict=True)):
        for rank in range(world_size):
            is_owner, own = rank == owner, OwnedLayout(layout, rank)
            assert own.is_stepped[index] == is_owner
            assert own.owned(index) == range(math.prod(shape) if is_owner else 0)
            assert own.shapes[index] == (shape if is_owner else (0,))
            assert layout.of_rank(rank).owned(index) == plain.of_rank(rank).owned(index)


@given(SHAPES, WORLDS)
def test_parts_of_all_shards_joined_are_the_aligned_tensors_of_their_owners(shapes, world_size):
    layout, owners = lay_out_owned(shapes, world_size)
    unsharded = FlatBuffer(layout, torch.float32, torch.device("cpu"))
    for index, view in enumerate(unsharded.views):
        view.copy_(torch.arange(view.numel()).reshape(view.shape) + 1000 * index)
    ranks = [OwnedLayout(layout, rank) for rank in range(world_size)]
    for rank, own in enumerate(ranks):
        sent = [
            torch.cat([unsharded.shard(r)[p.start : p.stop] for p in other.shard_parts[rank]])
            if other.shard_parts[rank]
            else torch.empty(0)
            for r, other in enumerate(ranks)
        ]
        assert [part.numel() for part in sent] == own.numels
        assert own.numels == [other.shard_numels[rank] for other in ranks]
        full = torch.cat(sent)
        assert full.numel() == own.numel
        for index, part in enumerate(own.split(full)):
            expected = unsharded.views[index].reshape(-1)
            assert torch.equal(part, expected if owners[index] == rank else expected[:0])
            assert own.ranges[index].start % ALIGN_NUMEL == 0


@given(st.lists(st.integers(0, 1000), max_size=40), WORLDS)
def test_no_rank_owns_more_than_another_but_for_one_tensor(numels, world_size):
    owners = assign_owners(numels, world_size)
    loads = [0] * world_size
    for numel, owner in zip(numels, owners, strict=True):
        loads[owner] += max(numel, 1)
    assert max(loads) - min(loads) <= max(numels, default=0) + 1
    assert assign_owners(numels, world_size) == owners
