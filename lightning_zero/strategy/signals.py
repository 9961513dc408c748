"""What all ranks agree on between two batches: each has one, and none is asked to stop or requeue.

Lightning broadcasts rank 0's "SIGTERM has come" there, on WORLD: a rank that has failed, or has no
batch left, keeps the others waiting, and so does a GPU until it has nothing left to do. It
broadcasts once more inside its handler, wherever the signal finds the rank, and afterwards each
rank stops where it finds the flag. Here the handler sets a flag of ours, and the ranks agree on the
control plane on what any of them was told: all stop before the same batch, or before a validation.
Inside an evaluation, Lightning's own flag ends it on the rank that was told, and so on all.

Requeue: a SLURM job that must give its place away saves once, is queued again, and goes on from
there. SLURM's signal (`#SBATCH --signal=SIGUSR1@90`, or SIGTERM before a preemption) finds every
rank somewhere else, perhaps inside a collective, and may reach only one of them. So the handler
sets a flag and nothing more; at the next boundary between batches, where no gradient is pending,
the ranks agree, save together, and rank 0 asks SLURM to queue the job again.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero.checkpoint.atomic import recover
from lightning_zero.comm.watchdog import RanksApartError
from lightning_zero.core.lockstep import Lockstep
from lightning_zero.strategy.checkpoint_io import on_rank_zero
from lightning_zero.strategy.patches import Patches

__all__ = ["BatchBoundary", "RequeuedExit", "Requeueing", "name_of_batch", "with_status"]

# There is no hook between batches that may end a training, nor one for the handler.
_AGREE = "_broadcast_sigterm_tensor"
_HANDLE = "_sigterm_notifier_fn"

_log = logging.getLogger(__name__)


class Wish(IntEnum):
    """What a rank wishes for all, between two batches; the lowest of all ranks counts."""

    LEAVE = 0  # the place is taken away
    REQUEUE = 1  # the time will soon be up
    STOP = 2
    NOTHING = 3


class BatchBoundary:
    """What a strategy puts between the batches of the running fit, and into every run's handler."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._trainer: Trainer | None = None
        self._lockstep: Lockstep | None = None
        self._is_told = False

    def begin(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Before Lightning installs its handlers. Local."""
        self.end()
        self._trainer, self._lockstep, self._is_told = trainer, lockstep, False
        lockstep.wishes(self._wish)
        self._patches.put(trainer.fit_loop.epoch_loop, _AGREE, self.agree)
        self._patches.put(trainer._signal_connector, _HANDLE, partial(self._note, trainer))

    def end(self) -> None:
        """After the run, or after an exception in it. Local."""
        self._patches.undo()

    def _wish(self) -> Wish:
        assert self._trainer is not None
        signals = self._trainer._signal_connector
        asked = signals.request if isinstance(signals, _Signals) else Wish.NOTHING
        return min(asked, Wish.STOP if self._is_told else Wish.NOTHING)

    def agree(self) -> None:
        """Whether all ranks go on. Collective: every rank, before the same batch.

        Raises:
            SIGTERMException: A rank was told to stop.
            RuntimeError: Another rank has no batch, or another one.
        """
        assert self._trainer is not None
        assert self._lockstep is not None
        if self._lockstep.pass_boundary(name_of_batch(self._trainer)) == Wish.STOP:
            rank_zero_warn("SIGTERM has come: the training of all ranks ends here.")
            with suppress(RanksApartError):  # so that none goes away before all know
                self._lockstep.meet_for("the stop of all ranks")
            raise with_status(SIGTERMException())

    def _note(self, trainer: Trainer, signum: int, frame: FrameType | None) -> None:
        _log.warning("rank %d: SIGTERM has come.", trainer.global_rank)
        if not self._is_told and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # the ranks that this process has started
        self._is_told = True
        if trainer.world_size == 1 or not trainer.training:
            trainer._signal_connector.received_sigterm = True


def with_status(exception: SIGTERMException) -> SIGTERMException:
    """The same, with the status of a process that SIGTERM has ended: the training is not done."""
    if exception.code is None:
        exception.code = 128 + signal.SIGTERM
    return exception


def name_of_batch(trainer: Trainer, *, is_over: bool = False) -> str:
    """Of the batch that comes next, or of the one that is over: the same on every rank."""
    number = trainer.fit_loop.epoch_loop.batch_idx + (not is_over)
    return f"{'the end of ' * is_over}batch {number} of epoch {trainer.current_epoch}"


_NUM_FITS = "LIGHTNING_ZERO_NUM_FITS"  # a variable, for it must outlive every Trainer
_SEEN_WITHIN_S = 60.0  # a file of one node, by the others on a shared file system


class RequeuedExit(SIGTERMException):
    """All ranks have saved; the process ends.

    Its status is that of a process that SIGTERM has ended, never 0: what the batch script would do
    after the training must not be done yet. SLURM queues the job again whatever the status is.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


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
        signals, lightnings = _Signals(self), trainer._signal_connector
        trainer._signal_connector = signals
        try:
            with signals.flagged():
                if (found := self._find(bound.arguments.get("ckpt_path"))) is not None:
                    # Ours, with whatever objects the user's hooks have put in; it wins over a
                    # start.
                    bound.arguments |= {"ckpt_path": found, "weights_only": False}
                result = function(*bound.args, **bound.kwargs)
        finally:
            signals.teardown()
            trainer._signal_connector = lightnings
        # Only now: after an exception, and where the process was killed, it is still there.
        if trainer.is_global_zero and self.path.exists():
            rank_zero_info(f"The fit has ended: {self.path}, from which it went on, is deleted.")
            trainer.strategy.remove_checkpoint(self.path)
        return result

    def _find(self, start: object) -> str | None:
        """The checkpoint to go on from, if this is a later run of the job. Collective then.

        Args:
            start: The user's own checkpoint, for the warning where there is no other.
        """
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts == 0:
            return None
        strategy = self.trainer.strategy
        strategy.setup_environment()  # forms the group, so that no rank decides for itself
        on_rank_zero(strategy, f"recover {self.path}", lambda: recover(self.path))
        self.path, is_there = strategy.broadcast((self.path, self.path.exists()))
        if not is_there:
            rank_zero_warn(
                f"SLURM started this job again (SLURM_RESTART_COUNT={restarts}), but {self.path} "
                f"is not there: the fit begins {f'from {start}' if start else 'anew'}. Either this "
                "fit had ended, or nothing was saved in time (#SBATCH --signal=SIGUSR1@120 gives "
                "more time), or default_root_dir is not the same in each run of the job."
            )
            return None
        rank_zero_info(f"This job was requeued: it goes on from {self.path}.")
        _wait_until_seen(self.path, _SEEN_WITHIN_S)
        return str(self.path)

    def at_boundary(self) -> Wish:
        """Asks the other ranks whether to stop here. Collective: every rank.

        Returns:
            What was wished, where training goes on.

        Raises:
            RequeuedExit: They stop; everything is saved.
        """
        engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
        batch = name_of_batch(self.trainer, is_over=True)
        agreed = engine.lockstep.pass_boundary(batch)
        if agreed not in (Wish.LEAVE, Wish.REQUEUE):
            return Wish.NOTHING
        rank_zero_info(f"SLURM wants this job's place: saving {self.path}.")
        strategy: Any = self.trainer.strategy
        strategy.finish_saving(warns=True)  # an earlier failure must not cost this save
        self.trainer.save_checkpoint(self.path)
        strategy.finish_saving()  # whole on the disk, also if asynchronous
        strategy.checkpoint_io.teardown()
        self._save_metrics()  # SLURM may kill the processes as soon as it is asked
        strategy.barrier()
        why_not = strategy.broadcast(self._requeue(agreed))
        if why_not is None:
            raise RequeuedExit
        goes_on = "ends" if agreed == Wish.LEAVE else "trains on"
        rank_zero_warn(
            f"The job is not requeued ({why_not}) and {goes_on}; {self.path} is saved, and "
            "fit(ckpt_path=...) goes on from it."
        )
        if agreed == Wish.LEAVE:
            raise RequeuedExit
        return Wish.REQUEUE

    def _save_metrics(self) -> None:
        try:
            for logger in self.trainer.loggers:
                logger.save()
        except Exception as error:  # the others wait for this rank, and the checkpoint is saved
            rank_zero_warn(f"the metrics were not saved: {type(error).__name__}: {error}")

    def _requeue(self, request: int) -> str | None:
        """Rank 0 asks SLURM; what speaks against it, or None."""
        if not self.trainer.is_global_zero:
            return None  # nobody reads it
        # SIGTERM also comes from scancel and after the time limit, and is then the job's end.
        if request == Wish.LEAVE and (state := _job_state()) != "RUNNING":
            return f"it is {state}"
        done = _scontrol("requeue", _job_name())
        if done.returncode == 0:
            return None
        return f"scontrol requeue {_job_name()}: {done.stderr.strip() or done.returncode}"


class _Signals(_SignalConnector):
    """Handlers that set a flag, and the boundaries at which it is looked at.

    Lightning's own handlers save and broadcast wherever the signal finds each rank.
    """

    def __init__(self, requeueing: Requeueing) -> None:
        super().__init__(requeueing.trainer)
        self.requeueing = requeueing
        self.request = Wish.NOTHING
        self._patches = Patches()

    @contextlib.contextmanager
    def flagged(self) -> Iterator[None]:
        """From before the set-up, which may take long and must not be killed, to the end."""
        environment = self.trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        requests = {environment.requeue_signal: Wish.REQUEUE, signal.SIGTERM: Wish.LEAVE}
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
                # None: it was not installed from Python, which cannot put it back.
                self._register_signal(signum, signal.SIG_DFL if handler is None else handler)

    def register_signal_handlers(self) -> None:
        """Lightning's moment to take the signals over, which are taken already."""
        fit_loop = self.trainer.fit_loop
        # When a round of a loop is over, whole and before the next has begun.
        self._patches.after(fit_loop.epoch_loop, "on_advance_end", self._after_batch)
        self._patches.after(fit_loop, "on_advance_end", self._after_epoch)

    def teardown(self) -> None:
        """Leaves the loops as they were."""
        self._patches.undo()

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
        done = self.requeueing.at_boundary()
        if done is Wish.REQUEUE and request is Wish.REQUEUE:  # else it has come since
            self.request = Wish.NOTHING


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


def _job_state() -> str:
    done = _scontrol("show", "job", "-o", _job_id())
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    return found[1] if found else f"in an unknown state: {done.stderr.strip() or done.stdout}"


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    """Asks SLURM; status 1 with the reason as its error where it cannot be asked."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=str(error))


def _wait_until_seen(path: Path, timeout_s: float) -> None:
    """Waits for what another node has written; if it does not come, opening it says so."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # has a network file system look again
        time.sleep(0.2)
