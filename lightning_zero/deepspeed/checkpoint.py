"""Opens checkpoint directories of DeepSpeed ZeRO, stages 0 to 3, as full tensors by name.

Besides tensors they contain pickled objects of DeepSpeed: a loss scaler, an enum, addresses. None
of them is needed, so the function that opens the files may replace them (see `open_without` in
checkpoint/torch_file.py).

    folder/latest                                                 name of the tag
    folder/TAG/mp_rank_00_model_states.pt                         stages 0 to 2: module, shapes
    folder/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt          stage 3: the same, by rank
    folder/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   masters and optimizer, by rank

Masters and optimizer states are flat tensors, one for each group of parameters and rank. The
parameters of a group follow one another in the order of `param_shapes`:

    stages 1, 2   |aaaaaaa bbbb|bbbbbbbbb cc|cccc....|     a group, split over ranks at any element
    stage 3       rank 0 |aaa bbbbb cc|   rank 1 |aaa bbbbb cc|   rank 2 |a.. bbb.. cc|
                                                           every parameter, split into equal parts
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_zero.layout.foreign_names import check_inside, printable
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["OpenFile", "files_with_checksums", "is_deepspeed", "open_deepspeed"]

OpenFile: TypeAlias = Callable[[Path], Any]  # opens one file of torch.save

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class _Group:
    """Parameters that follow one another in flat tensors."""

    shapes: Mapping[str, torch.Size]  # by name, in order
    numbers: Sequence[int]  # indices of the flat tensors, in the optimizer, too
    paddings: Sequence[int]  # unused elements after each parameter


@dataclass(frozen=True)
class _Saved:
    """Content of the files of one checkpoint."""

    folder: Path  # folder of the tag
    models: Sequence[dict[str, Any]]  # by rank; stages 0 to 2 have one
    optims: Sequence[dict[str, Any]]  # `optimizer_state_dict` of every rank

    @property
    def is_sharded_by_parameter(self) -> bool:
        """Whether every rank has a part of every parameter, as in stage 3."""
        return "fp32_flat_groups" in self.optims[0]

    @cached_property
    def masters(self) -> list[list[Tensor]]:
        """Flat tensors, by rank and number."""
        by_parameter = self.is_sharded_by_parameter
        key = "fp32_flat_groups" if by_parameter else "single_partition_of_fp32_groups"
        if any(key not in optim for optim in self.optims):
            raise ValueError(f"{self.folder} has no {key}, so it is not a ZeRO checkpoint.")
        return [[flat.reshape(-1) for flat in optim[key]] for optim in self.optims]

    @cached_property
    def groups(self) -> list[_Group]:
        """Groups of parameters; a single one if a parameter may extend over two flat tensors."""
        shapes = self.models[0]["param_shapes"]
        num_flat = len(self.masters[0])
        if len(shapes) != num_flat:
            merged = {name: shape for group in shapes for name, shape in group.items()}
            return [_Group(merged, range(num_flat), [0] * len(merged))]
        paddings = self.optims[0].get("param_alignment_paddings")
        return [
            _Group(group, [index], paddings[index] if paddings else [0] * len(group))
            for index, group in enumerate(shapes)
        ]


# -------------------------------------------------------------------------------------- files


def _open_files(folder: Path, open_file: OpenFile) -> _Saved:
    names = sorted(file.name for file in folder.iterdir())
    others = [name for name in names if re.search(r"expert_\d+_|^layer_\d+", name)]
    model_names, optim_names = _by_rank(folder, names, _MODEL), _by_rank(folder, names, _OPTIM)
    if others or not model_names:
        found = ", ".join(others or names) or "nothing"
        raise ValueError(
            f"{folder} is not a ZeRO checkpoint that can be read here: it holds {found}; expected "
            "one *_model_states.pt, or one for each rank, without experts or pipeline layers."
        )
    models = [_open_file(folder / name, open_file, "module") for name in model_names]
    optims = [
        _open_file(folder / name, open_file, "optimizer_state_dict")["optimizer_state_dict"]
        for name in optim_names
    ]
    expected = optims[0].get("partition_count", 1) if optims else 0
    if isinstance(expected, (list, tuple)):  # one count per group
        expected = max(expected, default=0)
    if not isinstance(expected, int):
        raise ValueError(f"{folder / optim_names[0]} has no valid partition_count.")
    if len(optims) != expected or len(models) not in (1, expected):
        missing = [name for name in _names_of_ranks(optim_names, expected) if name not in names]
        raise ValueError(
            f"{folder} holds {len(optims)} *_optim_states.pt and {len(models)} *_model_states.pt, "
            f"expected {expected} of the former: {', '.join(missing) or 'files'} are missing, or "
            "another save has overwritten files; copy the checkpoint again, or use another tag."
        )
    return _Saved(folder, models, optims)


def _names_of_ranks(names: Sequence[str], num_ranks: int) -> list[str]:
    """File names of all ranks, after the pattern of `names`."""
    ranks = range(min(num_ranks, 2**16))
    return [re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", names[0]) for rank in ranks]


def _by_rank(folder: Path, names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    """File names in the order of data-parallel ranks; a name without a rank is that of rank 0."""
    by_rank: dict[int, str] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            rank = int(match[1] or 0)
            if int(match[2]) or rank in by_rank:
                raise ValueError(
                    f"{folder} holds both {name} and {by_rank.get(rank, 'others')}: a checkpoint "
                    "of tensor parallelism, or two saves in one folder, which cannot be read here."
                )
            by_rank[rank] = name
    return [by_rank[rank] for rank in sorted(by_rank)]


def _open_file(path: Path, open_file: OpenFile, key: str) -> dict[str, Any]:
    """Content of a file that DeepSpeed saved, its tensors mapped into memory; has a dict `key`."""
    content = open_file(path)
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise ValueError(
            f"{path} contains a {type(content).__name__}, expected DeepSpeed's dict with {key!r}: "
            "it is damaged, or of another version."
        )
    return content


# Entries of a model file that DeepSpeed adds; all others are the user's or Lightning's.
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
_WRAPPER = "_forward_module."  # prefix of every name in Lightning before 2.1


def is_deepspeed(path: Any) -> bool:
    """Whether a path, local or remote, is a checkpoint directory of DeepSpeed or of one tag."""
    return (path / "latest").is_file() or any(path.glob("*mp_rank_*_model_states.pt"))


def open_deepspeed(path: Path, open_file: OpenFile) -> dict[str, Any]:
    """Opens the last tag of a checkpoint directory, or the directory of a tag.

    Args:
        path: The directory.
        open_file: Opens one of its files; need not load objects of DeepSpeed's classes.

    Returns:
        `state_dict` in full precision, `optimizer_states` by parameter name if the checkpoint has
        them, and all entries that the user or Lightning has added.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It is not a ZeRO checkpoint, is damaged, or has model parallelism.
    """
    folder = _tag_folder(path)
    saved = _open_files(folder, open_file)
    try:
        return _as_lightning(saved)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the files in {folder} do not have DeepSpeed's entries "
            f"({type(error).__name__}: {printable(str(error))}): they are damaged, or of another "
            "version."
        ) from error


def files_with_checksums(path: Path) -> list[Path]:
    """Files that `open_deepspeed` opens; their records have checksums."""
    folder = _tag_folder(path)
    names = sorted(file.name for file in folder.iterdir())
    return [folder / name for name in names if _MODEL.fullmatch(name) or _OPTIM.fullmatch(name)]


def _as_lightning(saved: _Saved) -> dict[str, Any]:
    model = saved.models[0]
    opened = {key: value for key, value in model.items() if key not in _OWN_ENTRIES}
    values = dict(_frozen_parameters(saved))
    if saved.optims:
        values.update(_full_tensors(saved, saved.masters, is_exact=True))
        opened["optimizer_states"] = [_optimizer_state(saved)]
    elif isinstance(model.get("optimizer"), dict) and "param_groups" in model["optimizer"]:
        opened["optimizer_states"] = [model["optimizer"]]
    module = model["module"]
    for alias, name in dict(model.get("shared_params") or {}).items():
        values.setdefault(alias, values[name] if name in values else module[name])
    # In the module's order. Entries that are not sharded (buffers) come from the module's file.
    opened["state_dict"] = {
        name.removeprefix(_WRAPPER): values.get(name, value) for name, value in module.items()
    }
    return opened


def _tag_folder(path: Path) -> Path:
    latest = path / "latest"
    if not latest.is_file():
        return path
    try:
        folder = path / check_inside(latest.read_text().strip())
    except ValueError as error:  # and UnicodeDecodeError
        raise ValueError(f"{latest} does not name a tag: {printable(str(error))}.") from error
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{latest} names the tag {printable(repr(folder.name))}, but that directory does not "
            "exist; copy the checkpoint again, or pass the directory of another tag."
        )
    return folder


# ------------------------------------------------------------------------------------- values


def _full_tensors(
    saved: _Saved, flats: Sequence[Sequence[Tensor | None]], *, is_exact: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields full tensors by name, from the flat tensors of all ranks, by rank and number.

    A group with a flat tensor of None is skipped. With `is_exact`, a flat tensor must not have more
    elements than parameters and alignment need.
    """
    for group in saved.groups:
        parts = [[rank[number] for number in group.numbers] for rank in flats]
        if not any(part is None for rank in parts for part in rank):
            yield from _split_group(saved, group, parts, is_exact)  # type: ignore[arg-type]


