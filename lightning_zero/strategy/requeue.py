"""Requeueing of SLURM jobs.

A job that SLURM is about to stop saves once, is queued again, and resumes from that checkpoint.
SLURM's signal (`#SBATCH --signal=SIGUSR1@90`, or SIGTERM before a preemption) finds each rank at a
different point, perhaps inside a collective, and may reach only one rank. So the handler only sets
a flag. At the next boundary between batches, where no gradient is pending, the ranks share their
flags and save together, and rank 0 asks SLURM to queue the job again.
"""

from __future__ import annotations

import errno
import inspect
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero._lightning.fabric import SLURMEnvironment
from lightning_zero._lightning.pytorch import SIGTERMException, Trainer, TrainerFn, _SignalConnector
from lightning_zero.checkpoint.atomic import recover
from lightning_zero.launch.slurm import requeue_job
from lightning_zero.strategy.loops import StopRequest, name_of_batch
from lightning_zero.strategy.patches import Patches

__all__ = ["RequeuedExit", "with_requeueing"]

_NUM_FITS = "LIGHTNING_ZERO_NUM_FITS"  # an environment variable, which outlives every Trainer
_SEEN_WITHIN_S = 60.0  # time until a shared file system shows a file of another node


def with_requeueing(function: Callable[..., Any], trainer: Trainer | None) -> Callable[..., Any]:
    """Wraps `function` of the Trainer if it is a fit that SLURM may requeue."""
    if trainer is None or not Requeueing.is_wanted(trainer):
        return function
    return partial(Requeueing(trainer).run, function)


class RequeuedExit(SIGTERMException):
    """Ends the process after all ranks have saved.

    The exit status is that of a process that SIGTERM has ended, never 0: training is not complete,
    and the batch script must not continue. SLURM requeues the job with any status.
    """

    def __init__(self) -> None:
        super().__init__()  # Lightning 2.7 accepts no argument
        self.code = 128 + signal.SIGTERM


