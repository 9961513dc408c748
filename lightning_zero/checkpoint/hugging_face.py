"""Weights as Hugging Face lays them out: one file, or several with an index.

The index is a JSON file beside them which says what is where, `{"weight_map": {name: file}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_zero.checkpoint.torch_file import open_torch_file

__all__ = ["holds_weights", "open_directory", "open_safetensors"]

# In the order of preference: repositories often hold the same weights twice.
_SUFFIXES = (".safetensors", ".bin")
# Beside which others may lie (training_args.bin).
_WHOLE = {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}


def holds_weights(path: Path) -> bool:
    """Whether the directory holds weights, with an index or in one file."""
    return any(any(path.glob(f"*{suffix}*")) for suffix in _SUFFIXES)


def open_directory(path: Path, *, weights_only: bool | None = None) -> dict[str, Tensor]:
    """The state dict of a directory of `*.safetensors` or `*.bin`.

    Raises:
        ValueError: Several files and no index, several indices, or an index that is wrong.
        FileNotFoundError: A file that the index names is missing.
    """
    for suffix in _SUFFIXES:
        indices = sorted(path.glob(f"*{suffix}.index.json"))
        files = sorted(path.glob(f"*{suffix}"))
        if len(indices) == 1:
            return _open_indexed(indices[0], weights_only)
        if not indices and path / _WHOLE[suffix] in files:
            return _open_file(path / _WHOLE[suffix], weights_only)
        if indices or len(files) > 1:
            names = ", ".join(file.name for file in indices or files)
            raise ValueError(
                f"{path} holds {names}, and nothing says which to take; give "
                "the path of one file, or leave one *.index.json there."
            )
        if files:
            return _open_file(files[0], weights_only)
    raise ValueError(f"{path} holds neither {' nor '.join(f'*{s}' for s in _SUFFIXES)}.")


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped into memory.

    Raises:
        ValueError: It is truncated or damaged.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
            return _with_tied(tensors, file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is truncated or damaged: {error}. Copy it again."
        ) from error


def _open_file(path: Path, weights_only: bool | None) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    content = open_torch_file(path, weights_only=weights_only)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a state dict.")
    return content


def _open_indexed(index: Path, weights_only: bool | None) -> dict[str, Tensor]:
    try:
        content = json.loads(index.read_text())
        weight_map: dict[str, str] = dict(content["weight_map"])
        tied = dict(dict(content.get("metadata") or {}).get("tied") or {})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} is no index of weights: expected JSON with a dict 'weight_map' of names to "
            f"files, got {type(error).__name__}: {error}."
        ) from error
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{index} names {len(names)} files, of which {', '.join(absent)} are missing; copy or "
            "download the directory again."
        )
    opened: dict[str, Any] = {name: _open_file(index.parent / name, weights_only) for name in names}
    lost = [name for name, file in weight_map.items() if name not in opened[file]]
    if lost:
        raise ValueError(
            f"{index} names weights that their files do not hold: {', '.join(lost)}; copy or "
            "download the directory again."
        )
    return _with_tied({name: opened[file][name] for name, file in weight_map.items()}, tied)


def _with_tied(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """Adds the names of tied weights, which are stored once: `{other name: name in the file}`."""
    tied = {o: name for o, name in metadata.items() if name in tensors and o not in tensors}
    return {**tensors, **{other: tensors[name] for other, name in tied.items()}}
