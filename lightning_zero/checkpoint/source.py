"""Opens a checkpoint of any format as a Lightning checkpoint, verifies it, and summarizes it.

    path                                                    opened by     contains
    file of torch.save, a Lightning checkpoint (DDP, ours)  torch_file    all
    file of torch.save, a state dict                        torch_file    weights
    *.safetensors                                           hugging_face  weights
    directory of *.safetensors or *.bin, with an index      hugging_face  weights
    directory of DeepSpeed's ZeRO                           ../deepspeed  weights, Adam's moments
    directory of PyTorch Distributed Checkpoint             dcp_reader    all

Values are read when they are used: tensors are mapped into memory from their file or are
`LazyTensor`s, so a rank that uses its part of each tensor reads only that part. From remote storage
it reads ranges of bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_zero.checkpoint import dcp_reader, hugging_face, torch_file
from lightning_zero.checkpoint.checksums import CHECKSUMS, find_listed_damage
from lightning_zero.checkpoint.dcp_reader import METADATA, is_sharded, open_sharded
from lightning_zero.checkpoint.hugging_face import has_weights, open_directory, open_safetensors
from lightning_zero.checkpoint.states import MASTERS_KEY, METADATA_KEY, RANK_STATES_KEY
from lightning_zero.checkpoint.storage import (
    CheckpointPath,
    as_local,
    check_shared,
    complete_renames,
    locate,
    read_consistently,
)
from lightning_zero.checkpoint.torch_file import is_torch_file, open_torch_file
from lightning_zero.deepspeed.checkpoint import files_with_checksums as deepspeed_files
from lightning_zero.deepspeed.checkpoint import is_deepspeed, open_deepspeed
from lightning_zero.health.together import Gather, failing_together, run_on_all_ranks
from lightning_zero.layout.foreign_names import printable
from lightning_zero.tensors.lazy import LazyTensor

__all__ = [
    "find_damage",
    "format_of",
    "has_checksums",
    "open_checkpoint",
    "open_objects",
    "open_objects_on_all_ranks",
    "open_on_all_ranks",
    "raise_damage",
    "raise_damage_on_any_rank",
    "summarize",
    "tensor_identity",
    "total_nbytes",
]

# ------------------------------------------------------------------------------------------ damage


def find_damage(path: str | os.PathLike[str], *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Verifies this rank's share of a checkpoint by its checksums, if it has any.

    There are checksums in files of `torch.save`, also in a directory of DeepSpeed or of weights, in
    a directory of torch's Distributed Checkpoint, and in `SHA256SUMS` of a directory.

    Returns:
        One line for each damaged part.
    """
    located = locate(path)
    return read_consistently(located, lambda: _find_damage(located, rank, world_size))


def _find_damage(path: CheckpointPath, rank: int, world_size: int) -> list[str]:
    if path.is_dir():
        damage = find_listed_damage(path, rank=rank, world_size=world_size)
        if any(line.startswith(METADATA) for line in damage):
            return damage
        if is_sharded(path):
            return damage + dcp_reader.find_damage(path, rank=rank, world_size=world_size)
        return damage + _find_damage_in_files(path, rank, world_size)
    if path.is_file():
        return torch_file.find_damage(path, rank=rank, world_size=world_size)
    return []


def _find_damage_in_files(folder: CheckpointPath, rank: int, world_size: int) -> list[str]:
    """Verifies the torch files in a directory by the checksums of their records."""
    try:
        files = _torch_files(folder)
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    return [
        f"{printable(file.name)}: {line}"
        for file in files
        if file.is_file()  # opening the checkpoint reports missing files
        for line in torch_file.find_damage(file, rank=rank, world_size=world_size)
    ]


def _torch_files(folder: CheckpointPath) -> list[CheckpointPath]:
    if is_deepspeed(folder):
        local = as_local(folder)
        return [*deepspeed_files(local)] if local else []
    return hugging_face.files_with_checksums(folder) if has_weights(folder) else []


def has_checksums(path: CheckpointPath) -> bool:
    """Whether the checkpoint has checksums for `find_damage`."""
    if path.is_dir():
        if is_sharded(path) or (path / CHECKSUMS).is_file():
            return True
        files = (file for file in _torch_files(path) if file.is_file())
        return any(torch_file.has_checksums(file) for file in files)
    return torch_file.has_checksums(path)


