"""A SLURM job that must give its place away saves once, is queued again, and goes on from there.

SLURM's signal (`#SBATCH --signal=SIGUSR1@90`, or SIGTERM before a preemption) finds every rank
somewhere else, perhaps inside a collective, and may reach only one of them. So the handler sets a
flag and nothing more; at the next boundary between batches, where no gradient is pending, the ranks
agree, save together, and rank 0 asks SLURM to queue the job again.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

__all__ = ["RequeuedExit", "Requeueing"]

_NUM_FITS = "LIGHTNING_ZERO_NUM_FITS"  # a variable, for it must outlive every Trainer
_EXIT_CODE_OF_SIGTERM = 128 + signal.SIGTERM


class RequeuedExit(SIGTERMException):
    """All ranks have saved; the process ends."""


class Request(IntEnum):
    """What a rank asks for; the lowest of all ranks counts."""

    LEAVE = 0  # the place is taken away
    REQUEUE = 1  # the time will soon be up
    NOTHING = 2


class Requeueing:
    """Requeueing of one fit of one job.

    Args:
        trainer: Lightning's own handlers are not installed while it fits.

    Attributes:
        path: The checkpoint from which the job goes on; the job's own, so that another job in the
            same directory does not take it up.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.path = Path(trainer.default_root_dir, f"requeue-{_job_id()}-{_next_fit()}.ckpt")

    @staticmethod
    def is_wanted(trainer: pl.Trainer) -> bool:
        """Whether this is a fit under SLURM that may be requeued."""
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        return (
            trainer.state.fn == TrainerFn.FITTING
            and isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and environment.job_id() is not None
        )

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function`, the Trainer's fit, from the checkpoint of an earlier run if any."""
        trainer = self.trainer
        bound = inspect.signature(function).bind(*args, **kwargs)
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and self.path.exists():
            rank_zero_info(f"This job was requeued: it goes on from {self.path}.")
            # Ours, with whatever objects the user's hooks have put in; it wins over a start.
            bound.arguments |= {"ckpt_path": str(self.path), "weights_only": False}
        signals, lightnings = _Signals(self), trainer._signal_connector
        trainer._signal_connector = signals
        try:
            with signals.flagged():
                result = function(*bound.args, **bound.kwargs)
        finally:
            signals.teardown()
            trainer._signal_connector = lightnings
        if trainer.is_global_zero and self.path.exists():
            trainer.strategy.remove_checkpoint(self.path)
        return result

    def at_boundary(self, request: Request) -> None:
        """Asks the other ranks whether to stop here. Collective: every rank.

        Raises:
            RequeuedExit: They stop; everything is saved.
        """
        engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
        agreed = Request(engine.comm.agree(int(request))[0])
        if agreed is Request.NOTHING:
            return
        rank_zero_info(f"SLURM wants this job's place: saving {self.path}.")
        self.trainer.save_checkpoint(self.path)
        # Whole on the disk, also if asynchronous.
        self.trainer.strategy.finish_saving()  # type: ignore[attr-defined]
        self.trainer.strategy.checkpoint_io.teardown()
        self.trainer.strategy.barrier()
        is_queued = self.trainer.strategy.broadcast(self._requeue(agreed))
        if is_queued:
            raise RequeuedExit
        if agreed is Request.LEAVE:
            raise RequeuedExit(_EXIT_CODE_OF_SIGTERM)
        rank_zero_warn(
            f"The job could not be requeued and trains on; {self.path} is saved, and "
            "fit(ckpt_path=...) goes on from it."
        )

    def _requeue(self, request: Request) -> bool:
        """Rank 0 asks SLURM; elsewhere False, which nobody reads."""
        if not self.trainer.is_global_zero:
            return False
        # SIGTERM also comes from scancel and after the time limit, and is then the job's end.
        if request is Request.LEAVE and _job_state() != "RUNNING":
            return False
        done = _scontrol("requeue", _job_name())
        return done is not None and done.returncode == 0


class _Signals(_SignalConnector):
    """Handlers that set a flag, and the boundaries at which it is looked at.

    Lightning's own handlers save and broadcast wherever the signal finds each rank.
    """

    def __init__(self, requeueing: Requeueing) -> None:
        super().__init__(requeueing.trainer)
        self.requeueing = requeueing
        self.request = Request.NOTHING

    @contextlib.contextmanager
    def flagged(self) -> Iterator[None]:
        """From before the set-up, which may take long and must not be killed, to the end."""
        environment = self.trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        requests = {environment.requeue_signal: Request.REQUEUE, signal.SIGTERM: Request.LEAVE}
        earlier = {signum: signal.getsignal(signum) for signum in requests}

        def flag(signum: int, frame: FrameType | None) -> None:
            self.request = min(self.request, requests[signum])
            chained = earlier[signum]
            if callable(chained):
                chained(signum, frame)

        for signum in requests:
            self._register_signal(signum, flag)
        try:
            yield
        finally:
            for signum, handler in earlier.items():
                self._register_signal(signum, handler)

    def register_signal_handlers(self) -> None:
        """Lightning's moment to take the signals over, which are taken already."""
        fit_loop = self.trainer.fit_loop
        self._look_after(fit_loop.epoch_loop, self._after_batch)
        self._look_after(fit_loop, self._after_epoch)

    def teardown(self) -> None:
        """Leaves the loops as they were."""
        for loop in (self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop):
            loop.__dict__.pop("on_advance_end", None)

    def _look_after(self, loop: Any, look: Callable[[], None]) -> None:
        """Calls `look` when a round of the loop is over, whole and before the next has begun."""
        end_round = type(loop).on_advance_end

        def on_advance_end(*args: Any, **kwargs: Any) -> None:
            end_round(loop, *args, **kwargs)
            look()

        loop.on_advance_end = on_advance_end

    def _after_batch(self) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        is_last = loop.batch_progress.is_last_batch or loop._is_training_done
        if not is_last and not loop._should_accumulate() and not self.trainer.should_stop:
            self._stop_if_asked()

    def _after_epoch(self) -> None:
        fit_loop = self.trainer.fit_loop
        max_epochs, max_steps = fit_loop.max_epochs or -1, fit_loop.max_steps
        num_epochs = fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        is_over = num_epochs >= max_epochs > 0
        is_over |= self.trainer.global_step >= max_steps > 0 or self.trainer.should_stop
        if not is_over:
            # As the next epoch does first: else a run that counts steps repeats this epoch's end.
            epoch_loop = fit_loop.epoch_loop
            epoch_loop.batch_progress.reset_on_run()
            epoch_loop.scheduler_progress.reset_on_run()
            epoch_loop.automatic_optimization.optim_progress.reset_on_run()
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        request = self.request
        self.requeueing.at_boundary(request)
        if request is not Request.NOTHING:  # else one that has come since would be lost
            self.request = Request.NOTHING


def _next_fit() -> int:
    """How many fits this process began before; the same in every run of a job."""
    number = int(os.environ.get(_NUM_FITS, "0"))
    os.environ[_NUM_FITS] = str(number + 1)
    return number


def _job_id() -> str:
    return os.environ["SLURM_JOB_ID"]


def _job_name() -> str:
    """The job, or the one task of an array: by its number alone, SLURM may take the whole array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return _job_id()


def _job_state() -> str | None:
    done = _scontrol("show", "job", "-o", _job_id())
    found = re.search(r"\bJobState=(\w+)", done.stdout) if done is not None else None
    return found[1] if found else None


def _scontrol(*words: str) -> subprocess.CompletedProcess[str] | None:
    """Asks SLURM; None where it cannot be asked."""
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        rank_zero_warn(f"scontrol {' '.join(words)} failed: {error}")
        return None
