"""Checks that a sharded checkpoint is complete: every element is stored once, within its file.

If two chunks overlapped, other elements would be in no chunk, and uninitialized memory would be
loaded for them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from lightning_zero.checkpoint.storage import CheckpointPath, file_sizes
from lightning_zero.layout.foreign_names import printable

__all__ = ["check_complete", "overlap"]

_MAX_COMPARISONS = 2**28  # of two chunks of one tensor


def check_complete(folder: CheckpointPath, metadata: Metadata) -> None:
    """Raises a ValueError unless every element is stored once and its file is long enough."""
    problems = _missing_bytes(folder, metadata)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and (
            why := _find_chunk_problem(name, entry, metadata)
        ):
            problems.append(f"{printable(name)} {why}")
    if problems:
        shown = "; ".join(problems[:20])
        raise ValueError(
            f"{folder} is incomplete: {shown}. Use another checkpoint, or copy this one again."
        )


def _missing_bytes(folder: CheckpointPath, metadata: Metadata) -> list[str]:
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
    problems = []
    sizes = file_sizes(folder)
    for name, end in ends.items():
        if name not in sizes:
            problems.append(f"{printable(name)} is missing")
        elif sizes[name] < end:
            problems.append(f"{printable(name)} has {sizes[name]} bytes, expected at least {end}")
    return problems


def _find_chunk_problem(name: str, entry: TensorStorageMetadata, metadata: Metadata) -> str | None:
    """Describes what is wrong with the chunks of a tensor; None if nothing is."""
    numel = math.prod(entry.size)
    itemsize = entry.properties.dtype.itemsize
    stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if stored < numel:
        return f"has {stored} of {numel} elements"
    for chunk in entry.chunks:
        length = metadata.storage_data[MetadataIndex(name, chunk.offsets)].length
        if math.prod(chunk.sizes) * itemsize > length:
            return f"has a chunk of {math.prod(chunk.sizes)} elements in {length} bytes"
    if stored > numel or overlap(entry.chunks, entry.size):
        return "has chunks that overlap"
    return None


def overlap(chunks: Sequence[ChunkStorageMetadata], size: Sequence[int]) -> bool:
    """Whether two chunks have an element in common."""
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks if math.prod(chunk.sizes)]
    if len(boxes) < 2 or _are_disjoint_ranges(boxes, size):
        return False
    starts = torch.tensor([offsets for offsets, _ in boxes], dtype=torch.int64)
    stops = starts + torch.tensor([sizes for _, sizes in boxes], dtype=torch.int64)
    # Along the dimension that is split most often, a box can overlap the fewest others.
    dim = max(range(len(size)), key=lambda d: len(starts[:, d].unique()))
    order = starts[:, dim].argsort()
    starts, stops = starts[order], stops[order]
    ends = torch.searchsorted(starts[:, dim].contiguous(), stops[:, dim].contiguous())
    if int((ends - torch.arange(len(boxes))).sum()) > _MAX_COMPARISONS:
        raise ValueError(f"a tensor has {len(boxes)} chunks, too many to check for overlaps")
    for number, end in enumerate(ends.tolist()):
        others = slice(number + 1, end)
        overlaps = (starts[others] < stops[number]) & (starts[number] < stops[others])
        if bool(overlaps.all(dim=1).any()):
            return True
    return False


def _are_disjoint_ranges(
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]], size: Sequence[int]
) -> bool:
    """Whether each box is a flat range of the tensor, and no two ranges overlap.

    Almost all writers store such boxes; this check is faster than the general one.
    """
    strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    ranges = []
    for offsets, sizes in boxes:
        split_dim = next((dim for dim, n in enumerate(sizes) if n != 1), len(size) - 1)
        if list(sizes[split_dim + 1 :]) != list(size[split_dim + 1 :]):
            return False
        start = sum(map(operator.mul, offsets, strides))
        ranges.append((start, start + math.prod(sizes)))
    return all(a[1] <= b[0] for a, b in pairwise(sorted(ranges)))
