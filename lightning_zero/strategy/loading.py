"""Loading of modules from checkpoints of every format, outside of a Trainer.

Lightning's own `load_from_checkpoint` opens its argument as one file of `torch.save`. It has no
hook for directories, `.safetensors` files and files that are checked. A class that overrides it
opens a file of `torch.save`, too, so for other formats it gets a temporary one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.fabric import _PATH
from lightning_zero._lightning.pytorch import (
    __version__ as lightning_version,
)
from lightning_zero._lightning.pytorch import (
    _load_state,
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    migrate_checkpoint,
)
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.source import find_damage, raise_damage
from lightning_zero.checkpoint.states import MASTERS_KEY, RANK_STATES_KEY
from lightning_zero.checkpoint.storage import as_local, locate
from lightning_zero.checkpoint.torch_file import write_torch_file

__all__ = ["is_download", "load_from_checkpoint"]

_M = TypeVar("_M", bound=pl.LightningModule | pl.LightningDataModule)


def load_from_checkpoint(
    module_type: type[_M],
    checkpoint_path: _PATH,
    *,
    map_location: torch.device | str | None = None,
    hparams_file: _PATH | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> _M:
    """As `module_type.load_from_checkpoint`, for a checkpoint of any format. Local.

    It also opens sharded checkpoints, DeepSpeed's and Hugging Face's directories, `.safetensors`
    files and files in remote storage, and verifies checksums.

    Args:
        module_type: A LightningModule or LightningDataModule.
        checkpoint_path: Path or address of the checkpoint.
        map_location: Device of the module. None: the CPU; for a file of `torch.save`, the devices
            from which it was saved.
        hparams_file: Replaces the hyperparameters of the checkpoint, as in Lightning.
        strict: Whether the names of the checkpoint must be those of the module. None: as the module
            defines.
        weights_only: As in `torch.load`. False unpickles any class: for trusted files only.
        kwargs: Arguments of `module_type`, which override the saved hyperparameters. A class with a
            `load_from_checkpoint` of its own gets them, the arguments above that are not None, and
            for formats other than a file of `torch.save` a temporary one, without training states.

    Raises:
        ValueError: The checkpoint is damaged, or its format is unknown.
        OSError: The checkpoint does not exist, or cannot be read.
    """
    is_module = issubclass(module_type, pl.LightningModule)
    options: dict[str, Any] = {"strict": strict} if is_module else {}
    given = {
        "map_location": map_location,
        "hparams_file": hparams_file,
        "weights_only": weights_only,
        **options,
    }
    has_own_loading = _has_own_loading(module_type)
    if has_own_loading:  # whose arguments may differ from Lightning's
        given = {key: value for key, value in given.items() if value is not None}
    if not is_download(checkpoint_path):
        raise_damage(checkpoint_path, find_damage(checkpoint_path))
    made: Any
    if is_download(checkpoint_path) or _is_torch_file(checkpoint_path):
        made = module_type.load_from_checkpoint(checkpoint_path, **given, **kwargs)
        return cast("_M", made)
    checkpoint = open_checkpoint(checkpoint_path, weights_only=weights_only)
    checkpoint.setdefault("pytorch-lightning_version", lightning_version)
    if has_own_loading:
        return cast("_M", _load_by_class(module_type, checkpoint, given | kwargs))
    checkpoint, _ = migrate_checkpoint(checkpoint)
    key = module_type.CHECKPOINT_HYPER_PARAMS_KEY
    if hparams_file is not None:
        is_csv = Path(hparams_file).suffix.lower() == ".csv"
        read = load_hparams_from_tags_csv if is_csv else load_hparams_from_yaml
        checkpoint[key] = read(hparams_file)
    checkpoint.setdefault(key, {}).update(kwargs)
    any_type: Any = module_type
    made = _load_state(any_type, checkpoint, **options, **kwargs)
    if is_module and map_location is not None:
        made.to(map_location)
    return cast("_M", made)


def _has_own_loading(module_type: type[Any]) -> bool:
    """Whether a class, or one of its bases, overrides Lightning's `load_from_checkpoint`."""
    owner = next(base for base in module_type.__mro__ if "load_from_checkpoint" in vars(base))
    return owner not in (pl.LightningModule, pl.LightningDataModule)


def _load_by_class(
    module_type: type[Any], checkpoint: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """Calls the `load_from_checkpoint` of a class with a temporary file, without training states.

    The file is in the folder for temporary files, which TMPDIR sets.
    """
    content = {k: v for k, v in checkpoint.items() if k not in (MASTERS_KEY, RANK_STATES_KEY)}
    if "optimizer_states" in content:
        content["optimizer_states"] = []
    with tempfile.TemporaryDirectory(prefix="lightning_zero-") as folder:
        path = Path(folder, "full.ckpt")
        write_torch_file(content, path)
        return module_type.load_from_checkpoint(str(path), **options)


def is_download(path: _PATH) -> bool:
    """Whether `path` is a web address, which Lightning downloads completely."""
    return str(path).startswith(("http://", "https://"))


def _is_torch_file(path: _PATH) -> bool:
    place = as_local(locate(path))
    return place is not None and not place.is_dir() and place.suffix != ".safetensors"
