"""Saves and loads optimizer states: full tensors outside, slices on this rank.

A state tensor is elementwise if it has the shape of its parameter (the full parameter, or the slice
that the optimizer steps), such as Adam's moments. Other states (step counters) are equal on all
ranks and are not sharded.

[Note: Owned states] If a rank owns full parameters, only that rank has their states, exactly as the
optimizer created them: of any shape (Adafactor's rows and columns), quantized, numbers, lists. For
a checkpoint, the ranks exchange `TensorSpec`s of these states, and then the values, by one
all-gather for each bucket in which every rank sends what it owns.

States are saved as the optimizer keeps them, not as rearranged by a `state_dict` of its class
(bitsandbytes hides them from FSDP in a nested dict), because that would contain slices. The class's
`load_state_dict` accepts both; dicts in a saved state are searched, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of
from lightning_zero.core.optim_states import is_elementwise_state
from lightning_zero.optim.blocks import pack_state, unpack_state
from lightning_zero.optim.clone import (
    copy_back,
    copy_of,
    parameters_of,
    probe_state,
    settings_of,
)
from lightning_zero.optim.state_view import (
    before_access,
    full_state_shape,
    is_sliced,
    local_part,
    raw_states,
)
from lightning_zero.tensors.composite import (
    flatten_composites,
    is_composite,
    map_tensors,
    plain_tensors,
    unflatten_composites,
)
from lightning_zero.tensors.guarded import FULL_NUMEL, Placement, placement_of
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = [
    "TensorSpec",
    "check_sliced_states",
    "unshard_optimizer_state",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "gather_owned_state_specs",
    "packed_options",
    "shard_initial_state",
]

_ALIGN_BYTES = 16


def shard_initial_state(optimizer: Optimizer) -> None:
    """Shards states that were created in the optimizer's constructor (Adagrad's sum)."""
    parameters = [key for key in optimizer.state if isinstance(key, Tensor)]
    entries = [(placement_of(p).shape, optimizer.state[p]) for p in parameters]
    keys = _ElementwiseKeys(optimizer, entries)
    for parameter in parameters:
        state = optimizer.state[parameter]  # keys other than parameters have global numbers
        if not _is_stepped(parameter):
            del optimizer.state[parameter]
            continue
        placement = placement_of(parameter)
        for key, value in state.items():
            if _is_full_state(placement, key, value, keys):
                state[key] = bucket_of(placement).shards.states.slice(placement.index, key, value)


def check_sliced_states(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Refuses quantized states of a slice, whose blocks differ from those of the full tensor."""
    placement = placement_of(parameter)
    if not is_sliced(bucket_of(placement)):
        return
    for key, value in raw_states(optimizer).get(parameter, {}).items():
        if is_composite(value):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps {key} of {placement.name} as "
                f"{type(value).__name__}, in blocks, and steps a slice of it, which gives other "
                "values than one process. Set assume_elementwise=False, so that it steps full "
                "tensors; if it is already False, use stage 0."
            )


def packed_options(optimizer: Optimizer) -> dict[str, Any]:
    """Result of `optimizer.state_dict()` without states of parameters. Local."""
    before_access(optimizer)
    packed: dict[str, Any] = type(optimizer).state_dict(optimizer)
    numbers = set(_parameter_ids(optimizer).values())
    packed["state"] = {k: v for k, v in packed["state"].items() if k not in numbers}
    return packed


