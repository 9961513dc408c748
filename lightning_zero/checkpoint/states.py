"""State dicts of an engine: full on rank 0, or sharded, with this rank's elements.

A full checkpoint has the state dict of the same module without sharding. Buckets are unsharded one
at a time, and only rank 0 keeps a copy, on the CPU. A sharded checkpoint is a directory to which
every rank writes its own part, in torch's DCP format:

    NAME/.metadata       torch's index of the tensors
    NAME/__0_0.distcp    file of rank 0, and so on for each rank; torch puts checksums in it
    NAME/meta.pt         all other entries: loops, hyperparameters, callbacks
    NAME/save.json       identifier of the save, and digests
    NAME/SHA256SUMS      checksums of .metadata, meta.pt and save.json

Every tensor has its name, its full shape and the module's dtype, in the layout of Lightning's
`ModelParallelStrategy`: `state_dict.NAME`, `optimizer_0.state.NAME.exp_avg`,
`optimizer_0.param_groups.0.lr`. The layout depends on neither world size nor stage nor tier;
`meta.pt` contains them for information only. Ranks that hold the same values each write
a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero._version import __version__
from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of
from lightning_zero.engine.counting import full_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.flat import ShardLayout
from lightning_zero.layout.mesh import Mesh
from lightning_zero.layout.sizes import format_bytes
from lightning_zero.optim.blocks import unpacked_bytes
from lightning_zero.optim.state import (
    TensorSpec,
    gather_owned_state_specs,
    optimizer_state_dict,
    packed_options,
)
from lightning_zero.optim.state_view import raw_states
from lightning_zero.tensors.composite import flatten_composites
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tensors.lazy import read_flat
from lightning_zero.tiers.memory import available_memory_bytes

__all__ = [
    "MASTERS_KEY",
    "METADATA_KEY",
    "RANK_STATES_KEY",
    "describe_save",
    "full_optimizer_state",
    "full_state_dict",
    "narrow_masters",
    "replicated_as_shards",
    "sharded_masters",
    "sharded_optimizer_state",
    "sharded_state_dict",
    "shards_in",
]

MASTERS_KEY = "lightning_zero_masters"
RANK_STATES_KEY = "lightning_zero_rank_states"  # see [Note: States of ranks]
_MIN_CHECKED_BYTES = 2**24
METADATA_KEY = "lightning_zero"  # version, stage and number of ranks that wrote the checkpoint


def describe_save(engine: Engine) -> dict[str, Any]:
    """The entry `METADATA_KEY` of a checkpoint that `engine` writes."""
    return {
        "version": __version__,
        "stage": engine.config.stage,
        "world_size": engine.comm.size,
    }


# -------------------------------------------------------------------------------------------- full


def full_state_dict(
    engine: Engine, module: nn.Module | None = None, *, is_on_all_ranks: bool = False
) -> dict[str, Any]:
    """State dict with the keys, order, dtypes and shapes of the module before sharding.

    Collective: every rank. Parameters that share memory (tied weights) share it in the result.

    Args:
        engine: Engine that holds the parameters.
        module: A shadow of the engine's module; None: the engine's module.
        is_on_all_ranks: Whether every rank gets the values.

    Returns:
        The state dict on rank 0. On other ranks the same keys, with parameters on the meta device
        unless `is_on_all_ranks`, so that hooks can rename or delete entries on every rank.

    Raises:
        RuntimeError: The tensors do not fit into the free CPU memory of rank 0; on every rank.
    """
    if not is_on_all_ranks:
        _check_fits(engine, "parameters", sum(map(full_bytes, engine.buckets)))
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


def full_optimizer_state(optimizer: Optimizer, engine: Engine) -> dict[str, Any]:
    """`optimizer.state_dict()` of full tensors on rank 0. Collective: every rank.

    Raises:
        RuntimeError: The tensors do not fit into the free CPU memory of rank 0; on every rank.
    """
    own = sum(unpacked_bytes(optimizer, state) for state in raw_states(optimizer).values())
    shares = engine.comm.control.gather_objects(own)
    num_copies = engine.comm.mesh.num_replicas
    if any(bucket.shards.replicates_optim for bucket in engine.buckets):
        num_copies = engine.comm.size
    _check_fits(engine, "optimizer states", sum(shares) // num_copies)
    is_recipient = engine.comm.rank == 0
    return optimizer_state_dict(optimizer, engine.buckets, is_recipient=is_recipient)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _check_fits(engine: Engine, what: str, num_bytes: int) -> None:
    """Raises on every rank if rank 0 lacks CPU memory for the full tensors. Collective.

    `num_bytes` is the same on every rank; less than `_MIN_CHECKED_BYTES` are not checked.
    """
    if num_bytes < _MIN_CHECKED_BYTES:
        return
    free = engine.comm.control.gather_objects(available_memory_bytes())[0]
    if num_bytes > free:
        raise RuntimeError(
            f"the {what} of a full checkpoint take {format_bytes(num_bytes)} of CPU memory on rank "
            f"0, where {format_bytes(free)} are free; save a sharded one, with "
            'ZeroStrategy(checkpoint="sharded") or save_checkpoint(..., is_sharded=True).'
        )


def narrow_masters(engine: Engine) -> dict[str, Tensor]:
    """Full masters of parameters with a narrower dtype, which a state dict rounds: by name.

    Collective: every rank. Empty on ranks other than 0, and unless the module itself is 16-bit
    (precision "bf16-true").

    Raises:
        RuntimeError: The tensors do not fit into the free CPU memory of rank 0; on every rank.
    """
    buckets = list(_narrow_buckets(engine))
    slots = [(slot, b.plan.master_dtype) for b in buckets for slot in b.plan.layout.slots]
    num_bytes = sum(slot.numel * dtype.itemsize for slot, dtype in slots)
    _check_fits(engine, "main parameters", num_bytes)
    masters: dict[str, Tensor] = {}
    for bucket in buckets:
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
    # With keep_vars the module returns the parameter objects, whose values are not read here.
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return state


def _with_entries(
    state: dict[str, Any], entry: Callable[[str, nn.Parameter], Tensor | None]
) -> dict[str, Any]:
    """Replaces parameters by `entry(key, parameter)` unless it is None; detaches other tensors."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            replaced = entry(key, value) if isinstance(value, nn.Parameter) else None
            state[key] = value.detach() if replaced is None else replaced
    return state


