"""Loads full tensors of a checkpoint into a module and its optimizers; ranks read their elements.

An optimizer's state may be by number, as torch's optimizers save it, or by parameter name,
`{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`. FSDP2's and sharded
checkpoints have names; so do those of other systems, whose parameter groups may differ.

[Note: Loading without copying] `Module.load_state_dict` is more than a copy: hooks rename entries,
modules support older versions, errors are collected. It therefore runs unchanged, but its copies
are recorded instead of executed. If it raises, nothing has changed yet. Otherwise buffers are
copied entirely, and each bucket reads this rank's elements of its parameters directly into the
masters. The exceptions are modules with custom loading code (an overridden `_load_from_state_dict`
or `load_state_dict`, or a hook after loading), which may read the loaded values: their parameters
are unsharded and loaded immediately; those of other modules are not.
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
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of
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
    """Loads the weights of a checkpoint of any format into a module, with or without an engine.

    Collective if an engine holds the module: every rank. Each rank reads its own part of the file.
    When an engine wraps the module, each rank reads its part of the values for tensors on the meta
    device.

    Args:
        module: A `LightningModule`, or the submodule of one at which the checkpoint's names start.
        path: Path or address of the checkpoint; for the formats see `open_checkpoint`.
        strict: Missing or unexpected names are an error, as for `load_state_dict`.
        weights_only: As for `torch.load`.
        verify: Compare the file with its checksums, if it has any. This reads all of the file; if
            an engine holds the module, the ranks share the work.

    Returns:
        The missing names and the unexpected names.

    Raises:
        RuntimeError: Names or shapes do not match; the module is unchanged.
        ValueError: The file is damaged; the module is unchanged.
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
    sharded = [p for p in module.parameters() if has_placement(p) and not is_dropped(p)]
    if sharded:
        comm = bucket_of(placement_of(sharded[0])).comm
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
    """Like `module.load_state_dict`, but each rank reads its own elements, into the masters, too.

    See [Note: Loading without copying]. For tied weights, one name in the state dict is enough.

    Collective if an engine holds the module: every rank, with the same arguments. Besides the
    shards it needs memory for this rank's part of one tensor, and for the buckets of modules with
    custom loading code.

    Args:
        module: Module to be loaded.
        state_dict: Full tensors by name; they may be `LazyTensor`s.
        strict: Missing or unexpected names are an error.
        awaited: Receives, by name, the values for parameters and buffers on the meta device, for
            `set_pending_values`. None: tensors on the meta device are an error.

    Returns:
        The missing names and the unexpected names.

    Raises:
        RuntimeError: Names are missing or unexpected, if strict, or shapes are wrong; lists all.
        ValueError: A parameter or buffer is on the meta device, and `awaited` is None.
    """
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    buffers: dict[Tensor, str] = {b: name for name, b in module.named_buffers()}
    on_meta = {t: name for t, name in {**names, **buffers}.items() if t.is_meta}
    if on_meta and awaited is None:
        raise _no_memory(next(iter(on_meta.values())))
    custom = _with_custom_loading(module)
    custom_params = [tensor for tensor in custom if isinstance(tensor, nn.Parameter)]
    recorder = _CopyRecorder({*names, *buffers} - custom.keys() | set(on_meta))
    with gathered(custom_params, writeback=True), recorder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # see `awaited`
        entries = _with_ties(module, with_compiled_names(module, state_dict))
        result = _load(module, entries, strict=strict)
    sources = recorder.sources
    for tensor, name in on_meta.items():
        if tensor in sources and awaited is not None:
            awaited[name] = sources.pop(tensor)
        elif tensor in names and name not in result.missing_keys:
            raise _no_memory(name)  # custom loading code has written to it, without effect
    _copy_sources(sources)
    return list(result.missing_keys), list(result.unexpected_keys)


def _load(module: nn.Module, entries: Mapping[str, Any], *, strict: bool) -> Any:
    """Calls `module.load_state_dict`, and loads entries that modules save but do not load.

    bitsandbytes' 4-bit layers save the scales of their codes as extra entries and do not load them:
    here they are copied into the tensors that the module would save.
    """
    iterators = (module.named_parameters, module.named_buffers)
    named = {name for iterator in iterators for name, _ in iterator(remove_duplicate=False)}
    extra: set[str] = set()
    if entries.keys() - named:
        extra = entries.keys() & _extra_tensors(module).keys()
    if not extra:
        return module.load_state_dict(entries, strict=strict)
    result: Any = module.load_state_dict(entries, strict=False)
    own = [name for name in result.unexpected_keys if name in extra]
    result.unexpected_keys[:] = [name for name in result.unexpected_keys if name not in extra]
    if strict:
        _check_keys(module, result)
    saved = _extra_tensors(module)
    with torch.no_grad():
        for name in own:
            if saved[name].shape == entries[name].shape:
                saved[name].copy_(entries[name])
    saved = _extra_tensors(module)  # tensors that are computed for saving did not take the copy
    result.unexpected_keys.extend(
        name for name in own if not torch.equal(saved[name].cpu(), entries[name].cpu())
    )
    if strict:
        _check_keys(module, result)
    return result