def optimizer_state_dict(
    optimizer: Optimizer, buckets: Sequence[Bucket], *, is_recipient: bool
) -> dict[str, Any]:
    """State dict of the optimizer as without sharding, on the CPU. Collective: every rank.

    Gathers one bucket and one kind of state at a time. Ranks with `is_recipient=False` get an empty
    dict.
    """
    packed = packed_options(optimizer)
    ids, own = _parameter_ids(optimizer), raw_states(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for parameter, owned in _gather_owned_states(optimizer, buckets):
        if is_recipient:
            state[ids[parameter]] = map_tensors(lambda v: v.to("cpu", copy=True), owned)
    for member in ids.keys() & own.keys():
        # A copy: the optimizer's own dict must not be changed.
        state.setdefault(ids[member], dict(own[member]))
    for parameter, key, joined in _unsharded_states(optimizer, buckets):
        if is_recipient:
            state[ids[parameter]][key] = joined.to("cpu", copy=True)
    if not is_recipient:
        return {}
    own_of = {ids[member]: own[member] for member in ids.keys() & own.keys()}
    for number in sorted(state):
        own_values = own_of.get(number, {})
        on_cpu = {key: _to_cpu(v, own_values) for key, v in state.pop(number).items()}
        packed["state"][number] = unpack_state(optimizer, on_cpu)
    return packed


def _to_cpu(value: object, own: Mapping[str, Any]) -> object:
    """`value` on the CPU; a copy if it is one of the optimizer's `own` values, which change."""
    if not isinstance(value, Tensor):
        return value
    return value.to("cpu", copy=any(value is other for other in own.values()))


def load_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads a state dict of full tensors; each rank reads and keeps its own elements. Local.

    Args:
        optimizer: Optimizer whose state and group options are replaced.
        state_dict: Result of `torch.optim.Optimizer.state_dict`; tensors may be LazyTensors.

    Raises:
        ValueError: The state dict does not fit the optimizer, which is then unchanged.
    """
    if "param_groups" not in state_dict:
        raise ValueError(
            f"the state dict of {type(optimizer).__name__} has no param_groups; load a state dict "
            "of full tensors on every rank. engine.optimizer_state(optimizer), and in Fabric "
            "optimizer.state_dict(), return it on rank 0 and an empty dict on the other ranks."
        )
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, {**state_dict}) or state_dict
    parameters = parameters_of(optimizer)
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    _check_states(optimizer, by_number, state_dict)
    shapes = {number: placement_of(p).shape for number, p in by_number.items()}
    entries = state_dict["state"]
    keys = _ElementwiseKeys(optimizer, [(shapes[number], entries[number]) for number in entries])
    in_files = {p for p in parameters if bucket_of(placement_of(p)).shards.states.are_in_files}
    state = {
        number: {
            key: _own_part(by_number[number], key, value, keys)
            for key, value in entry.items()
            if by_number[number] not in in_files
            or not _is_shaped_like(shapes[number], key, value, keys)
        }
        for number, entry in entries.items()
        if _is_stepped(by_number[number])
    }
    _load_sliced(optimizer, {**state_dict, "state": state})
    for number, entry in entries.items():
        if by_number[number] in in_files:
            _load_into_files(optimizer, by_number[number], entry, keys)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _load_sliced(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict of slices with the `load_state_dict` of the optimizer's class.

    It casts states to the dtype and device of the parameters, here those of stand-ins.
    """
    stand_in_of = {parameter: _stand_in(parameter) for parameter in parameters_of(optimizer)}
    groups = [
        {**settings_of(group, copies=False), "params": [stand_in_of[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    given = [dict(group) for group in groups]
    loader = copy_of(optimizer, groups)
    attributes = dict(vars(loader))
    type(optimizer).load_state_dict(loader, state_dict)
    raw = raw_states(optimizer)
    raw.clear()
    raw.update({p: loader.state[s] for p, s in stand_in_of.items() if s in loader.state})
    copy_back(optimizer, loader, given, attributes)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter without memory, of the dtype and on the device of what is stepped."""
    placement = placement_of(parameter)
    shards = bucket_of(placement).shards
    device = shards.storage.step_device(shards.plan.tiers.optim)
    value = torch.empty((), dtype=shards.plan.master_dtype, device=device)
    stand_in = nn.Parameter(value.expand(shards.step_layout.shapes[placement.index]))
    vars(stand_in)[FULL_NUMEL] = placement.shape.numel()
    return stand_in


def _load_into_files(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    entry: Mapping[str, Any],
    keys: _ElementwiseKeys,
) -> None:
    """Loads elementwise states into their files, one after another to limit memory."""
    placement = placement_of(parameter)
    for key, value in entry.items():
        if _is_shaped_like(placement.shape, key, value, keys):
            own = {key: _own_part(parameter, key, value, keys)}
            packed = pack_state(optimizer, own, placement.shape.numel())
            bucket_of(placement).shards.states.adopt(placement.index, packed)
            raw_states(optimizer)[parameter].update(packed)


def _own_part(parameter: nn.Parameter, key: str, value: object, keys: _ElementwiseKeys) -> object:
    placement = placement_of(parameter)
    if isinstance(value, dict):
        return {name: _own_part(parameter, name, part, keys) for name, part in value.items()}
    if isinstance(value, ShardedTensor):
        return local_part(parameter, key, value)
    has_slices = not bucket_of(placement).shards.has_tensor_owners
    if has_slices and _is_full_state(placement, key, value, keys):
        assert isinstance(value, Tensor)
        return bucket_of(placement).shards.states.slice(placement.index, key, value)
    return map_tensors(Tensor.clone, value)  # a copy of what may be mapped from a file


def _is_stepped(parameter: Tensor) -> bool:
    placement = placement_of(parameter)
    return bucket_of(placement).shards.step_layout.is_stepped[placement.index]


def _check_states(
    optimizer: Optimizer, by_number: Mapping[int, nn.Parameter], state_dict: Mapping[str, Any]
) -> None:
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    wrong = []
    if saved != own:
        wrong.append(f"groups of {saved} parameters, but the optimizer has groups of {own}")
    for number, entry in state_dict["state"].items():
        if number not in by_number:
            if saved == own:
                wrong.append(f"a state of parameter {number}, which is in no group")
            continue
        placement = placement_of(by_number[number])
        wrong += [
            f"{key} of {placement.name} as a {type(value).__name__} of shape "
            f"{tuple(value.shape)}, but slices of {tuple(placement.shape)} are stepped"
            for key, value in _named_tensors(entry)
            if value.numel() > 1
            and (value.shape != full_state_shape(placement, key) or is_composite(value))
            and is_sliced(bucket_of(placement))
        ]
    if wrong:
        lines = "\n\t".join(wrong)
        raise ValueError(
            f"the checkpoint's state does not fit {type(optimizer).__name__}; it has\n\t{lines}\n"
            "Resume with the model and the optimizer of the checkpoint, or load only the weights: "
            "lightning_zero.load_weights(module, path)."
        )


def _named_tensors(entry: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in entry.items():
        if isinstance(value, Mapping):
            yield from _named_tensors(value)
        elif isinstance(value, Tensor):
            yield key, value


def unshard_optimizer_state(
    optimizer: Optimizer, buckets: Sequence[Bucket], device: torch.device
) -> None:
    """Replaces sharded states by full tensors on `device`, on every rank. Collective."""

    def on_device(value: Tensor) -> Tensor:
        """A copy on `device`; a 0-dim tensor stays on its device."""
        return value.to(device if value.dim() else value.device, copy=True)

    unsharded = [
        (p, key, full.to(device, copy=True))
        for p, key, full in _unsharded_states(optimizer, buckets)
    ]
    owned = [(p, map_tensors(on_device, s)) for p, s in _gather_owned_states(optimizer, buckets)]
    states = raw_states(optimizer)
    states.update(owned)
    for parameter, key, full in unsharded:
        states[parameter][key] = full


def _unsharded_states(
    optimizer: Optimizer, buckets: Sequence[Bucket]
) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
    """Yields every elementwise state of sliced parameters as a full tensor.

    Collective: every rank must exhaust it.
    """
    mine, own = set(_parameter_ids(optimizer)), raw_states(optimizer)
    for bucket in filter(is_sliced, buckets):
        states = [own.get(p, {}) if p in mine else {} for p in bucket.parameters]
        keys = sorted({key for state in states for key in state})
        for key in keys:
            slices = [
                state.get(key)
                if bucket.shards.states.is_shard(index, key, state.get(key))
                else None
                for index, state in enumerate(states)
            ]
            if all(part is None for part in slices):
                continue
            views = bucket.masters.all_gather_state(key, slices)
            for index, part in enumerate(slices):
                if part is not None:
                    yield bucket.parameters[index], key, views[index]


class _ElementwiseKeys:
    """Keys of the states that are elementwise, for parameters with one element.

    A step counter and a moment of such a parameter may have the same shape. The states of other
    parameters decide, given as `entries` of (shape of the parameter, state); without such states, a
    probe decides. The entries may be sliced in place afterwards.
    """

    def __init__(
        self, optimizer: Optimizer, entries: Sequence[tuple[torch.Size, Mapping[str, Any]]]
    ) -> None:
        self._optimizer = optimizer
        self._is_elementwise: dict[str, bool] = {}  # by key
        for shape, entry in entries:
            for key, value in entry.items():
                if shape.numel() != 1 and isinstance(value, Tensor):
                    is_shaped = self._is_elementwise.get(key, True) and value.shape == shape
                    self._is_elementwise[key] = is_shaped

    def __contains__(self, key: str) -> bool:
        known = self._is_elementwise.get(key)
        return key in self._probed_keys if known is None else known

    @cached_property
    def _probed_keys(self) -> set[str]:
        state = probe_state(self._optimizer, torch.zeros(2))
        return {key for key, value in state.items() if is_elementwise_state(value, 2)}


def _is_shaped_like(shape: torch.Size, key: str, value: object, keys: _ElementwiseKeys) -> bool:
    if not isinstance(value, Tensor) or is_composite(value) or value.shape != shape:
        return False
    return shape.numel() != 1 or key in keys


def _is_full_state(placement: Placement, key: str, value: object, keys: _ElementwiseKeys) -> bool:
    """Whether `value` is a full state of which each rank has a shard."""
    if bucket_of(placement).shards.states.layouts.is_in_blocks(key):
        return isinstance(value, Tensor) and value.shape == full_state_shape(placement, key)
    return _is_shaped_like(placement.shape, key, value, keys)


def _parameter_ids(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Numbers of the parameters in a state dict of torch: by order in the groups."""
    return {p: number for number, p in enumerate(dict.fromkeys(parameters_of(optimizer)))}


# ---------------------------------------------------------------- states of full parameters


@dataclass(frozen=True)
class TensorSpec:
    """Description of a state tensor, which another rank may have.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        is_on_cpu: Whether the optimizer keeps the tensor on the CPU.
        number: Value of a 0-dim tensor; None for other tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool
    number: float | None

    @staticmethod
    def of(value: object) -> object:
        """Spec of a tensor; other values are returned as they are."""
        if not isinstance(value, Tensor):
            return value
        number = value.item() if value.dim() == 0 else None
        return TensorSpec(tuple(value.shape), value.dtype, value.device.type == "cpu", number)

    @property
    def nbytes(self) -> int:
        """Size in bytes, rounded up so that the next tensor is aligned."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


_StateSpecs = Mapping[nn.Parameter, Any]


def gather_owned_state_specs(optimizer: Optimizer, buckets: Sequence[Bucket]) -> _StateSpecs:
    """States of all owned parameters that have been stepped, with specs in place of tensors.

    Composite tensors are flattened. Collective: every rank.
    """
    own_buckets = _buckets_of(optimizer, buckets)
    if not own_buckets:
        return {}
    own_buckets[0].wait_for_all_steps()
    states = raw_states(optimizer)
    own = {
        (number, index): tree_map(TensorSpec.of, flatten_composites(states[parameter]))
        for number, bucket in enumerate(own_buckets)
        for index, parameter in enumerate(bucket.parameters)
        if bucket.shards.step_layout.is_stepped[index] and parameter in states
    }
    known: dict[tuple[int, int], Any] = {}
    for of_rank in own_buckets[0].comm.control.gather_objects(own):
        known.update(of_rank)
    return {own_buckets[number].parameters[i]: known[number, i] for number, i in sorted(known)}


def _gather_owned_states(
    optimizer: Optimizer, buckets: Sequence[Bucket]
) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yields every parameter that is stepped as a full tensor, with its state, on every rank.

    Gathers one bucket at a time; if every rank steps all parameters, it has their states. Tensors
    are views on the device, valid until the next one is yielded; 0-dim tensors that the optimizer
    keeps on the CPU are on the CPU. Collective: every rank must exhaust it.
    """
    for bucket in buckets:
        if bucket.shards.replicates_optim:
            states = raw_states(optimizer)  # a defaultdict: `states[p]` would create missing ones
            yield from ((p, states[p]) for p in bucket.parameters if p in states)
    specs = gather_owned_state_specs(optimizer, buckets)
    for bucket in _buckets_of(optimizer, buckets):
        for parameter, tensors in _gather_bucket(bucket, specs, optimizer).items():
            rest = iter(tensors)

            def restore(leaf: object, rest: Iterator[Tensor] = rest) -> object:
                if not isinstance(leaf, TensorSpec):
                    return leaf
                tensor = next(rest)
                return tensor.cpu() if leaf.is_on_cpu and not leaf.shape else tensor

            yield parameter, unflatten_composites(tree_map(restore, specs[parameter]))


def _buckets_of(optimizer: Optimizer, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Buckets with owned parameters of `optimizer`, in layout order."""
    members = set(parameters_of(optimizer))
    return [
        bucket
        for bucket in buckets
        if bucket.shards.has_tensor_owners and not members.isdisjoint(bucket.parameters)
    ]


def _gather_bucket(
    bucket: Bucket, specs: _StateSpecs, optimizer: Optimizer
) -> dict[nn.Parameter, list[Tensor]]:
    """State tensors by parameter: views of one buffer on the device. Collective: every rank."""
    comm, mesh = bucket.comm, bucket.comm.mesh
    by_owner: list[list[tuple[nn.Parameter, list[TensorSpec]]]] = [
        [] for _ in range(mesh.num_shards)
    ]
    for slot, parameter in zip(bucket.plan.layout.slots, bucket.parameters, strict=True):
        if parameter in specs:
            assert slot.owner is not None
            leaves = tree_leaves(specs[parameter])
            own = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
            by_owner[slot.owner].append((parameter, own))
    split_sizes = [
        max(_ALIGN_BYTES, sum(leaf.nbytes for _, leaves in owned for leaf in leaves))
        for owned in by_owner
    ]
    shard = torch.zeros(split_sizes[mesh.shard_rank], dtype=torch.uint8, device=comm.device)
    for parameter, views in _views_in(shard, by_owner[mesh.shard_rank]).items():
        values = plain_tensors(raw_states(optimizer)[parameter])
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
    states = f"states of {bucket.plan.name}"
    shards = comm.all_gather_shards(shard, states, split_sizes).split(split_sizes)
    found: dict[nn.Parameter, list[Tensor]] = {}
    for part, owned in zip(shards, by_owner, strict=True):
        found.update(_views_in(part, owned))
    return found


def _views_in(
    shard: Tensor, owned: Iterable[tuple[nn.Parameter, list[TensorSpec]]]
) -> dict[nn.Parameter, list[Tensor]]:
    """State tensors that one rank owns, by parameter: views of `shard`, one after another."""
    start = 0
    views: dict[nn.Parameter, list[Tensor]] = {}
    for parameter, leaves in owned:
        views[parameter] = []
        for leaf in leaves:
            part = shard[start : start + math.prod(leaf.shape) * leaf.dtype.itemsize]
            views[parameter].append(part.view(leaf.dtype).view(leaf.shape))
            start += leaf.nbytes
    return views
