"""Optimizer state between whole tensors and this rank's slices.

A state tensor is elementwise when it is shaped like its parameter (the whole one, or the slice that
the optimizer steps): Adam's moments. Others (step counters) are the same on every rank and stay as
they are.

[Note: Owned states] Where a rank owns whole parameters, it alone has their states, just as the
optimizer made them: of any shape (Adafactor's rows and columns), quantised, numbers, lists. What
other ranks need of them for a checkpoint is told by `TensorSpec`s, and the values by one gather for
each bucket, in which every rank sends what it owns.

States are saved as the optimizer keeps them, and not as a `state_dict` of its class may have
rearranged them (bitsandbytes hides them from FSDP in a dict of their own), for that has slices. The
class's `load_state_dict` takes either; dicts in a saved state are looked into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.shards import is_elementwise_state
from lightning_zero.optim.clone import parameters_of, probe_state
from lightning_zero.optim.state_view import is_sliced, local_part, raw_states, without_state_view
from lightning_zero.tensors.composite import (
    flatten_composites,
    is_composite,
    map_tensors,
    plain_tensors,
    unflatten_composites,
)
from lightning_zero.tensors.guarded import placement_of
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = [
    "TensorSpec",
    "swap_in_states",
    "check_sliced_states",
    "is_elementwise",
    "unshard_optimizer_state",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "gather_owned_state_specs",
    "shard_initial_state",
    "swap_out_states",
]

_ALIGN_BYTES = 16


def shard_initial_state(optimizer: Optimizer) -> None:
    """Replaces whole states that an optimizer was born with (Adagrad's sum) by this rank's part."""
    parameters = [key for key in optimizer.state if isinstance(key, Tensor)]
    entries = [(placement_of(p).shape, optimizer.state[p]) for p in parameters]
    keys = _ElementwiseKeys(optimizer, entries)
    for parameter in parameters:
        state = optimizer.state[parameter]  # under other keys are numbers of the optimizer
        if not _is_stepped(parameter):
            del optimizer.state[parameter]
            continue
        placement = placement_of(parameter)
        for key, value in state.items():
            if _is_shaped_like(placement.shape, key, value, keys):
                state[key] = bucket_of(placement).shards.slice_state(placement.index, value)


def check_sliced_states(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Refuses quantised states of a slice: their blocks begin elsewhere than on one rank."""
    placement = placement_of(parameter)
    if not is_sliced(bucket_of(placement)):
        return
    for key, value in raw_states(optimizer).get(parameter, {}).items():
        if is_composite(value):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps {key} of {placement.name} as "
                f"{type(value).__name__}, in blocks, and steps a slice of it: other values than on "
                "one rank. Leave assume_elementwise=False, so that it steps whole tensors; where "
                "it is, use stage 0."
            )


def swap_in_states(optimizer: Optimizer, bucket: Bucket) -> None:
    """Reads states from files into memory until `swap_out_states`: a method may write them."""
    states = raw_states(optimizer)
    for parameter in bucket.parameters:
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, LazyTensor):
                states[parameter][key] = value.read()


def swap_out_states(optimizer: Optimizer, bucket: Bucket) -> None:
    """States of `bucket` go to their files again."""
    states = raw_states(optimizer)
    for index, parameter in enumerate(bucket.parameters):
        if parameter in states:
            bucket.shards.adopt_state(index, states[parameter])


