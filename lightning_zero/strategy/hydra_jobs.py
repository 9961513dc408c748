"""A callback for Hydra, which this imports: where one job of a sweep ends and the next begins."""

from __future__ import annotations

import os
from typing import Any

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from lightning.pytorch.strategies.launchers import subprocess_script

from lightning_zero.strategy.children import Children, ProcessSnapshot
from lightning_zero.strategy.hydra import child_command

__all__ = ["HydraJobs"]

_RANKS = ("LOCAL_RANK", "RANK", "SLURM_PROCID")  # of processes that something else has started


class HydraJobs(Callback):
    """Lets the jobs of a sweep launch their ranks one after another: `hydra.callbacks`.

    A Trainer makes its process rank 0 for good, and the next job would find a process group whose
    other ranks are gone. `ZeroStrategy` sees to that for itself; Lightning's own strategies do not,
    and their children would run the whole sweep again: they are started as ours are.

    Alternatives considered: to look for the end of a job from within the strategy, which the next
    job need not use.
    """

    def __init__(self) -> None:
        self._before: ProcessSnapshot | None = None
        self._lightnings: Any = None

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        """Remembers the process as it is."""
        if not any(name in os.environ for name in _RANKS):
            self._before = ProcessSnapshot.take()
            self._lightnings = vars(subprocess_script)["_hydra_subprocess_cmd"]
            vars(subprocess_script)["_hydra_subprocess_cmd"] = child_command

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """Makes it so again, once the ranks of this node have ended."""
        if self._before is None:
            return
        vars(subprocess_script)["_hydra_subprocess_cmd"] = self._lightnings
        has_failed = job_return.status is JobStatus.FAILED
        if config.hydra.mode is not RunMode.MULTIRUN and not has_failed:
            return  # no job follows, and a rank may take its time to end
        if (children := Children.current()) is not None:
            children.end(has_failed=has_failed)
        self._before.restore()
        self._before = None
