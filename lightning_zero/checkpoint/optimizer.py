"""Optimizer states by number, as torch's optimizers save them, or by parameter name.

By name, `{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`, is how FSDP2's
and sharded checkpoints have them, and the way in from other systems, whose groups may be others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import saved_name
from lightning_zero.optim.state import load_optimizer_state_dict
from lightning_zero.tensors.guarded import placement_of

__all__ = ["load_optimizer"]


def load_optimizer(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a saved optimizer state of whole tensors; each rank reads its own elements.

    Args:
        engine: Holds the optimizer.
        optimizer: Attached to the engine.
        state: By number or by name.

    Raises:
        ValueError: It does not fit the optimizer. Nothing has been changed.
    """
    if _is_named(state):
        state = _numbered(engine.module, optimizer, state)
    load_optimizer_state_dict(optimizer, engine.buckets, state)


def _is_named(state: Mapping[str, Any]) -> bool:
    keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    return any(isinstance(key, str) for key in keys)


def _numbered(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state with the numbers and the groups of `optimizer`."""
    own_names = {
        saved_name(name): parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    group_of = {
        own_names.get(saved_name(name)): group
        for group in state["param_groups"]
        for name in group["params"]
    }
    entry_of = {own_names.get(saved_name(name)): entry for name, entry in state["state"].items()}
    _check_names(optimizer, own_names, group_of, state)
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
    own_names: Mapping[str, nn.Parameter],
    group_of: Mapping[nn.Parameter | None, Any],
    state: Mapping[str, Any],
) -> None:
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    absent = [
        placement_of(p).name
        for p in mine
        if p.requires_grad and state["state"] and p not in group_of
    ]
    foreign = [name for name in state["state"] if own_names.get(saved_name(name)) not in mine]
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