def raise_damage(path: str | os.PathLike[str], damage: Sequence[str]) -> None:
    """Raises a ValueError if there is any damage."""
    if damage:
        raise ValueError(
            f"{path} is damaged: {printable('; '.join(damage))}. Use another checkpoint, or copy "
            "this one again."
        )


def raise_damage_on_any_rank(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    gather: Gather,
) -> None:
    """Verifies a checkpoint by its checksums; each rank verifies its share. Collective: every rank.

    Raises:
        ValueError: A file is damaged; on every rank.
        OSError, RuntimeError: A rank cannot read it; see `run_on_all_ranks`.
    """
    shares = run_on_all_ranks(
        partial(find_damage, path, rank=rank, world_size=world_size),
        gather=gather,
        what=f"verify {path}",
    )
    raise_damage(path, [line for share in shares for line in share])


# --------------------------------------------------------------------------------------- opening

# Entries whose tensors are read from the file when they are loaded.
_READ_FROM_FILE = {
    "state_dict",
    "optimizer_states",
    "current_model_state",
    MASTERS_KEY,
    RANK_STATES_KEY,
}
_ACCEPTED = (
    "a Lightning checkpoint (.ckpt), a state dict written by torch.save, a .safetensors file, a "
    "directory of such files with a Hugging Face index, a DeepSpeed ZeRO checkpoint directory, or "
    "a directory of PyTorch Distributed Checkpoint"
)


def open_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None
) -> dict[str, Any]:
    """Opens a checkpoint without reading its tensors. Local: no collective.

    Args:
        path: A file or directory, or the address of one on remote storage, such as
            `s3://bucket/run/last.ckpt`, for which fsspec may need another package (`s3fs`).
        weights_only: As for `torch.load`: None or True refuses pickled classes that are not known
            to be safe. False unpickles everything; use it only for sources that you trust.

    Returns:
        The dict of a Lightning checkpoint: `state_dict` by name, and the other entries
        (`optimizer_states`, `loops`, `hyper_parameters`, ...). Its tensors are on the CPU and must
        not be written to.

    Raises:
        FileNotFoundError: The path does not exist, or a file of the checkpoint is missing.
        ValueError: It is not a checkpoint, or a truncated one.
        ImportError: A package is missing that the address needs.
        pickle.UnpicklingError: It contains classes that `weights_only` refuses.
    """
    located = locate(path)
    try:
        opened = read_consistently(located, lambda: _open_located(located, path, weights_only))
    except (LookupError, UnicodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {printable(str(error))}): it is "
            "damaged, or of an unknown version."
        ) from error
    return _as_one_module(opened, path)


def open_objects(
    path: str | os.PathLike[str], *, weights_only: bool | None = None
) -> dict[str, Any]:
    """As `open_checkpoint`, with the keys that were saved, and any dict of `torch.save`. Local."""
    located = locate(path)

    contents = read_consistently(
        located, lambda: _open_located(located, path, weights_only, keeps_keys=True)
    )
    if not isinstance(contents, dict):
        raise ValueError(f"{path} contains a {type(contents).__name__}, expected a dict.")
    return contents


