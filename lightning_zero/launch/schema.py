"""Schema and resolvers for the files of `conf`.

Every choice of the group `zero` is based on the schema of the strategy's settings. So Hydra shows
and completes all of them, and reports a misspelt key or a wrong type before anything runs. The
group also adds the callback `HydraJobs`. `lightning_zero.conf` registers both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lightning_zero.launch.hydra import run_name, sweep_name

__all__ = ["process_rank", "register"]

_GROUP = "hydra/lightning_zero"
# Groups that only the example can use, and that of the help itself.
_NOT_LISTED = {
    "data",
    "experiment",
    "hparams_search",
    "hydra/help",
    "local",
    "model",
    "optimizer",
}
_JOBS = {"lightning_zero": {"_target_": "lightning_zero.launch.hydra_jobs.HydraJobs"}}
_CONF = Path(__file__).parents[1] / "conf"


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
    for resolver in (*process_resolvers, _gpus_per_node, _groups, run_name, sweep_name):
        name = f"zero.{resolver.__name__.removeprefix('_')}"
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _accelerator() -> str:
    import torch  # only where it is needed: `--help` and `--cfg job` compose without it

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


def _groups() -> str:
    """The groups of this package and their choices, one group on a line, as Hydra lists them."""
    choices: dict[str, list[str]] = {}
    for file in sorted(_CONF.glob("*/**/*.yaml")):
        group = file.parent.relative_to(_CONF).as_posix()
        if group not in _NOT_LISTED:
            choices.setdefault(group, []).append(file.stem)
    return "\n".join(f"{group}: {', '.join(names)}" for group, names in choices.items())
