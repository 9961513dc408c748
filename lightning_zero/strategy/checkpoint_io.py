"""The full checkpoint on its way to the disk, and `load_from_checkpoint` of every format.

Lightning's loader opens its argument as one file of `torch.save`, through one function of its
module `lightning.pytorch.core.saving`. `accept_every_format` puts another in that function's place:
it opens directories, `.safetensors` files and remote storage, and hands everything else to
Lightning's as before. The rest of the loader (hyperparameters, arguments, strictness) is its
own, for all formats.

Alternatives considered: an override of `LightningModule.load_from_checkpoint` would have to repeat
its check of being called on a class, and the loader.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import __version__ as lightning_version
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.atomic import local_path, locate
from lightning_zero.checkpoint.dcp_reader import is_sharded
from lightning_zero.checkpoint.remote import RemotePath
from lightning_zero.checkpoint.source import find_damage, raise_damage
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.comm.world import failing_together

__all__ = ["ZeroCheckpointIO", "accept_every_format", "is_download", "on_rank_zero"]


class ZeroCheckpointIO(TorchCheckpointIO):
    """Writes a file whole or not at all, without a copy in memory, and checks it when it is read.

    The file is what `torch.save` writes. Remote storage is written in the same way, and read by
    Lightning where other code than `ZeroStrategy` asks.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = locate(path)
        if isinstance(place, Path):
            place.parent.mkdir(parents=True, exist_ok=True)
        elif is_sharded(place):
            raise FileExistsError(
                errno.EEXIST,
                "a sharded checkpoint is there, which a full one cannot replace at a remote "
                "address; delete it, or choose another name",
                str(place),
            )
        write_torch_file(checkpoint, place)

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


def on_rank_zero(strategy: Strategy, what: str, act: Callable[[], None]) -> None:
    """Runs `act` on rank 0; the others wait, and raise if it does. Collective.

    Raises:
        Exception: See `failing_together`, also for `what`.
    """
    with failing_together(what, lambda told: [strategy.broadcast(told)]):
        if strategy.is_global_zero:
            act()


def accept_every_format() -> None:
    """Makes `load_from_checkpoint` open directories. Doing it again is harmless."""
    load_file: Callable[..., Any] = vars(saving)["pl_load"]
    if load_file.__module__ == __name__:
        return

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        is_place = isinstance(path_or_url, (str, Path)) and not is_download(path_or_url)
        if is_place:
            raise_damage(path_or_url, find_damage(path_or_url))
        if not is_place or not _is_ours(path_or_url):
            return load_file(path_or_url, map_location=map_location, weights_only=weights_only)
        checkpoint = open_checkpoint(path_or_url, weights_only=weights_only)
        checkpoint.setdefault("pytorch-lightning_version", lightning_version)
        if isinstance(map_location, (str, torch.device)):
            # The module follows its first tensor.
            state_dict = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                name: value.to(map_location) if isinstance(value, Tensor) else value
                for name, value in state_dict.items()
            }
        return checkpoint

    saving.pl_load = load  # type: ignore[attr-defined]


def is_download(path: _PATH) -> bool:
    """Whether it is an address of the web, which Lightning downloads as a whole."""
    return str(path).startswith(("http://", "https://"))


def _is_ours(path: _PATH) -> bool:
    place = locate(path)
    return isinstance(place, RemotePath) or place.is_dir() or place.suffix == ".safetensors"
