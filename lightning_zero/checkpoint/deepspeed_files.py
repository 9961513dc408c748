"""The files of DeepSpeed's checkpoints, read without DeepSpeed.

They pickle a loss scaler, an enum and addresses beside the tensors. None of them is needed, so a
placeholder takes the place of every class of DeepSpeed's, and `weights_only` still refuses the
classes of everybody else.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.torch_file import open_torch_file

__all__ = ["Group", "Saved", "open_files"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class Group:
    """Parameters that lie one after another in flat tensors.

    Attributes:
        shapes: By name, in order.
        numbers: Which flat tensors: their index, and the optimizer's number for them.
        paddings: Elements after each parameter that belong to none.
    """

    shapes: Mapping[str, torch.Size]
    numbers: Sequence[int]
    paddings: Sequence[int]


@dataclass(frozen=True)
class Saved:
    """What the files hold.

    Attributes:
        folder: That of the tag.
        models: By rank; stages 0 to 2 have one.
        optims: The `optimizer_state_dict` of every rank.
    """

    folder: Path
    models: Sequence[dict[str, Any]]
    optims: Sequence[dict[str, Any]]

    @property
    def is_cut_by_parameter(self) -> bool:
        """Every rank has a part of every parameter."""
        return "fp32_flat_groups" in self.optims[0]

    def masters(self) -> list[list[Tensor]]:
        """Flat tensors, by rank and group."""
        by_parameter = self.is_cut_by_parameter
        key = "fp32_flat_groups" if by_parameter else "single_partition_of_fp32_groups"
        if any(key not in optim for optim in self.optims):
            raise ValueError(f"{self.folder} holds no {key}, so it is no ZeRO checkpoint.")
        return [[flat.reshape(-1) for flat in optim[key]] for optim in self.optims]

    def groups(self) -> list[Group]:
        """The groups, which are one where parameters may lie across two flat tensors."""
        shapes = self.models[0]["param_shapes"]
        num_flat = len(self.masters()[0])
        if len(shapes) != num_flat:
            merged = {name: shape for group in shapes for name, shape in group.items()}
            return [Group(merged, range(num_flat), [0] * len(merged))]
        paddings = self.optims[0].get("param_alignment_paddings")
        return [
            Group(group, [index], paddings[index] if paddings else [0] * len(group))
            for index, group in enumerate(shapes)
        ]


def open_files(folder: Path, *, weights_only: bool | None = None) -> Saved:
    """Opens the files of one tag.

    Raises:
        ValueError: Files are missing, damaged, too many, or those of another parallelism.
        pickle.UnpicklingError: They hold what `weights_only` refuses.
    """
    names = sorted(file.name for file in folder.iterdir())
    others = [name for name in names if re.search(r"expert_\d+_|^layer_\d+", name)]
    model_names, optim_names = _by_rank(folder, names, _MODEL), _by_rank(folder, names, _OPTIM)
    if others or not model_names:
        found = ", ".join(others or names) or "nothing"
        raise ValueError(
            f"{folder} is no ZeRO checkpoint that can be read here: it holds {found}; expected one "
            "*_model_states.pt, or one for each rank, without experts or pipeline layers."
        )
    models = [_open_file(folder / name, weights_only) for name in model_names]
    optims = [
        _open_file(folder / name, weights_only)["optimizer_state_dict"] for name in optim_names
    ]
    expected = _partition_count(optims[0]) if optims else 0
    if len(optims) != expected or len(models) not in (1, expected):
        raise ValueError(
            f"{folder} holds {len(optims)} *_optim_states.pt and {len(models)} *_model_states.pt, "
            f"expected {expected} of the former: files are missing, or another save lies over this "
            "one; copy the checkpoint again, or give another tag."
        )
    return Saved(folder, models, optims)


def _by_rank(folder: Path, names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    """File names by data-parallel rank; without a rank, the only one."""
    by_rank: dict[int, str] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            rank = int(match[1] or 0)
            if int(match[2]) or rank in by_rank:
                raise ValueError(
                    f"{folder} holds {name} beside {by_rank.get(rank, 'others')}: a checkpoint of "
                    "tensor parallelism, or two saves in one place, which cannot be read here."
                )
            by_rank[rank] = name
    return [by_rank[rank] for rank in sorted(by_rank)]


def _partition_count(optim: Mapping[str, Any]) -> int:
    count = optim.get("partition_count", 1)
    return int(max(count) if isinstance(count, (list, tuple)) else count)


class _Placeholder:
    """An object of a class that is not there."""

    def __new__(cls, *arguments: Any) -> _Placeholder:
        """Takes whatever the class takes."""
        return super().__new__(cls)


def _open_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """What DeepSpeed saved in a file, its tensors mapped into memory."""
    if weights_only is False:
        content = open_torch_file(path, weights_only=False, pickle_module=_pickle_module())
    else:
        foreign = [name for name in _foreign_names(path) if name.startswith("deepspeed.")]
        with torch.serialization.safe_globals([(_placeholder(name), name) for name in foreign]):
            content = open_torch_file(path, weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected DeepSpeed's dict.")
    return content


def _foreign_names(path: Path) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except (ValueError, RuntimeError, OSError):
        return []  # not a zip file, or a truncated one: opening it will say so


def _placeholder(name: str) -> type[_Placeholder]:
    return type(name.rpartition(".")[2], (_Placeholder,), {})


def _pickle_module() -> ModuleType:
    """The module pickle, whose unpickler knows DeepSpeed's classes as placeholders."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.split(".")[0] == "deepspeed":
                return _placeholder(name)
            return super().find_class(module, name)

    changed = ModuleType("pickle")
    changed.__dict__.update(vars(pickle))
    changed.Unpickler = Unpickler  # type: ignore[attr-defined]
    return changed