def optimizer_state_dict(
    optimizer: Optimizer, buckets: Sequence[Bucket], *, is_recipient: bool
) -> dict[str, Any]:
    """The state dict that the same optimizer would have without sharding, on the CPU. Collective.

    One bucket and one kind of state is gathered at a time. Ranks that are no recipients get an
    empty dict.
    """
    with without_state_view(optimizer):
        packed = optimizer.state_dict()
    ids, own = _parameter_ids(optimizer), raw_states(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for parameter, owned in _gather_owned_states(optimizer, buckets):
        if is_recipient:
            state[ids[parameter]] = map_tensors(lambda v: v.to("cpu", copy=True), owned)
    for member in ids.keys() & own.keys():
        # Never write into the optimizer's own.
        state.setdefault(ids[member], dict(own[member]))
    for parameter, key, joined in _unsharded_states(optimizer, buckets):
        if is_recipient:
            state[ids[parameter]][key] = joined.to("cpu", copy=True)
    if not is_recipient:
        return {}
    of_no_member = {k: v for k, v in packed["state"].items() if k not in set(ids.values())}
    packed["state"] = {
        number: {key: v.cpu() if isinstance(v, Tensor) else v for key, v in state[number].items()}
        for number in sorted(state)
    } | of_no_member
    return packed


def load_optimizer_state_dict(
    optimizer: Optimizer, buckets: Sequence[Bucket], state_dict: Mapping[str, Any]
) -> None:
    """Loads a state dict of whole tensors; each rank reads and keeps its own elements. Local.

    Args:
        optimizer: Its state and the options of its groups are replaced.
        buckets: All buckets of the engine.
        state_dict: As `torch.optim.Optimizer.state_dict` gives it; its tensors may be stored ones.

    Raises:
        ValueError: It does not fit the optimizer. Nothing has been changed.
    """
    parameters = parameters_of(optimizer)
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    _check_states(optimizer, by_number, state_dict)
    shapes = {number: placement_of(p).shape for number, p in by_number.items()}
    entries = state_dict["state"]
    keys = _ElementwiseKeys(optimizer, [(shapes[number], entries[number]) for number in entries])
    in_files = {p for p in parameters if bucket_of(placement_of(p)).shards.keeps_states_in_files}
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
    # The optimizer casts state to its parameters' dtype and device: they must be the masters then.
    mine = set(parameters) - in_files
    own_buckets = [bucket for bucket in buckets if not mine.isdisjoint(bucket.parameters)]
    for bucket in own_buckets:
        bucket.masters.enter_step(has_grads=False)
    try:
        with without_state_view(optimizer):
            optimizer.load_state_dict({**state_dict, "state": state})
    finally:
        for bucket in own_buckets:
            bucket.masters.leave_step(is_changed=False)
    for number, entry in entries.items():
        if by_number[number] in in_files:
            _load_into_files(by_number[number], entry, keys, raw_states(optimizer))


def _load_into_files(
    parameter: nn.Parameter,
    entry: Mapping[str, Any],
    keys: _ElementwiseKeys,
    states: dict[Any, Any],
) -> None:
    """Moves elementwise states to their files, one after another: memory holds one of them."""
    placement = placement_of(parameter)
    for key, value in entry.items():
        if _is_shaped_like(placement.shape, key, value, keys):
            part = {key: _own_part(parameter, key, value, keys)}
            bucket_of(placement).shards.adopt_state(placement.index, part)
            states[parameter].update(part)


def _own_part(parameter: nn.Parameter, key: str, value: object, keys: _ElementwiseKeys) -> object:
    placement = placement_of(parameter)
    if isinstance(value, dict):
        return {name: _own_part(parameter, name, part, keys) for name, part in value.items()}
    if isinstance(value, ShardedTensor):
        return local_part(parameter, value)
    is_cut = not bucket_of(placement).shards.has_tensor_owners
    if is_cut and _is_shaped_like(placement.shape, key, value, keys):
        assert isinstance(value, Tensor)
        return bucket_of(placement).shards.slice_state(placement.index, value)
    return map_tensors(Tensor.clone, value)  # a copy of what may be mapped from a file


def _is_stepped(parameter: Tensor) -> bool:
    placement = placement_of(parameter)
    return bucket_of(placement).shards.is_stepped[placement.index]


def _check_states(
    optimizer: Optimizer, by_number: Mapping[int, nn.Parameter], state_dict: Mapping[str, Any]
) -> None:
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    wrong = []
    if saved != own:
        wrong.append(f"groups of {saved} parameters, and the optimizer has groups of {own}")
    for number, entry in state_dict["state"].items():
        if number not in by_number:
            if saved == own:
                wrong.append(f"a state of parameter {number}, which is in no group")
            continue
        placement = placement_of(by_number[number])
        wrong += [
            f"{key} of {placement.name} as a {type(value).__name__} of shape "
            f"{tuple(value.shape)}, and slices of {tuple(placement.shape)} are stepped"
            for key, value in _named_tensors(entry)
            if value.numel() > 1
            and (value.shape != placement.shape or is_composite(value))
            and is_sliced(bucket_of(placement))
        ]
    if wrong:
        lines = "\n\t".join(wrong)
        raise ValueError(
            f"the checkpoint's state does not fit {type(optimizer).__name__}; it has\n\t{lines}\n"
            "Resume with the model and the optimizer that were saved, or load the weights alone: "
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
    """Replaces slices by whole tensors on `device`, on every rank. Collective."""

    def at_home(value: Tensor) -> Tensor:
        """A copy on `device`, or on the CPU for a number that the optimizer keeps there."""
        return value.to(device if value.dim() else value.device, copy=True)

    joined = [
        (p, key, whole.to(device, copy=True))
        for p, key, whole in _unsharded_states(optimizer, buckets)
    ]
    owned = [(p, map_tensors(at_home, s)) for p, s in _gather_owned_states(optimizer, buckets)]
    states = raw_states(optimizer)
    states.update(owned)
    for parameter, key, whole in joined:
        states[parameter][key] = whole


def _unsharded_states(
    optimizer: Optimizer, buckets: Sequence[Bucket]
) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
    """Every elementwise state of what is sliced, whole. Collective: exhaust it on every rank."""
    mine, own = set(_parameter_ids(optimizer)), raw_states(optimizer)
    for bucket in filter(is_sliced, buckets):
        states = [own.get(p, {}) if p in mine else {} for p in bucket.parameters]
        keys = sorted({key for state in states for key in state})
        for key in keys:
            slices = [
                state.get(key) if is_elementwise(bucket, index, state.get(key)) else None
                for index, state in enumerate(states)
            ]
            if all(part is None for part in slices):
                continue
            views = bucket.masters.all_gather_state(slices)
            for index, part in enumerate(slices):
                if part is not None:
                    yield bucket.parameters[index], key, views[index]


class _ElementwiseKeys:
    """Which states have one number for each element, where shapes do not tell.

    Of a parameter without dimensions a counter of steps and a moment have one shape. The same keys
    of other parameters tell, `entries` of (shape of the parameter, state), else a step of a toy.
    """

    def __init__(
        self, optimizer: Optimizer, entries: Sequence[tuple[torch.Size, Mapping[str, Any]]]
    ) -> None:
        self._optimizer = optimizer
        self._entries = [(shape, entry) for shape, entry in entries if shape]

    def __contains__(self, key: str) -> bool:
        for shape, entry in self._entries:
            if isinstance(value := entry.get(key), Tensor):
                return value.shape == shape
        return key in self._probed_keys

    @cached_property
    def _probed_keys(self) -> set[str]:
        state = probe_state(self._optimizer, torch.zeros(2))
        return {key for key, value in state.items() if is_elementwise_state(value, 2)}


def _is_shaped_like(shape: torch.Size, key: str, value: object, keys: _ElementwiseKeys) -> bool:
    if not isinstance(value, Tensor) or is_composite(value) or value.shape != shape:
        return False
    return bool(shape) or key in keys


def is_elementwise(bucket: Bucket, index: int, value: object) -> bool:
    """Whether a state of slot `index` has one number for each element that this rank steps."""
    return is_elementwise_state(value, len(bucket.owned(index)))


def _parameter_ids(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Numbers as torch gives them in a state dict: by order in the groups."""
    return {p: number for number, p in enumerate(dict.fromkeys(parameters_of(optimizer)))}


# ---------------------------------------------------------------- states of whole parameters


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that another rank may hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool  # the optimizer keeps it there
    number: float | None  # its value, where it has no dimensions

    @staticmethod
    def of(value: object) -> object:
        """The outline of a tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        number = value.item() if value.dim() == 0 else None
        return TensorSpec(tuple(value.shape), value.dtype, value.device.type == "cpu", number)

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up so that what follows is aligned."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


_StateSpecs = Mapping[nn.Parameter, Any]


def gather_owned_state_specs(optimizer: Optimizer, buckets: Sequence[Bucket]) -> _StateSpecs:
    """By owned parameter that has been stepped, its state with an outline for every tensor.

    Tensors made of tensors are taken apart. Collective: every rank.
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
        if bucket.shards.is_stepped[index] and parameter in states
    }
    known: dict[tuple[int, int], Any] = {}
    for of_rank in own_buckets[0].comm.control.gather_objects(own):
        known.update(of_rank)
    return {own_buckets[number].parameters[i]: known[number, i] for number, i in sorted(known)}


def _gather_owned_states(
    optimizer: Optimizer, buckets: Sequence[Bucket]
) -> Iterator[tuple[nn.Parameter, Any]]:
    """Every parameter that is stepped whole, with its state, on every rank.

    Collective: exhaust it on every rank. One bucket is gathered at a time; where every rank steps
    all parameters, each has their states. Tensors are views on the device, to be copied at once;
    those that the optimizer keeps on the CPU and that have no dimensions are there.
    """
    for bucket in buckets:
        if bucket.replicates_optim:
            states = raw_states(optimizer)  # a defaultdict: not to be asked for what it lacks
            yield from ((p, states[p]) for p in bucket.parameters if p in states)
    outlines = gather_owned_state_specs(optimizer, buckets)
    for bucket in _buckets_of(optimizer, buckets):
        for parameter, tensors in _gather_bucket(bucket, outlines, optimizer).items():
            rest = iter(tensors)

            def restore(leaf: object, rest: Iterator[Tensor] = rest) -> object:
                if not isinstance(leaf, TensorSpec):
                    return leaf
                tensor = next(rest)
                return tensor.cpu() if leaf.is_on_cpu and not leaf.shape else tensor

            yield parameter, unflatten_composites(tree_map(restore, outlines[parameter]))


def _buckets_of(optimizer: Optimizer, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those with owned parameters of `optimizer`, in layout order."""
    members = set(parameters_of(optimizer))
    return [
        bucket
        for bucket in buckets
        if bucket.shards.has_tensor_owners and not members.isdisjoint(bucket.parameters)
    ]


def _gather_bucket(
    bucket: Bucket, outlines: _StateSpecs, optimizer: Optimizer
) -> dict[nn.Parameter, list[Tensor]]:
    """By parameter, the tensors of its state: views of one buffer on the device. Collective."""
    comm, mesh = bucket.comm, bucket.comm.mesh
    by_owner: list[list[tuple[nn.Parameter, list[TensorSpec]]]] = [
        [] for _ in range(mesh.num_shards)
    ]
    for slot, parameter in zip(bucket.plan.layout.slots, bucket.parameters, strict=True):
        if parameter in outlines:
            assert slot.owner is not None
            leaves = tree_leaves(outlines[parameter])
            own = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
            by_owner[slot.owner].append((parameter, own))
    cuts = [
        max(_ALIGN_BYTES, sum(leaf.nbytes for _, leaves in owned for leaf in leaves))
        for owned in by_owner
    ]
    buffer = torch.zeros(sum(cuts), dtype=torch.uint8, device=comm.device)
    views: dict[nn.Parameter, list[Tensor]] = {}
    for owned, start in zip(by_owner, accumulate([0, *cuts[:-1]]), strict=True):
        for parameter, leaves in owned:
            views[parameter] = []
            for leaf in leaves:
                numel = math.prod(leaf.shape)
                part = buffer[start : start + numel * leaf.dtype.itemsize]
                views[parameter].append(part.view(leaf.dtype).view(leaf.shape))
                start += leaf.nbytes
    for parameter, _ in by_owner[mesh.shard_rank]:
        values = plain_tensors(raw_states(optimizer)[parameter])
        for view, value in zip(views[parameter], values, strict=True):
            view.copy_(value)
    comm.all_gather(buffer, f"states of {bucket.plan.name}", split_sizes=cuts).wait()
    return views
