"""The checkpoint from which a run resumes with `ckpt_path="last"` or `"newest"`.

[Note: Before Lightning searches] Lightning searches for `last.ckpt` on each rank separately, before
the ranks are connected. A job that was killed while it replaced `last.ckpt` may have left it under
another name, and ranks that do not find the same file would not resume from the same state. So the
ranks connect first. Rank 0 deletes leftovers in the folders of all `ModelCheckpoint`s, searches,
and broadcasts the path. The strategy's launcher passes this path to the Trainer's method.

Alternatives considered: replacing the Trainer's connector, which does the search.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero._lightning.pytorch import (
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Trainer,
    TrainerFn,
)
from lightning_zero.checkpoint.atomic import delete_leftovers
from lightning_zero.checkpoint.newest import newest_of
from lightning_zero.checkpoint.storage import is_remote, local_path

__all__ = ["with_resolved_ckpt_path", "tidy_folders"]

_LAST = "last"
_NEWEST = "newest"


def with_resolved_ckpt_path(
    function: Callable[..., Any], trainer: Trainer | None
) -> Callable[..., Any]:
    """Wraps `function` of the Trainer to resolve `ckpt_path="last"` and `"newest"`.

    See [Note: Before Lightning searches]. The wrapper is collective.
    """
    if trainer is None or "ckpt_path" not in inspect.signature(function).parameters:
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        ckpt_path = bound.arguments.get("ckpt_path")
        if ckpt_path is None and _resumes_after_exception(trainer):
            ckpt_path = _LAST
        if ckpt_path in (_LAST, _NEWEST):
            weights_only = bound.arguments.get("weights_only")
            bound.arguments["ckpt_path"] = _find(trainer, ckpt_path, weights_only)
        return function(*bound.args, **bound.kwargs)

    return call


def _resumes_after_exception(trainer: Trainer) -> bool:
    """Whether Lightning uses "last" if no path is given."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    return is_fitting and any(isinstance(c, OnExceptionCheckpoint) for c in callbacks)


def _find(trainer: Trainer, ckpt_path: str, weights_only: bool | None) -> str | None:
    strategy: Any = trainer.strategy
    strategy.setup_environment()

    def search() -> str | None:
        tidy_folders(trainer)
        if ckpt_path == _NEWEST:
            return _newest(trainer, weights_only)
        if trainer.state.fn != TrainerFn.FITTING:  # Lightning uses other arguments, too
            return ckpt_path
        connector = trainer._checkpoint_connector
        path = connector._parse_ckpt_path(
            TrainerFn.FITTING, _LAST, model_provided=True, model_connected=False
        )
        return None if path is None else str(path)

    what = f"find the {ckpt_path} checkpoint"
    found: str | None = strategy.run_on_rank_zero(what, search, otherwise=ckpt_path)
    return found


def _newest(trainer: Trainer, weights_only: bool | None) -> str | None:
    folders = _folders(trainer)
    path = newest_of(folders, weights_only=weights_only)
    if path is not None:
        return str(path)
    where = ", ".join(map(str, folders)) or "a local folder of a ModelCheckpoint"
    text = (
        f'ckpt_path="{_NEWEST}": there is no complete checkpoint in {where}. To resume from an '
        "earlier run, give ModelCheckpoint the dirpath of that run."
    )
    if trainer.state.fn != TrainerFn.FITTING:
        raise FileNotFoundError(text)
    rank_zero_warn(f"{text} fit starts from scratch.")
    return None


def tidy_folders(trainer: Trainer) -> None:
    """Deletes leftovers of killed jobs in the folders of the Trainer's checkpoints. Local.

    On rank 0 only.
    """
    for folder in _folders(trainer):
        delete_leftovers(folder)


def _folders(trainer: Trainer) -> list[Path]:
    """Local folders of the Trainer's checkpoint callbacks, also before their set-up."""
    return list(dict.fromkeys(local_path(f) for f in _addresses(trainer) if not is_remote(f)))


def _addresses(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            # This private method resolves a missing `dirpath` from the loggers and the Trainer.
            yield str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        elif isinstance(callback, OnExceptionCheckpoint):
            yield os.path.dirname(callback.ckpt_path)
