"""Hydra jobs: the job of this process, and the command that starts one of its ranks.

Hydra is imported only if there is a job, and Lightning only to start ranks, not with the module.

A child rank gets the values that rank 0 has resolved, not rank 0's command line: in a sweep the
command line describes many jobs, and its flags may have any position.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "RecordsOfPackage",
    "check_launch",
    "child_command",
    "current_job",
    "is_secret",
    "masked",
    "run_name",
    "sweep_name",
]

MASK = "***"
_NUMERIC = {"apikey", "passphrase", "passwd", "password", "passwords", "secret", "secrets"}
_SECRET = {*_NUMERIC, "credential", "credentials", "key", "keys", "token"}
# Minimum length of a secret that is searched for in other strings: in strings with a reference, and
# in strings without one.
_MIN_LETTERS = 4
_MIN_LETTERS_OF_TEXT = 8  # "key: loss" must not mask every "loss"

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
    """Name of a run, from the overrides that distinguish it; None without any."""
    hydra = _hydra()
    overrides = hydra.overrides.task if hydra is not None else ()
    parts = (override.partition("=") for override in overrides)
    texts = (
        key + equals + (MASK if is_secret(key) else value)
        for key, equals, value in parts
        if key not in _NOT_IN_NAME
    )
    return " ".join(texts) or None


def is_secret(key: str) -> bool:
    """Whether a setting of this name, such as `logger.wandb.api_key`, must not appear in logs."""
    return not _SECRET.isdisjoint(_words(key))


def _words(key: str) -> list[str]:
    """Words of the last part of a key: "api" and "key" for "wandb.apiKey" and for "API_KEY"."""
    last = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", key.rpartition(".")[2])
    return re.split(r"[^a-z0-9]+", last.lower())


def masked(config: Any) -> Any:
    """Resolved values of a `DictConfig`, with secrets masked.

    Masked are strings under a key that `is_secret`, numbers under a key for a password or a secret,
    and values of the environment (`oc.env`), also through references. Also masked are strings that
    contain the value of such a key or environment variable. Short values are masked only through
    references, since a few letters may be a common word.
    """
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(config, resolve=True)
    secrets = _Secrets()
    partly_masked = secrets.mask(values, OmegaConf.to_container(config, resolve=False))
    return secrets.replace(partly_masked, OmegaConf.to_container(config, resolve=False))


class _Secrets:
    """Masks the secrets of one configuration.

    A `source` is a value before interpolation. It is None inside a value that comes from a
    reference.
    """

    def __init__(self) -> None:
        self._anywhere: set[str] = set()  # values that are masked in every string
        self._by_reference: set[str] = set()  # values that are masked in strings with a reference

    def mask(self, value: Any, source: Any, *, is_hidden: bool = False) -> Any:
        """Masks secrets in `value` at their own keys."""
        if isinstance(value, dict):
            parts = {}
            for key, part in value.items():
                is_hidden_too = is_hidden or is_secret(str(key))
                parts[key] = self.mask(part, _part(source, key), is_hidden=is_hidden_too)
                if _is_number(part) and not _NUMERIC.isdisjoint(_words(str(key))):
                    parts[key] = MASK
            return parts
        if isinstance(value, list):
            return [
                self.mask(part, _part(source, index), is_hidden=is_hidden)
                for index, part in enumerate(value)
            ]
        variables = re.findall(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)", str(source))
        if not isinstance(value, str) or not value:
            return MASK if variables and _is_number(value) else value
        if is_hidden or any(map(is_secret, variables)):
            self._anywhere.add(value)
        elif variables:
            self._by_reference.add(value)
        return MASK if is_hidden or variables else value

    def replace(self, value: Any, source: Any) -> Any:
        """Masks the values of secrets in all other strings of `value`, as returned by `mask`."""
        if isinstance(value, dict):
            return {key: self.replace(part, _part(source, key)) for key, part in value.items()}
        if isinstance(value, list):
            return [self.replace(part, _part(source, index)) for index, part in enumerate(value)]
        if isinstance(value, str):
            is_reference = source is None or "${" in str(source)
            secrets = self._anywhere | self._by_reference if is_reference else self._anywhere
            if is_reference and value in secrets:
                return MASK
            min_letters = _MIN_LETTERS if is_reference else _MIN_LETTERS_OF_TEXT
            for secret in sorted(secrets, key=len, reverse=True):
                if len(secret) >= min_letters:
                    value = value.replace(secret, MASK)
        return value


def _part(source: Any, key: Any) -> Any:
    if isinstance(source, dict):
        return source.get(key)
    return source[key] if isinstance(source, list) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    flags = _config_flags(hydra)
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task, *_job_overrides(hydra, local_rank)]
    return [sys.executable, *_script(), *flags, *overrides], str(hydra.runtime.cwd)


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
