"""The sharded form: a directory to which every rank writes its own part, in torch's DCP format.

    NAME/.metadata       which tensor lies where (torch's)
    NAME/__0_0.distcp    what rank 0 wrote, and so on for each rank; torch puts checksums in it
    NAME/meta.pt         the rest of the checkpoint: loops, hyperparameters, callbacks
    NAME/SHA256SUMS      of .metadata and meta.pt

Every tensor has its own name, whole shape and the module's own dtype, in the layout in which
Lightning's `ModelParallelStrategy` writes: `state_dict.NAME`, `optimizer_0.state.NAME.exp_avg`,
`optimizer_0.param_groups.0.lr`. So neither world size nor stage nor tier is in it, but as a note in
`meta.pt` for those who look. Ranks that hold the same values write a part of them each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.checkpoint.shard_tensor import ShardTensor
from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.mesh import Mesh
from lightning_zero.optim.state import Outline, is_elementwise, outline_owned_states
from lightning_zero.tensors.composite import take_apart
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tensors.lazy import read_flat

__all__ = [
    "sharded_masters",
    "sharded_optimizer_state",
    "sharded_state_dict",
    "shards_in",
    "whole_as_shards",
]


def sharded_state_dict(
    engine: Engine, module: nn.Module | None = None, kind: str = "parameter"
) -> dict[str, Any]:
    """The module's state dict with this rank's shards for parameters. Local.

    Keys, order, dtypes and shapes are those before sharding. The values are read when they are
    written: before the next step.

    Args:
        engine: Says which rank writes what.
        module: A shadow of its module; None: the module itself.
        kind: What the parameters are called among all that is saved at once.
    """
    module = engine.module if module is None else module
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    exact = _ExactParts()
    for key, value in state.items():
        if isinstance(value, nn.Parameter) and has_placement(value):
            placement = placement_of(value)
            bucket, index = bucket_of(placement), placement.index
            state[key] = _shard(
                f"{kind} {placement.name}",
                bucket,
                index,
                partial(exact.part, bucket, index),
                bucket.own_dtypes[index],
                engine,
            )
        elif isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def whole_as_shards(module: nn.Module, rank: int, world_size: int) -> dict[str, Any]:
    """The state dict of a module that is whole and equal on every rank: each writes its 1/N."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    names: dict[nn.Parameter, str] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            name = names.setdefault(value, f"parameter {key}")
            owned = _equal_share(range(value.numel()), rank, world_size)
            read = _reader(partial(_itself, value.detach()), 0)
            state[key] = ShardTensor.of(name, value.shape, value.dtype, owned, read)
        elif isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def sharded_masters(engine: Engine) -> dict[str, ShardTensor]:
    """Masters that a state dict in the module's own dtype would round: by name. Local.

    Empty unless the module itself is 16-bit (precision "bf16-true").
    """
    masters: dict[str, ShardTensor] = {}
    exact = _ExactParts()
    for bucket in engine.buckets:
        dtype = bucket.plan.master_dtype
        if not any(own.itemsize < dtype.itemsize for own in bucket.own_dtypes):
            continue
        if not any(p.requires_grad for p in bucket.parameters):
            continue
        for index, slot in enumerate(bucket.plan.layout.slots):
            part = partial(exact.part, bucket, index)
            masters[slot.name] = _shard(f"master {slot.name}", bucket, index, part, dtype, engine)
    return masters


