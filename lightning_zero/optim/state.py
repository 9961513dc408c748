"""Optimizer state between whole tensors and this rank's slices.

A state tensor is elementwise when it is shaped like its parameter (the whole one, or the slice that
the optimizer steps): Adam's moments. Others (step counters) are the same on every rank and stay as
they are. Where a rank owns whole parameters, it alone has all of their states (owned_state.py).

States are saved as the optimizer keeps them, and not as a `state_dict` of its class may have
rearranged them (bitsandbytes hides them from FSDP in a dict of their own), for that has slices. The
class's `load_state_dict` takes either; dicts in a saved state are looked into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.shards import SCALAR_KEYS, is_elementwise_state
from lightning_zero.optim.owned_state import gather_owned_states
from lightning_zero.tensors.composite import is_composite, map_tensors
from lightning_zero.tensors.guarded import placement_of

__all__ = [
    "check_slice",
    "is_elementwise",
    "join_optimizer_state",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "shard_initial_state",
]


def shard_initial_state(optimizer: Optimizer) -> None:
    """Replaces whole states that an optimizer was born with (Adagrad's sum) by this rank's part."""
    for parameter, state in list(optimizer.state.items()):
        placement = placement_of(parameter)
        if not bucket_of(placement).shards.is_stepped[placement.index]:
            del optimizer.state[parameter]
            continue
        for key, value in state.items():
            if _is_shaped_like(placement.shape, key, value):
                state[key] = bucket_of(placement).shards.slice_state(placement.index, value)


def check_slice(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Refuses quantised states of a slice: their blocks begin elsewhere than on one rank.

    Raises:
        RuntimeError: The optimizer has some, and was taken to treat every element by itself.
    """
    placement = placement_of(parameter)
    if bucket_of(placement).steps_whole or bucket_of(placement).shards.holds_whole_tensors:
        return
    for key, value in optimizer.state.get(parameter, {}).items():
        if is_composite(value):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps {key} of {placement.name} as "
                f"{type(value).__name__}, in blocks, and steps a slice of it: other values than on "
                "one rank. Leave assume_elementwise=False, so that it steps whole tensors; where "
                "it is, use stage 0."
            )