class Requeueing(_SignalConnector):
    """Requeueing of one fit: signal handlers that set a flag, and boundaries that read it.

    Replaces the Trainer's own signal handlers during the fit. Those save and broadcast wherever the
    signal finds each rank.

    Attributes:
        path: Checkpoint from which the job resumes. Its name has the job's id, so that no other job
            in the same directory resumes from it.
        request: Stop request of this rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        number = int(os.environ.get(_NUM_FITS, "0"))  # of this fit, the same in every run of a job
        os.environ[_NUM_FITS] = str(number + 1)
        name = f"requeue-{os.environ['SLURM_JOB_ID']}-{number}.ckpt"
        self.path = Path(trainer.default_root_dir, name)
        self.request = StopRequest.NONE
        self._patches = Patches()

    @staticmethod
    def is_wanted(trainer: Trainer) -> bool:
        """Whether this is a fit under SLURM that may be requeued."""
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        return (
            trainer.state.fn == TrainerFn.FITTING
            and isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and environment.job_id() is not None
        )

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function`, the Trainer's fit, with the checkpoint of an earlier run, if any."""
        trainer = self.trainer
        bound = inspect.signature(function).bind(*args, **kwargs)
        lightnings, trainer._signal_connector = trainer._signal_connector, self
        try:
            with self._installed_handlers():
                found = self._find_checkpoint(bound.arguments.get("ckpt_path"))
                if found is not None:
                    # It overrides the user's `ckpt_path`, and may hold objects of the user's hooks.
                    bound.arguments |= {"ckpt_path": found, "weights_only": False}
                result = function(*bound.args, **bound.kwargs)
        finally:
            self.teardown()
            trainer._signal_connector = lightnings
        # Only after success: a failed or killed fit keeps its checkpoint.
        if trainer.is_global_zero and self.path.exists():
            rank_zero_info(f"fit is complete: deleting {self.path}, from which it was resumed.")
            trainer.strategy.remove_checkpoint(self.path)
        return result

    @contextmanager
    def _installed_handlers(self) -> Iterator[None]:
        """Context with the signal handlers, also during set-up, which may take long."""
        environment = self.trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        requests = {
            environment.requeue_signal: StopRequest.REQUEUE,
            signal.SIGTERM: StopRequest.PREEMPT,
        }
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
                # None: not installed from Python, which cannot restore it.
                self._register_signal(signum, signal.SIG_DFL if handler is None else handler)

    def _find_checkpoint(self, start: object) -> str | None:
        """Finds the checkpoint to resume from, in a later run of the job. Collective then.

        `start`: the user's `ckpt_path`, for the warning that there is no other checkpoint.
        """
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts == 0:
            return None
        strategy: Any = self.trainer.strategy
        strategy.setup_environment()  # creates the group, so that rank 0 decides for all
        path = self.path
        strategy.run_on_rank_zero(f"recover {path}", lambda: recover(path))

        def check() -> tuple[Path, bool]:
            _check_owner(path)
            return path, path.exists()

        own = (path, path.exists())
        self.path, exists = strategy.run_on_rank_zero(f"check {path}", check, otherwise=own)
        if not exists:
            begins = "from scratch" if not start else f"from {start}"
            rank_zero_warn(
                f"SLURM restarted this job (SLURM_RESTART_COUNT={restarts}), but {self.path} does "
                f"not exist: fit starts {begins}. Either this fit was complete, or there was no "
                "time to save (#SBATCH --signal=SIGUSR1@120 gives more), or default_root_dir "
                "differs between runs of the job."
            )
            return None
        rank_zero_info(f"SLURM requeued this job: resuming from {self.path}.")
        _wait_until_seen(self.path, _SEEN_WITHIN_S)
        return str(self.path)

    # ---------------------------------------------------------------- between two batches

    def register_signal_handlers(self) -> None:
        """Called when Lightning would install its handlers; patches the loops instead."""
        fit_loop = self.trainer.fit_loop
        # After an iteration of a loop is complete, and before the next one.
        self._patches.within(fit_loop.epoch_loop, "on_advance_end", self._batch)
        self._patches.within(fit_loop, "on_advance_end", self._epoch)

    def teardown(self) -> None:
        """Restores the loops."""
        self._patches.undo()

    @contextmanager
    def _batch(self) -> Iterator[None]:
        yield
        loop = self.trainer.fit_loop.epoch_loop
        is_last = loop.batch_progress.is_last_batch or loop._is_training_done
        if not is_last and not loop._should_accumulate() and not self.trainer.should_stop:
            self._stop_if_asked()

    @contextmanager
    def _epoch(self) -> Iterator[None]:
        yield
        fit_loop = self.trainer.fit_loop
        max_epochs, max_steps = fit_loop.max_epochs or -1, fit_loop.max_steps
        num_epochs = fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        is_over = num_epochs >= max_epochs > 0
        is_over |= self.trainer.global_step >= max_steps > 0 or self.trainer.should_stop
        if not is_over:
            # The next epoch resets these first. A checkpoint without the reset would repeat the end
            # of this epoch in a run with max_steps.
            epoch_loop = fit_loop.epoch_loop
            epoch_loop.batch_progress.reset_on_run()
            epoch_loop.scheduler_progress.reset_on_run()
            epoch_loop.automatic_optimization.optim_progress.reset_on_run()
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """Saves and stops here if any rank has a stop request. Collective: every rank."""
        request = self.request
        strategy: Any = self.trainer.strategy
        order = strategy.engine.lockstep.order
        agreed = order.pass_boundary(name_of_batch(self.trainer, is_over=True))
        if agreed not in (StopRequest.PREEMPT, StopRequest.REQUEUE):
            return
        rank_zero_info(f"SLURM is about to stop this job: saving {self.path}.")
        strategy.finish_saving(warns=True)  # an earlier failure must not prevent this save
        self.trainer.save_checkpoint(self.path)
        strategy.finish_saving()  # completes an asynchronous save
        strategy.checkpoint_io.teardown()
        self._save_metrics()  # SLURM may kill the processes as soon as it requeues the job
        strategy.barrier()
        # SIGTERM also comes from scancel and after the time limit; the job then ends.
        is_preempted = agreed == StopRequest.PREEMPT
        is_first = strategy.is_global_zero
        why_not = requeue_job(only_if_running=is_preempted) if is_first else None
        why_not = strategy.broadcast(why_not)
        if why_not is None:
            raise RequeuedExit
        consequence = "ends" if is_preempted else "continues to train"
        rank_zero_warn(
            f"The job is not requeued ({why_not}) and {consequence}; {self.path} is saved, and "
            "fit(ckpt_path=...) resumes from it."
        )
        if is_preempted:
            raise RequeuedExit
        if request is StopRequest.REQUEUE:  # a request during the save stays
            self.request = StopRequest.NONE

    def _save_metrics(self) -> None:
        try:
            for logger in self.trainer.loggers:
                logger.save()
        except Exception as error:  # other ranks wait, and the checkpoint is saved
            rank_zero_warn(f"the metrics were not saved: {type(error).__name__}: {error}")


def _check_owner(path: Path) -> None:
    """Raises if another user has created the checkpoint to resume from.

    The checkpoint is unpickled without limits, since it may hold objects of the user's hooks, and
    its name is predictable. A network file system may change the owner of a file, as it does for
    root. So files also count as this user's if a file that this process creates there has the same
    owner.

    Raises:
        PermissionError: The checkpoint or a file in it belongs to another user, or is a link.
    """
    if not os.path.lexists(path):
        return
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    own = {os.geteuid()}
    for found in (path, *inside):
        owner = found.lstat().st_uid
        if owner not in own:
            with tempfile.TemporaryFile(dir=path.parent) as probe:
                own.add(os.fstat(probe.fileno()).st_uid)
        if owner not in own or found.is_symlink():
            what = "is a link" if found.is_symlink() else f"belongs to user {owner}"
            raise PermissionError(
                errno.EPERM,
                f"it {what}, and a requeued job resumes only from checkpoints of user "
                f"{os.geteuid()}; remove it, or set a default_root_dir that only you can write to",
                str(found),
            )


def _wait_until_seen(path: Path, timeout_s: float) -> None:
    """Waits until a file of another node is visible. If it never is, opening it will raise."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh its cache
        time.sleep(0.2)