def sharded_optimizer_state(optimizer: Optimizer, engine: Engine) -> dict[str, Any]:
    """`optimizer.state_dict()` by parameter names, with this rank's shards. Collective: every rank.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}`.
    """
    number = engine.optimizers.index(optimizer)
    outlines = outline_owned_states(optimizer, engine.buckets)
    packed = optimizer.state_dict()  # its options: states are saved as the optimizer keeps them
    ids = {
        parameter: packed_id
        for live, group in zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for parameter, packed_id in zip(live["params"], group["params"], strict=True)
    }
    names: dict[int, str] = {}
    state: dict[str, Any] = {}
    # In the order of the module, on every rank: which parameter was stepped first means nothing.
    for bucket in engine.buckets:
        for index, parameter in enumerate(bucket.parameters):
            if parameter not in ids:
                continue
            name = names[ids[parameter]] = bucket.plan.layout.slots[index].name
            entry = take_apart(dict(optimizer.state.get(parameter, {})))
            if parameter in outlines:
                own = entry if bucket.shards.is_stepped[index] else None
                source = f"of {name} in optimizer {number}"
                state[name] = _owned_shards(outlines[parameter], own, source, engine.comm.mesh)
            elif parameter in optimizer.state:
                state[name] = {
                    key: _shard(
                        f"{key} of {name} in optimizer {number}",
                        bucket,
                        index,
                        partial(_itself, value),
                        value.dtype,
                        engine,
                    )
                    if is_elementwise(bucket, index, key, value)
                    else value
                    for key, value in entry.items()
                }
    groups = [
        {**group, "params": [names[packed_id] for packed_id in group["params"]]}
        for group in packed["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def shards_in(tree: Any) -> dict[str, ShardTensor]:
    """All shards in nested dicts and lists, by source."""
    found: dict[str, ShardTensor] = {}
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, ShardTensor):
            found[value.source] = value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return found


def _owned_shards(outline: Any, own: Any | None, source: str, mesh: Mesh) -> Any:
    """The state of a parameter that one rank of a group owns: it is written there.

    Args:
        outline: Of the state.
        own: The state; None on other ranks.
        source: Names the values, with a number before it.
        mesh: Owners of other groups write another part of it.
    """
    values = iter([leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor)])
    number = 0

    def shard(leaf: object) -> object:
        nonlocal number
        if not isinstance(leaf, Outline):
            return leaf
        if leaf.number is not None:
            next(values, None)
            return torch.tensor(leaf.number, dtype=leaf.dtype)
        number += 1
        value = torch.empty(0, dtype=leaf.dtype) if own is None else next(values)
        read = _reader(partial(_itself, value), 0)
        owned = _equal_share(range(value.numel()), mesh.replica_rank, mesh.num_replicas)
        return ShardTensor.of(f"state {number} {source}", leaf.shape, leaf.dtype, owned, read)

    return tree_map(shard, outline)


class _ExactParts:
    """Parameters of one bucket at a time in full precision: where they rest on a disk, a copy."""

    def __init__(self) -> None:
        self._bucket: Bucket | None = None
        self._parts: list[Tensor] = []  # by slot, 1-D

    def part(self, bucket: Bucket, index: int) -> Tensor:
        """This rank's elements of slot `index`, 1-D."""
        if bucket is not self._bucket:
            self._parts = []
            self._bucket, self._parts = bucket, bucket.masters.exact_parts()
        return self._parts[index]


def _shard(
    source: str,
    bucket: Bucket,
    index: int,
    part: Callable[[], Tensor],
    dtype: torch.dtype,
    engine: Engine,
) -> ShardTensor:
    """`part()`, the elements of slot `index` that this rank steps, as what this rank writes."""
    stepped, mesh = bucket.owned(index), engine.comm.mesh
    if bucket.steps_whole:
        written = _equal_share(stepped, mesh.rank, mesh.world_size)
    else:
        written = _equal_share(stepped, mesh.replica_rank, mesh.num_replicas)
    shape = bucket.plan.layout.slots[index].shape
    return ShardTensor.of(source, shape, dtype, written, _reader(part, stepped.start))


def _reader(part: Callable[[], Tensor], origin: int) -> Callable[[int, int], Tensor]:
    return lambda start, stop: read_flat(part(), start - origin, stop - origin)


def _itself(value: Tensor) -> Tensor:
    return value


def _equal_share(elements: range, rank: int, num_ranks: int) -> range:
    numel = len(elements)
    return elements[numel * rank // num_ranks : numel * (rank + 1) // num_ranks]
