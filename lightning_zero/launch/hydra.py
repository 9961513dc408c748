"""Hydra jobs: the job of this process, and the command that starts one of its ranks.

Hydra is imported only if there is a job, and Lightning only to start ranks, not with the module.

A child rank gets the overrides of rank 0's job, not rank 0's command line: in a sweep the command
line describes many jobs, and its flags may have any position.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = [
    "RecordsOfPackage",
    "check_launch",
    "child_command",
    "current_job",
    "run_name",
    "sweep_name",
]

# Overrides that are not part of the name of a run.
_NOT_IN_NAME = {"ckpt_path", "logger", "tags", "task_name", "test", "train"}
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


class RecordsOfPackage(logging.Filter):
    """Passes the log records of this package only: what the strategy saves, restores, requeues.

    They have the logger of Lightning's own messages, which conf keeps off the terminal.
    """

    _FOLDER = str(Path(__file__).parents[1])

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record was logged by a file of this package."""
        return record.pathname.startswith(self._FOLDER)


def current_job() -> str | None:
    """Identifies a Hydra job among those of a process; None outside Hydra."""
    hydra = _hydra()
    if hydra is None:
        return None
    from omegaconf import OmegaConf

    number = "" if OmegaConf.is_missing(hydra.job, "num") else hydra.job.num
    return f"{hydra.runtime.output_dir}#{number}"


def run_name() -> str | None:
    """Name of a run, from the overrides that distinguish it; None without any.

    Overrides with a reference are left out: OmegaConf would resolve them in the name, too.
    """
    hydra = _hydra()
    overrides = _overrides(hydra).task if hydra is not None else ()
    named = (o for o in overrides if "${" not in o and o.partition("=")[0] not in _NOT_IN_NAME)
    return " ".join(named) or None


def _overrides(hydra: Any) -> SimpleNamespace:
    """Overrides as they were given: reading one in the configuration resolves its references."""
    from omegaconf import OmegaConf

    given: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    return SimpleNamespace(**given)


def sweep_name() -> str | None:
    """Name of the sweep that a job belongs to: its folder, or the id of a SLURM array."""
    hydra = _hydra()
    if hydra is not None and _is_sweep(hydra):
        return Path(hydra.sweep.dir).resolve().name
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return None if array is None else f"slurm-{array}"


def check_launch(num_processes: int) -> None:
    """Raises a RuntimeError if a Hydra launcher runs this job and its ranks cannot be started.

    The workers of such a launcher do not run the script, which ranks are started from, and the
    tasks of submitit are not connected.
    """
    hydra = _hydra()
    num_tasks = int(os.environ.get("SUBMITIT_LOCAL_NTASKS", "1"))
    if hydra is None or num_processes == num_tasks == 1:
        return
    target = hydra.launcher.get("_target_")
    if _is_sweep(hydra) and target != _BASIC:
        raise RuntimeError(
            f"Trainer(devices={num_processes}) needs {num_processes} rank(s), but "
            f"{target} runs this job as {num_tasks} task(s) in which ranks cannot be started; use "
            f"hydra/launcher=basic, with which the Trainer starts the ranks, or "
            f"hydra/launcher=slurm with hydra.launcher.tasks_per_node={num_processes}."
        )


def _hydra() -> Any | None:
    """Hydra's own settings of the job; None without a job."""
    if "hydra" not in sys.modules:
        return None  # without importing it
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


def _is_sweep(hydra: Any) -> bool:
    from hydra.types import RunMode

    return bool(hydra.mode == RunMode.MULTIRUN)


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """Command line of a child rank, and its working directory (None: that of this process)."""
    hydra = _hydra()
    if hydra is None:
        from lightning_zero._lightning.fabric import _basic_subprocess_cmd

        return list(_basic_subprocess_cmd()), None
    given = _overrides(hydra)
    overrides = [*given.hydra, *given.task, *_job_overrides(hydra, local_rank)]
    command = [sys.executable, *_script(), *_config_flags(hydra), *overrides]
    return command, str(hydra.runtime.cwd)


def _script() -> list[str]:
    from hydra.utils import to_absolute_path

    import __main__  # imported late: during a test's import it is a different module

    if __main__.__spec__ is not None:
        return ["-m", __main__.__spec__.name]
    script = to_absolute_path(sys.argv[0])
    if not Path(script).is_file():
        raise RuntimeError(
            f"expected a script to start more ranks from, got {sys.argv[0]!r}; put the training "
            "code into a file, or start the ranks with torchrun or srun."
        )
    return [script]


def _config_flags(hydra: Any) -> list[str]:
    """Flags for rank 0's configuration files, which override the arguments of `hydra.main`."""
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
    """Overrides that make the child a rank of the same job; the last value of a key wins."""
    values: dict[str, Any] = {
        "hydra.mode": "RUN",
        "hydra.run.dir": hydra.runtime.output_dir,
        "hydra.output_subdir": None,  # rank 0 has already written the composed settings
    }
    if _is_sweep(hydra):
        values |= {f"hydra.sweep.{name}": hydra.sweep[name] for name in ("dir", "subdir")}
        values |= {f"hydra.job.{name}": hydra.job[name] for name in ("num", "id")}
    values |= _log_files(hydra, local_rank)
    return [f"{key}={_quoted(value)}" for key, value in values.items()]


def _log_files(hydra: Any, local_rank: int) -> dict[str, str]:
    """Overrides that give this rank its own log files."""
    from omegaconf import OmegaConf

    logging = OmegaConf.to_container(hydra.job_logging, resolve=False)
    handlers = logging.get("handlers") if isinstance(logging, dict) else None
    names = {}
    for name, handler in (handlers or {}).items():
        file = handler.get("filename")
        if file and not re.search(r"\$\{[^}]*rank", file, re.IGNORECASE):  # else it has the rank
            stem, dot, suffix = file.rpartition(".")
            file = f"{stem}_rank{local_rank}.{suffix}" if dot else f"{file}_rank{local_rank}"
            names[f"hydra.job_logging.handlers.{name}.filename"] = file
    return names


def _quoted(value: Any) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    if not isinstance(value, str):
        return "null" if value is None else str(value)
    return QuotedString(value, Quote.single).with_quotes()
