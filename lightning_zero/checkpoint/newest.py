"""The checkpoint of a folder from which training goes on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.atomic import local_path, recover_all
from lightning_zero.checkpoint.dcp_reader import METADATA, is_sharded
from lightning_zero.checkpoint.source import open_checkpoint
from lightning_zero.checkpoint.torch_file import is_torch_file

__all__ = ["newest_checkpoint", "newest_of"]


def newest_checkpoint(
    folder: str | os.PathLike[str], *, weights_only: bool | None = None
) -> Path | None:
    """The complete checkpoint of the highest step in a folder, to be given as `ckpt_path`. Local.

    Full and sharded checkpoints of any name count, by the `global_step` in them and, of one step,
    by the time when they were written. What holds weights alone does not count, nor do folders in
    the folder that are no checkpoints. A file or directory that is cut off or of which a part is
    missing is left out, with a warning; checksums are compared when the checkpoint is loaded. After
    going back to an earlier step on purpose, move the later checkpoints away, or use
    `ckpt_path="last"`, which goes by time.

    Args:
        folder: On a local or mounted file system.
        weights_only: As for `open_checkpoint`.

    Returns:
        None where there is no checkpoint, or no folder.

    Raises:
        ValueError: An address of remote storage.
        pickle.UnpicklingError: A checkpoint holds classes that `weights_only` refuses.
    """
    return newest_of([local_path(folder)], weights_only=weights_only)


def newest_of(folders: Iterable[Path], *, weights_only: bool | None = None) -> Path | None:
    """As `newest_checkpoint`, of several folders."""
    found: list[tuple[int, int, Path]] = []
    for folder in folders:
        recover_all(folder)
        for path in folder.iterdir() if folder.is_dir() else ():
            age = None if path.name.startswith(".") else _age(path, weights_only)
            if age is not None:
                found.append((*age, path))
    return max(found)[-1] if found else None


def _age(path: Path, weights_only: bool | None) -> tuple[int, int] | None:
    """Step, and time of the last write in ns; None where training cannot go on from `path`."""
    try:
        if not (is_sharded(path) if path.is_dir() else _may_be_file(path)):
            return None
        checkpoint: dict[str, Any] = open_checkpoint(path, weights_only=weights_only)
        file = path / METADATA if path.is_dir() else path
        written_ns = file.stat().st_mtime_ns
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is left out, as it is not complete: {error}", stacklevel=4)
        return None
    step = checkpoint.get("global_step")
    if not isinstance(step, int) or "lr_schedulers" not in checkpoint:
        return None
    return step, written_ns


def _may_be_file(path: Path) -> bool:
    return path.is_file() and (path.suffix == ".ckpt" or is_torch_file(path))
