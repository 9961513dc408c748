"""Between two batches of training: every rank has the same one, and none is asked to stop.

Lightning broadcasts rank 0's "SIGTERM has come" there, on WORLD: a rank that has failed, or has no
batch left, keeps the others waiting, and so does a GPU until it has nothing left to do. It
broadcasts once more inside its handler, wherever the signal finds the rank, and afterwards each
rank stops where it finds the flag. Here the handler sets a flag of ours, and the ranks agree on the
control plane on what any of them was told: all stop before the same batch, or before a validation.
Inside an evaluation, Lightning's own flag ends it on the rank that was told, and so on all.
"""

from __future__ import annotations

import logging
import signal
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.comm.watchdog import RanksApartError
from lightning_zero.core.lockstep import Lockstep

__all__ = ["BatchBoundary", "name_of_batch", "with_status"]

# There is no hook between batches that may end a training, nor one for the handler.
_AGREE = "_broadcast_sigterm_tensor"
_HANDLE = "_sigterm_notifier_fn"
_STOP, _GO_ON = 0, 1  # what a rank wishes; the lowest of all ranks counts

_log = logging.getLogger(__name__)


class BatchBoundary:
    """What a strategy puts between the batches of the running fit, and into every run's handler."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []
        self._trainer: Trainer | None = None
        self._lockstep: Lockstep | None = None
        self._is_told = False

    def begin(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Before Lightning installs its handlers. Local."""
        self.end()
        self._trainer, self._lockstep, self._is_told = trainer, lockstep, False
        self._replace(trainer.fit_loop.epoch_loop, _AGREE, self.agree)
        self._replace(trainer._signal_connector, _HANDLE, partial(self._note, trainer))

    def end(self) -> None:
        """After the run, or after an exception in it. Local."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced = []

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        assert hasattr(type(owner), name), f"this release of Lightning has no {name}"
        setattr(owner, name, function)
        self._replaced.append((owner, name))

    def agree(self) -> None:
        """Whether all ranks go on. Collective: every rank, before the same batch.

        Raises:
            SIGTERMException: A rank was told to stop.
            RuntimeError: Another rank has no batch, or another one.
        """
        assert self._trainer is not None
        assert self._lockstep is not None
        wish = _STOP if self._is_told else _GO_ON
        if self._lockstep.meet_for(name_of_batch(self._trainer), wish) == _STOP:
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