# ----------------------------------------------------------------------------------------- sharded


def sharded_state_dict(module: nn.Module, kind: str) -> dict[str, Any]:
    """The module's state dict with this rank's shards in place of parameters. Local.

    Keys, order, dtypes and shapes are those before sharding. The values are read when they are
    written, which must be before the next step.

    Args:
        module: An engine's module or a shadow of it.
        kind: Prefix of the shards' sources, which distinguishes modules that are saved together.
    """
    read = _shard_reader()

    def entry(key: str, parameter: nn.Parameter) -> Tensor | None:
        if not has_placement(parameter):
            return None
        placement = placement_of(parameter)
        bucket, index = bucket_of(placement), placement.index
        part = partial(read, bucket, index)
        return _shard(f"{kind} {placement.name}", bucket, index, bucket.orig_dtypes[index], part)

    return _with_entries(_live_state(module), entry)


def replicated_as_shards(module: nn.Module, rank: int, world_size: int) -> dict[str, Any]:
    """State dict of a module that is replicated on all ranks; each rank writes 1/N of a tensor."""
    names: dict[nn.Parameter, str] = {}

    def entry(key: str, parameter: nn.Parameter) -> Tensor:
        name = names.setdefault(parameter, f"parameter {key}")
        owned = _equal_share(range(parameter.numel()), rank, world_size)
        read = partial(read_flat, parameter.detach())
        return CheckpointShard.of(name, parameter.shape, parameter.dtype, owned, read)

    return _with_entries(_live_state(module), entry)


