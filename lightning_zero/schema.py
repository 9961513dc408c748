"""The settings of the strategy with their types, for Hydra: `zero/schema` in its store.

Every group `zero` starts from it, so that all settings are shown and completed, and a misspelt key
or a wrong type is Hydra's error before anything runs.
"""

from __future__ import annotations

import inspect
from dataclasses import field, make_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore

from lightning_zero.strategy import ZeroStrategy

__all__ = ["register_schema", "schema"]

_SIMPLE = {bool, int, float, str, NoneType}
_OF_THE_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "precision_plugin"}


def schema() -> type[Any]:
    """A dataclass of the strategy's own settings: those whose default a YAML file can say."""
    hints = get_type_hints(ZeroStrategy.__init__)
    settings: list[Any] = [("_target_", str, field(default="lightning_zero.ZeroStrategy"))]
    for name, parameter in inspect.signature(ZeroStrategy).parameters.items():
        default = parameter.default
        if name not in _OF_THE_TRAINER and type(default) in _SIMPLE:
            settings.append((name, _yaml_type(hints[name]), field(default=default)))
    return make_dataclass("ZeroStrategySettings", settings)


def _yaml_type(hint: Any) -> Any:
    """`hint` where Hydra can check it, else anything: the strategy checks it itself."""
    if hint in _SIMPLE:
        return hint
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if parts and set(parts) <= _SIMPLE:
        return Union[tuple(parts)]  # noqa: UP007  # made of a tuple
    return Any


def register_schema() -> None:
    """Makes it known. Harmless when repeated."""
    ConfigStore.instance().store(
        group="zero", name="schema", node=schema(), provider="lightning_zero"
    )
