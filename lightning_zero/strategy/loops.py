"""Lightning's loops on ranks that differ: with a stop request, or with fewer batches.

Between two batches of a fit, all ranks check in one control-plane round that each rank has a batch
and that no rank has a stop request. Lightning instead broadcasts rank 0's SIGTERM flag there, on
WORLD. A rank that has failed or has no batch left keeps the others waiting, and so does a GPU until
its queue is empty. Lightning broadcasts once more inside its handler, wherever the signal finds the
rank, and then each rank stops where it reads the flag. Here the handler only sets a flag of ours,
and the round shares it: all ranks stop before the same batch, or before a validation. Inside an
evaluation, Lightning's own flag ends the loop on the rank that received the signal, and so on all.

Validation, test and prediction may have a different number of batches on each rank.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero._lightning.fabric import sized_len
from lightning_zero._lightning.pytorch import SIGTERMException, Trainer
from lightning_zero.core.lockstep import Lockstep
from lightning_zero.health.failures import DesynchronizedError
from lightning_zero.strategy.patches import Patches

__all__ = ["LockstepLoops", "StopRequest", "replace_empty_loader", "name_of_batch", "with_status"]

# Lightning has no hook between batches that may end training, and none for the signal handler.
_CHECK_SIGTERM = "_broadcast_sigterm_tensor"
_HANDLE_SIGTERM = "_sigterm_notifier_fn"
# Lightning has no hook between the last batch and the first collective after it, which synchronizes
# metrics, so these methods of the running loop are wrapped. The first one ends a data loader's
# batches (the prediction loop lacks it), the second one ends the loop.
_END_OF_LOADER = "_store_dataloader_outputs"
_END_OF_LOOP = "on_run_end"

_log = logging.getLogger(__name__)


class StopRequest(IntEnum):
    """A rank's request to all ranks between two batches. The lowest of all ranks takes effect."""

    PREEMPT = 0  # the job is being preempted
    REQUEUE = 1  # the job's time limit is near
    STOP = 2
    NONE = 3


