"""From which checkpoint a run starts, where that is to be looked for: "last" and "newest".

[Note: Before Lightning looks] Lightning looks for `last.ckpt` on each rank by itself, before the
ranks are connected. A job that was killed while it replaced `last.ckpt` may have left it under
another name, and ranks that do not find the same file would not start alike. So the ranks connect
first, rank 0 puts the folders of all `ModelCheckpoint`s in order, looks, and tells the others. The
strategy's launcher calls the Trainer's method and hands it the path in place of the word.

Alternatives considered: the connector of the Trainer that looks, which would have to be replaced.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.atomic import delete_leftovers, local_path
from lightning_zero.checkpoint.newest import newest_of
from lightning_zero.checkpoint.remote import is_remote

__all__ = ["with_resolved_ckpt_path", "tidy_folders"]

_LAST = "last"
_NEWEST = "newest"


def with_resolved_ckpt_path(
    function: Callable[..., Any], trainer: Trainer | None
) -> Callable[..., Any]:
    """`function`, of the Trainer, given the checkpoint for "last" and "newest".

    See [Note: Before Lightning looks]. Collective when it is called.
    """
    if trainer is None or "ckpt_path" not in inspect.signature(function).parameters:
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        asked = bound.arguments.get("ckpt_path")
        if asked is None and _goes_on_after_exception(trainer):
            asked = _LAST
        if asked in (_LAST, _NEWEST):
            weights_only = bound.arguments.get("weights_only")
            bound.arguments["ckpt_path"] = _find(trainer, asked, weights_only)
        return function(*bound.args, **bound.kwargs)

    return call


def _goes_on_after_exception(trainer: Trainer) -> bool:
    """Whether Lightning reads "last" where no path is given."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    return is_fitting and any(isinstance(c, OnExceptionCheckpoint) for c in callbacks)


def _find(trainer: Trainer, asked: str, weights_only: bool | None) -> str | None:
    strategy: Any = trainer.strategy
    strategy.setup_environment()
    found: list[str | None] = [asked]

    def look() -> None:
        tidy_folders(trainer)
        if asked == _NEWEST:
            found[0] = _newest(trainer, weights_only)
        elif trainer.state.fn == TrainerFn.FITTING:  # else it depends on what else is given
            connector = trainer._checkpoint_connector
            path = connector._parse_ckpt_path(
                TrainerFn.FITTING, _LAST, model_provided=True, model_connected=False
            )
            found[0] = None if path is None else str(path)

    strategy._on_rank_zero(f"find the {asked} checkpoint", look)
    path: str | None = strategy.broadcast(found[0])
    return path


def _newest(trainer: Trainer, weights_only: bool | None) -> str | None:
    folders = _folders(trainer)
    if (path := newest_of(folders, weights_only=weights_only)) is not None:
        return str(path)
    where = ", ".join(map(str, folders)) or "a local folder of a ModelCheckpoint"
    text = (
        f'ckpt_path="{_NEWEST}": there is no complete checkpoint in {where}. To go on from an '
        "earlier run, give ModelCheckpoint the dirpath of that run."
    )
    if trainer.state.fn != TrainerFn.FITTING:
        raise FileNotFoundError(text)
    rank_zero_warn(f"{text} The fit begins anew.")
    return None


def tidy_folders(trainer: Trainer) -> None:
    """Puts the folders of the Trainer's checkpoints in order, after a job that was killed. Local.

    On rank 0 only.
    """
    for folder in _folders(trainer):
        delete_leftovers(folder)


def _folders(trainer: Trainer) -> list[Path]:
    """The local folders of its checkpoint callbacks; also before their set-up."""
    return list(dict.fromkeys(local_path(f) for f in _addresses(trainer) if not is_remote(f)))


def _addresses(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            # By this name it asks the loggers and the Trainer, where it was given no `dirpath`.
            yield str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        elif isinstance(callback, OnExceptionCheckpoint):
            yield os.path.dirname(callback.ckpt_path)
