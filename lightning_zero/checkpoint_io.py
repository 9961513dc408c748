"""How the full checkpoint gets to the disk, and how all ranks learn if it did not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_zero.checkpoint.archive import find_damage, write_torch_file

__all__ = ["ZeroCheckpointIO", "on_rank_zero", "raise_damage"]


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
        path = _local(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_torch_file(checkpoint, path)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if _is_local_file_protocol(path) and _local(path).is_file():
            raise_damage(path, find_damage(_local(path)))
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


def raise_damage(path: _PATH, damage: Sequence[str]) -> None:
    """Raises where there is any.

    Raises:
        ValueError: The checkpoint is damaged.
    """
    if damage:
        raise ValueError(
            f"{path} is damaged: {'; '.join(damage)}. Use another checkpoint, or copy this one "
            "again."
        )


def _local(path: _PATH) -> Path:
    return Path(get_filesystem(path)._strip_protocol(str(path)))  # without file://, ~ expanded
