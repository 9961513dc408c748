"""Splitting a flat range into boxes."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.checkpoint.checkpoint_shard import Box, boxes_of_range

SHAPES = st.lists(st.integers(1, 5), max_size=5).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    bounds = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(bounds), draw(bounds)))
    return shape, start, stop


@given(ranges())
def test_the_boxes_are_the_range_in_order(case):
    shape, start, stop = case
    full = torch.arange(math.prod(shape)).view(shape)
    position = start
    for box in boxes_of_range(shape, start, stop):
        assert box.start == position
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert full[index].flatten().tolist() == list(range(box.start, box.stop))
        position = box.stop
    assert position == max(start, stop)


@given(ranges())
def test_there_are_at_most_two_ragged_ends_for_each_dimension_but_one(case):
    shape, start, stop = case
    assert len(boxes_of_range(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


def test_the_full_tensor_is_one_box():
    assert boxes_of_range((4, 6), 0, 24) == [Box((0, 0), (4, 6), 0)]
    assert boxes_of_range((), 0, 1) == [Box((), (), 0)]


def test_the_example_of_the_drawing():
    assert boxes_of_range((4, 6), 8, 19) == [
        Box((1, 2), (1, 4), 8),
        Box((2, 0), (1, 6), 12),
        Box((3, 0), (1, 1), 18),
    ]


def test_an_empty_range_or_tensor_has_no_boxes():
    assert boxes_of_range((4, 6), 7, 7) == []
    assert boxes_of_range((0, 6), 0, 0) == []