def open_objects_on_all_ranks(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    gather_for: Callable[[str], Gather],
    *,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """As `open_on_all_ranks`, with `open_objects`. Collective: every rank."""
    open_here = partial(open_objects, weights_only=weights_only)
    return _open_on_all_ranks(open_here, path, rank, world_size, gather_for)


def _as_one_module(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint of named objects with one module, as a checkpoint of the Trainer."""
    metadata = checkpoint.get(METADATA_KEY)
    if not isinstance(metadata, Mapping) or "modules" not in metadata:
        return checkpoint
    names = metadata["modules"]
    if len(names) != 1:
        raise ValueError(
            f"{path} has the states of {len(names)} modules ({', '.join(map(str, names))}), "
            "expected those of one; load it with fabric.load."
        )
    (name,) = names
    found = dict(checkpoint)
    found["state_dict"] = found.pop(name)
    keys = [key for key in metadata.get("optimizers", ()) if key in found]
    found["optimizer_states"] = [found.pop(key) for key in keys]
    found.setdefault("lr_schedulers", [])  # the Trainer requires that key
    if MASTERS_KEY in found:
        found[MASTERS_KEY] = found[MASTERS_KEY].get(name, {})
    return found


def open_on_all_ranks(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    gather_for: Callable[[str], Gather],
    *,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """As `open_checkpoint`, after the ranks have verified it together. Collective: every rank.

    `path` is the same on every rank. `gather_for` returns a function that gathers, for a name of
    the wait. Tensors besides the model's and the optimizers' are copies,
    which stay valid when the file is replaced.

    Raises:
        ValueError: The checkpoint is damaged, or its format is unknown.
        OSError, RuntimeError: Another rank could not open it.
    """
    open_here = partial(open_checkpoint, weights_only=weights_only)
    checkpoint = _open_on_all_ranks(open_here, path, rank, world_size, gather_for)
    for key, value in checkpoint.items():
        if key not in _READ_FROM_FILE:
            checkpoint[key] = tree_map_only(Tensor, Tensor.clone, value)
    return checkpoint


def _open_on_all_ranks(
    open_here: Callable[[str | os.PathLike[str]], dict[str, Any]],
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    gather_for: Callable[[str], Gather],
) -> dict[str, Any]:
    """Recovers a checkpoint of a killed job, verifies and opens it. Collective: every rank."""
    with failing_together(f"reach {path}", gather=gather_for(f"all ranks to reach {path}")):
        check_shared(path, world_size)
    with failing_together(f"recover {path}", gather=gather_for(f"rank 0 to recover {path}")):
        if rank == 0:
            complete_renames(locate(path))
    raise_damage_on_any_rank(path, rank, world_size, gather_for(f"all ranks to verify {path}"))
    with failing_together(f"open {path}", gather=gather_for(f"all ranks to open {path}")):
        return open_here(path)


def _open_located(
    located: CheckpointPath,
    path: str | os.PathLike[str],
    weights_only: bool | None,
    *,
    keeps_keys: bool = False,
) -> Any:
    """Opens a checkpoint; with `keeps_keys` also one of other entries, or another object."""
    if located.is_dir():
        return _open_directory(located, weights_only, keeps_keys)
    if not located.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if located.stat().st_size == 0:
        raise ValueError(f"{path} is empty: its save was interrupted; use an earlier checkpoint.")
    if located.suffix == ".safetensors":
        return {"state_dict": open_safetensors(located)}
    if is_torch_file(located):
        content = open_torch_file(located, weights_only=weights_only)
        return content if keeps_keys else _as_checkpoint(content, located)
    with located.open("rb") as file:
        found = file.read(8)
    raise ValueError(
        f"{path} is not a checkpoint: its first bytes are {found!r}. Accepted: {_ACCEPTED}."
    )


def _open_directory(
    path: CheckpointPath, weights_only: bool | None, keeps_keys: bool
) -> dict[str, Any]:
    if is_sharded(path):
        return open_sharded(path, weights_only=weights_only, keeps_keys=keeps_keys)
    if is_deepspeed(path):
        if (local := as_local(path)) is None:
            raise ValueError(f"{path} is a DeepSpeed checkpoint; copy it to a local folder first.")
        return open_deepspeed(
            local, partial(torch_file.open_without, "deepspeed", weights_only=weights_only)
        )
    if has_weights(path):
        return {"state_dict": open_directory(path, weights_only=weights_only)}
    names = sorted(entry.name for entry in path.iterdir())
    found = ", ".join(names[:8]) or "nothing"
    if len(names) > 8:
        found += f" and {len(names) - 8} more"
    raise ValueError(
        f"{path} is not a checkpoint: a directory that holds {found}. A sharded checkpoint has a "
        "file .metadata, a DeepSpeed one a file latest, weights an *.index.json or one "
        f"*.safetensors. Accepted: {_ACCEPTED}."
    )


def _as_checkpoint(content: Any, path: CheckpointPath) -> dict[str, Any]:
    """Returns a Lightning checkpoint unchanged, and a state dict as the only entry of one."""
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} contains a {type(content).__module__}.{type(content).__qualname__}, expected "
            f"a dict; save module.state_dict() instead. Accepted: {_ACCEPTED}."
        )
    metadata = content.get(METADATA_KEY)
    has_objects = isinstance(metadata, dict) and "modules" in metadata  # see `_as_one_module`
    if isinstance(content.get("state_dict"), dict) or has_objects:
        return content
    others = [
        key
        for key, value in content.items()
        if not isinstance(value, Tensor) and not str(key).endswith("_extra_state")
    ]
    if others or not content:
        keys = [repr(key) for key in content]
        found = ", ".join(keys[:6]) or "no keys"
        if len(keys) > 6:
            found += ", ..."
        raise ValueError(
            f"{path} contains a dict with {found}, which is neither a Lightning checkpoint "
            "(it has no dict under 'state_dict') nor a state dict (tensors by name). Save only "
            f"the state dict. Accepted: {_ACCEPTED}."
        )
    return {"state_dict": content}


# ------------------------------------------------------------------- summaries, without reading

_NUM_LARGEST = 5


def tensor_identity(tensor: Tensor) -> object:
    """A key that is equal for two tensors if they are the same one; both must be alive."""
    if isinstance(tensor, LazyTensor) or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def total_nbytes(tree: object) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples; tied tensors count once."""
    return sum(t.numel() * t.element_size() for t in _tensors_in(tree))


def _tensors_in(tree: object) -> Iterator[Tensor]:
    seen: set[object] = set()
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            if (key := tensor_identity(value)) not in seen:
                seen.add(key)
                yield value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)


def format_of(path: CheckpointPath) -> str:
    """Name of the format of a checkpoint that `open_checkpoint` opens."""
    if is_sharded(path):
        return "directory of torch.distributed.checkpoint"
    if path.is_dir():
        return "directory of DeepSpeed ZeRO" if is_deepspeed(path) else "directory of weights"
    return "safetensors file" if path.suffix == ".safetensors" else "file of torch.save"


def summarize(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of an opened checkpoint, as JSON values; tied tensors count once."""
    weights = {k: v for k, v in checkpoint["state_dict"].items() if isinstance(v, Tensor)}
    named: dict[object, tuple[str, Tensor]] = {}
    for name, tensor in weights.items():
        named.setdefault(tensor_identity(tensor), (name, tensor))
    distinct = [tensor for _, tensor in named.values()]
    largest = sorted(named.values(), key=lambda item: -item[1].numel())[:_NUM_LARGEST]
    optimizer = checkpoint.get("optimizer_states", [])
    known = {"state_dict", "optimizer_states"}
    others = {k: v for k, v in checkpoint.items() if k not in known}
    note = checkpoint.get("lightning_zero")
    note = note if isinstance(note, Mapping) else {}
    return {
        "lightning_version": checkpoint.get("pytorch-lightning_version"),
        "lightning_zero_version": note.get("version"),
        "world_size": note.get("world_size"),
        "stage": note.get("stage"),
        "nonfinite_parameters": list(note.get("nonfinite_parameters", ())),
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step"),
        "has_average": "averaging_state" in checkpoint,
        "num_tensors": len(weights),
        "num_tied": len(weights) - len(distinct),
        "parameters_numel": sum(t.numel() for t in distinct),
        "dtypes_numel": _numel_by_dtype(distinct),
        "optimizer_dtypes_numel": _numel_by_dtype(_tensors_in(optimizer)),
        "parameters_bytes": total_nbytes(distinct),
        "optimizer_bytes": total_nbytes(optimizer),
        "other_bytes": total_nbytes(others),
        "largest": [
            {"name": name, "shape": list(tensor.shape), "dtype": _name_of(tensor.dtype)}
            for name, tensor in largest
        ],
        "entries": [str(key) for key in checkpoint],
    }


def _numel_by_dtype(tensors: Iterable[Tensor]) -> dict[str, int]:
    count: Counter[str] = Counter()
    for tensor in tensors:
        count[_name_of(tensor.dtype)] += tensor.numel()
    return dict(count.most_common())


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
