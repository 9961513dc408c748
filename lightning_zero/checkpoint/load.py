"""Whole tensors of a checkpoint into a module and its optimizers: each rank reads its own elements.

An optimizer's state may come by number, as torch's optimizers save it, or by parameter name,
`{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`: so FSDP2's and sharded
checkpoints have it, and so it comes from other systems, whose groups may be others.

[Note: Loading without copying] `Module.load_state_dict` is more than a copy: hooks rename entries,
modules keep to older versions, errors are collected. So it runs as it is, and only its copies are
taken down instead of carried out. Where it raises, nothing has been changed yet. Where it does not,
buffers are copied whole, and a bucket takes this rank's elements of its parameters, straight into
the master. The exception is a module with loading code of its own (`_load_from_state_dict` or
`load_state_dict` overridden, a hook for after loading), which may look at what was loaded: its
parameters are gathered and loaded at once, those of other modules are not.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.source import (
    find_damage,
    open_checkpoint,
    raise_damage,
    raise_damage_on_any_rank,
)
from lightning_zero.core.access import gathered
from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.building import partial_of
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import saved_name, with_compiled_names
from lightning_zero.optim.state import load_optimizer_state_dict
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tensors.lazy import values_reader
from lightning_zero.tensors.meta import accepting_pending_values, is_dropped, set_pending_values

__all__ = ["load_masters", "load_module", "load_optimizer", "load_weights"]

# ----------------------------------------------------------------------------------------- modules


def load_weights(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    weights_only: bool | None = None,
    verify: bool = True,
) -> tuple[list[str], list[str]]:
    """Loads the weights of a checkpoint of any format into a module, held by an engine or not.

    Collective where an engine holds the module: every rank. Each reads its own part of the file.
    What is on the meta device is read when the engine takes the module over, each rank its part.

    Args:
        module: A `LightningModule`, or the part of one that the names in the checkpoint begin with.
        path: See `open_checkpoint` for what is accepted.
        strict: Names that are missing or unexpected are an error, as for `load_state_dict`.
        weights_only: As for `torch.load`.
        verify: Compare the file with its checksums, where it has any: all of it is read for
            that, by the ranks together where an engine holds the module.

    Returns:
        The missing and the unexpected names.

    Raises:
        RuntimeError: Names or shapes do not match; nothing has been changed.
        ValueError: The file is damaged; nothing has been changed.
        FileNotFoundError, ValueError: See `open_checkpoint`.
    """
    if verify:
        _verify(module, path)
    opened = open_checkpoint(path, weights_only=weights_only)
    awaited: dict[str, Tensor] = {}
    with accepting_pending_values(module):
        result = load_module(module, opened["state_dict"], strict=strict, awaited=awaited)
        set_pending_values(module, awaited)
    return result


def _verify(module: nn.Module, path: str | os.PathLike[str]) -> None:
    # Which parameters are in parts while a module is built may differ by rank.
    held = [p for p in module.parameters() if has_placement(p) and partial_of(p) is None]
    held = [p for p in held if not is_dropped(p)]
    if held:
        comm = bucket_of(placement_of(held[0])).comm
        raise_damage_on_any_rank(path, comm.rank, comm.size, comm.control.gather_objects)
    else:
        raise_damage(path, find_damage(path))


def load_module(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    awaited: dict[str, Tensor] | None = None,
) -> tuple[list[str], list[str]]:
    """`module.load_state_dict`, of which each rank reads its own elements; masters follow.

    See [Note: Loading without copying]. Of tied weights, one name in the state dict is enough.

    Collective where an engine holds the module: the same on every rank. Beside the shards it takes
    the memory of one tensor's part, and of the buckets of modules with loading code of their own.

    `awaited` gets, by name, what is meant for parameters and buffers on the meta device, for
    `set_pending_values`; without it those are an error.

    Returns:
        The missing and the unexpected names.

    Raises:
        RuntimeError: All missing and unexpected names, if strict, and all wrong shapes.
        ValueError: Parameters or buffers on the meta device.
    """
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    buffers: dict[Tensor, str] = {b: name for name, b in module.named_buffers()}
    # What is being built has no memory for all of its values either.
    in_parts = {t for t in names if isinstance(t, nn.Parameter) and partial_of(t) is not None}
    everything = {**names, **buffers}
    on_meta = {t: name for t, name in everything.items() if t.is_meta or t in in_parts}
    if on_meta and awaited is None:
        raise _no_memory(next(iter(on_meta.values())))
    custom = _with_custom_loading(module)
    held = [tensor for tensor in custom if isinstance(tensor, nn.Parameter)]
    recorder = _CopyRecorder({*names, *buffers} - custom.keys() | set(on_meta))
    with gathered(held, writeback=True), recorder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # see `awaited`
        entries = _with_ties(module, with_compiled_names(module, state_dict))
        result = _load(module, entries, strict=strict)
    sources = recorder.sources
    for tensor, name in on_meta.items():
        if tensor in sources and awaited is not None:
            awaited[name] = sources.pop(tensor)
        elif tensor in names and name not in result.missing_keys:
            raise _no_memory(name)  # code of its own has written it, to nowhere
    _copy_sources(sources)
    return list(result.missing_keys), list(result.unexpected_keys)


def _load(module: nn.Module, entries: Mapping[str, Any], *, strict: bool) -> Any:
    """`module.load_state_dict`, which also knows entries that a module saves and does not load.

    bitsandbytes' 4-bit layers save the scales of their codes beside them, and leave it to others to
    load them: here they are copied into the tensors that the module would save.
    """
    tensors = (module.named_parameters, module.named_buffers)
    named = {name for of_kind in tensors for name, _ in of_kind(remove_duplicate=False)}
    beside = (entries.keys() - named) and entries.keys() & _extra_tensors(module).keys()
    if not beside:
        return module.load_state_dict(entries, strict=strict)
    result: Any = module.load_state_dict(entries, strict=False)
    own = [name for name in result.unexpected_keys if name in beside]
    result.unexpected_keys[:] = [name for name in result.unexpected_keys if name not in beside]
    if strict:
        _check_keys(module, result)
    saved = _extra_tensors(module)
    with torch.no_grad():
        for name in own:
            if saved[name].shape == entries[name].shape:
                saved[name].copy_(entries[name])
    saved = _extra_tensors(module)  # what is made for saving has other values still
    result.unexpected_keys.extend(
        name for name in own if not torch.equal(saved[name].cpu(), entries[name].cpu())
    )
    if strict:
        _check_keys(module, result)
    return result


def _check_keys(module: nn.Module, result: Any) -> None:
    """Raises as `Module.load_state_dict` does where it is strict."""
    keys_of = {"Missing": result.missing_keys, "Unexpected": result.unexpected_keys}
    errors = [
        f"{kind} key(s) in state_dict: {', '.join(map(repr, keys))}. "
        for kind, keys in keys_of.items()
        if keys
    ]
    if errors:
        found = "\n\t".join(errors)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{found}"
        )


def _extra_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules with saving code of their own save beside parameters and buffers."""
    saved: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        if _is_overridden(part._save_to_state_dict):
            entries: dict[str, Any] = {}
            part._save_to_state_dict(entries, prefix and f"{prefix}.", keep_vars=True)
            own = {*part._parameters, *part._buffers}
            for name, value in entries.items():
                is_own = name.removeprefix(f"{prefix}.") in own
                if isinstance(value, Tensor) and not is_own and not value.is_meta:
                    saved[name] = value
    return saved