def optimizer_state_dict(
    optimizer: Optimizer, buckets: Sequence[Bucket], *, is_recipient: bool
) -> dict[str, Any]:
    """The state dict that the same optimizer would have without sharding, on the CPU. Collective.

    One bucket and one kind of state is gathered at a time.

    Args:
        optimizer: Its state is slices.
        buckets: All buckets of the engine.
        is_recipient: Whether this rank wants the result; the others get an empty dict.
    """
    packed = optimizer.state_dict()
    ids = _parameter_ids(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for parameter, owned in gather_owned_states(optimizer, buckets):
        if is_recipient:
            state[ids[parameter]] = map_tensors(_on_cpu, owned)
    for member in ids.keys() & optimizer.state.keys():
        # Never write into the optimizer's own.
        state.setdefault(ids[member], dict(optimizer.state[member]))
    for parameter, key, joined in _joined(optimizer, buckets):
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
        ValueError: States shaped neither like their parameter nor like a scalar, of parameters that
            are not there, or other groups than the optimizer's. Nothing has been changed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    _check_states(optimizer, by_number, state_dict)
    in_files = {p for p in parameters if bucket_of(placement_of(p)).shards.keeps_states_in_files}
    state = {
        number: {
            key: _own_part(by_number[number], key, value)
            for key, value in entry.items()
            if by_number[number] not in in_files or key == "step"
        }
        for number, entry in state_dict["state"].items()
        if _is_stepped(by_number[number])
    }
    # The optimizer casts state to its parameters' dtype and device: they must be the masters then.
    mine = set(parameters) - in_files
    with _as_stepped([b for b in buckets if any(p in mine for p in b.parameters)]):
        optimizer.load_state_dict({**state_dict, "state": state})
    for number, entry in state_dict["state"].items():
        if by_number[number] in in_files:
            _load_into_files(by_number[number], entry, optimizer.state[by_number[number]])


def _load_into_files(
    parameter: nn.Parameter, entry: Mapping[str, Any], state: dict[str, Any]
) -> None:
    """Moves all states but the step to their files, one after another: memory holds one of them."""
    placement = placement_of(parameter)
    for key, value in entry.items():
        if key != "step":
            part = {key: _own_part(parameter, key, value)}
            bucket_of(placement).shards.adopt_state(placement.index, part)
            state.update(part)


def _own_part(parameter: nn.Parameter, key: str, value: object) -> object:
    placement = placement_of(parameter)
    if isinstance(value, dict):
        return {name: _own_part(parameter, name, part) for name, part in value.items()}
    is_cut = not bucket_of(placement).shards.holds_whole_tensors
    if is_cut and isinstance(value, Tensor) and _is_shaped_like(placement.shape, key, value):
        return bucket_of(placement).shards.slice_state(placement.index, value)
    return map_tensors(Tensor.clone, value)  # a copy of what may be mapped from a file


def _is_stepped(parameter: nn.Parameter) -> bool:
    placement = placement_of(parameter)
    return bucket_of(placement).shards.is_stepped[placement.index]


def _on_cpu(value: Tensor) -> Tensor:
    return value.to("cpu", copy=True)


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
            and not bucket_of(placement).steps_whole
            and not bucket_of(placement).shards.holds_whole_tensors
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


def join_optimizer_state(
    optimizer: Optimizer, buckets: Sequence[Bucket], device: torch.device
) -> None:
    """Replaces slices by whole tensors on `device`, on every rank. Collective."""
    joined = [
        (parameter, key, whole.to(device, copy=True))
        for parameter, key, whole in _joined(optimizer, buckets)
    ]
    owned = [
        (parameter, map_tensors(partial(_at_home, device), state))
        for parameter, state in gather_owned_states(optimizer, buckets)
    ]
    for parameter, state in owned:
        optimizer.state[parameter] = state
    for parameter, key, whole in joined:
        optimizer.state[parameter][key] = whole


def _at_home(device: torch.device, value: Tensor) -> Tensor:
    """A copy on `device`, or on the CPU for a number that the optimizer keeps there."""
    return value.to(device if value.dim() else value.device, copy=True)


def _joined(
    optimizer: Optimizer, buckets: Sequence[Bucket]
) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
    """Every elementwise state of what is sliced, whole. Collective: exhaust it on every rank."""
    mine = set(_parameter_ids(optimizer))
    for bucket in buckets:
        if bucket.steps_whole or bucket.shards.holds_whole_tensors:
            continue
        states = [optimizer.state.get(p, {}) if p in mine else {} for p in bucket.parameters]
        keys = sorted({key for state in states for key in state})
        for key in keys:
            slices = [
                state.get(key) if is_elementwise(bucket, index, key, state.get(key)) else None
                for index, state in enumerate(states)
            ]
            if all(part is None for part in slices):
                continue
            views = bucket.masters.join_state(slices)
            for index, part in enumerate(slices):
                if part is not None:
                    yield bucket.parameters[index], key, views[index]


def _is_shaped_like(shape: torch.Size, key: str, value: object) -> bool:
    if not isinstance(value, Tensor) or is_composite(value):
        return False
    return value.shape == shape and key not in SCALAR_KEYS


def is_elementwise(bucket: Bucket, index: int, key: str, value: object) -> bool:
    """Whether a state of slot `index` has one number for each element that this rank steps."""
    if bucket.steps_whole and isinstance(value, Tensor) and value.dim() == 0:
        return key not in SCALAR_KEYS and value.numel() == len(bucket.owned(index))
    return is_elementwise_state(key, value, len(bucket.owned(index)))


def _parameter_ids(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Numbers as torch gives them in a state dict: by order in the groups."""
    ids: dict[nn.Parameter, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ids.setdefault(parameter, len(ids))
    return ids


@contextmanager
def _as_stepped(buckets: Sequence[Bucket]) -> Iterator[None]:
    for bucket in buckets:
        bucket.masters.enter_step(has_grads=False)
    try:
        yield
    finally:
        for bucket in buckets:
            bucket.masters.leave_step(is_changed=False)
