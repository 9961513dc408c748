"""A directory of torch's Distributed Checkpoint, written by one process.

The layout is that of sharded checkpoints; see `sharded`. Tensors are read when they are written.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.archive import Progress
from lightning_zero.checkpoint.dcp import METADATA, REST
from lightning_zero.checkpoint.file import explained
from lightning_zero.checkpoint.rank_file import RankFile
from lightning_zero.checkpoint.shard_tensor import ShardTensor
from lightning_zero.checkpoint.ties import identity
from lightning_zero.checkpoint.writer import split_rest
from lightning_zero.tensors.composite import take_apart
from lightning_zero.tensors.lazy import read_flat

__all__ = ["write_dcp"]

# Other entries go into `meta.pt` as they are.
_HELD_BY_NAME = {
    "averaging_state",
    "current_model_state",
    "lightning_zero_masters",
    "optimizer_states",
    "state_dict",
}


def write_dcp(checkpoint: Mapping[str, Any], path: Path, progress: Progress) -> None:
    """Writes an opened checkpoint as a directory, whole or not at all.

    Args:
        checkpoint: As `open_checkpoint` returns it.
        path: Its folder exists.
        progress: Is told the bytes of every tensor.

    Raises:
        OSError: It cannot be written.
    """
    sources: dict[object, str] = {}
    content = {
        key: _as_shards(take_apart(value), sources, progress) if key in _HELD_BY_NAME else value
        for key, value in checkpoint.items()
    }
    tree, others = split_rest(content)
    rest = io.BytesIO()
    torch.save(others, rest)
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    planner.finish_plan(plans[0])
    needed = sum(v.owned_bytes for v in planner.state_dict.values() if isinstance(v, ShardTensor))
    folder = directory.begin(path)
    try:
        with explained(path, needed + rest.getbuffer().nbytes):
            written = RankFile(folder, 0).write(planner)
            FileSystemWriter(folder).finish(metadata, [written.results])
            with open(folder / REST, "wb") as file:
                file.write(rest.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            names = {name: directory.hash_file(folder / name) for name in (METADATA, REST)}
            directory.write_checksums(folder, {written.file: written.digest, **names})
            directory.put_in_place(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _as_shards(tree: Any, sources: dict[object, str], progress: Progress) -> Any:
    """Tensors in dicts and lists as shards that are all of it, by what they share."""
    if isinstance(tree, Mapping):
        return {key: _as_shards(value, sources, progress) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_as_shards(value, sources, progress) for value in tree]
    if not isinstance(tree, Tensor) or tree.layout != torch.strided:
        return tree
    if not tree.dim() or not tree.numel():
        return tree.clone()
    source = sources.setdefault(identity(tree), f"tensor {len(sources)}")
    read = partial(_read, tree, progress)
    return ShardTensor.of(source, tree.shape, tree.dtype, range(tree.numel()), read)


def _read(tensor: Tensor, progress: Progress, start: int, stop: int) -> Tensor:
    values = read_flat(tensor, start, stop)
    progress(values.numel() * values.element_size())
    return values
