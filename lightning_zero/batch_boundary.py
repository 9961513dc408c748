"""Between two batches of training: every rank has the same one, and none is asked to stop.

Lightning broadcasts rank 0's "SIGTERM has come" there, on WORLD: a rank that has failed, or has no
batch left, keeps the others waiting, and so does a GPU until it has nothing left to do. It
broadcasts once more inside its handler, wherever the signal finds the rank. Here the ranks agree on
the control plane instead, on what any of them was told, and the handler sets a flag.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.lockstep import Lockstep

__all__ = ["BatchBoundary", "batch_mark"]

# There is no hook between batches that may end a training, nor one for the handler.
_AGREE = "_broadcast_sigterm_tensor"
_HANDLE = "_sigterm_notifier_fn"


class _Wish(IntEnum):
    """What a rank asks for; the lowest of all ranks counts."""

    STOP = 0
    GO_ON = 1


class BatchBoundary:
    """What a strategy puts between the batches of the running fit."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []

    def begin(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Before Lightning installs its handlers. Local."""
        self.end()
        connector: Any = trainer._signal_connector
        self._replace(trainer.fit_loop.epoch_loop, _AGREE, partial(_agree, trainer, lockstep))
        self._replace(connector, _HANDLE, partial(_note, connector))

    def end(self) -> None:
        """After the fit, or after an exception in it. Local."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced = []

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        setattr(owner, name, function)
        self._replaced.append((owner, name))


def batch_mark(trainer: Trainer, *, is_over: bool = False) -> int:
    """Names the batch that comes next, or the one that is over: the same on every rank."""
    number = trainer.fit_loop.epoch_loop.batch_idx + (not is_over)
    return (trainer.current_epoch << 33) + 2 * number + is_over


def _agree(trainer: Trainer, lockstep: Lockstep) -> None:
    wish = _Wish.STOP if trainer.received_sigterm else _Wish.GO_ON
    if lockstep.meet_for_batch(wish, batch_mark(trainer)) == _Wish.STOP:
        raise SIGTERMException


def _note(connector: Any, signum: int, frame: FrameType | None) -> None:
    launcher = connector.trainer.strategy.launcher
    if not connector.received_sigterm and launcher is not None:
        launcher.kill(signum)  # the ranks that this process has started
    connector.received_sigterm = True
