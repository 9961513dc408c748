"""State dicts of an engine: whole on rank 0, or sharded, each rank its own elements.

The full form is the state dict of the same module without sharding. Buckets are gathered one at a
time, and only rank 0 keeps a copy, on the CPU. The sharded form is a directory to which every rank
writes its own part, in torch's DCP format:

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

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.mesh import Mesh
from lightning_zero.optim.state import TensorSpec, gather_owned_state_specs, is_elementwise
from lightning_zero.optim.state_view import raw_states, without_state_view
from lightning_zero.tensors.composite import flatten_composites
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tensors.lazy import read_flat

__all__ = [
    "full_state_dict",
    "narrow_masters",
    "sharded_masters",
    "sharded_optimizer_state",
    "sharded_state_dict",
    "shards_in",
    "replicated_as_shards",
]

# ------------------------------------------------------------------------------------------- whole


def full_state_dict(
    engine: Engine, module: nn.Module | None = None, *, is_on_all_ranks: bool = False
) -> dict[str, Any]:
    """Keys, order, dtypes and shapes of `module.state_dict()` before sharding. Collective.

    Parameters that share memory (tied weights) share it in the result.

    Args:
        engine: Holds the parameters.
        module: A shadow of the engine's; None: that itself.
        is_on_all_ranks: Every rank gets the values.

    Returns:
        The state dict on rank 0. Elsewhere the same keys, with parameters on the meta device unless
        `is_on_all_ranks`: hooks that rename or delete entries work on every rank.
    """
    target = "cpu" if is_on_all_ranks or engine.comm.rank == 0 else "meta"
    state = _live_state(engine.module if module is None else module)
    wanted = [v for v in state.values() if isinstance(v, nn.Parameter) and has_placement(v)]
    full = dict.fromkeys(wanted, torch.empty(0))
    for bucket in dict.fromkeys(bucket_of(placement_of(p)) for p in full):
        views = bucket.masters.full_tensors()
        for index, parameter in enumerate(bucket.parameters):
            if parameter in full:
                full[parameter] = views[index].to(target, bucket.orig_dtypes[index], copy=True)
    return _with_entries(state, lambda key, parameter: full.get(parameter))


def narrow_masters(engine: Engine) -> dict[str, Tensor]:
    """Masters that a state dict in the module's own dtype would round: by name, whole, on rank 0.

    Empty unless the module itself is 16-bit (precision "bf16-true"). Collective.
    """
    masters: dict[str, Tensor] = {}
    for bucket in _narrow_buckets(engine):
        views = bucket.masters.all_gather().views
        if engine.comm.rank == 0:
            for slot, view in zip(bucket.plan.layout.slots, views, strict=True):
                masters[slot.name] = view.to("cpu", copy=True)
    return masters


def _narrow_buckets(engine: Engine) -> Iterator[Bucket]:
    for bucket in engine.buckets:
        itemsize = bucket.plan.master_dtype.itemsize
        is_narrow = any(own.itemsize < itemsize for own in bucket.orig_dtypes)
        if is_narrow and any(p.requires_grad for p in bucket.parameters):
            yield bucket


def _live_state(module: nn.Module) -> dict[str, Any]:
    # With keep_vars the module hands out the parameter objects, of which nothing is read here.
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return state


def _with_entries(
    state: dict[str, Any], entry: Callable[[str, nn.Parameter], Tensor | None]
) -> dict[str, Any]:
    """A live state dict with `entry(key, parameter)` for parameters, unless that is None."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            made = entry(key, value) if isinstance(value, nn.Parameter) else None
            state[key] = value.detach() if made is None else made
    return state


# ------------------------------------------------------------------------------------------ shards


def sharded_state_dict(module: nn.Module, kind: str) -> dict[str, Any]:
    """The module's state dict with this rank's shards for parameters. Local.

    Keys, order, dtypes and shapes are those before sharding. The values are read when they are
    written: before the next step. `module` is an engine's or a shadow of it, `kind` what its
    parameters are called among all that is saved at once.
    """
    read = _part_reader()

    def entry(key: str, parameter: nn.Parameter) -> Tensor | None:
        if not has_placement(parameter):
            return None
        placement = placement_of(parameter)
        bucket, index = bucket_of(placement), placement.index
        part = partial(read, bucket, index)
        return _shard(f"{kind} {placement.name}", bucket, index, bucket.orig_dtypes[index], part)

    return _with_entries(_live_state(module), entry)


