"""Hydra jobs: which one this process runs, and the command that starts a rank of it.

Hydra is imported where a job is there, not with the package.

A Hydra job is told by what was resolved for it on rank 0, not by the words of the command line: in
a sweep those stand for many jobs, and its flags may stand anywhere.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd

__all__ = [
    "check_launch",
    "child_command",
    "current_job",
    "is_secret",
    "masked",
    "run_name",
    "sweep_name",
]

MASK = "***"
_SECRET = {"apikey", "credential", "credentials", "key", "passwd", "password", "secret", "token"}

_UNSAID = {"ckpt_path", "logger", "tags", "task_name", "test", "train"}  # in the name of a run
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def current_job() -> str | None:
    """What tells one Hydra job of a process from the next; None outside Hydra."""
    hydra = _hydra()
    if hydra is None:
        return None
    from omegaconf import OmegaConf

    number = "" if OmegaConf.is_missing(hydra.job, "num") else hydra.job.num
    return f"{hydra.runtime.output_dir}#{number}"


def run_name() -> str | None:
    """What of a job's overrides tells it from others; None where there is nothing."""
    hydra = _hydra()
    words = hydra.overrides.task if hydra is not None else ()
    parts = (word.partition("=") for word in words)
    shown = (
        key + equals + (MASK if is_secret(key) else value)
        for key, equals, value in parts
        if key not in _UNSAID
    )
    return " ".join(shown) or None


def is_secret(key: str) -> bool:
    """Whether a setting of this name, such as `logger.wandb.api_key`, is for no log to show."""
    last = key.rpartition(".")[2].lower()
    return not _SECRET.isdisjoint(re.split(r"[^a-z0-9]+", last))


def masked(config: Any) -> Any:
    """The values of a `DictConfig`, resolved, without its secrets.

    Secret are strings under a key that `is_secret`, what is read from the environment (`oc.env`),
    and strings anywhere else that have such a value in them. Shorter ones than four letters are
    not looked for elsewhere.
    """
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(config, resolve=True)
    secrets: set[str] = set()
    shown = _mask(values, OmegaConf.to_container(config, resolve=False), False, secrets)
    long = sorted((secret for secret in secrets if len(secret) >= 4), key=len, reverse=True)
    return _replace(shown, long)


def _mask(value: Any, source: Any, is_hidden: bool, secrets: set[str]) -> Any:
    """`value` with secrets masked; `source` is the same before interpolation.

    Values of variables whose name is a secret's, and of keys, are added to `secrets`.
    """
    if isinstance(value, dict):
        sources = source if isinstance(source, dict) else {}
        return {
            key: _mask(part, sources.get(key), is_hidden or is_secret(str(key)), secrets)
            for key, part in value.items()
        }
    if isinstance(value, list):
        each = source if isinstance(source, list) else [None] * len(value)
        return [_mask(p, s, is_hidden, secrets) for p, s in zip(value, each, strict=True)]
    if not isinstance(value, str) or not value:
        return value
    variables = re.findall(r"\$\{oc\.env:([^,}]+)", source) if isinstance(source, str) else []
    if is_hidden or any(map(is_secret, variables)):
        secrets.add(value)
    return MASK if is_hidden or variables else value


