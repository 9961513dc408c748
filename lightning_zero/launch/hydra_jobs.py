"""A Hydra callback that separates the jobs of a sweep. Imports Hydra."""

from __future__ import annotations

import os
from typing import Any

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode

from lightning_zero._lightning.pytorch import subprocess_script
from lightning_zero.launch.children import Children, ProcessSnapshot
from lightning_zero.launch.hydra import child_command

__all__ = ["HydraJobs"]

_RANKS = ("LOCAL_RANK", "RANK", "SLURM_PROCID")  # set if another launcher has started this process


class HydraJobs(Callback):
    """Hydra callback that lets each job of a sweep launch its own ranks (`hydra.callbacks`).

    A Trainer makes its process rank 0 permanently, and the next job would find a process group
    whose other ranks are gone. `ZeroStrategy` handles this itself. Lightning's own strategies do
    not, and their children would run the sweep again; this callback makes Lightning start them with
    our command.

    Alternatives considered: detecting the end of a job in the strategy, which the next job may not
    use.
    """

    def __init__(self) -> None:
        self._before: ProcessSnapshot | None = None
        self._lightning_command: Any = None

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        """Saves the state of the process."""
        if not any(name in os.environ for name in _RANKS):
            self._before = ProcessSnapshot.take()
            self._lightning_command = vars(subprocess_script)["_hydra_subprocess_cmd"]
            vars(subprocess_script)["_hydra_subprocess_cmd"] = child_command

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """Ends the node's ranks and, in a sweep, restores the state saved in `on_job_start`."""
        if self._before is None:
            return
        vars(subprocess_script)["_hydra_subprocess_cmd"] = self._lightning_command
        has_failed = job_return.status is JobStatus.FAILED
        is_sweep = config.hydra.mode is RunMode.MULTIRUN
        children = Children.current()
        # After the only job, a success, ranks may take long to end.
        if children is not None and (is_sweep or has_failed):
            children.end(has_failed=has_failed)
        if is_sweep:  # else no job follows, and the error is yet to be printed
            self._before.restore()
            self._before = None
