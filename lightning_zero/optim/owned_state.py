"""Optimizer states of parameters that one rank owns whole.

The owner alone has them, just as the optimizer made them: of any shape (Adafactor's rows and
columns), quantised, numbers, lists. What other ranks need of them for a checkpoint is told by
`Outline`s, and the values by one gather for each bucket, in which every rank sends what it owns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.core.bucket import Bucket
from lightning_zero.tensors.composite import plain_tensors, put_together, take_apart

__all__ = [
    "Outline",
    "gather_owned_states",
    "missing_state_bytes",
    "outline_owned_states",
    "own_itemsize",
]

_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Outline:
    """A tensor that another rank may hold.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        is_on_cpu: Whether the optimizer keeps it on the CPU.
        number: Its value, where it has no dimensions.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool
    number: float | None

    @staticmethod
    def of(value: object) -> object:
        """The outline of a tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        number = value.item() if value.dim() == 0 else None
        return Outline(tuple(value.shape), value.dtype, value.device.type == "cpu", number)

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up so that what follows is aligned."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


_Outlines = Mapping[nn.Parameter, Any]


def outline_owned_states(optimizer: Optimizer, buckets: Sequence[Bucket]) -> _Outlines:
    """By owned parameter that has been stepped, its state with an outline for every tensor.

    Tensors made of tensors are taken apart. Collective: every rank.

    Args:
        optimizer: Its state has what this rank owns.
        buckets: All buckets of the engine.
    """
    own_buckets = _buckets_of(optimizer, buckets)
    if not own_buckets:
        return {}
    own_buckets[0].wait_for_all_steps()
    own = {
        (number, index): tree_map(Outline.of, take_apart(optimizer.state[parameter]))
        for number, bucket in enumerate(own_buckets)
        for index, parameter in enumerate(bucket.parameters)
        if bucket.shards.is_stepped[index] and parameter in optimizer.state
    }
    known: dict[tuple[int, int], Any] = {}
    for of_rank in own_buckets[0].comm.control.gather_objects(own):
        known.update(of_rank)
    return {own_buckets[number].parameters[i]: known[number, i] for number, i in sorted(known)}


def gather_owned_states(
    optimizer: Optimizer, buckets: Sequence[Bucket]
) -> Iterator[tuple[nn.Parameter, Any]]:
    """Every parameter that is stepped whole, with its state, on every rank.

    Collective: exhaust it on every rank. One bucket is gathered at a time; where every rank steps
    all parameters, each has their states. Tensors are views on the device, to be copied at once;
    those that the optimizer keeps on the CPU and that have no dimensions are there.
    """
    for bucket in buckets:
        if bucket.steps_whole:
            states = optimizer.state  # a defaultdict: not to be asked for what it lacks
            yield from ((p, states[p]) for p in bucket.parameters if p in states)
    outlines = outline_owned_states(optimizer, buckets)
    for bucket in _buckets_of(optimizer, buckets):
        packed = _gather_bucket(bucket, outlines, optimizer)
        for parameter, tensors in packed.items():
            rest = iter(tensors)

            def restore(leaf: object, rest: Iterator[Tensor] = rest) -> object:
                if not isinstance(leaf, Outline):
                    return leaf
                tensor = next(rest)
                return tensor.cpu() if leaf.is_on_cpu and not leaf.shape else tensor

            yield parameter, put_together(tree_map(restore, outlines[parameter]))


def missing_state_bytes(optimizer: Optimizer, buckets: Sequence[Bucket]) -> int:
    """An estimate of the bytes of states that other ranks own. Local.

    A parameter of another rank is taken to have what the one of this rank has that is nearest in
    size among those with equally many dimensions, with its own sizes in the place of that one's;
    nothing where this rank has none of these.
    """
    nbytes = 0
    for bucket in _buckets_of(optimizer, buckets):
        for index, parameter in enumerate(bucket.parameters):
            slot = bucket.plan.layout.slots[index]
            if not bucket.shards.is_stepped[index] and parameter.requires_grad:
                own = bucket.own_dtypes[index]
                nbytes += _state_bytes_like(slot.shape, parameter, optimizer, own)
    return nbytes


def _state_bytes_like(
    shape: tuple[int, ...], parameter: nn.Parameter, optimizer: Optimizer, own: torch.dtype
) -> int:
    members = {p for group in optimizer.param_groups for p in group["params"]}
    if parameter not in members:
        return 0
    alike = [known for known in optimizer.state if len(known.shape) == len(shape)]
    if not alike:
        return 0
    nearest = min(alike, key=lambda known: abs(known.shape.numel() - math.prod(shape)))
    return sum(
        math.prod(_sizes_like(tuple(tensor.shape), tuple(nearest.shape), shape))
        * own_itemsize(tensor, own)
        for tensor in plain_tensors(optimizer.state[nearest])
    )


def own_itemsize(state: Tensor, own: torch.dtype) -> int:
    """Of an element of `state` where the optimizer steps parameters in their `own` dtype."""
    is_masters = state.dim() > 0 and state.is_floating_point() and own.is_floating_point
    return min(own.itemsize, state.itemsize) if is_masters else state.itemsize


def _sizes_like(
    state: tuple[int, ...], known: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    if len(state) != len(known):
        return state
    sizes = zip(state, known, shape, strict=True)
    return tuple(own if size == like else size for size, like, own in sizes)


def _buckets_of(optimizer: Optimizer, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those with owned parameters of `optimizer`, in layout order."""
    members = {p for group in optimizer.param_groups for p in group["params"]}
    return [
        bucket
        for bucket in buckets
        if bucket.shards.holds_whole_tensors and not members.isdisjoint(bucket.parameters)
    ]


def _gather_bucket(
    bucket: Bucket, outlines: _Outlines, optimizer: Optimizer
) -> dict[nn.Parameter, list[Tensor]]:
    """By parameter, the tensors of its state: views of one buffer on the device. Collective."""
    comm, mesh = bucket.comm, bucket.comm.mesh
    by_owner: list[list[tuple[nn.Parameter, list[Outline]]]] = [[] for _ in range(mesh.num_shards)]
    for slot, parameter in zip(bucket.plan.layout.slots, bucket.parameters, strict=True):
        if parameter in outlines:
            assert slot.owner is not None
            leaves = tree_leaves(outlines[parameter])
            own = [leaf for leaf in leaves if isinstance(leaf, Outline)]
            by_owner[slot.owner].append((parameter, own))
    cuts = [
        max(_ALIGN_BYTES, sum(leaf.nbytes for _, leaves in owned for leaf in leaves))
        for owned in by_owner
    ]
    buffer = torch.zeros(sum(cuts), dtype=torch.uint8, device=comm.device)
    views: dict[nn.Parameter, list[Tensor]] = {}
    for owned, start in zip(by_owner, _starts(cuts), strict=True):
        for parameter, leaves in owned:
            views[parameter] = []
            for leaf in leaves:
                numel = math.prod(leaf.shape)
                part = buffer[start : start + numel * leaf.dtype.itemsize]
                views[parameter].append(part.view(leaf.dtype).view(leaf.shape))
                start += leaf.nbytes
    for parameter, _ in by_owner[mesh.shard_rank]:
        values = plain_tensors(optimizer.state[parameter])
        for view, value in zip(views[parameter], values, strict=True):
            view.copy_(value)
    comm.all_gather(buffer, f"states of {bucket.plan.name}", cuts=cuts).wait()
    return views


def _starts(cuts: Sequence[int]) -> list[int]:
    starts = [0]
    for cut in cuts[:-1]:
        starts.append(starts[-1] + cut)
    return starts
