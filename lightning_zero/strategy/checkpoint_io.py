"""How the full checkpoint gets to the disk, and how all ranks learn if it did not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_zero.checkpoint.archive import write_torch_file
from lightning_zero.checkpoint.damage import find_damage, raise_damage, raise_damage_of_any
from lightning_zero.checkpoint.place import local_path
from lightning_zero.comm.world import gather_objects

__all__ = ["ZeroCheckpointIO", "find_damage_together", "on_rank_zero"]


class ZeroCheckpointIO(TorchCheckpointIO):
    """Writes a file whole or not at all, without a copy in memory, and checks it when it is read.

    The file is what `torch.save` writes. URLs of other file systems go Lightning's way.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = local_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_torch_file(checkpoint, path)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if _is_local_file_protocol(path) and local_path(path).is_file():
            raise_damage(path, find_damage(local_path(path)))
        loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return loaded


def on_rank_zero(strategy: Strategy, act: Callable[[], None]) -> None:
    """Runs `act` on rank 0; the others wait, and raise if it does. Collective.

    Raises:
        Exception: On rank 0, whatever `act` raises.
        OSError: On the others, where it was one.
        RuntimeError: On the others, where it was something else.
    """
    failure: Exception | None = None
    if strategy.is_global_zero:
        try:
            act()
        except Exception as error:
            failure = error
    number = failure.errno if isinstance(failure, OSError) else None
    text = f"{type(failure).__name__}: {failure}" if failure is not None else None
    number, text = strategy.broadcast((number, text))
    if failure is not None:
        raise failure
    if number is not None:
        raise OSError(number, f"rank 0 failed: {text}")
    if text is not None:
        raise RuntimeError(f"rank 0 failed: {text}")


def find_damage_together(path: Path, rank: int, world_size: int) -> None:
    """Compares a checkpoint with its checksums, every rank its share. Collective.

    Raises:
        ValueError: Some file is damaged, or some rank cannot read it; on every rank.
    """
    raise_damage_of_any(path, rank, world_size, gather_objects)
