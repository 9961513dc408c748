"""Every element of every parameter is owned by exactly one rank."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.buffer import FlatBuffer, slice_shard
from lightning_zero.layout import ALIGN_NUMEL, Layout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
WORLDS = st.integers(1, 9)


def lay_out(shapes, world_size):
    return Layout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size)


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


@given(SHAPES, WORLDS)
def test_gaps_and_slots_together_are_the_flat_space(shapes, world_size):
    layout = lay_out(shapes, world_size)
    gaps = sum(len(gap) for gap in layout.gaps())
    assert gaps + layout.parameter_numel == layout.numel


@given(SHAPES, WORLDS)
def test_slices_of_all_shards_joined_are_the_parameters(shapes, world_size):
    layout = lay_out(shapes, world_size)
    whole = FlatBuffer(layout, torch.float32, torch.device("cpu"))
    for index, view in enumerate(whole.views):
        view.copy_(torch.arange(view.numel()).reshape(view.shape) + 1000 * index)
    parts = [slice_shard(layout, whole.shard(rank), rank) for rank in range(world_size)]
    for index, view in enumerate(whole.views):
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
    assert buffer.tensor.sum() == buffer.layout.parameter_numel