def replicated_as_shards(module: nn.Module, rank: int, world_size: int) -> dict[str, Any]:
    """The state dict of a module that is whole and equal on every rank: each writes its 1/N."""
    names: dict[nn.Parameter, str] = {}

    def entry(key: str, parameter: nn.Parameter) -> Tensor:
        name = names.setdefault(parameter, f"parameter {key}")
        owned = _equal_share(range(parameter.numel()), rank, world_size)
        read = partial(read_flat, parameter.detach())
        return CheckpointShard.of(name, parameter.shape, parameter.dtype, owned, read)

    return _with_entries(_live_state(module), entry)


def sharded_masters(engine: Engine) -> dict[str, CheckpointShard]:
    """The same as `narrow_masters`, as this rank's shards. Local."""
    masters: dict[str, CheckpointShard] = {}
    read = _part_reader()
    for bucket in _narrow_buckets(engine):
        for index, slot in enumerate(bucket.plan.layout.slots):
            name, dtype = f"master {slot.name}", bucket.plan.master_dtype
            masters[slot.name] = _shard(name, bucket, index, dtype, partial(read, bucket, index))
    return masters


def sharded_optimizer_state(optimizer: Optimizer, engine: Engine) -> dict[str, Any]:
    """`optimizer.state_dict()` by parameter names, with this rank's shards. Collective: every rank.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}`.
    """
    number = engine.optimizers.index(optimizer)
    outlines = gather_owned_state_specs(optimizer, engine.buckets)
    with without_state_view(optimizer):  # its options: states are saved as the optimizer keeps them
        packed = optimizer.state_dict()
    own_of = raw_states(optimizer)
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
            source = f"of {name} in optimizer {number}"
            entry = flatten_composites(dict(own_of.get(parameter, {})))
            if parameter in outlines:
                own = entry if bucket.shards.is_stepped[index] else None
                state[name] = _owned_shards(outlines[parameter], own, source, engine.comm.mesh)
            elif parameter in own_of:
                for key, value in entry.items():
                    if is_elementwise(bucket, index, value):
                        part = partial(_itself, value)
                        entry[key] = _shard(f"{key} {source}", bucket, index, value.dtype, part)
                state[name] = entry
    groups = [
        {**group, "params": [names[packed_id] for packed_id in group["params"]]}
        for group in packed["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def shards_in(tree: Any) -> dict[str, CheckpointShard]:
    """All shards in nested dicts and lists, by source."""
    found: dict[str, CheckpointShard] = {}
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, CheckpointShard):
            found[value.source] = value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return found


def _owned_shards(outline: Any, own: Any | None, source: str, mesh: Mesh) -> Any:
    """The state of a parameter that one rank of a group owns, `own`, None on the others.

    It is written there; owners of other groups write another part of it.
    """
    values = iter([leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor)])
    number = 0

    def shard(leaf: object) -> object:
        nonlocal number
        if not isinstance(leaf, TensorSpec):
            return leaf
        if leaf.number is not None:
            next(values, None)
            return torch.tensor(leaf.number, dtype=leaf.dtype)
        number += 1
        value = torch.empty(0, dtype=leaf.dtype) if own is None else next(values)
        owned = _equal_share(range(value.numel()), mesh.replica_rank, mesh.num_replicas)
        read = partial(read_flat, value)
        return CheckpointShard.of(f"state {number} {source}", leaf.shape, leaf.dtype, owned, read)

    return tree_map(shard, outline)


def _shard(
    source: str, bucket: Bucket, index: int, dtype: torch.dtype, part: Callable[[], Tensor]
) -> CheckpointShard:
    """`part()`, the elements of slot `index` that this rank steps, as what this rank writes."""
    stepped, mesh = bucket.owned(index), bucket.comm.mesh
    if bucket.replicates_optim:
        written = _equal_share(stepped, mesh.rank, mesh.world_size)
    else:
        written = _equal_share(stepped, mesh.replica_rank, mesh.num_replicas)

    def read(start: int, stop: int) -> Tensor:
        return read_flat(part(), start - stepped.start, stop - stepped.start)

    shape = bucket.plan.layout.slots[index].shape
    return CheckpointShard.of(source, shape, dtype, written, read)


def _part_reader() -> Callable[[Bucket, int], Tensor]:
    """Reads this rank's elements of a slot in full precision, 1-D; keeps those of one bucket."""
    parts = lru_cache(1)(lambda bucket: bucket.masters.shard_views())
    return lambda bucket, index: parts(bucket)[index]


def _itself(value: Tensor) -> Tensor:
    return value


def _equal_share(elements: range, rank: int, num_ranks: int) -> range:
    numel = len(elements)
    return elements[numel * rank // num_ranks : numel * (rank + 1) // num_ranks]
