"""Exports a checkpoint of any format to another one, tensor by tensor.

For `safetensors` only the piece that is being written is in memory, so a checkpoint may be larger;
for `dcp` the largest tensor must fit, for `ckpt` all of them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_writer import ShardedSave
from lightning_zero.checkpoint.hugging_face import (
    INDEX,
    encode_index,
    split_by_size,
    write_safetensors,
)
from lightning_zero.checkpoint.new_file import explain_os_errors
from lightning_zero.checkpoint.source import tensor_identity, total_nbytes
from lightning_zero.checkpoint.storage import CheckpointPath, stage, write_bytes
from lightning_zero.checkpoint.torch_file import Progress, write_torch_file
from lightning_zero.comm.control import Channel
from lightning_zero.layout.sizes import format_bytes
from lightning_zero.tensors.composite import flatten_composites
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tiers.memory import available_memory_bytes

__all__ = ["ExportPlan", "Format", "drop_pages", "plan_export"]

_MADV_DONTNEED = 4


def drop_pages(path: Path) -> None:
    """Drops the mapped pages of `path`, a file or a directory of files, from this process's memory.

    The next access reads them from the file again. Without it, every page that was read counts as
    resident until the system is short of memory. Does nothing on systems other than Linux.

    Danger: writes to a private map of such a file are lost. Tensors of an opened checkpoint are
    only read.
    """
    if not sys.platform.startswith("linux"):
        return
    name = os.path.realpath(path)
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6 or not (fields[5] == name or fields[5].startswith(f"{name}/")):
                continue
            start, stop = (int(bound, 16) for bound in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


Format = Literal["safetensors", "ckpt", "dcp"]

_AVERAGED = "averaging_state"  # with it, `state_dict` holds the averaged weights
_CURRENT = "current_model_state"  # the trained weights
_MASTERS = "lightning_zero_masters"  # float32 masters of a 16-bit module
# Entries that belong to the trained weights, not to their average.
_TRAINED_ONLY = {
    _AVERAGED,
    _CURRENT,
    "callbacks",
    _MASTERS,
    "lr_schedulers",
    "MixedPrecision",
    "optimizer_states",
}


@dataclass(frozen=True)
class ExportPlan:
    """An export that is ready to be written."""

    # Writes atomically to a path whose folder exists, or to remote storage.
    write: Callable[[CheckpointPath, Progress], None]
    nbytes: int  # bytes of all tensors that are written
    notes: tuple[str, ...]  # for the user: entries that are not exported, and why


def plan_export(
    checkpoint: Mapping[str, Any],
    file_format: Format,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    is_averaged: bool = False,
    part: str | None = None,
) -> ExportPlan:
    """Plans the export of an opened checkpoint.

    Args:
        checkpoint: Result of `open_checkpoint`.
        file_format: `safetensors` stores the weights only; `ckpt` (one file, as Lightning's) and
            `dcp` (a directory of torch's Distributed Checkpoint) store everything.
        dtype: Dtype to which floating-point weights are cast; other states keep theirs.
        max_shard_bytes: Maximum size of a safetensors file, in a directory of files. None: one file
            of any size; the path given to `write` is that of the file.
        is_averaged: Export the averaged weights of Lightning's `WeightAveraging`, without entries
            that belong to the trained ones.
        part: Name of a submodule; only its weights are exported, under their names in it.

    Raises:
        ValueError: There are no averaged weights or no such submodule, or the format does not
            support the dtype or `part`.
    """
    if part is not None and file_format != "safetensors":
        raise ValueError(
            f"--part exports weights only, so it needs --format safetensors, got {file_format}."
        )
    weights, notes = _weights(checkpoint, file_format, is_averaged)
    if not is_averaged and dtype is not None:
        weights = _with_masters(weights, checkpoint.get(_MASTERS, {}), dtype)
    weights = _cast(weights, dtype)
    if part is not None:
        weights = _submodule_weights(weights, part)
    write: Callable[[CheckpointPath, Progress], None]
    if file_format == "safetensors":
        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
        if others := sorted(set(weights) - set(tensors)):
            notes.append(f"not exported, because they are not tensors: {', '.join(others)}")
        kept, tied = _untied(tensors)
        write = partial(_write_weights, kept, tied, max_shard_bytes)
        return ExportPlan(write, total_nbytes(kept), tuple(notes))
    content = dict(checkpoint) | {"state_dict": weights}
    if is_averaged:
        content = {key: value for key, value in content.items() if key not in _TRAINED_ONLY}
    if file_format == "ckpt":
        if "optimizer_states" in content:
            content["optimizer_states"] = [_numbered(s) for s in content["optimizer_states"]]
        write = partial(_write_file, content)
    else:
        write = partial(_write_dcp, content)
    return ExportPlan(write, total_nbytes(content), tuple(notes))


# ---------------------------------------------------------------------------------------- weights


def _weights(
    checkpoint: Mapping[str, Any], file_format: Format, is_averaged: bool
) -> tuple[dict[str, Any], list[str]]:
    has_average = _AVERAGED in checkpoint and _CURRENT in checkpoint
    if is_averaged and not has_average:
        raise ValueError(
            "the checkpoint has no averaged weights from Lightning's WeightAveraging or "
            "EMAWeightAveraging; omit --ema to export the trained weights."
        )
    if not has_average or is_averaged or file_format != "safetensors":
        return dict(checkpoint["state_dict"]), []
    note = "the trained weights are exported; use --ema for the averaged ones"
    return dict(checkpoint[_CURRENT]), [note]


def _submodule_weights(weights: Mapping[str, Any], part: str) -> dict[str, Any]:
    inside = {
        name.removeprefix(f"{part}."): value
        for name, value in weights.items()
        if name.startswith(f"{part}.")
    }
    if not inside:
        parts = sorted({name.partition(".")[0] for name in weights})
        raise ValueError(
            f"--part must be a submodule, got {part}; the checkpoint has {', '.join(parts)}."
        )
    return inside


def _with_masters(
    weights: Mapping[str, Any], masters: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    """Replaces weights that are narrower than `dtype` by their masters; tied ones stay tied."""
    narrow = {
        name: tensor_identity(value)
        for name, value in weights.items()
        if isinstance(value, Tensor) and value.element_size() < dtype.itemsize
    }
    exact = {narrow[name]: master for name, master in masters.items() if name in narrow}
    return {name: exact.get(narrow.get(name), value) for name, value in weights.items()}


def _cast(weights: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    if dtype is None:
        return dict(weights)
    cast: dict[object, Tensor] = {}  # tied weights stay one tensor
    result = dict(weights)
    for name, value in weights.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            read = partial(_read_cast, name, value, dtype)
            new = LazyTensor.of(value.shape, dtype, read)
            result[name] = cast.setdefault(tensor_identity(value), new)
    return result


def _read_cast(name: str, tensor: Tensor, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    values = read_flat(tensor, start, stop)
    narrow = values.to(dtype)
    if dtype is torch.float16 and bool((narrow.isinf() & values.isfinite()).any()):
        raise ValueError(
            f"{name} has values up to {float(values.abs().max()):.3g}, too large for float16; use "
            "--dtype bf16."
        )
    return narrow


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors under their first names; and for every further name, the first name."""
    first: dict[object, str] = {}
    tied = {
        name: kept
        for name, tensor in tensors.items()
        if (kept := first.setdefault(tensor_identity(tensor), name)) != name
    }
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by number, as torch's optimizers have it; it may be by name."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    if not any(isinstance(name, str) for name in names):
        return dict(state)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    entries = {numbers[name]: entry for name, entry in state["state"].items()}
    return {**state, "state": dict(sorted(entries.items())), "param_groups": groups}


def _write_file(content: Mapping[str, Any], path: CheckpointPath, progress: Progress) -> None:
    """Writes a file of `torch.save`, for which all tensors that are not in memory are read."""
    lazy = [leaf for leaf in tree_leaves(content) if isinstance(leaf, LazyTensor)]
    needed, free = total_nbytes(lazy), available_memory_bytes()
    if needed > free:
        raise ValueError(
            f"a file of torch.save needs all tensors in memory, {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free; use --format dcp, or --format safetensors for the "
            "weights."
        )
    write_torch_file(content, path, progress)


# ------------------------------------------------------------------------------- safetensors


def _write_weights(
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    max_bytes: int | None,
    path: CheckpointPath,
    progress: Progress,
) -> None:
    """Writes one file, or a directory of files of at most `max_bytes`."""
    if max_bytes is None:
        write_safetensors(path, tensors, tied, progress)
        return
    files = split_by_size(tensors, max_bytes)
    staged = stage(path)
    try:
        with explain_os_errors(path, total_nbytes(tensors)):
            for name, file_tensors in files.items():
                tied_here = {other: kept for other, kept in tied.items() if kept in file_tensors}
                write_safetensors(staged.folder / name, file_tensors, tied_here, progress)
            names = [*files]
            if len(files) > 1:
                write_bytes(staged.folder / INDEX, encode_index(files, tied))
                names.append(INDEX)
            staged.publish(listed=names)
    finally:
        staged.discard()


# ------------------------------------------------------------------------------------------- DCP

# All other entries are stored in `meta.pt` unchanged.
_TENSOR_ENTRIES = {
    "averaging_state",
    "current_model_state",
    "lightning_zero_masters",
    "optimizer_states",
    "state_dict",
}


def _write_dcp(checkpoint: Mapping[str, Any], path: CheckpointPath, progress: Progress) -> None:
    sources: dict[object, str] = {}
    content = {
        key: _as_shards(flatten_composites(value), sources, progress)
        if key in _TENSOR_ENTRIES
        else value
        for key, value in checkpoint.items()
    }
    ShardedSave.prepare(content, path, {}, Channel(0, 1, None)).run()


def _as_shards(tree: Any, sources: dict[object, str], progress: Progress) -> Any:
    """Replaces tensors in dicts and lists by shards that cover them; tied ones share a source."""
    if isinstance(tree, Mapping):
        return {key: _as_shards(value, sources, progress) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_as_shards(value, sources, progress) for value in tree]
    if not isinstance(tree, Tensor) or tree.layout != torch.strided:
        return tree
    if not tree.dim() or not tree.numel():
        return tree.clone()
    source = sources.setdefault(tensor_identity(tree), f"tensor {len(sources)}")
    read = partial(_read, tree, progress)
    return CheckpointShard.of(source, tree.shape, tree.dtype, range(tree.numel()), read)


def _read(tensor: Tensor, progress: Progress, start: int, stop: int) -> Tensor:
    values = read_flat(tensor, start, stop)
    progress(values.nbytes)
    return values
