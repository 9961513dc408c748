"""Checkpoints with finite and with non-finite parameters.

A run that goes on after a NaN soon has only checkpoints with NaN, because each new one replaces the
one before. So such a checkpoint is marked, and the last one without it is kept, until a newer one
is finite again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.atomic import local_path, replace_atomically
from lightning_zero.checkpoint.remote import is_remote
from lightning_zero.engine.engine import Engine

__all__ = ["NONFINITE_KEY", "FiniteCheckpoints", "find_nonfinite_parameters"]

NONFINITE_KEY = "nonfinite_parameters"  # in the entry METADATA_KEY: names; absent: all are finite


def find_nonfinite_parameters(engine: Engine) -> list[str]:
    """Names of the parameters with a NaN or an infinity on any rank. Collective: every rank."""
    own: list[str] = []
    with torch.no_grad():
        for bucket in engine.buckets:
            shard = bucket.masters.fetch()
            if not bool(shard.sum().isfinite()):  # also if the sum overflows
                slots, parts = bucket.plan.layout.slots, bucket.shards.layout.split(shard)
                own += [
                    slot.name
                    for slot, part in zip(slots, parts, strict=True)
                    if not bool(part.isfinite().all())
                ]
    by_rank = engine.comm.control.gather_objects(own)
    return list(dict.fromkeys(name for names in by_rank for name in names))


class FiniteCheckpoints:
    """The last checkpoint with finite parameters that this run has saved, or resumed from.

    Every rank knows whether there is one. Rank 0 compares paths.
    """

    def __init__(self) -> None:
        self._last_finite: str | None = None
        self._is_kept = False  # a newer checkpoint is not finite

    def note_load(
        self, path: str | os.PathLike[str], metadata: object, *, is_resumed: bool
    ) -> None:
        """After a checkpoint was opened; warns if it is marked. Local.

        Args:
            path: Its path.
            metadata: Its entry `METADATA_KEY`; None: it has none.
            is_resumed: Whether training goes on from it.
        """
        names = metadata.get(NONFINITE_KEY) if isinstance(metadata, Mapping) else None
        if names:
            rank_zero_warn(f"{path} was saved with non-finite values in {_summary(names)}.")
        elif is_resumed:
            self._last_finite, self._is_kept = _resolved(path, follows_link=True), False

    def prepare(
        self,
        path: str,
        names: list[str],
        on_rank_zero: Callable[[str, Callable[[], tuple[str | None, str]]], tuple[str | None, str]],
        *,
        is_movable: bool,
    ) -> None:
        """Before a save to `path` of parameters of which `names` are non-finite. Collective.

        Moves the last finite checkpoint aside if it would be overwritten.

        Args:
            path: Path of the new checkpoint, the same on every rank.
            names: Names of non-finite parameters; empty: all are finite.
            on_rank_zero: Runs a function on rank 0, and returns its result, or raises its error, on
                every rank.
            is_movable: Whether a checkpoint is a file or a directory of this package.
        """
        if not names:
            self._last_finite, self._is_kept = _resolved(path), False
            return
        last, reason = self._last_finite, ""
        if last is not None:
            self._last_finite, reason = on_rank_zero(
                f"keep {last}", lambda: _keep(last, path, is_movable=is_movable)
            )
        self._is_kept = self._last_finite is not None
        rank_zero_warn(
            f"{path} is saved with non-finite values in {_summary(names)}, and is marked so."
            + (f" {self._last_finite} is the last finite checkpoint." if self._is_kept else reason)
        )

    def keeps(self, path: str) -> bool:
        """Whether `path` must not be deleted: all newer checkpoints are non-finite. Local."""
        if not self._is_kept or _resolved(path) != self._last_finite:
            return False
        rank_zero_warn(
            f"{path} is kept: it is the last checkpoint that was saved from finite parameters."
        )
        return True


def _summary(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} other parameters" if names[1:] else names[0]


def _resolved(path: str | os.PathLike[str], *, follows_link: bool = False) -> str:
    """One name for each checkpoint; a save replaces a link, and a load follows it."""
    if is_remote(path):
        return os.fspath(path)
    local = local_path(path)
    return str(local.resolve() if follows_link else local.parent.resolve() / local.name)


def _keep(last: str, path: str, *, is_movable: bool) -> tuple[str | None, str]:
    """Moves `last` aside if `path` is the same; returns its new path, or None and the reason."""
    is_local = is_movable and not is_remote(last)
    if is_local and not Path(last).exists():
        return None, f" {last}, the last finite checkpoint, no longer exists."
    if _resolved(path) != last:
        return last, ""
    if not is_local:
        return None, (
            " It replaces the last finite checkpoint, which is moved only on a local or mounted "
            "file system, and without a CheckpointIO of your own."
        )
    source = Path(last)
    kept = source.with_name(f"{source.stem}-finite{source.suffix}")
    replace_atomically(source, kept)
    return str(kept), ""
