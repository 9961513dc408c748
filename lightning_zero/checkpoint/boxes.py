"""A flat range of a row-major tensor as boxes: what a shard is to those who think in n dimensions.

    shape (4, 6), elements [8, 19) of 24         . . . . . .
                                                 . . A A A A     A: offsets (1, 2), sizes (1, 4)
                                                 B B B B B B     B: offsets (2, 0), sizes (1, 6)
                                                 C . . . . .     C: offsets (3, 0), sizes (1, 1)

Checkpoint formats store boxes; a rank owns a flat range. The elements of each box are contiguous in
the flat range, so that writing one copies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "boxes_of_range"]


@dataclass(frozen=True)
class Box:
    """A block of a tensor whose elements are contiguous in row-major order.

    Attributes:
        offsets: First element, by dimension.
        sizes: Elements, by dimension; none is zero.
        start: First element, counted in the whole flat tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past the last element, counted in the whole flat tensor."""
        return self.start + math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The row-major elements [start, stop) of a tensor of `shape`, in order.

    Returns:
        At most 2n - 1 boxes in n dimensions: a ragged end on each side in every dimension but the
        last, and what is left in the middle. None for an empty range.
    """
    if start >= stop:
        return []
    return _split(tuple(shape), (), start, stop, 0)


def _split(
    shape: tuple[int, ...], outer: tuple[int, ...], start: int, stop: int, origin: int
) -> list[Box]:
    """Boxes of [start, stop) within the block at `outer`, whose first element is `origin`."""
    lead = (1,) * len(outer)
    if not shape:
        return [Box(outer, lead, origin)]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner  # rows that hold an element
    is_first_ragged = start > first * inner
    is_last_ragged = stop < (last + 1) * inner
    if first == last and (is_first_ragged or is_last_ragged):
        base = first * inner
        return _split(shape[1:], (*outer, first), start - base, stop - base, origin + base)
    boxes: list[Box] = []
    if is_first_ragged:
        base = first * inner
        boxes += _split(shape[1:], (*outer, first), start - base, inner, origin + base)
        first += 1
    end = last if is_last_ragged else last + 1
    if end > first:
        offsets = (*outer, first, *(0 for _ in shape[1:]))
        sizes = (*lead, end - first, *shape[1:])
        boxes.append(Box(offsets, sizes, origin + first * inner))
    if is_last_ragged:
        base = last * inner
        boxes += _split(shape[1:], (*outer, last), 0, stop - base, origin + base)
    return boxes
