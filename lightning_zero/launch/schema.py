"""Schema and resolvers for the files of `conf`.

Every choice of the group `zero` is based on the schema of the strategy's settings. So Hydra shows
and completes all of them, and reports a misspelt key or a wrong type before anything runs. The
group also adds the callback `HydraJobs`. `lightning_zero.conf` registers both.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lightning_zero.launch.hydra import run_name, sweep_name

__all__ = ["process_rank", "register", "schema"]

_GROUP = "hydra/lightning_zero"
_JOBS = {"lightning_zero": {"_target_": "lightning_zero.launch.hydra_jobs.HydraJobs"}}
_SIMPLE = {bool, int, float, str, NoneType}
_SET_BY_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "precision_plugin"}


def schema(strategy: type, target: str, *, module: str) -> type[Any]:
    """A dataclass of the strategy's settings whose default YAML can express.

    Args:
        strategy: Class of the strategy.
        target: Path from which users import it.
        module: Name of the module that keeps the result as `ZeroStrategySettings`, so that a
            composed config can be pickled.
    """
    hints = get_type_hints(strategy.__init__)  # type: ignore[misc]
    settings: list[Any] = [("_target_", str, field(default=target))]
    for name, parameter in inspect.signature(strategy).parameters.items():
        default = parameter.default
        if name not in _SET_BY_TRAINER and type(default) in _SIMPLE:
            settings.append((name, _yaml_type(hints[name]), field(default=default)))
    made = make_dataclass("ZeroStrategySettings", settings)
    made.__module__ = module  # pickle finds the class by module and `__qualname__`
    # Hydra and OmegaConf print `__name__` in their errors, which we cannot catch: for an unknown
    # key, a wrong type, and another strategy in the place of this one.
    made.__name__ = _NameWithHint("ZeroStrategySettings", [name for name, *_ in settings])
    return made


class _NameWithHint(str):
    """Name of the schema, which in an error also names the setting nearest to a misspelt one.

    The misspelt key is not known here, so it is looked for in this process's command line.
    """

    def __new__(cls, name: str, settings: Sequence[str]) -> _NameWithHint:
        return super().__new__(cls, name)

    def __init__(self, name: str, settings: Sequence[str]) -> None:
        super().__init__()
        self.settings = settings

    def __str__(self) -> str:
        hints = [f"did you mean {name}?" for name in self._near()]
        hints.append("--cfg job shows all; leave out zero= with trainer=ddp or another strategy")
        return f"{super().__str__()} ({' '.join(hints)})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def _near(self) -> Iterator[str]:
        for word in sys.argv[1:]:
            path, _, key = word.partition("=")[0].rpartition(".")
            if path.endswith("strategy") and key not in self.settings:
                yield from get_close_matches(key, self.settings, n=1)


def _yaml_type(hint: Any) -> Any:
    """`hint` if Hydra can check it, else Any: the strategy checks such settings itself."""
    if hint in _SIMPLE:
        return hint
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if parts and set(parts) <= _SIMPLE:
        return Union[tuple(parts)]  # noqa: UP007  # from a tuple
    return Any


def register(settings: type[Any]) -> None:
    """Registers the schema `settings` and the resolvers of the files of `conf`. Idempotent.

    The group is below `hydra/`, so that Hydra does not list it among an application's own groups.
    """
    store = ConfigStore.instance()
    store.store("strategy", settings, _GROUP, provider="lightning_zero")
    store.store("jobs", _JOBS, _GROUP, provider="lightning_zero")
    # The same for a launcher, since Hydra refuses a name that occurs twice. Workers do not import
    # the script; importing the callback's class registers the names of strategies there.
    store.store("submitted", _JOBS, _GROUP, provider="lightning_zero")
    process_resolvers = (_accelerator, _devices, _precision, _rank_suffix)
    for resolver in (*process_resolvers, _gpus_per_node, run_name, sweep_name):
        name = f"zero.{resolver.__name__.removeprefix('_')}"
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _accelerator() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _devices(accelerator: str) -> int | str:
    return 2 if accelerator == "cpu" else "auto"  # Lightning's own "auto" is one process on a CPU


def _precision(accelerator: str) -> str:
    if accelerator == "auto":
        accelerator = _accelerator()
    return "32-true" if accelerator == "cpu" else "bf16-mixed"  # bf16 is slow on most CPUs


def process_rank() -> int:
    """Rank of this process, before there is a Trainer."""
    variables = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    return next((int(os.environ[name]) for name in variables if name in os.environ), 0)


def _rank_suffix() -> str:
    rank = process_rank()
    return f"_rank{rank}" if rank else ""


def _gpus_per_node(accelerator: str | None, tasks_per_node: int) -> int | None:
    """Number of GPUs to request from SLURM: one per task if the Trainer uses GPUs, else None."""
    return tasks_per_node if accelerator in ("gpu", "cuda") else None
