"""`ZeroConfig`: settings of the engine, checked once, before any process group exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from lightning_zero.layout.foreign_options import explain_unknown_options
from lightning_zero.layout.keep_float32 import AUTOCAST
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.sizes import as_integer
from lightning_zero.layout.stage import STAGES, Stage, State

__all__ = [
    "MAY_BE_ZERO",
    "NEEDS",
    "SELECTIVE",
    "SIZES",
    "Modules",
    "Need",
    "ZeroConfig",
    "as_modules",
    "as_timeout",
]

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
)
_Item = str | type[nn.Module]  # a name, a pattern or a class
_Items = tuple[_Item, ...]
Modules = _Item | Sequence[_Item] | Set[_Item]
_MODULES = {
    "keep_float32": "names or patterns of parameters or modules, classes of modules",
    "unit_classes": "classes of modules, class names, or names or patterns of modules",
    "activation_checkpointing": 'True, False, "selective", classes of modules, class names, or '
    "names or patterns of modules",
}
SELECTIVE = "selective"  # an item of `activation_checkpointing`
MAY_BE_ZERO = ("prefetch_bucket_size", "param_persistence_threshold")
ON_NONFINITE = ("warn", "stop", "skip", None)


class Need(NamedTuple):
    """Stages in which an option applies, and the text of its error in the others."""

    is_met_by: Callable[[Stage], bool]
    stages: str  # in which it applies
    otherwise: str  # why it does not apply in the others
    remedy: str


NEEDS = {
    **dict.fromkeys(
        (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "unit_classes",
            "reshard_after_forward",
            "offload_param",
        ),
        Need(
            lambda stage: stage.shards_params,
            "stage 3",
            "where parameters are replicated",
            "stage=3",
        ),
    ),
    "allgather_bucket_size": Need(
        lambda stage: stage.all_gathers_after_step,
        "stage 1 or 2",
        "which runs no all-gather after the step",
        "stage=1 or stage=2",
    ),
    **dict.fromkeys(
        (
            "offload_optimizer",
            "overlap_step",
            "sharding_group_size",
        ),
        Need(
            lambda stage: stage.has_shard(State.OPTIM),
            "stage 1, 2 or 3",
            "where every rank stores and steps all optimizer states on its device",
            "stage=1",
        ),
    ),
}


@explain_unknown_options
@dataclass(frozen=True)
class ZeroConfig:
    """Settings of the engine, for all optimizers and parameters of a module.

    Sizes are in elements, as in DeepSpeed. A size is an int, a float such as 5e8, or text such as
    "64M" (64 * 10^6) or "64Mi" (64 * 2^20). None means that the engine chooses.

    Attributes:
        stage: int, default 3. ZeRO stage: 0 replicates all model states (plain data parallelism), 1
            shards optimizer states, 2 also gradients, 3 also parameters.
        reduce_bucket_size: int (elements), default None. Largest number of gradient elements in one
            reduction; small parameters may add a sixteenth of it. None: 4 Mi, or 256 Ki for each
            rank if that is more. All stages; in stage 3 a repeated block is one bucket of any size.
        allgather_bucket_size: int (elements), default None. Largest number of parameter elements in
            one all-gather after the step. Reductions and all-gathers share their buckets, so the
            smaller of this and `reduce_bucket_size` applies. None: no limit of its own. Stages 1
            and 2.
        prefetch_bucket_size: int (elements), default None. Number of parameter elements to unshard
            before their use. None: one unit; 0: no prefetch. Stage 3.
        param_persistence_threshold: int (elements), default None. Parameters with fewer elements
            stay replicated; their gradients and optimizer states are sharded. None: 2^16 for those
            that keep float32 beside 16-bit ones, and 0 for all others, because a small parameter is
            in the bucket of its unit and needs no collective of its own. Stage 3.
        unit_classes: Class, str, or list of these, default None. Modules that are unsharded and
            resharded one by one, such as transformer blocks: a class, its name, the name of a
            module, or a pattern of names. None: repeated blocks in a ModuleList, ModuleDict or
            Sequential. Other large modules are units, too; all remaining parameters stay unsharded
            throughout a step. Stage 3.
        reshard_after_forward: bool, default None. Free the unsharded parameters of a unit after its
            forward, and all-gather them again for its backward. None: True. False needs more memory
            and a third less communication. Stage 3.
        overlap_comm: bool, default True. Communicate while computing. False: wait for every
            collective where it is issued. All stages.
        reduce_dtype: torch.dtype or its name, default None. Dtype in which gradients are reduced
            and stored. None: float32, or the parameters' dtype if that is wider. All stages.
        param_dtype: torch.dtype or its name, default None. Dtype of unsharded parameters, in which
            the module computes. None: the dtypes of the module. For a dtype narrower than float32
            the optimizer steps float32 main parameters. All stages.
        keep_float32: Class, str, or list of these, default None. Parameters that keep their dtype
            instead of `param_dtype`: the name of a parameter, or of a module for all parameters
            below it; the name of a class or base class of modules; a pattern of names, such as
            "*.router.*"; a class. "autocast" selects the parameters that `torch.autocast` does not
            cast; a mixed precision of the Trainer adds it. BatchNorm and other modules with running
            statistics always keep their dtype. All stages.
        activation_checkpointing: bool, class, str, or list of these, default False. Modules that
            save only their inputs and run again in backward, for less memory and about a third more
            computation. True: repeated blocks; or modules as in `unit_classes`. "selective" saves
            the outputs of attention and of every second matrix product, too, for less computation;
            alone, or in a list with modules. Values and random numbers do not change. All stages.
        broadcast_buffers: bool, default True. Copy rank 0's buffers, such as BatchNorm statistics,
            to all ranks at the first forward after a step, as DistributedDataParallel does. All
            stages.
        assume_elementwise: bool or list of class names, default False. Promise that all optimizers,
            or those of these classes, treat each element by itself. Others do if their class is
            known to, and step full tensors if not. With True, no optimizer is probed, and each
            steps all its parameters in one call. If the promise is wrong, training is wrong. Stages
            1 to 3.
        offload_optimizer: str, mapping or OffloadConfig, default None. Tier of optimizer shards and
            of the gradients that step them: "cpu", "nvme", "auto", or an `OffloadConfig`. The CPU
            then steps them. None: the device. Stages 1 to 3.
        offload_param: str, mapping or OffloadConfig, default None. Tier of parameter shards, as in
            `offload_optimizer`. None: the device. Stage 3.
        overlap_step: bool, default False. Step bucket by bucket during the next forward, which
            waits for each bucket where it needs it. The values do not change. Reading
            `optimizer.state` waits for the step. Without effect on optimizers that can only step
            all parameters in one call and, in stage 3, on those that step full tensors. Stages 1
            to 3.
        sharding_group_size: int (ranks) or "node", default None. Number of consecutive ranks that
            form a shard group; each group holds all shards. It must divide the number of
            ranks. "node": the ranks that the launcher starts on a node, so that only gradient
            shards cross the links between nodes. None: all ranks. Stages 1 to 3.
        on_nonfinite: "warn", "stop", "skip" or None, default "warn". Reaction to a NaN or an
            infinity in a gradient: its rank, parameter and micro-batch are named, and the step is
            taken with a warning on rank 0 ("warn"), not taken with an error on all ranks ("stop"),
            or left out ("skip"; after 10 in a row of one optimizer, one more is an error). None:
            gradients are not looked at. All stages.

    Raises:
        ValueError: A value is out of range, or an option does not apply in this stage.
        TypeError: A value has the wrong type.
    """

    stage: int = 3
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    prefetch_bucket_size: int | None = None
    param_persistence_threshold: int | None = None
    unit_classes: Modules | None = None
    reshard_after_forward: bool | None = None
    overlap_comm: bool = True
    reduce_dtype: torch.dtype | str | None = None
    param_dtype: torch.dtype | str | None = None
    keep_float32: Modules | None = None
    activation_checkpointing: bool | Modules = False
    broadcast_buffers: bool = True
    assume_elementwise: bool | Sequence[str] = False
    offload_optimizer: OffloadConfig | str | Mapping[str, Any] | None = None
    offload_param: OffloadConfig | str | Mapping[str, Any] | None = None
    overlap_step: bool = False
    sharding_group_size: int | str | None = None
    on_nonfinite: str | None = "warn"

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            # None needs no check where it is the default.
            if value is not None or _DEFAULTS[name] is not None:
                object.__setattr__(self, name, check(name, value))
        for name, need in NEEDS.items():
            if getattr(self, name) != _DEFAULTS[name] and not need.is_met_by(self.states):
                raise ValueError(
                    f"{name} needs {need.stages}, got stage {self.stage}, {need.otherwise}; use "
                    f"{need.remedy}, or leave {name} out."
                )

    def group_size(self, *, local_world_size: int) -> int | None:
        """Ranks of a shard group; None: all ranks.

        `local_world_size`: number of ranks on this node.
        """
        size = self.sharding_group_size
        return local_world_size if isinstance(size, str) else size

    # The same values with the types that the checks guarantee.

    @property
    def offloads(self) -> tuple[OffloadConfig | None, OffloadConfig | None]:
        """Offload of parameter shards, and of optimizer shards."""
        both = self.offload_param, self.offload_optimizer
        return cast("tuple[OffloadConfig | None, OffloadConfig | None]", both)

    @property
    def keep_float32_items(self) -> _Items:
        """Items of `keep_float32`."""
        return cast("_Items", self.keep_float32 or ())

    @property
    def unit_kinds(self) -> _Items:
        """Items of `unit_classes`; empty: repeated blocks."""
        return cast("_Items", self.unit_classes or ())

    @property
    def checkpointed_modules(self) -> bool | _Items:
        """Items of `activation_checkpointing`; True: repeated blocks."""
        items = cast("bool | _Items", self.activation_checkpointing)
        if isinstance(items, bool):
            return items
        return tuple(item for item in items if item != SELECTIVE) or True

    @property
    def saves_matmuls(self) -> bool:
        """Whether modules that run again save the outputs of some operations."""
        items = cast("bool | _Items", self.activation_checkpointing)
        return not isinstance(items, bool) and SELECTIVE in items

    def under_autocast(self) -> ZeroConfig:
        """A copy for a module that computes under `torch.autocast`."""
        return self.replace(keep_float32=tuple(dict.fromkeys((AUTOCAST, *self.keep_float32_items))))

    @property
    def separates_gathers(self) -> bool:
        """Whether all-gathers need a process group of their own, on backends other than gloo.

        In stages 1 and 2, a thread that steps buckets also all-gathers them, in no fixed order with
        other collectives.
        """
        return self.overlap_step and self.states.all_gathers_after_step

    @property
    def states(self) -> Stage:
        """The states that are sharded."""
        return STAGES[self.stage]

    def replace(self, **changes: Any) -> ZeroConfig:
        """A copy with `changes`, checked again."""
        return dataclasses.replace(self, **changes)

    def for_stage(self, stage: int) -> ZeroConfig:
        """A copy for another stage, without the options that do not apply there."""
        unused = [name for name, need in NEEDS.items() if not need.is_met_by(STAGES[stage])]
        return self.replace(stage=stage, **{name: _DEFAULTS[name] for name in unused})


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ZeroConfig)}


def _check_stage(_: str, stage: object) -> int:
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(
            f"stage must be one of 0, 1, 2, 3, got {stage!r} ({type(stage).__name__}); "
            'ZeroStrategy also accepts "auto".'
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


def _check_reaction(_: str, value: object) -> str | None:
    if not (value is None or isinstance(value, str)) or value not in ON_NONFINITE:
        raise ValueError(f'on_nonfinite must be "warn", "stop", "skip" or None, got {value!r}.')
    return value


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def _check_assumed(name: str, value: object) -> bool | tuple[str, ...]:
    names = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if isinstance(value, bool):
        return value
    if not names or not all(isinstance(item, str) for item in names):
        raise TypeError(
            f'{name} must be True, False, or names of optimizer classes, ["MyAdam"], got {value!r}.'
        )
    return names


def _check_dtype(name: str, value: object) -> torch.dtype:
    dtype = _FLOATING.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in _FLOATING.values():
        names = "float16, bfloat16, float32, float64"
        raise ValueError(f"{name} must be one of {names}, or such a torch dtype, got {value!r}.")
    return dtype


def as_modules(name: str, value: object, expected: str = "") -> _Items:
    """Converts a user's selection of modules, of the setting `name`; a TypeError if it is none.

    `expected`: what the error asks for; empty: that of the option of `ZeroConfig`.
    """
    if isinstance(value, Set):
        value = sorted(value, key=str)  # the same on every rank
    items = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for item in items:
        is_class = isinstance(item, type) and issubclass(item, nn.Module)
        if not (is_class or (isinstance(item, str) and item)):
            expected = expected or _MODULES[name]
            raise TypeError(f"{name} must be {expected}, or a list of these, got {item!r}.")
    return items


def _check_checkpointing(name: str, value: object) -> bool | _Items:
    if value is None or isinstance(value, bool):
        return bool(value)
    return as_modules(name, value) or False


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "stage": _check_stage,
    **dict.fromkeys(SIZES, _check_size),
    "overlap_comm": _check_bool,
    "broadcast_buffers": _check_bool,
    "assume_elementwise": _check_assumed,
    "overlap_step": _check_bool,
    "reshard_after_forward": _check_bool,
    "reduce_dtype": _check_dtype,
    "param_dtype": _check_dtype,
    "keep_float32": as_modules,
    "unit_classes": as_modules,
    "activation_checkpointing": _check_checkpointing,
    "offload_optimizer": OffloadConfig.of,
    "offload_param": OffloadConfig.of,
    "sharding_group_size": _check_group_size,
    "on_nonfinite": _check_reaction,
}


def as_timeout(value: object) -> timedelta | None:
    """Converts a user's timeout of collectives; None: the backend's.

    Raises:
        TypeError: It is neither a timedelta nor a number of seconds.
        ValueError: It is not positive and finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (timedelta, int, float)):
        raise TypeError(
            "timeout must be a datetime.timedelta or a number of seconds, got "
            f"{value!r}; one hour is timeout=timedelta(hours=1) or timeout=3600."
        )
    try:
        timeout = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (ValueError, OverflowError):  # NaN and infinity
        timeout = timedelta(0)
    if timeout <= timedelta(0):
        raise ValueError(
            f"timeout must be more than 0 seconds, and finite, got {value!r}; one day is "
            "timeout=timedelta(days=1)."
        )
    return timeout