def sharded_masters(engine: Engine, prefix: str = "") -> dict[str, CheckpointShard]:
    """Like `narrow_masters`, with this rank's shards. Local.

    `prefix`: of the shards' sources, which distinguishes engines that are saved together.
    """
    masters: dict[str, CheckpointShard] = {}
    read = _shard_reader()
    for bucket in _narrow_buckets(engine):
        for index, slot in enumerate(bucket.plan.layout.slots):
            name, dtype = f"{prefix}master {slot.name}", bucket.plan.master_dtype
            masters[slot.name] = _shard(name, bucket, index, dtype, partial(read, bucket, index))
    return masters


def sharded_optimizer_state(
    optimizer: Optimizer, engine: Engine, prefix: str = ""
) -> dict[str, Any]:
    """`optimizer.state_dict()` by parameter name, with this rank's shards. Collective: every rank.

    `prefix`: as for `sharded_masters`.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}`.
    """
    number = engine.optimizers.index(optimizer)
    specs_of = gather_owned_state_specs(optimizer, engine.buckets)
    packed = packed_options(optimizer)  # states are saved as the optimizer keeps them
    own_of = raw_states(optimizer)
    ids = {
        parameter: packed_id
        for live, group in zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for parameter, packed_id in zip(live["params"], group["params"], strict=True)
    }
    names: dict[int, str] = {}
    state: dict[str, Any] = {}
    # In the order of the module on every rank; the order of the first steps may differ.
    for bucket in engine.buckets:
        for index, parameter in enumerate(bucket.parameters):
            if parameter not in ids:
                continue
            name = names[ids[parameter]] = bucket.plan.layout.slots[index].name
            source = f"of {name} in {prefix}optimizer {number}"
            entry = flatten_composites(dict(own_of.get(parameter, {})))
            if parameter in specs_of:
                own = entry if bucket.shards.step_layout.is_stepped[index] else None
                state[name] = _owned_shards(specs_of[parameter], own, source, engine.comm.mesh)
            elif parameter in own_of:
                for key, value in entry.items():
                    if bucket.shards.states.is_shard(index, key, value):
                        layout = bucket.shards.states.layouts.of(key)
                        part, of_key = partial(_identity, value), f"{key} {source}"
                        entry[key] = _shard(of_key, bucket, index, value.dtype, part, layout)
                state[name] = entry
    groups = [
        {**group, "params": [names[packed_id] for packed_id in group["params"]]}
        for group in packed["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def shards_in(tree: Any) -> dict[str, CheckpointShard]:
    """All shards in nested dicts and lists, by their source."""
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


def _owned_shards(specs: Any, own: Any | None, source: str, mesh: Mesh) -> Any:
    """Shards of the state of a parameter with a tensor owner; `own` is None on other ranks.

    The owner writes the state; with replicas, the owner in each replica writes a part of it.
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

    return tree_map(shard, specs)


def _shard(
    source: str,
    bucket: Bucket,
    index: int,
    dtype: torch.dtype,
    part: Callable[[], Tensor],
    layout: ShardLayout | None = None,
) -> CheckpointShard:
    """The shard that this rank writes of slot `index`; `part()` returns this rank's elements.

    `layout`: of the elements; None: that of the parameters.
    """
    layout, mesh = layout or bucket.shards.layout, bucket.comm.mesh
    stepped = layout.owned(index)
    if bucket.shards.replicates_optim:
        written = _equal_share(stepped, mesh.rank, mesh.world_size)
    else:
        written = _equal_share(stepped, mesh.replica_rank, mesh.num_replicas)

    def read(start: int, stop: int) -> Tensor:
        return read_flat(part(), start - stepped.start, stop - stepped.start)

    shape = layout.layout.slots[index].shape
    return CheckpointShard.of(source, shape, dtype, written, read)


def _shard_reader() -> Callable[[Bucket, int], Tensor]:
    """Returns a reader of this rank's elements of a slot, 1-D, in the masters' precision.

    It caches the elements of one bucket.
    """
    parts = lru_cache(1)(lambda bucket: bucket.masters.shard_views())
    return lambda bucket, index: parts(bucket)[index]


def _identity(value: Tensor) -> Tensor:
    return value


def _equal_share(elements: range, rank: int, num_ranks: int) -> range:
    numel = len(elements)
    return elements[numel * rank // num_ranks : numel * (rank + 1) // num_ranks]
