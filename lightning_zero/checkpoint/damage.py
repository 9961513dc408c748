"""Whether a checkpoint is as it was written, whatever its form."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_zero.checkpoint import archive, directory
from lightning_zero.checkpoint.archive import Progress, silent
from lightning_zero.checkpoint.place import local_path

__all__ = ["find_damage", "has_checksums", "raise_damage", "raise_damage_of_any"]


def find_damage(
    path: str | os.PathLike[str], progress: Progress = silent, *, rank: int = 0, world_size: int = 1
) -> list[str]:
    """Compares a checkpoint with the checksums that were written with it, if any were.

    Args:
        path: A directory with `SHA256SUMS`, or a file of `torch.save`.
        progress: Is told the bytes that were read of a file, from several threads.
        rank: This rank reads its share.
        world_size: Ranks among which the work is shared.

    Returns:
        One line for each damage in this rank's share.
    """
    path = local_path(path)
    if path.is_dir():
        return directory.find_damage(path, rank=rank, world_size=world_size)
    if path.is_file():
        return archive.find_damage(path, progress, rank=rank, world_size=world_size)
    return []


def has_checksums(path: Path) -> bool:
    """Whether `find_damage` has anything to compare with."""
    if path.is_dir():
        return (path / directory.CHECKSUMS).is_file()
    return archive.has_checksums(path)


def raise_damage(path: str | os.PathLike[str], damage: Sequence[str]) -> None:
    """Raises where there is any.

    Raises:
        ValueError: The checkpoint is damaged.
    """
    if damage:
        raise ValueError(
            f"{path} is damaged: {'; '.join(damage)}. Use another checkpoint, or copy this one "
            "again."
        )


def raise_damage_of_any(
    path: Path, rank: int, world_size: int, gather: Callable[[list[str]], list[list[str]]]
) -> None:
    """Compares a checkpoint with its checksums, every rank its share. Collective: every rank.

    Args:
        path: See `find_damage`.
        rank: This rank.
        world_size: How many share the work.
        gather: Gives every rank's lines on every rank.

    Raises:
        ValueError: Some file is damaged, or some rank cannot read it; on every rank.
    """
    try:
        damage = find_damage(path, rank=rank, world_size=world_size)
    except Exception as error:  # on one rank; the others must learn of it
        damage = [f"rank {rank} cannot read it ({type(error).__name__}: {error})"]
    raise_damage(path, [line for share in gather(damage) for line in share])
