"""The command that starts one more rank of this script, and of this Hydra job where there is one.

A Hydra job is told by what was resolved for it on rank 0, not by the words of the command line: in
a sweep those stand for many jobs, and its flags may stand anywhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from hydra.utils import to_absolute_path
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from omegaconf import OmegaConf

__all__ = ["child_command", "current_job"]


def current_job() -> str | None:
    """What tells one Hydra job of a process from the next; None outside Hydra."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    number = "" if OmegaConf.is_missing(hydra.job, "num") else hydra.job.num
    return f"{hydra.runtime.output_dir}#{number}"


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """The command line, and the working directory to start it in (None: this process's own).

    Raises:
        RuntimeError: There is no script to run again.
    """
    if not HydraConfig.initialized():
        return list(_basic_subprocess_cmd()), None
    hydra = HydraConfig.get()
    flags = _config_flags(hydra)
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task, *_job_overrides(hydra, local_rank)]
    return [sys.executable, *_script(), *flags, *overrides], str(hydra.runtime.cwd)


def _script() -> list[str]:
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
    if hydra.mode == RunMode.MULTIRUN:
        values["hydra.sweep.dir"] = hydra.sweep.dir
        values["hydra.sweep.subdir"] = hydra.sweep.subdir
        values["hydra.job.num"] = hydra.job.num
        values["hydra.job.id"] = hydra.job.id
    values |= _log_files(hydra, local_rank)
    return [f"{key}={_quoted(value)}" for key, value in values.items()]


def _log_files(hydra: Any, local_rank: int) -> dict[str, str]:
    """A file of its own for every log that goes to one."""
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
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    return QuotedString(value, Quote.single).with_quotes()