class LockstepLoops:
    """Patches of a run's loops and of its SIGTERM handler."""

    def __init__(self) -> None:
        self._of_run, self._of_evaluation = Patches(), Patches()
        self._trainer: Trainer | None = None
        self._lockstep: Lockstep | None = None
        self._has_sigterm = False

    def begin(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Installs the patches of a run. Call before Lightning installs its handlers. Local."""
        self.end()
        self._trainer, self._lockstep, self._has_sigterm = trainer, lockstep, False
        lockstep.set_stop_request(self._stop_request)
        self._of_run.put(trainer.fit_loop.epoch_loop, _CHECK_SIGTERM, self.check_stop_requests)
        self._of_run.put(
            trainer._signal_connector, _HANDLE_SIGTERM, partial(self._on_sigterm, trainer)
        )

    def end(self) -> None:
        """Removes all patches, after the run or an exception in it. Local."""
        self._of_run.undo()
        self._of_evaluation.undo()

    def _stop_request(self) -> StopRequest:
        assert self._trainer is not None
        # Only the connector of a requeueable SLURM job has requests of its own.
        request: StopRequest = getattr(self._trainer._signal_connector, "request", StopRequest.NONE)
        return min(request, StopRequest.STOP if self._has_sigterm else StopRequest.NONE)

    def check_stop_requests(self) -> None:
        """Raises unless every rank has a batch and no rank has a stop request. Collective."""
        assert self._trainer is not None
        assert self._lockstep is not None
        request = self._lockstep.order.pass_boundary(name_of_batch(self._trainer))
        if request == StopRequest.STOP:
            rank_zero_warn("received SIGTERM: training ends here on all ranks.")
            with suppress(DesynchronizedError):  # no rank may exit before all have the result
                self._lockstep.barrier("the stop of all ranks")
            raise with_status(SIGTERMException())

    def _on_sigterm(self, trainer: Trainer, signum: int, frame: FrameType | None) -> None:
        _log.warning("rank %d: received SIGTERM.", trainer.global_rank)
        if not self._has_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # forwards it to the ranks it has started
        self._has_sigterm = True
        if trainer.world_size == 1 or not trainer.training:
            trainer._signal_connector.received_sigterm = True

    def begin_evaluation(self) -> None:
        """Patches an evaluation loop before its first batch. Collective."""
        self.check_stop_requests()
        self._of_evaluation.undo()
        assert self._trainer is not None
        assert self._lockstep is not None
        loop: Any = self._trainer._active_loop
        if hasattr(loop, _END_OF_LOADER):
            at_end = partial(_end_of_loader, loop, self._lockstep)
            self._of_evaluation.within(loop, _END_OF_LOADER, at_end)
        self._of_evaluation.within(loop, _END_OF_LOOP, partial(_end_of_loop, self._lockstep))
        self._lockstep.begin_loop()

    def end_evaluation(self) -> None:
        self._of_evaluation.undo()


def with_status(exception: SIGTERMException) -> SIGTERMException:
    """Sets the exit status of a process that SIGTERM has ended: training is not complete."""
    if exception.code is None:
        exception.code = 128 + signal.SIGTERM
    return exception


def name_of_batch(trainer: Trainer, *, is_over: bool = False) -> str:
    """Name of the next batch, or of the one that is over. The same on every rank."""
    number, epoch = trainer.fit_loop.epoch_loop.batch_idx, trainer.current_epoch
    if is_over:
        return f"the end of batch {number} of epoch {epoch}"
    return f"batch {number + 1} of epoch {epoch}"


# -------------------------------------------------------------------- evaluation


class _NoBatches:
    """An empty data loader with a length, for a loader that is empty on this rank only.

    Lightning skips a loop in which a rank has no batches, and the other ranks would wait for it.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def replace_empty_loader(loader: object, trainer: Trainer) -> object:
    """Replaces a loader that is empty on this rank only, so that every rank enters the loop.

    Collective if `loader` has a length.
    """
    if not (trainer.evaluating or trainer.predicting):
        return loader
    length = sized_len(loader)
    if length is None:
        return loader
    strategy = trainer.strategy
    total = strategy.reduce(torch.tensor(length, device=strategy.root_device), reduce_op="sum")
    return _NoBatches(int(total)) if length == 0 and int(total) > 0 else loader


@contextmanager
def _end_of_loader(loop: Any, lockstep: Lockstep) -> Iterator[None]:
    _serve_until_all_end(lockstep, _synchronised_metrics(loop), is_end=False)
    yield
    lockstep.begin_loop()


@contextmanager
def _end_of_loop(lockstep: Lockstep) -> Iterator[None]:
    # Other ranks may have a data loader that is empty here.
    while not _serve_until_all_end(lockstep, [], is_end=True):
        lockstep.begin_loop()
    yield


def _serve_until_all_end(lockstep: Lockstep, metrics: list[str], *, is_end: bool) -> bool:
    """Takes part in other ranks' passes until all ranks are at the end of a data loader.

    Returns:
        Whether all ranks are at the end of the loop.
    """
    lockstep.end_loop()
    ends = lockstep.gather_objects((metrics, is_end))
    if any(names != metrics for names, _ in ends):
        listed = ", ".join(f"rank {rank} {names}" for rank, (names, _) in enumerate(ends))
        raise RuntimeError(
            "at the end of a data loader the ranks would synchronize different metrics and hang: "
            f"{listed}; give every rank a batch of each data loader, and log the same names with "
            "sync_dist=True on all ranks."
        )
    return all(is_at_end for _, is_at_end in ends)


def _synchronised_metrics(loop: Any) -> list[str]:
    """Names of the metrics that are synchronized at the end of a data loader."""
    results = loop.trainer._results
    if loop.trainer.sanity_checking or results is None:
        return []
    return [
        name
        for name, metric in results.valid_items()
        if metric.meta.on_epoch
        and not metric.meta.sync.rank_zero_only
        and (metric.meta.sync.should or not metric.is_tensor)
    ]
