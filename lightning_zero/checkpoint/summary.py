"""What is in a checkpoint, counted without reading its tensors; tied ones count once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.atomic import Place
from lightning_zero.checkpoint.dcp_reader import is_sharded
from lightning_zero.checkpoint.deepspeed import is_deepspeed
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["format_of", "identity", "nbytes", "summarize", "tensors_in", "total_nbytes"]


def identity(tensor: Tensor) -> object:
    """Equal for two tensors that are the same one; both must be alive."""
    if isinstance(tensor, LazyTensor) or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor, wherever they are."""
    return tensor.numel() * tensor.element_size()


def tensors_in(tree: object) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples; one that is there twice comes once."""
    seen: set[object] = set()
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            if (key := identity(value)) not in seen:
                seen.add(key)
                yield value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)


def total_nbytes(tree: object) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples; tied ones count once."""
    return sum(map(nbytes, tensors_in(tree)))


_NUM_LARGEST = 5


def format_of(path: Place) -> str:
    """The name of the format of what `open_checkpoint` opens."""
    if is_sharded(path):
        return "directory of torch.distributed.checkpoint"
    if path.is_dir():
        return "directory of DeepSpeed ZeRO" if is_deepspeed(path) else "directory of weights"
    return "safetensors file" if path.suffix == ".safetensors" else "file of torch.save"


def summarize(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Counts what an opened checkpoint holds.

    Returns:
        Of JSON values: versions, progress, note (world size and stage where they are recorded),
        counts, bytes by kind, the largest tensors, and the names of the other entries.
    """
    weights = {k: v for k, v in checkpoint["state_dict"].items() if isinstance(v, Tensor)}
    distinct = list(tensors_in(weights))
    optimizer = list(tensors_in(checkpoint.get("optimizer_states", [])))
    known = {"state_dict", "optimizer_states"}
    others = list(tensors_in({k: v for k, v in checkpoint.items() if k not in known}))
    note = checkpoint.get("lightning_zero")
    note = dict(note) if isinstance(note, Mapping) else {}
    return {
        "lightning_version": checkpoint.get("pytorch-lightning_version"),
        "lightning_zero_version": note.get("version"),
        "world_size": note.get("world_size"),
        "stage": note.get("stage"),
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step"),
        "has_average": "averaging_state" in checkpoint,
        "num_tensors": len(weights),
        "num_tied": len(weights) - len(distinct),
        "parameters_numel": sum(t.numel() for t in distinct),
        "dtypes_numel": _by_dtype(distinct),
        "optimizer_dtypes_numel": _by_dtype(optimizer),
        "parameters_bytes": sum(map(nbytes, distinct)),
        "optimizer_bytes": sum(map(nbytes, optimizer)),
        "other_bytes": sum(map(nbytes, others)),
        "largest": _largest(weights),
        "entries": [str(key) for key in checkpoint],
    }


def _by_dtype(tensors: list[Tensor]) -> dict[str, int]:
    count: Counter[str] = Counter()
    for tensor in tensors:
        count[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return dict(count.most_common())


def _largest(weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    seen: set[object] = set()
    largest = []
    for name, tensor in sorted(weights.items(), key=lambda item: -math.prod(item[1].shape)):
        if identity(tensor) in seen:
            continue
        seen.add(identity(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        largest.append({"name": name, "shape": list(tensor.shape), "dtype": dtype})
        if len(largest) == _NUM_LARGEST:
            break
    return largest