def _split_group(
    saved: _Saved, group: _Group, parts: Sequence[Sequence[Tensor]], is_exact: bool
) -> Iterator[tuple[str, Tensor]]:
    by_parameter = saved.is_sharded_by_parameter
    num_ranks = len(parts)
    flat = [part for rank in parts for part in rank]
    available = sum(part.numel() for part in (parts[0] if by_parameter else flat))
    start = 0
    for (name, shape), padding in zip(group.shapes.items(), group.paddings, strict=True):
        size = numel = math.prod(shape)
        if by_parameter:
            size = -(-numel // num_ranks)
            pieces = []
            for number, rank in enumerate(parts):
                length = max(0, min(size, numel - number * size))
                pieces += _flat_range(rank, start, start + length)
        else:
            pieces = _flat_range(flat, start, start + numel)
        if sum(piece.numel() for piece in pieces) != numel:
            raise _mismatch(saved, available, start + size)
        yield name, _concatenated(pieces, shape)
        start += size + padding
    alignment = 1 if by_parameter else 2 * num_ranks
    if is_exact and -(-start // alignment) != -(-available // alignment):
        raise _mismatch(saved, available, start)


def _mismatch(saved: _Saved, available: int, needed: int) -> ValueError:
    return ValueError(
        f"{saved.folder} has {available} elements for a group of parameters, expected {needed}: "
        "its files do not belong together, or its state was on NVMe, which DeepSpeed saves as raw "
        "copies. Convert it with DeepSpeed's own zero_to_fp32.py."
    )


def _frozen_parameters(saved: _Saved) -> Iterator[tuple[str, Tensor]]:
    """Yields the frozen parameters; in stage 3 every rank has a part of each."""
    for name, shape in dict(saved.models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in saved.models]
        yield name, _concatenated(_flat_range(parts, 0, math.prod(shape)), shape)


def _flat_range(parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Views of the elements [start, stop) of consecutive flat tensors."""
    pieces = []
    for part in parts:
        piece = part[max(start, 0) : max(stop, 0)]
        if piece.numel():
            pieces.append(piece)
        start, stop = start - part.numel(), stop - part.numel()
    return pieces


def _concatenated(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """One tensor from flat pieces, which are concatenated when they are read."""
    if len(pieces) == 1:
        return pieces[0].view(torch.Size(shape))

    def read(start: int, stop: int) -> Tensor:
        return torch.cat([pieces[0][:0], *_flat_range(pieces, start, stop)])

    return LazyTensor.of(shape, pieces[0].dtype, read)


# ---------------------------------------------------------------------------------- optimizer


def _optimizer_state(saved: _Saved) -> dict[str, Any]:
    """The optimizer's states and groups, by parameter name."""
    states, groups = zip(*(_base_state(optim) for optim in saved.optims), strict=True)
    masters = saved.masters
    numbers = range(len(masters[0]))
    by_name: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for number in numbers for key in states[0].get(number, {})):
        flats = [
            [_flat(state.get(n, {}).get(key), flat) for n, flat in zip(numbers, rank, strict=True)]
            for state, rank in zip(states, masters, strict=True)
        ]
        for name, value in _full_tensors(saved, flats, is_exact=False):
            by_name.setdefault(name, {})[key] = value
    options = []
    for number, group in enumerate(groups[0]):
        members = group.get("params", [number])
        of_group = [g for g in saved.groups if set(g.numbers) & set(members)]
        names = [name for g in of_group for name in g.shapes]
        scalars = _scalars(states[0].get(members[0], {}), group)
        for name in names:
            if name in by_name:
                by_name[name].update(scalars)
        options.append({**group, "params": [name.removeprefix(_WRAPPER) for name in names]})
    state = {name.removeprefix(_WRAPPER): entry for name, entry in by_name.items()}
    return {"state": state, "param_groups": options}


def _base_state(optim: Mapping[str, Any]) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """The wrapped optimizer's states, by number, and its parameter groups."""
    base = optim.get("base_optimizer_state", optim.get("optimizer_state_dict"))
    if isinstance(base, Mapping):
        return dict(base["state"]), list(base["param_groups"])
    states = dict(enumerate(base or []))  # an "elastic" checkpoint: a list of states, one per group
    step = optim.get("base_optimizer_state_step")
    return states, [{} if step is None else {"step": step} for _ in states]


def _flat(value: object, master: Tensor) -> Tensor | None:
    """`value` as a flat tensor if it has a value for every element of `master`; may be padded."""
    if isinstance(value, Tensor) and value.dim() and value.numel() >= master.numel():
        return value.reshape(-1)
    return None


def _scalars(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """States that are one number for all elements, such as the step; some groups store it."""
    scalars = {k: v for k, v in state.items() if not isinstance(v, Tensor) or v.dim() == 0}
    if "step" in group:
        scalars.setdefault("step", group["step"])
    if "step" in scalars and not isinstance(scalars["step"], Tensor):
        scalars["step"] = torch.tensor(float(scalars["step"]))
    return scalars
