"""Lightning's loops, in which ranks may differ: told to stop, without a batch, with fewer of them.

Between two batches of a fit all ranks agree that each has one, and that none is asked to stop or
requeue. Lightning broadcasts rank 0's "SIGTERM has come" there, on WORLD: a rank that has failed,
or has no batch left, keeps the others waiting, and so does a GPU until it has nothing left to do.
It broadcasts once more inside its handler, wherever the signal finds the rank, and afterwards each
rank stops where it finds the flag. Here the handler sets a flag of ours, and the ranks agree on the
control plane on what any of them was told: all stop before the same batch, or before a validation.
Inside an evaluation, Lightning's own flag ends it on the rank that was told, and so on all.

Validation, test and prediction may have another number of batches on each rank.
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
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.comm.watchdog import DesynchronizedError
from lightning_zero.core.lockstep import Lockstep
from lightning_zero.strategy.patches import Patches

__all__ = ["LockstepLoops", "StopRequest", "replace_empty_loader", "name_of_batch", "with_status"]

# There is no hook between batches that may end a training, nor one for the handler.
_CHECK_SIGTERM = "_broadcast_sigterm_tensor"
_HANDLE_SIGTERM = "_sigterm_notifier_fn"
# No hook of Lightning's comes between the last batch and the first collective after it, which
# synchronises the metrics, so these methods of the running loop are wrapped: the first ends a data
# loader's batches (prediction has none of it), the second ends the loop.
_END_OF_LOADER = "_store_dataloader_outputs"
_END_OF_LOOP = "on_run_end"

_log = logging.getLogger(__name__)


class StopRequest(IntEnum):
    """What a rank wishes for all, between two batches; the lowest of all ranks counts."""

    PREEMPT = 0  # the job is being preempted
    REQUEUE = 1  # the time will soon be up
    STOP = 2
    NONE = 3


class LockstepLoops:
    """What a strategy puts into the loops of a run, and into its handler of SIGTERM."""

    def __init__(self) -> None:
        self._of_run, self._of_evaluation = Patches(), Patches()
        self._trainer: Trainer | None = None
        self._lockstep: Lockstep | None = None
        self._has_sigterm = False

    def begin(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Before Lightning installs its handlers. Local."""
        self.end()
        self._trainer, self._lockstep, self._has_sigterm = trainer, lockstep, False
        lockstep.set_stop_request(self._stop_request)
        self._of_run.put(trainer.fit_loop.epoch_loop, _CHECK_SIGTERM, self.check_stop_requests)
        self._of_run.put(
            trainer._signal_connector, _HANDLE_SIGTERM, partial(self._on_sigterm, trainer)
        )

    def end(self) -> None:
        """After the run, or after an exception in it. Local."""
        self._of_run.undo()
        self._of_evaluation.undo()

    def _stop_request(self) -> StopRequest:
        assert self._trainer is not None
        asked: StopRequest = getattr(
            self._trainer._signal_connector, "request", StopRequest.NONE
        )  # SLURM's
        return min(asked, StopRequest.STOP if self._has_sigterm else StopRequest.NONE)

    def check_stop_requests(self) -> None:
        """Raises unless each rank has a batch and none was told to stop. Collective."""
        assert self._trainer is not None
        assert self._lockstep is not None
        if self._lockstep.pass_boundary(name_of_batch(self._trainer)) == StopRequest.STOP:
            rank_zero_warn("SIGTERM has come: the training of all ranks ends here.")
            with suppress(DesynchronizedError):  # so that none goes away before all know
                self._lockstep.barrier("the stop of all ranks")
            raise with_status(SIGTERMException())

    def _on_sigterm(self, trainer: Trainer, signum: int, frame: FrameType | None) -> None:
        _log.warning("rank %d: SIGTERM has come.", trainer.global_rank)
        if not self._has_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # the ranks that this process has started
        self._has_sigterm = True
        if trainer.world_size == 1 or not trainer.training:
            trainer._signal_connector.received_sigterm = True

    def begin_evaluation(self) -> None:
        """Before the first batch of an evaluation loop. Collective."""
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
    """The same, with the status of a process that SIGTERM has ended: the training is not done."""
    if exception.code is None:
        exception.code = 128 + signal.SIGTERM
    return exception


def name_of_batch(trainer: Trainer, *, is_over: bool = False) -> str:
    """Of the batch that comes next, or of the one that is over: the same on every rank."""
    number = trainer.fit_loop.epoch_loop.batch_idx + (not is_over)
    return f"{'the end of ' * is_over}batch {number} of epoch {trainer.current_epoch}"


# -------------------------------------------------------------------- evaluation


class _NoBatches:
    """In place of a data loader that is empty on this rank alone: nothing, of a length.

    Lightning leaves a loop out in which a rank has no batches, and the others would wait for it.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def replace_empty_loader(loader: object, trainer: Trainer) -> object:
    """A data loader of an evaluation that every rank enters. Collective where it has a length."""
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
    _meet(lockstep, _synchronised(loop), is_end=False)
    yield
    lockstep.begin_loop()


@contextmanager
def _end_of_loop(lockstep: Lockstep) -> Iterator[None]:
    while not _meet(lockstep, [], is_end=True):  # others have a data loader that is empty here
        lockstep.begin_loop()
    yield


def _meet(lockstep: Lockstep, metrics: list[str], *, is_end: bool) -> bool:
    """Serves until all ranks are at the end of a data loader; whether all are at the loop's."""
    lockstep.end_loop()
    ends = lockstep.gather_objects((metrics, is_end))
    if any(names != metrics for names, _ in ends):
        listed = ", ".join(f"rank {rank} {names}" for rank, (names, _) in enumerate(ends))
        raise RuntimeError(
            "at the end of a data loader the ranks would synchronise different metrics and wait "
            f"for each other: {listed}; give every rank a batch of each data loader, and log the "
            "same names with sync_dist=True on all."
        )
    return all(is_at_end for _, is_at_end in ends)


def _synchronised(loop: Any) -> list[str]:
    """Names of the metrics that the end of the data loader computes across ranks."""
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