def _no_memory(name: str) -> ValueError:
    return ValueError(
        f"{name} is on the meta device and has no memory to load into; materialise the "
        "module first (module.to_empty(device=...))."
    )


def load_masters(engine: Engine, masters: Mapping[str, Tensor]) -> None:
    """Puts back what `narrow_masters` took. Collective: the same on every rank."""
    for bucket in engine.buckets:
        slots = enumerate(bucket.plan.layout.slots)
        values = {index: masters[slot.name] for index, slot in slots if slot.name in masters}
        if values:
            bucket.masters.load(values_reader(values))


def _copy_sources(sources: Mapping[Tensor, Tensor]) -> None:
    """Copies each source into its target: a shard of a bucket, or a tensor that no engine holds."""
    buckets: dict[Bucket, dict[int, Tensor]] = {}
    for target, source in sources.items():
        if has_placement(target):
            placement = placement_of(target)
            buckets.setdefault(bucket_of(placement), {})[placement.index] = source
        else:
            with torch.no_grad():
                target.copy_(source)
    for bucket, values in buckets.items():
        bucket.masters.load(values_reader(values))


class _CopyRecorder(TorchFunctionMode):
    """Takes down copies into certain tensors instead of making them."""

    def __init__(self, targets: Iterable[Tensor]) -> None:
        super().__init__()
        self.sources: dict[Tensor, Tensor] = {}  # by target, in the order of the first copy
        self._targets = set(targets)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.copy_ and args[0] in self._targets:
            self.sources[args[0]] = args[1]
            return args[0]
        return func(*args, **(kwargs or {}))


