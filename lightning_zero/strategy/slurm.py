"""A job under SLURM: its layout compared with the Trainer's, and its requeueing.

A rank that SLURM did not start never comes, and the others would wait for it until the timeout: a
layout that SLURM did not give is refused before, with the lines that would be right.

Requeue: a job that must give its place away saves once, is queued again, and goes on from there.
SLURM's signal (`#SBATCH --signal=SIGUSR1@90`, or SIGTERM before a preemption) finds every rank
somewhere else, perhaps inside a collective, and may reach only one of them. So the handler sets a
flag and nothing more; at the next boundary between batches, where no gradient is pending, the ranks
agree, save together, and rank 0 asks SLURM to queue the job again.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero.checkpoint.atomic import recover
from lightning_zero.strategy.loops import StopRequest, name_of_batch
from lightning_zero.strategy.patches import Patches

__all__ = ["RequeuedExit", "Requeueing", "check_slurm_layout"]

_NUM_FITS = "LIGHTNING_ZERO_NUM_FITS"  # a variable, for it must outlive every Trainer
_SEEN_WITHIN_S = 60.0  # a file of one node, by the others on a shared file system


def check_slurm_layout(
    environment: Mapping[str, str], *, num_devices: int, num_nodes: int, on_cuda: bool
) -> None:
    """Compares nodes, tasks per node and GPUs. Reads the environment only.

    Args:
        environment: As srun sets it for a task, or sbatch for its script.
        num_devices: The Trainer's, of one node.
        num_nodes: The Trainer's.
        on_cuda: Whether the devices are GPUs.
    """
    get = environment.get
    given_nodes = int(get("SLURM_STEP_NUM_NODES", get("SLURM_NNODES", "1")))
    packed = get("SLURM_STEP_TASKS_PER_NODE", get("SLURM_TASKS_PER_NODE", ""))  # `2(x3),1`
    tasks = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", packed)
        for _ in range(int(times or 1))
    ] or [int(get("SLURM_NTASKS_PER_NODE", num_devices))]
    num_tasks = int(get("SLURM_NTASKS", "1"))
    asked = f"Trainer(num_nodes={num_nodes}, devices={num_devices})"
    lines = _lines(num_devices, num_nodes, on_cuda)
    if on_cuda and "SLURM_GPUS_PER_TASK" in environment:
        lines += (
            "\n--gpus-per-task shows each task its own GPUs only, but devices counts all of a "
            "node, which every task must see: ask with --gpus-per-node, and set devices to that."
        )
    if given_nodes != num_nodes or any(count != num_devices for count in tasks):
        counts = str(tasks[0]) if len(set(tasks)) == 1 else ", ".join(map(str, tasks))
        raise ValueError(
            f"{asked} needs {num_nodes} node(s) with {num_devices} task(s) each, one for every "
            f"device, but SLURM gave {given_nodes} node(s) with {counts} task(s).\n{lines}"
        )
    if num_tasks > 1 and "SLURM_PROCID" in environment and "SLURM_STEP_ID" not in environment:
        raise ValueError(
            f"SLURM gave {num_tasks} tasks, but this process was started without srun, so that the "
            f"other ranks would never come.\n{lines}"
        )
    gpus = get("SLURM_GPUS_ON_NODE", "")
    if on_cuda and gpus.isdigit() and int(gpus) < num_devices:
        raise ValueError(
            f"{asked} needs {num_devices} GPU(s) on every node, but SLURM gave {gpus}.\n{lines}"
        )


def _lines(num_devices: int, num_nodes: int, on_cuda: bool) -> str:
    lines = [f"#SBATCH --nodes={num_nodes}", f"#SBATCH --ntasks-per-node={num_devices}"]
    if on_cuda:
        lines.append(f"#SBATCH --gpus-per-node={num_devices}")
    return (
        "Use these lines in the batch script, and start Python with srun:\n"
        + "\n".join(f"    {line}" for line in [*lines, "srun python ..."])
        + "\nWith Hydra's submitit launcher: hydra.launcher.nodes="
        f"{num_nodes} hydra.launcher.tasks_per_node={num_devices}"
    )


# -------------------------------------------------------------------- requeue


class RequeuedExit(SIGTERMException):
    """All ranks have saved; the process ends.

    Its status is that of a process that SIGTERM has ended, never 0: what the batch script would do
    after the training must not be done yet. SLURM queues the job again whatever the status is.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Requeueing(_SignalConnector):
    """Requeueing of one fit of one job: handlers that set a flag, and boundaries that look at it.

    Takes the place of the Trainer's own handlers while it fits, which save and broadcast wherever
    the signal finds each rank.

    Attributes:
        path: The checkpoint from which the job goes on; the job's own, so that another job in the
            same directory does not take it up.
        request: What this rank was told.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        number = int(os.environ.get(_NUM_FITS, "0"))  # of the fit: the same in every run of a job
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
        """Calls `function`, the Trainer's fit, from the checkpoint of an earlier run if any."""
        trainer = self.trainer
        bound = inspect.signature(function).bind(*args, **kwargs)
        lightnings, trainer._signal_connector = trainer._signal_connector, self
        try:
            with self._flagged():
                if (found := self._find(bound.arguments.get("ckpt_path"))) is not None:
                    # Ours, with whatever objects the user's hooks have put in; it wins over a
                    # start.
                    bound.arguments |= {"ckpt_path": found, "weights_only": False}
                result = function(*bound.args, **bound.kwargs)
        finally:
            self.teardown()
            trainer._signal_connector = lightnings
        # Only now: after an exception, and where the process was killed, it is still there.
        if trainer.is_global_zero and self.path.exists():
            rank_zero_info(f"The fit has ended: {self.path}, from which it went on, is deleted.")
            trainer.strategy.remove_checkpoint(self.path)
        return result

    @contextmanager
    def _flagged(self) -> Iterator[None]:
        """From before the set-up, which may take long and must not be killed, to the end."""
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
                # None: it was not installed from Python, which cannot put it back.
                self._register_signal(signum, signal.SIG_DFL if handler is None else handler)

    def _find(self, start: object) -> str | None:
        """The checkpoint to go on from, if this is a later run of the job. Collective then.

        `start`: the user's own checkpoint, for the warning where there is no other.
        """
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts == 0:
            return None
        strategy: Any = self.trainer.strategy
        strategy.setup_environment()  # forms the group, so that no rank decides for itself
        strategy._on_rank_zero(f"recover {self.path}", lambda: recover(self.path))
        strategy._on_rank_zero(f"take {self.path}", lambda: _check_owner(self.path))
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

    # ---------------------------------------------------------------- between two batches

    def register_signal_handlers(self) -> None:
        """Lightning's moment to take the signals over, which are taken already."""
        fit_loop = self.trainer.fit_loop
        # When a round of a loop is over, whole and before the next has begun.
        self._patches.within(fit_loop.epoch_loop, "on_advance_end", self._batch)
        self._patches.within(fit_loop, "on_advance_end", self._epoch)

    def teardown(self) -> None:
        """Leaves the loops as they were."""
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
            # As the next epoch does first: else a run that counts steps repeats this epoch's end.
            epoch_loop = fit_loop.epoch_loop
            epoch_loop.batch_progress.reset_on_run()
            epoch_loop.scheduler_progress.reset_on_run()
            epoch_loop.automatic_optimization.optim_progress.reset_on_run()
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """Asks the other ranks whether to save and stop here. Collective: every rank."""
        request = self.request
        strategy: Any = self.trainer.strategy
        agreed = strategy.engine.lockstep.pass_boundary(name_of_batch(self.trainer, is_over=True))
        if agreed not in (StopRequest.PREEMPT, StopRequest.REQUEUE):
            return
        rank_zero_info(f"SLURM wants this job's place: saving {self.path}.")
        strategy.finish_saving(warns=True)  # an earlier failure must not cost this save
        self.trainer.save_checkpoint(self.path)
        strategy.finish_saving()  # whole on the disk, also if asynchronous
        strategy.checkpoint_io.teardown()
        self._save_metrics()  # SLURM may kill the processes as soon as it is asked
        strategy.barrier()
        why_not = strategy.broadcast(self._requeue(agreed) if strategy.is_global_zero else None)
        if why_not is None:
            raise RequeuedExit
        goes_on = "ends" if agreed == StopRequest.PREEMPT else "trains on"
        rank_zero_warn(
            f"The job is not requeued ({why_not}) and {goes_on}; {self.path} is saved, and "
            "fit(ckpt_path=...) goes on from it."
        )
        if agreed == StopRequest.PREEMPT:
            raise RequeuedExit
        if request is StopRequest.REQUEUE:  # else it has come since
            self.request = StopRequest.NONE

    def _save_metrics(self) -> None:
        try:
            for logger in self.trainer.loggers:
                logger.save()
        except Exception as error:  # the others wait for this rank, and the checkpoint is saved
            rank_zero_warn(f"the metrics were not saved: {type(error).__name__}: {error}")

    def _requeue(self, request: int) -> str | None:
        """Asks SLURM; what speaks against it, or None. On rank 0 only."""
        job = number = os.environ["SLURM_JOB_ID"]
        # SIGTERM also comes from scancel and after the time limit, and is then the job's end.
        if request == StopRequest.PREEMPT:
            shown = _scontrol("show", "job", "-o", number)
            state = re.search(r"\bJobState=(\w+)", shown.stdout)
            if state is None:
                return f"it is in an unknown state: {shown.stderr.strip() or shown.stdout}"
            if state[1] != "RUNNING":
                return f"it is {state[1]}"
        if "SLURM_ARRAY_JOB_ID" in os.environ:  # by the number alone, SLURM may take all of it
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        done = _scontrol("requeue", job)
        if done.returncode == 0:
            return None
        return f"scontrol requeue {job}: {done.stderr.strip() or done.returncode}"


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    """Asks SLURM; status 1 with the reason as its error where it cannot be asked."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=str(error))


def _check_owner(path: Path) -> None:
    """Refuses a checkpoint to go on from that another user has put there.

    It is unpickled without limits, for objects of this user's own hooks may be in it, and its name
    can be foreseen. A file system may give files another owner than their writer, as it does for
    root in a network; then they belong to the owner of a file that this process makes there.

    Raises:
        PermissionError: It, or a file in it, belongs to another user, or is a link to elsewhere.
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
                f"it {what}, and a requeued job goes on only from what user {os.geteuid()} has "
                "saved; remove it, or set a default_root_dir that only you can write to",
                str(found),
            )


def _wait_until_seen(path: Path, timeout_s: float) -> None:
    """Waits for what another node has written; if it does not come, opening it says so."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(path.parent)  # has a network file system look again
        time.sleep(0.2)
