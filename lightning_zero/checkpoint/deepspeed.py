"""Checkpoint directories of DeepSpeed ZeRO, stages 0 to 3, as whole tensors under their names.

    folder/latest                                                 the name of the tag
    folder/TAG/mp_rank_00_model_states.pt                         stages 0 to 2: module, shapes
    folder/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt          stage 3: the same, by rank
    folder/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   masters and optimizer, by rank

Masters and optimizer states are flat tensors, one for each group of parameters and rank, with the
parameters of the group one after another, in the order of `param_shapes`:

    stages 1, 2   |aaaaaaa bbbb|bbbbbbbbb cc|cccc....|     a group, cut into ranks anywhere
    stage 3       rank 0 |aaa bbbbb cc|   rank 1 |aaa bbbbb cc|   rank 2 |a.. bbb.. cc|
                                                           every parameter, cut into equal parts
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.deepspeed_files import Group, Saved, open_files
from lightning_zero.tensors.lazy import StoredTensor

__all__ = ["is_deepspeed", "open_deepspeed"]

# The entries of a model file that are DeepSpeed's; the others are the user's, or Lightning's.
_OWN_ENTRIES = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "csr_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "universal_checkpoint_info",
}
_WRAPPER = "_forward_module."  # before every name, in Lightning before 2.1


def is_deepspeed(path: Path) -> bool:
    """Whether it is a checkpoint directory of DeepSpeed, or the directory of one tag."""
    return (path / "latest").is_file() or any(path.glob("*mp_rank_*_model_states.pt"))


def open_deepspeed(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Opens a checkpoint directory; the last tag, or the directory of a tag.

    Args:
        path: Of the directory.
        weights_only: As for `torch.load`; DeepSpeed's own classes are never needed.

    Returns:
        `state_dict` in full precision, `optimizer_states` by parameter name where they are there,
        and what the user, or Lightning, saved beside them.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It is no such checkpoint, a damaged one, or one of model parallelism.
        pickle.UnpicklingError: It holds classes that `weights_only` refuses.
    """
    saved = open_files(_tag_folder(path), weights_only=weights_only)
    model = saved.models[0]
    opened = {key: value for key, value in model.items() if key not in _OWN_ENTRIES}
    values = dict(_frozen(saved))
    if saved.optims:
        values.update(_spread(saved, saved.masters(), is_exact=True))
        opened["optimizer_states"] = [_optimizer_state(saved)]
    elif isinstance(model.get("optimizer"), dict) and "param_groups" in model["optimizer"]:
        opened["optimizer_states"] = [model["optimizer"]]
    module = model["module"]
    for alias, name in dict(model.get("shared_params") or {}).items():
        values.setdefault(alias, values[name] if name in values else module[name])
    # In the module's own order. What is not sharded (buffers) is in the module's own file.
    opened["state_dict"] = {
        name.removeprefix(_WRAPPER): values.get(name, value) for name, value in module.items()
    }
    return opened


def _tag_folder(path: Path) -> Path:
    latest = path / "latest"
    if not latest.is_file():
        return path
    folder = path / latest.read_text().strip()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{latest} names the tag {folder.name!r}, and there is no such directory; copy the "
            "checkpoint again, or give the directory of another tag."
        )
    return folder


# ------------------------------------------------------------------------------------- values