def _replace(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _replace(part, secrets) for key, part in value.items()}
    if isinstance(value, list):
        return [_replace(part, secrets) for part in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
    return value


def sweep_name() -> str | None:
    """What the jobs of one sweep have in common: the folder of it, or the number of an array."""
    hydra = _hydra()
    if hydra is not None and _is_sweep(hydra):
        return Path(hydra.sweep.dir).resolve().name
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return None if array is None else f"slurm-{array}"


def check_launch(num_processes: int) -> None:
    """Raises a RuntimeError where this process may neither start ranks nor be the only one.

    That is where another of Hydra's launchers runs the job: its workers are not the script that
    would have to be run again, and submitit's own tasks do not know of each other.
    """
    hydra = _hydra()
    num_tasks = int(os.environ.get("SUBMITIT_LOCAL_NTASKS", "1"))
    if hydra is None or num_processes == num_tasks == 1:
        return
    target = hydra.launcher.get("_target_")
    if _is_sweep(hydra) and target != _BASIC:
        raise RuntimeError(
            f"Trainer(devices={num_processes}) needs {num_processes} rank(s), but "
            f"{target} runs this job as {num_tasks} task(s) in which ranks cannot be started. Use "
            f"hydra/launcher=basic, which leaves starting them to the Trainer, or "
            f"hydra/launcher=slurm with hydra.launcher.tasks_per_node={num_processes}."
        )


def _hydra() -> Any | None:
    """Hydra's own settings of the job; None where there is none."""
    if "hydra" not in sys.modules:
        return None  # and it need not be imported
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


def _is_sweep(hydra: Any) -> bool:
    from hydra.types import RunMode

    return bool(hydra.mode == RunMode.MULTIRUN)


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """The command line, and the working directory to start it in (None: this process's own)."""
    hydra = _hydra()
    if hydra is None:
        return list(_basic_subprocess_cmd()), None
    flags = _config_flags(hydra)
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task, *_job_overrides(hydra, local_rank)]
    return [sys.executable, *_script(), *flags, *overrides], str(hydra.runtime.cwd)


def _script() -> list[str]:
    from hydra.utils import to_absolute_path

    import __main__  # as late as possible: it is another module while a test imports this one

    if __main__.__spec__ is not None:
        return ["-m", __main__.__spec__.name]
    script = to_absolute_path(sys.argv[0])
    if not Path(script).is_file():
        raise RuntimeError(
            f"expected a script to start more ranks from, got {sys.argv[0]!r}; put the training "
            "into a file, or start the ranks with torchrun or srun."
        )
    return [script]


def _config_flags(hydra: Any) -> list[str]:
    """Where rank 0 found its configuration: the flags win over what the decorator says."""
    flags = []
    sources = {source.provider: source for source in hydra.runtime.config_sources}
    for provider, flag in (("main", "--config-path"), ("command-line", "--config-dir")):
        source = sources.get(provider)
        if source is not None and source.path:
            is_file = source.schema == "file"
            flags += [flag, source.path if is_file else f"{source.schema}://{source.path}"]
    if hydra.job.config_name is not None:
        flags += ["--config-name", hydra.job.config_name]
    return flags


def _job_overrides(hydra: Any, local_rank: int) -> list[str]:
    """What makes the child one more rank of the same job; the last word on each key wins."""
    values: dict[str, Any] = {
        "hydra.mode": "RUN",
        "hydra.run.dir": hydra.runtime.output_dir,
        "hydra.output_subdir": None,  # rank 0 has written the composed settings
    }
    if _is_sweep(hydra):
        values |= {f"hydra.sweep.{name}": hydra.sweep[name] for name in ("dir", "subdir")}
        values |= {f"hydra.job.{name}": hydra.job[name] for name in ("num", "id")}
    values |= _log_files(hydra, local_rank)
    return [f"{key}={_quoted(value)}" for key, value in values.items()]


def _log_files(hydra: Any, local_rank: int) -> dict[str, str]:
    """A file of its own for every log that goes to one."""
    from omegaconf import OmegaConf

    logging = OmegaConf.to_container(hydra.job_logging, resolve=False)
    handlers = logging.get("handlers") if isinstance(logging, dict) else None
    names = {}
    for name, handler in (handlers or {}).items():
        file = handler.get("filename")
        if file and not re.search(r"\$\{[^}]*rank", file, re.IGNORECASE):  # else it differs already
            stem, dot, suffix = file.rpartition(".")
            file = f"{stem}_rank{local_rank}.{suffix}" if dot else f"{file}_rank{local_rank}"
            names[f"hydra.job_logging.handlers.{name}.filename"] = file
    return names


def _quoted(value: Any) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    if not isinstance(value, str):
        return "null" if value is None else str(value)
    return QuotedString(value, Quote.single).with_quotes()