def _with_custom_loading(module: nn.Module) -> dict[Tensor, None]:
    """Parameters and buffers of modules with loading code of their own, and of those inside.

    In an order that is the same on every rank.
    """
    if _is_overridden(module.load_state_dict):
        return dict.fromkeys((*module.parameters(), *module.buffers()))
    looking = [
        part
        for part in module.modules()
        if part._load_state_dict_post_hooks or _is_overridden(part._load_from_state_dict)
    ]
    return {t: None for part in looking for t in (*part.parameters(), *part.buffers())}


def _is_overridden(method: Any) -> bool:
    """Whether a method is not torch's own: torch's modules keep to what a state dict holds."""
    return not str(getattr(method, "__module__", "")).startswith("torch.")


def _with_ties(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with an entry for every name of a tied parameter that has one for any."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    complete: OrderedDict[str, Any] = OrderedDict(state_dict)
    for names in names_of.values():
        present = [name for name in names if name in state_dict]
        for name in names if present else ():
            complete.setdefault(name, state_dict[present[0]])
    if len(complete) == len(state_dict):
        return state_dict
    if hasattr(state_dict, "_metadata"):
        complete._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return complete


# -------------------------------------------------------------------------------------- optimizers


def load_optimizer(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a saved optimizer state of whole tensors, by number or by name, or changes nothing.

    Raises:
        ValueError: It does not fit the optimizer.
    """
    keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    if any(isinstance(key, str) for key in keys):
        state = _numbered(engine.module, optimizer, state)
    load_optimizer_state_dict(optimizer, engine.buckets, state)


def _numbered(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state with the numbers and the groups of `optimizer`."""
    named = module.named_parameters(remove_duplicate=False)
    own = {saved_name(name): parameter for name, parameter in named}
    group_of = {
        own.get(saved_name(name)): group
        for group in state["param_groups"]
        for name in group["params"]
    }
    owner_of = {name: own.get(saved_name(name)) for name in state["state"]}
    _check_names(optimizer, owner_of, group_of)
    entry_of = {owner_of[name]: entry for name, entry in state["state"].items()}
    states: dict[int, Any] = {}
    groups = []
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        numbers = range(number, number + len(group["params"]))
        number = numbers.stop
        for key, parameter in zip(numbers, group["params"], strict=True):
            if parameter in entry_of:
                states[key] = entry_of[parameter]
        saved = _one_group(index, [group_of[p] for p in group["params"] if p in group_of])
        options = {key: value for key, value in group.items() if key != "params"}
        options |= {k: v for k, v in saved.items() if k in options or k == "initial_lr"}
        groups.append({**options, "params": list(numbers)})
    return {"state": states, "param_groups": groups}


def _one_group(index: int, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options that all of these groups have in common with each other, params aside."""
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    if any(other != options[0] for other in options[1:]):
        raise ValueError(
            f"the optimizer's group {index} was several groups with different options when it was "
            "saved; resume with the groups that were saved."
        )
    return options[0] if options else {}


def _check_names(
    optimizer: Optimizer,
    owner_of: Mapping[str, nn.Parameter | None],
    group_of: Mapping[nn.Parameter | None, Any],
) -> None:
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    absent = [
        placement_of(p).name for p in mine if p.requires_grad and owner_of and p not in group_of
    ]
    foreign = [name for name, parameter in owner_of.items() if parameter not in mine]
    parts = []
    if absent:
        parts.append(f"no state for {', '.join(sorted(absent))}")
    if foreign:
        parts.append(f"states for {', '.join(foreign)}, which the optimizer does not have")
    if parts:
        raise ValueError(
            f"the checkpoint's state does not fit {type(optimizer).__name__}: it has "
            f"{' and '.join(parts)}. Resume with the model and the optimizer that were saved, or "
            "load the weights alone: lightning_zero.load_weights(module, path)."
        )
