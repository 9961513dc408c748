"""Finds the newest checkpoint in a folder, to resume training from it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.atomic import delete_leftovers
from lightning_zero.checkpoint.dcp_reader import METADATA, is_sharded
from lightning_zero.checkpoint.source import open_checkpoint
from lightning_zero.checkpoint.storage import local_path
from lightning_zero.checkpoint.torch_file import is_torch_file

__all__ = ["newest_checkpoint", "newest_of"]


def newest_checkpoint(
    folder: str | os.PathLike[str], *, weights_only: bool | None = None
) -> Path | None:
    """Finds the complete checkpoint with the highest step in a folder, for `ckpt_path`. Local.

    Considers full and sharded checkpoints of any name, by their `global_step` and, for the same
    step, by the time of their last write. Ignores files with weights only and other folders. A
    truncated or incomplete checkpoint is ignored with a warning; checksums are only verified when
    the checkpoint is loaded. To resume from an earlier step, move later checkpoints away, or use
    `ckpt_path="last"`, which selects by time of writing.

    Args:
        folder: Path on a local or mounted file system.
        weights_only: Passed to `open_checkpoint`.

    Returns:
        Path of the checkpoint; None if there is no checkpoint or no folder.

    Raises:
        ValueError: `folder` is an address of remote storage.
        pickle.UnpicklingError: A checkpoint contains classes that `weights_only` refuses.
    """
    return newest_of([local_path(folder)], weights_only=weights_only)


def newest_of(folders: Iterable[Path], *, weights_only: bool | None = None) -> Path | None:
    """Like `newest_checkpoint`, for several folders."""
    found: list[tuple[int, int, Path]] = []
    for folder in folders:
        delete_leftovers(folder)
        for path in folder.iterdir() if folder.is_dir() else ():
            age = None if path.name.startswith(".") else _age(path, weights_only)
            if age is not None:
                found.append((*age, path))
    return max(found)[-1] if found else None


def _age(path: Path, weights_only: bool | None) -> tuple[int, int] | None:
    """Step, and time of the last write in ns; None if training cannot resume from `path`."""
    try:
        if not (is_sharded(path) if path.is_dir() else _may_be_file(path)):
            return None
        checkpoint: dict[str, Any] = open_checkpoint(path, weights_only=weights_only)
        file = path / METADATA if path.is_dir() else path
        written_ns = file.stat().st_mtime_ns
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored because it is not complete: {error}", stacklevel=4)
        return None
    step = checkpoint.get("global_step")
    if not isinstance(step, int) or "lr_schedulers" not in checkpoint:
        return None
    return step, written_ns


def _may_be_file(path: Path) -> bool:
    return path.is_file() and (path.suffix == ".ckpt" or is_torch_file(path))
