"""What a user can set, checked once, before any process group exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from lightning_zero.layout.keep_float32 import AUTOCAST
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.sizes import as_integer
from lightning_zero.layout.stage import STAGES, Stage, State

__all__ = ["MAY_BE_ZERO", "NEEDS", "SIZES", "Modules", "Need", "ZeroConfig"]

_FLOATING = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_FLOATING |= {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATING.values()}
SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
)
_Kind = str | type[nn.Module]  # a name, a pattern or a class
_Kinds = tuple[_Kind, ...]
Modules = _Kind | Sequence[_Kind] | Set[_Kind]
_MODULES = {
    "keep_float32": "names or patterns of parameters or modules, classes of modules",
    "unit_classes": "classes of modules, names of these, or names or patterns of modules",
    "activation_checkpointing": "True, False, classes of modules, names of these, or names or "
    "patterns of modules",
}
MAY_BE_ZERO = ("prefetch_bucket_size", "param_persistence_threshold")


class Need(NamedTuple):
    """Of an option that has no meaning in some stages."""

    is_met_by: Callable[[Stage], bool]
    stages: str  # in which it has one
    otherwise: str  # what is so in the others
    remedy: str


NEEDS = {
    **dict.fromkeys(
        (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "max_live_parameters",
            "unit_classes",
            "reshard_after_forward",
            "offload_param",
        ),
        Need(
            lambda stage: stage.shards_params,
            "stage 3",
            "in which parameters rest whole on the device",
            "stage=3",
        ),
    ),
    "allgather_bucket_size": Need(
        lambda stage: stage.all_gathers_after_step,
        "stage 1 or 2",
        "which gathers nothing after a step",
        "stage=1 or stage=2",
    ),
    **dict.fromkeys(
        ("offload_optimizer", "overlap_step", "sharding_group_size"),
        Need(
            lambda stage: stage.has_shard(State.OPTIM),
            "stage 1, 2 or 3",
            "in which every rank keeps and steps everything on the device",
            "stage=1",
        ),
    ),
}


@dataclass(frozen=True)
class ZeroConfig:
    """Settings of the engine. Sizes are in elements, as in DeepSpeed; None means "choose well".

    A size may be written as 67108864, 5e8, "64M" (of 10^6) or "64Mi" (of 2^20).

    Attributes:
        stage: 0 (plain data parallel, the control), 1, 2 or 3.
        reduce_bucket_size: Elements of gradient that travel in one reduce-scatter. None: 4 Mi, or
            256 Ki for each rank where that is more. In stage 3 it bounds the buckets that are not a
            repeated block.
        allgather_bucket_size: Stages 1 and 2: elements of parameters gathered at once after the
            step. Buckets travel both ways, so the smaller of this and `reduce_bucket_size` holds.
        prefetch_bucket_size: Stage 3: elements gathered ahead of their use. None: one unit ahead;
            0: none.
        param_persistence_threshold: Stage 3: parameters with fewer elements stay whole. None: 0,
            because a small parameter travels with its unit and costs no collective of its own.
        max_live_parameters: Stage 3: no prefetch that would bring more whole elements than this.
        unit_classes: Stage 3: modules that are gathered and released one by one, such as
            transformer blocks: a class, its name, a pattern, or a list of these. None: found by
            themselves, see units.py. Large modules outside of them are units too, the rest stays
            whole throughout a step.
        reshard_after_forward: Stage 3: free a unit's parameters after its forward and gather them
            again for its backward. None: True. False trades memory for a third of the
            communication.
        overlap_comm: Communicate while computing. False: wait for every collective where it is
            issued.
        reduce_dtype: Dtype in which gradients are summed and kept. None: float32, or the
            parameters' own dtype where that is wider.
        param_dtype: Dtype of whole parameters, in which the module computes. None: as the module
            is. Where it is narrower than float32, float32 masters are kept and stepped.
        keep_float32: Parameters that stay as they are beside `param_dtype`, one or several of:
            the name of a parameter, or of a module for all below it; the name of a module's class
            or of a base of it; a pattern of such names, as "*.router.*"; a class of modules.
            "autocast": what computes under `torch.autocast` needs so, see keep_float32.py; a mixed
            precision of the Trainer adds this. BatchNorm and its like always stay.
        activation_checkpointing: Modules that keep their inputs only, and run again in backward:
            less memory for about a third more computation. True: repeated blocks, see units.py; or
            as `unit_classes`. Values and random numbers are the same.
        broadcast_buffers: Rank 0's buffers (BatchNorm statistics) are copied to all ranks at the
            first forward after a step, as DistributedDataParallel does.
        assume_elementwise: Promise that optimizers treat every element by itself, instead of a
            trial on toy tensors, which finds out whether they do or need whole tensors. For an
            optimizer that draws random numbers, say; a wrong promise trains wrongly.
        offload_optimizer: Stages 1 to 3: where optimizer shards rest, with the gradients that step
            them: None (the device), "cpu", "nvme", "auto", a mapping or an OffloadConfig. They are
            stepped on the CPU then.
        offload_param: Stage 3: where parameter shards rest; likewise.
        overlap_step: Step bucket by bucket beside the next forward, which waits for each bucket
            where it needs it. The same values as without. A look at `optimizer.state` waits.
        sharding_group_size: Stages 1 to 3: how many consecutive ranks share one set of shards,
            which every such group repeats. It divides the number of ranks. "node": as many as the
            launcher starts on a node, so that only shards of gradients cross the links between
            nodes. None: all ranks.

    Raises:
        ValueError: A value out of range, or an option that has no meaning in this stage.
        TypeError: A value of the wrong type.
    """

    stage: int = 3
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    prefetch_bucket_size: int | None = None
    param_persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    unit_classes: Modules | None = None
    reshard_after_forward: bool | None = None
    overlap_comm: bool = True
    reduce_dtype: torch.dtype | str | None = None
    param_dtype: torch.dtype | str | None = None
    keep_float32: Modules | None = None
    activation_checkpointing: bool | Modules = False
    broadcast_buffers: bool = True
    assume_elementwise: bool = False
    offload_optimizer: OffloadConfig | str | Mapping[str, Any] | None = None
    offload_param: OffloadConfig | str | Mapping[str, Any] | None = None
    overlap_step: bool = False
    sharding_group_size: int | str | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or _UNSET[name] is not None:  # what is None unless set may be
                object.__setattr__(self, name, check(name, value))
        for name, need in NEEDS.items():
            if getattr(self, name) != _UNSET[name] and not need.is_met_by(self.states):
                raise ValueError(
                    f"{name} needs {need.stages}, got stage {self.stage}, {need.otherwise}; use "
                    f"{need.remedy}, or leave {name} out."
                )

    def group_size(self, *, local_world_size: int) -> int | None:
        """Ranks that share one set of shards, where so many are on this node; None: all."""
        size = self.sharding_group_size
        return local_world_size if isinstance(size, str) else size

    # What has been checked, by its type.

    @property
    def offloads(self) -> tuple[OffloadConfig | None, OffloadConfig | None]:
        """Where parameter and optimizer shards rest."""
        both = self.offload_param, self.offload_optimizer
        return cast("tuple[OffloadConfig | None, OffloadConfig | None]", both)

    @property
    def keep_float32_items(self) -> _Kinds:
        """What keeps its dtype beside `param_dtype`."""
        return cast("_Kinds", self.keep_float32 or ())

    @property
    def unit_kinds(self) -> _Kinds:
        """What is a unit; empty: to be found."""
        return cast("_Kinds", self.unit_classes or ())

    @property
    def checkpointed_modules(self) -> bool | _Kinds:
        """What runs again in backward; True: to be found."""
        return cast("bool | _Kinds", self.activation_checkpointing)

    def under_autocast(self) -> ZeroConfig:
        """The same where the module computes under `torch.autocast`."""
        return self.replace(keep_float32=tuple(dict.fromkeys((AUTOCAST, *self.keep_float32_items))))

    @property
    def states(self) -> Stage:
        """Which states rest as shards."""
        return STAGES[self.stage]

    def replace(self, **changes: Any) -> ZeroConfig:
        """A copy with `changes`, checked again."""
        return dataclasses.replace(self, **changes)

    def for_stage(self, stage: int) -> ZeroConfig:
        """The same in another stage, without options that have no meaning there."""
        lost = [name for name, need in NEEDS.items() if not need.is_met_by(STAGES[stage])]
        return self.replace(stage=stage, **{name: _UNSET[name] for name in lost})


_UNSET = {one.name: one.default for one in dataclasses.fields(ZeroConfig)}


def _check_stage(_: str, stage: object) -> int:
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(
            f"stage must be one of 0, 1, 2, 3, got {stage!r} ({type(stage).__name__}); "
            'ZeroStrategy also takes "auto".'
        )
    if stage not in STAGES:
        raise ValueError(f"stage must be one of 0, 1, 2, 3, got {stage!r}.")
    return stage


def _check_size(name: str, value: object) -> int:
    return as_integer(name, value, least=0 if name in MAY_BE_ZERO else 1)


def _check_group_size(_: str, value: object) -> int | str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value == "node":
        return "node"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f'sharding_group_size must be a number of ranks, "node" or None, got {value!r}.'
        )
    if value < 1:
        raise ValueError(f"sharding_group_size must be at least 1 rank, got {value}.")
    return value


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def _check_dtype(name: str, value: object) -> torch.dtype:
    dtype = _FLOATING.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in _FLOATING.values():
        names = "float16, bfloat16, float32, float64"
        raise ValueError(f"{name} must be one of {names} or a torch dtype of these, got {value!r}.")
    return dtype


def _check_modules(name: str, value: object) -> _Kinds:
    if isinstance(value, Set):
        value = sorted(value, key=str)  # the same on every rank
    items = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for item in items:
        is_class = isinstance(item, type) and issubclass(item, nn.Module)
        if not (is_class or (isinstance(item, str) and item)):
            raise TypeError(f"{name} must be {_MODULES[name]}, or a list of these, got {item!r}.")
    return items


def _check_again(name: str, value: object) -> bool | _Kinds:
    if value is None or isinstance(value, bool):
        return bool(value)
    return _check_modules(name, value) or False


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "stage": _check_stage,
    **dict.fromkeys(SIZES, _check_size),
    "overlap_comm": _check_bool,
    "broadcast_buffers": _check_bool,
    "assume_elementwise": _check_bool,
    "overlap_step": _check_bool,
    "reshard_after_forward": _check_bool,
    "reduce_dtype": _check_dtype,
    "param_dtype": _check_dtype,
    "keep_float32": _check_modules,
    "unit_classes": _check_modules,
    "activation_checkpointing": _check_again,
    "offload_optimizer": OffloadConfig.of,
    "offload_param": OffloadConfig.of,
    "sharding_group_size": _check_group_size,
}
