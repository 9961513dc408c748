"""Checkpoints with finite and with non-finite parameters.

A run that goes on after a NaN soon has only checkpoints with NaN, because each new one replaces the
one before. So such a checkpoint is marked, and the last one without it is kept, until a newer one
is finite again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.atomic import locate
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
    """Knows the last checkpoint of this run that was saved from finite parameters.

    Every rank has the same.
    """

    def __init__(self) -> None:
        self._last_finite: str | None = None
        self._is_kept = False  # a newer checkpoint is not finite

    def prepare(self, path: str, names: list[str], on_rank_zero: Callable[..., Any]) -> None:
        """Before a save to `path` of parameters of which `names` are non-finite. Collective.

        Moves the last finite checkpoint aside if it would be overwritten.

        Args:
            path: Path of the new checkpoint.
            names: Names of non-finite parameters; empty: all are finite.
            on_rank_zero: Runs a function on rank 0, and raises its error on every rank.
        """
        if not names:
            self._last_finite, self._is_kept = path, False
            return
        self._is_kept = self._last_finite is not None
        what = f"{names[0]} and {len(names) - 1} other parameters" if names[1:] else names[0]
        rank_zero_warn(
            f"{path} is saved with non-finite values in {what}, and is marked so."
            + (f" {self._last_finite} is the last finite checkpoint." if self._is_kept else "")
        )
        if path == self._last_finite:
            located = locate(path)
            if isinstance(located, Path):
                kept = located.with_name(f"{located.stem}-finite{located.suffix}")
                on_rank_zero(f"keep {path} as {kept}", lambda: _move(located, kept))
                self._last_finite = str(kept)

    def keeps(self, path: str) -> bool:
        """Whether `path` must not be deleted: all newer checkpoints are non-finite. Local."""
        if not self._is_kept or path != self._last_finite:
            return False
        rank_zero_warn(
            f"{path} is kept: it is the last checkpoint that was saved from finite parameters."
        )
        return True


def _move(source: Path, target: Path) -> None:
    if source.exists():
        source.replace(target)