def _check_keys(module: nn.Module, result: Any) -> None:
    """Raises the error of a strict `Module.load_state_dict`."""
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
    """Tensors that modules with custom saving code save in addition to parameters and buffers."""
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
        f"{name} is on the meta device and has no memory to load into; materialize the "
        "module first (module.to_empty(device=...))."
    )


def load_masters(engine: Engine, masters: Mapping[str, Tensor]) -> None:
    """Loads the result of `narrow_masters`. Collective: every rank, with the same values."""
    for bucket in engine.buckets:
        slots = enumerate(bucket.plan.layout.slots)
        values = {index: masters[slot.name] for index, slot in slots if slot.name in masters}
        if values:
            bucket.masters.load(values_reader(values))


def _copy_sources(sources: Mapping[Tensor, Tensor]) -> None:
    """Copies each source into its target: a shard of a bucket, or a tensor without an engine."""
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
    """Records copies into certain tensors instead of executing them."""

    def __init__(self, targets: Iterable[Tensor]) -> None:
        super().__init__()
        self.sources: dict[Tensor, Tensor] = {}  # by target, in the order of the first copies
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
    """Parameters and buffers of modules with custom loading code, equally ordered on all ranks."""
    if _is_overridden(module.load_state_dict):
        return dict.fromkeys((*module.parameters(), *module.buffers()))
    custom = [
        part
        for part in module.modules()
        if part._load_state_dict_post_hooks or _is_overridden(part._load_from_state_dict)
    ]
    return {t: None for part in custom for t in (*part.parameters(), *part.buffers())}


def _is_overridden(method: Any) -> bool:
    """Whether a method is not torch's own; torch's modules load exactly their state dict."""
    return not str(getattr(method, "__module__", "")).startswith("torch.")


def _with_ties(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds an entry for every name of a tied parameter if the state dict has one of its names."""
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
    """Loads a saved optimizer state of full tensors, by number or by name.

    Raises:
        ValueError: The state does not fit the optimizer, which is unchanged.
    """
    keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    if any(isinstance(key, str) for key in keys):
        state = _numbered(engine.module, optimizer, state)
    load_optimizer_state_dict(optimizer, state)


def _numbered(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state, with the numbers and parameter groups of `optimizer`."""
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
    groups: list[dict[str, Any]] = []
    number = 0
    _check_divided(optimizer, group_of)
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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parameter group: neither its parameters nor their names, which torch may add."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _check_divided(
    optimizer: Optimizer, group_of: Mapping[nn.Parameter | None, Mapping[str, Any]]
) -> None:
    """Raises if groups with different options would all get those of one saved group."""
    first: dict[int, tuple[int, dict[str, Any]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        options = _options(group)
        for saved in {id(group_of[p]) for p in group["params"] if p in group_of}:
            other, expected = first.setdefault(saved, (index, options))
            if options != expected:
                raise ValueError(
                    f"parameters of the optimizer's groups {other} and {index}, whose options "
                    "differ, were saved in one group, whose options both would get; resume with "
                    "the groups that were saved."
                )


def _one_group(index: int, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of these groups, without params; they must be the same in all groups."""
    options = [_options(group) for group in groups]
    if any(other != options[0] for other in options[1:]):
        raise ValueError(
            f"parameters of the optimizer's group {index} were saved in several groups with "
            "different options; resume with the groups that were saved."
        )
    return options[0] if options else {}


def _check_names(
    optimizer: Optimizer,
    owner_of: Mapping[str, nn.Parameter | None],
    group_of: Mapping[nn.Parameter | None, Any],
) -> None:
    own = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [
        placement_of(p).name for p in own if p.requires_grad and owner_of and p not in group_of
    ]
    unexpected = [name for name, parameter in owner_of.items() if parameter not in own]
    problems = []
    if missing:
        problems.append(f"no state for {', '.join(sorted(missing))}")
    if unexpected:
        problems.append(f"states for {', '.join(unexpected)}, which the optimizer does not have")
    if problems:
        raise ValueError(
            f"the checkpoint's state does not fit {type(optimizer).__name__}: it has "
            f"{' and '.join(problems)}. Resume with the model and the optimizer that were saved, "
            "or load the weights only: lightning_zero.load_weights(module, path)."
        )