def _spread(
    saved: Saved, flats: Sequence[Sequence[Tensor | None]], *, is_exact: bool
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by name, from the flat tensors of all ranks.

    Args:
        saved: The checkpoint.
        flats: By rank and group number; a group that has None on rank 0 is left out.
        is_exact: No more elements are allowed than parameters and alignment need.
    """
    for group in saved.groups():
        parts = [[rank[number] for number in group.numbers] for rank in flats]
        if any(part is None for rank in parts for part in rank):
            continue
        yield from _cut_group(saved, group, parts, is_exact)  # type: ignore[arg-type]


def _cut_group(
    saved: Saved, group: Group, parts: Sequence[Sequence[Tensor]], is_exact: bool
) -> Iterator[tuple[str, Tensor]]:
    by_parameter = saved.is_cut_by_parameter
    num_ranks = len(parts)
    available = sum(flat.numel() for flat in parts[0]) if by_parameter else 0
    flat = [part for rank in parts for part in rank]
    available = available or sum(part.numel() for part in flat)
    start = 0
    for (name, shape), padding in zip(group.shapes.items(), group.paddings, strict=True):
        numel = math.prod(shape)
        if by_parameter:
            size = -(-numel // num_ranks)
            sizes = [max(0, min(size, numel - rank * size)) for rank in range(num_ranks)]
            pieces = [
                piece
                for rank, part in zip(parts, sizes, strict=True)
                for piece in _cut(rank, start, start + part)
            ]
        else:
            size = numel
            pieces = _cut(flat, start, start + numel)
        if sum(piece.numel() for piece in pieces) != numel:
            raise _mismatch(saved, available, start + size)
        yield name, _joined(pieces, shape)
        start += size + padding
    alignment = 1 if by_parameter else 2 * num_ranks
    if is_exact and -(-start // alignment) != -(-available // alignment):
        raise _mismatch(saved, available, start)


def _mismatch(saved: Saved, available: int, needed: int) -> ValueError:
    return ValueError(
        f"{saved.folder} holds {available} elements for a group of parameters, expected {needed}: "
        "its files do not belong together, or its state was on NVMe, of which DeepSpeed saves raw "
        "copies only. Convert it with DeepSpeed's own zero_to_fp32.py."
    )


def _frozen(saved: Saved) -> Iterator[tuple[str, Tensor]]:
    """Parameters that were not trained: whole, or a part on every rank."""
    for name, shape in dict(saved.models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in saved.models]
        yield name, _joined(_cut(parts, 0, math.prod(shape)), shape)


def _cut(parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Views of elements [start, stop) of flat tensors that follow one another."""
    pieces = []
    for part in parts:
        piece = part[max(start, 0) : max(stop, 0)]
        if piece.numel():
            pieces.append(piece)
        start, stop = start - part.numel(), stop - part.numel()
    return pieces


def _joined(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """One tensor of flat pieces, joined when they are read."""
    if len(pieces) == 1:
        return pieces[0].view(torch.Size(shape))

    def read(start: int, stop: int) -> Tensor:
        return torch.cat([pieces[0][:0], *_cut(pieces, start, stop)])

    return StoredTensor.of(shape, pieces[0].dtype, read)


# ---------------------------------------------------------------------------------- optimizer


def _optimizer_state(saved: Saved) -> dict[str, Any]:
    """States and groups by parameter name."""
    states, groups = zip(*(_base_state(optim) for optim in saved.optims), strict=True)
    masters = saved.masters()
    numbers = range(len(masters[0]))
    by_name: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for number in numbers for key in states[0].get(number, {})):
        flats = [
            [_flat(state.get(n, {}).get(key), flat) for n, flat in zip(numbers, rank, strict=True)]
            for state, rank in zip(states, masters, strict=True)
        ]
        for name, value in _spread(saved, flats, is_exact=False):
            by_name.setdefault(name, {})[key] = value
    options = []
    for number, group in enumerate(groups[0]):
        members = group.get("params", [number])
        of_group = [g for g in saved.groups() if set(g.numbers) & set(members)]
        names = [name for g in of_group for name in g.shapes]
        scalars = _scalars(states[0].get(members[0], {}), group)
        for name in names:
            if name in by_name:
                by_name[name].update(scalars)
        options.append({**group, "params": [name.removeprefix(_WRAPPER) for name in names]})
    state = {name.removeprefix(_WRAPPER): entry for name, entry in by_name.items()}
    return {"state": state, "param_groups": options}


def _base_state(optim: Mapping[str, Any]) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """The wrapped optimizer's state by number, and its groups."""
    base = optim.get("base_optimizer_state", optim.get("optimizer_state_dict"))
    if isinstance(base, Mapping):
        return dict(base["state"]), list(base["param_groups"])
    states = dict(enumerate(base or []))  # "elastic": a list of states by group
    step = optim.get("base_optimizer_state_step")
    return states, [{} if step is None else {"step": step} for _ in states]


def _flat(value: object, master: Tensor) -> Tensor | None:
    """A state that has a value for every element of the master; it may have its padding too."""
    if isinstance(value, Tensor) and value.dim() and value.numel() >= master.numel():
        return value.reshape(-1)
    return None


def _scalars(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """States that are one number for all elements: the step, which may be kept with the group."""
    scalars = {k: v for k, v in state.items() if not isinstance(v, Tensor) or v.dim() == 0}
    if "step" in group:
        scalars.setdefault("step", group["step"])
    if "step" in scalars and not isinstance(scalars["step"], Tensor):
        scalars["step"] = torch.tensor(float(scalars["step"]))
    return scalars
