"""Checkpoints of named objects: `fabric.save(path, {"model": model, "optimizer": optimizer, ...})`.

The file has the keys of the user, as Fabric's files have with every strategy, and so has a sharded
checkpoint. An entry `lightning_zero` lists which keys are modules and optimizers. With it a Trainer
opens a checkpoint of one module as its own (checkpoint/source.py). In the other direction, the
weights and optimizer states of a Trainer's checkpoint go to the module and the optimizers that are
loaded, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero._lightning.fabric import (
    _apply_filter,
    _Stateful,
    _validate_keys_for_strict_loading,
)
from lightning_zero.checkpoint import load_masters, load_module, load_optimizer
from lightning_zero.checkpoint.states import (
    MASTERS_KEY,
    METADATA_KEY,
    describe_save,
    full_optimizer_state,
    full_state_dict,
    narrow_masters,
    sharded_masters,
    sharded_optimizer_state,
    sharded_state_dict,
)
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import with_saved_names

__all__ = ["NamedObjects"]

_Filter = Mapping[str, Callable[[str, Any], bool]]


@dataclass
class NamedObjects:
    """The objects of one save or load.

    Attributes:
        state: Objects by the user's keys; what is no object is replaced when it is loaded.
        engines: Engine of each module and optimizer that has one, by key.
    """

    state: dict[str, Any]
    engines: Mapping[str, Engine]
    modules: Sequence[str] = field(init=False)
    optimizers: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self._list()

    def reorder(self, first: Iterable[str]) -> None:
        """Puts the keys `first` before all others."""
        self.state = {key: self.state[key] for key in first} | self.state
        self._list()

    def _list(self) -> None:
        self.modules = [k for k, v in self.state.items() if isinstance(v, nn.Module)]
        self.optimizers = [k for k, v in self.state.items() if isinstance(v, Optimizer)]

    # ---------------------------------------------------------------- saving

    @property
    def skipped_keys(self) -> set[str]:
        """Keys of a checkpoint whose entries have no sharded parameters but those of an engine."""
        return {*self.engines, MASTERS_KEY, METADATA_KEY}

    def checkpoint(self, filters: _Filter, *, is_sharded: bool) -> dict[str, Any]:
        """The contents of the checkpoint. Collective: every rank.

        A full one has full tensors on rank 0; a sharded one has this rank's shards.
        """
        contents: dict[str, Any] = {}
        masters: dict[str, Any] = {}
        for key, value in self.state.items():
            engine = self.engines.get(key)
            entry = value
            if engine is None:
                entry = value.state_dict() if isinstance(value, _Stateful) else value
            elif key in self.modules:
                entry = with_saved_names(
                    sharded_state_dict(engine.module, f"{key} parameter")
                    if is_sharded
                    else full_state_dict(engine)
                )
                own = sharded_masters(engine, f"{key} ") if is_sharded else narrow_masters(engine)
                masters |= {key: own} if own else {}
            elif is_sharded:
                entry = sharded_optimizer_state(value, engine, f"{key} ")
            else:
                entry = full_optimizer_state(value, engine)
            _apply_filter(key, dict(filters), entry, contents)
        if masters:
            contents[MASTERS_KEY] = masters
        first = next(iter(self.engines.values()))
        names = {"modules": list(self.modules), "optimizers": list(self.optimizers)}
        contents[METADATA_KEY] = describe_save(first) | names
        return contents

    # ---------------------------------------------------------------- loading

    def load(self, contents: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Loads the objects; returns the other entries. Collective: every rank."""
        contents = dict(contents)
        self._rename_states_of_trainer(contents)
        _validate_keys_for_strict_loading(self.state.keys(), contents.keys(), strict)
        masters = contents.pop(MASTERS_KEY, {})
        contents.pop(METADATA_KEY, None)
        for key, value in list(self.state.items()):
            if key not in contents:
                continue
            entry, engine = contents.pop(key), self.engines.get(key)
            if isinstance(value, nn.Module):
                load_module(value if engine is None else engine.module, entry, strict=strict)
                if engine is not None:
                    load_masters(engine, masters.get(key, {}))
            elif isinstance(value, Optimizer) and engine is not None:
                load_optimizer(engine, value, entry)
            elif isinstance(value, _Stateful):
                value.load_state_dict(entry)
            else:
                self.state[key] = _copied(entry)
        return {key: _copied(entry) for key, entry in contents.items()}

    def _rename_states_of_trainer(self, contents: dict[str, Any]) -> None:
        """Gives the states of a Trainer's checkpoint the keys of this state."""
        if "state_dict" not in contents or "state_dict" in self.state or len(self.modules) != 1:
            return
        (module,) = self.modules
        if module in contents:
            return
        contents[module] = contents.pop("state_dict")
        if MASTERS_KEY in contents:
            contents[MASTERS_KEY] = {module: contents[MASTERS_KEY]}
        states = contents.get("optimizer_states", [])
        if len(states) == len(self.optimizers):
            contents.pop("optimizer_states", None)
            contents.update(zip(self.optimizers, states, strict=True))


def _copied(entry: Any) -> Any:
    """An entry whose tensors stay valid when the file is replaced."""
    return tree_map_only(Tensor, Tensor.clone, entry)
