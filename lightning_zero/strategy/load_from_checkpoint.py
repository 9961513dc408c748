"""`Model.load_from_checkpoint(path)` of every format that `open_checkpoint` knows.

Lightning's loader opens its argument as one file of `torch.save`, through one function of its
module `lightning.pytorch.core.saving`. `accept_every_format` puts another in that function's place:
it opens directories and `.safetensors` files, and hands everything else to Lightning's as before.
The rest of the loader (hyperparameters, arguments, strictness) is Lightning's own, for all formats.

Alternatives considered: an override of `LightningModule.load_from_checkpoint` would have to repeat
its check of being called on a class, and the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import __version__ as lightning_version
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.core import saving
from torch import Tensor

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.damage import find_damage, raise_damage
from lightning_zero.checkpoint.place import local_path

__all__ = ["accept_every_format"]


def accept_every_format() -> None:
    """Makes `load_from_checkpoint` open directories. Doing it again is harmless."""
    load_file: Callable[..., Any] = vars(saving)["pl_load"]
    if load_file.__module__ == __name__:
        return

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if _is_local(path_or_url):
            raise_damage(path_or_url, find_damage(local_path(path_or_url)))
        if not _is_ours(path_or_url):
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


def _is_local(path: Any) -> bool:
    return isinstance(path, (str, Path)) and bool(_is_local_file_protocol(path))


def _is_ours(path: Any) -> bool:
    if not _is_local(path):
        return False
    local = local_path(path)
    return local.is_dir() or local.suffix == ".safetensors"
