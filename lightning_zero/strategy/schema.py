"""What the files of `conf` need from Python: the strategy's settings with their types, resolvers.

Every choice of the group `zero` starts from the settings, so that all are shown and completed, and
a misspelt key or a wrong type is Hydra's error before anything runs; and it brings `HydraJobs`.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import field, make_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lightning_zero.strategy.hydra import run_name, sweep_name
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["ZeroStrategySettings", "register", "schema"]

_GROUP = "hydra/lightning_zero"
_JOBS = {"lightning_zero": {"_target_": "lightning_zero.strategy.hydra_jobs.HydraJobs"}}
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
    made = make_dataclass("ZeroStrategySettings", settings)
    made.__module__ = __name__  # for pickle, which finds it as `__qualname__`
    # Hydra and OmegaConf put the name into their errors, which nothing of ours can catch.
    made.__name__ = "ZeroStrategySettings (--cfg job shows all)"
    return made


def _yaml_type(hint: Any) -> Any:
    """`hint` where Hydra can check it, else anything: the strategy checks it itself."""
    if hint in _SIMPLE:
        return hint
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if parts and set(parts) <= _SIMPLE:
        return Union[tuple(parts)]  # noqa: UP007  # made of a tuple
    return Any


ZeroStrategySettings = schema()  # a module holds it, so that a composed config can be pickled


def register() -> None:
    """Makes known to Hydra what the files of `conf` refer to. Harmless when repeated.

    The group is one of `hydra/`, so that it is not offered among an application's own.
    """
    store = ConfigStore.instance()
    store.store("strategy", ZeroStrategySettings, _GROUP, provider="lightning_zero")
    store.store("jobs", _JOBS, _GROUP, provider="lightning_zero")
    # The same, for a launcher: Hydra refuses one name twice. Workers that import no script import
    # its class, and so know the names of strategies.
    store.store("submitted", _JOBS, _GROUP, provider="lightning_zero")
    of_this_process = (_accelerator, _devices, _precision, _rank_suffix)
    for resolver in (*of_this_process, _gpus_per_node, run_name, sweep_name):
        name = f"zero.{resolver.__name__.removeprefix('_')}"
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _accelerator() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _devices(accelerator: str) -> int | str:
    return 2 if accelerator == "cpu" else "auto"  # Lightning's own "auto" is one process on a CPU


def _precision(accelerator: str) -> str:
    if accelerator == "auto":
        accelerator = _accelerator()
    return "32-true" if accelerator == "cpu" else "bf16-mixed"  # which few CPUs compute fast


def _rank_suffix() -> str:
    """Of this process, before there is a Trainer; empty on rank 0."""
    variables = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    rank = next((int(os.environ[name]) for name in variables if name in os.environ), 0)
    return f"_rank{rank}" if rank else ""


def _gpus_per_node(accelerator: str | None, tasks_per_node: int) -> int | None:
    """What to ask SLURM for: one for each task, if the Trainer is told to use them."""
    return tasks_per_node if accelerator in ("gpu", "cuda") else None
