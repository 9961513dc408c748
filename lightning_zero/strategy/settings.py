"""The engine's settings, the choice of `stage="auto"`, and the memory check before a run.

The bytes of model states are compared with this machine's memory.

[Note: Same choice on all ranks] Ranks gather their memory and use the least of any rank, so that
all make the same choice, and all of them raise or none does.

[Note: Memory check] A run is refused only if model states alone exceed the total memory, used or
free. Activations, buffers and other programs are not counted, nor optimizer states that a probe
does not show, nor the memory of CUDA and NCCL, which depends on the links between devices.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_zero._lightning.pytorch import Trainer, TrainerFn
from lightning_zero.engine.consistency import describe_config
from lightning_zero.engine.expected import MemoryByRank, expected_bytes
from lightning_zero.health.together import Gather, failing_together
from lightning_zero.health.world import known_backends
from lightning_zero.layout.config import NEEDS, ZeroConfig
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import OffloadConfig, Tier
from lightning_zero.layout.plan import BucketPlan, Plan
from lightning_zero.layout.stage import State
from lightning_zero.optim.probe import find_full_optimizers
from lightning_zero.optim.state_sizes import StateSpec
from lightning_zero.planner.choices import (
    AUTO_STAGES,
    Choice,
    all_choices,
    as_arguments,
    auto_base,
    plan_of,
)
from lightning_zero.strategy.precision import ZeroPrecision
from lightning_zero.tiers.disk import free_bytes
from lightning_zero.tiers.memory import available_memory_bytes

__all__ = [
    "AutoChoice",
    "Hardware",
    "AvailableMemory",
    "Settings",
    "check_backend",
    "choose",
    "check_memory_fits",
    "check_memory_together",
]

_AUTO = "auto"
# Offloads by name; those of `all_choices`, fastest first.
_BY_SPEED = ("none", "cpu_optimizer", "cpu", "nvme_optimizer", "nvme", "nvme with gradients")
_SHARE = 0.7  # of the free memory; the rest is for activations, which are not known in advance
_GIB = 1024**3
# Adam's states, for an optimizer whose states a probe does not show.
_TWO_MOMENTS = StateSpec({"exp_avg": 4, "exp_avg_sq": 4})


@dataclass(frozen=True)
class Hardware:
    """Hardware of a run: this rank's device, and the number of ranks in all and on this node."""

    device: torch.device
    num_ranks: int
    ranks_per_node: int

    @property
    def has_device_memory(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device.type != "cpu"


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes of memory: the least of any rank."""

    device_free: int  # on the CPU, this rank's share of what is available
    device_total: int  # on the CPU, as `host_total`
    host_free: int  # of a machine
    host_total: int  # of a machine, with its swap space
    disk_free: int  # of a machine's folder for files; 0 if none is set


@dataclass(frozen=True)
class AutoChoice:
    """The choice of `stage="auto"`, and its reason in a sentence."""

    config: ZeroConfig
    reason: str

    def as_hyperparameters(self) -> dict[str, Any]:
        """The choice as hyperparameters for loggers."""
        param, optimizer = self.config.offloads
        return {
            "zero_stage": self.config.stage,
            "zero_offload_optimizer": None if optimizer is None else optimizer.device,
            "zero_offload_param": None if param is None else param.device,
        }


class Settings:
    """User settings and the configuration resolved from them.

    Args:
        stage: Stage, or "auto".
        options: Other options of `ZeroConfig`.
        **compared: Options of the strategy alone that must be equal on all ranks.

    Attributes:
        config: Configuration to train with. With stage "auto", a placeholder until `decide`.
        choice: Choice of stage "auto". None with another stage, and before `decide`.
    """

    def __init__(self, stage: Any, options: Mapping[str, Any], **compared: object) -> None:
        self._is_auto = stage == _AUTO
        self._given = auto_base(options) if self._is_auto else ZeroConfig(stage, **options)
        self._others = {name: str(value) for name, value in compared.items()}
        self.config = self._given
        self.choice: AutoChoice | None = None

    def check_folders(self) -> None:
        """Raises a ValueError if `nvme_path` is not a folder of this machine."""
        for offload in self._given.offloads:
            path = None if offload is None else offload.nvme_path
            if path is not None and not Path(path).is_dir():
                raise ValueError(
                    f"nvme_path must be an existing folder, got {path!r}; create it on every "
                    "machine, or leave it out for a temporary folder."
                )

    def describe(self) -> dict[str, str]:
        """Describes the given settings, for the consistency check."""
        stage = {"stage": _AUTO} if self._is_auto else {}
        return describe_config(self._given) | stage | self._others

    def decide(
        self,
        trainer: Trainer,
        optimizers: Sequence[Optimizer],
        hardware: Hardware,
        precision: ZeroPrecision | None,
        gather: Gather,
    ) -> ZeroConfig:
        """Resolves the settings of one run completely. Collective."""
        config = self.resolve(
            hardware,
            precision.param_dtype if precision else None,
            is_autocast=precision is not None and precision.is_autocast,
        )
        if config.assume_elementwise and not config.states.has_shard(State.OPTIM):
            rank_zero_warn(
                f"assume_elementwise has no effect in stage {config.stage}: optimizers step full "
                "tensors."
            )
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if not (self._is_auto or is_fitting):
            return config
        memory = _measure_memory(hardware, config, gather)
        if self._is_auto:
            micro_batches = trainer.accumulate_grad_batches
            choice = choose(
                trainer.lightning_module, optimizers, config, memory, hardware, micro_batches
            )
            rank_zero_info(f'stage="auto": {choice.reason}')
            for logger in trainer.loggers if is_fitting else ():
                logger.log_hyperparams(choice.as_hyperparameters())
            self.choice, config = choice, choice.config
            self.config = config
        if is_fitting:
            with failing_together("start", gather=gather):  # models are not compared yet
                check_memory_fits(trainer.lightning_module, optimizers, config, memory, hardware)
        return config

    def resolve(
        self, hardware: Hardware, param_dtype: torch.dtype | None, *, is_autocast: bool
    ) -> ZeroConfig:
        """The given settings on this hardware, in a precision that computes in `param_dtype`."""
        config = self._given.replace(
            sharding_group_size=self._given.group_size(local_world_size=hardware.ranks_per_node),
            param_dtype=self._param_dtype(param_dtype),
        )
        return config.under_autocast() if is_autocast else config

    def _param_dtype(self, param_dtype: torch.dtype | None) -> torch.dtype | None:
        chosen = self._given.param_dtype or param_dtype
        assert not isinstance(chosen, str)
        if self._given.keep_float32_items and (
            chosen is None or chosen.itemsize >= torch.float32.itemsize
        ):
            rank_zero_warn(
                "keep_float32 has no effect: with precision='32-true' or 'bf16-true', or with "
                "param_dtype='float32', no parameter is cast."
            )
        return chosen


def check_backend(value: object) -> None:
    """Checks that torch knows a user's backend, such as "cpu:gloo,cuda:nccl".

    Raises:
        TypeError: It is not a string.
        ValueError: Torch does not know it.
    """
    if value is None or not (known := known_backends()):
        return
    if not isinstance(value, str):
        raise TypeError(
            f"process_group_backend must be a name such as 'gloo' or 'nccl', got {value!r}."
        )
    for part in value.split(","):
        name = part.rpartition(":")[2].strip().lower()
        if name not in known:
            raise ValueError(
                f"process_group_backend must be one of {', '.join(known)}, or such as "
                f"'cpu:gloo,cuda:nccl', got {value!r}; leave it out for nccl on CUDA and gloo on "
                "the CPU. A backend of another package must be registered first: import it."
            )


def _measure_memory(hardware: Hardware, base: ZeroConfig, gather: Gather) -> AvailableMemory:
    """Measures the least memory of any rank. Collective. See [Note: Same choice on all ranks]."""
    host_free, host_total = available_memory_bytes(), _physical_bytes()
    if hardware.device.type == "cuda":
        device_free, device_total = torch.cuda.mem_get_info(hardware.device)
    else:
        device_free, device_total = host_free // hardware.ranks_per_node, host_total
    folder = _named_folder(base)
    disk_free = 0
    if folder is not None:
        with suppress(OSError):  # this rank must reach the collective below
            disk_free = free_bytes(folder)
    own = [device_free, device_total, host_free, host_total, disk_free]
    return AvailableMemory(*(min(values) for values in zip(*gather(own), strict=True)))


def _physical_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total += sum(int(x.split()[1]) * 1024 for x in lines if x.startswith("SwapTotal"))
    except OSError:
        pass  # not Linux
    return total


def _named_folder(base: ZeroConfig) -> Path | None:
    """Folder for files if the user has set one: a temporary folder may be in memory."""
    for config in base.offloads:
        if config is not None and config.nvme_path is not None:
            return _existing(Path(config.nvme_path))
    default = OffloadConfig("nvme")
    return _existing(Path(default.folder)) if default.has_named_folder else None


def _existing(path: Path) -> Path:
    """Returns `path`, or its closest parent that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


# -------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class _Option:
    """A choice with the bytes of its model states, computed from the plan of its engine.

    The planner's runs of the engine need a copy of the module, and no process group.

    Attributes:
        choice: Stage and offload.
        ranks: Model states at a step, on every rank.
        used_bytes: Upper bound of unsharded parameters and gradients on the device in a step.
        hardware: Hardware of the run.
    """

    choice: Choice
    ranks: MemoryByRank
    used_bytes: int
    hardware: Hardware

    @property
    def device_bytes(self) -> int:
        """Bytes on one device; on the CPU, of all memory of one rank."""
        nbytes = self.ranks.most_bytes(Tier.DEVICE) + self.used_bytes
        if self.hardware.has_device_memory:
            return nbytes
        return nbytes + self.ranks.most_bytes(Tier.CPU) + self._buffer_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in the CPU memory of a machine."""
        per_node = self.hardware.ranks_per_node
        return self.ranks.node_bytes(Tier.CPU, per_node) + per_node * self._buffer_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of files of a machine."""
        return self.ranks.node_bytes(Tier.NVME, self.hardware.ranks_per_node)

    @property
    def _buffer_bytes(self) -> int:
        offloads = [o for o in self.choice.config.offloads if o is not None and o.device != "cpu"]
        return sum(offload.total_buffer_bytes for offload in offloads)

    def lacks(self, memory: AvailableMemory, *, has_folder: bool) -> dict[str, int]:
        """Missing bytes by name of the memory that is too small for states and activations."""
        limits = [("device memory", self.device_bytes, int(_SHARE * memory.device_free))]
        if self.hardware.has_device_memory:
            limits.append(("host memory", self.host_bytes, int(_SHARE * memory.host_free)))
        if memory.disk_free or not has_folder:
            limits.append(("disk", self.disk_bytes, memory.disk_free))
        return {name: needed - limit for name, needed, limit in limits if needed > limit}


def _option(
    choice: Choice,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    hardware: Hardware,
    *,
    full_optimizers: Collection[int],
    fallback: StateSpec,
    accumulates: bool = False,
) -> _Option:
    config = choice.config
    size = config.group_size(local_world_size=hardware.ranks_per_node) or hardware.num_ranks
    plan = plan_of(config, module, optimizers, size, full_optimizers)
    ranks = expected_bytes(
        plan,
        parameters_by_name(module),
        optimizers,
        has_device_memory=hardware.has_device_memory,
        accumulates=accumulates,
        fallback=fallback,
    )
    return _Option(choice, ranks, _used_bytes(plan, config), hardware)


def _used_bytes(plan: Plan, config: ZeroConfig) -> int:
    """Upper bound of the bytes that are unsharded at once.

    Parameters of the root and the two largest units, or of all units if these stay unsharded, and
    gradients of the two largest buckets.
    """

    def nbytes(buckets: Iterable[BucketPlan]) -> int:
        return sum(bucket.layout.numel * bucket.dtype.itemsize for bucket in buckets)

    root, *units = (
        nbytes(bucket for bucket in unit.buckets if bucket.stage.shards_params)
        for unit in plan.units
    )
    grads = (
        nbytes([bucket])
        for bucket in plan.buckets
        if bucket.is_trainable and bucket.stage.has_shard(State.GRAD)
    )
    count = 2 if config.reshard_after_forward is not False else len(units)
    return root + sum(sorted(units, reverse=True)[:count]) + sum(sorted(grads)[-2:])


def _slowness(option: _Option, *, accumulates: bool) -> tuple[int, bool, bool]:
    """Sort key: less of a step waits for CPU memory and files first, then fewer bytes are sent.

    Stages 1 and 2 send the same in one micro-batch, and stage 2 needs less memory.
    """
    states = option.choice.config.states
    offload = _BY_SPEED.index(option.choice.offload) if option.choice.offload in _BY_SPEED else 0
    return offload, states.shards_params, states.reduces_every_backward is accumulates


def choose(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    base: ZeroConfig,
    memory: AvailableMemory,
    hardware: Hardware,
    num_micro_batches: int = 1,
) -> AutoChoice:
    """Chooses the fastest stage and offload that fit. Local; the same where `memory` is.

    If `base` has offloads, these are kept and only the stage is chosen.
    """
    full_optimizers = find_full_optimizers(optimizers, base)
    accumulates = num_micro_batches > 1
    options = [
        _option(
            choice,
            module,
            optimizers,
            hardware,
            full_optimizers=full_optimizers,
            fallback=_TWO_MOMENTS,
            accumulates=accumulates,
        )
        for choice in _candidates(base, hardware.has_device_memory)
    ]
    options.sort(key=partial(_slowness, accumulates=accumulates))
    lacking = [option.lacks(memory, has_folder=any(base.offloads)) for option in options]
    chosen = next((index for index, lacks in enumerate(lacking) if not lacks), None)
    faster = options[:chosen] if chosen is not None else []
    best = options[chosen] if chosen is not None else min(options, key=lambda o: o.device_bytes)
    offload = best.choice.offload.replace("none", "without offload")
    text = (
        f"stage {best.choice.config.stage}, {offload}: {_gib(best.device_bytes)} of the "
        f"{_gib(memory.device_free)} that are free on each of {hardware.num_ranks} devices, before "
        "activations"
    )
    if chosen is None:
        text += "; no choice leaves memory for activations, and this one takes the least"
    elif faster:
        index = min(range(chosen), key=lambda i: faster[i].device_bytes)
        missing = ", ".join(f"{_gib(n)} of {name}" for name, n in lacking[index].items())
        text += f"; {faster[index].choice.name} would be faster but lacks {missing}"
    else:
        text += "; nothing that fits sends fewer bytes"
    return AutoChoice(best.choice.config, text)


def _candidates(base: ZeroConfig, has_device_memory: bool) -> list[Choice]:
    found = all_choices(base, stages=AUTO_STAGES)
    if not any(base.offloads):
        # On the CPU both tiers are the same memory.
        return [c for c in found if has_device_memory or not c.offload.startswith("cpu")]
    kept = {"offload_param": base.offload_param, "offload_optimizer": base.offload_optimizer}
    kept = {name: offload for name, offload in kept.items() if offload is not None}
    return [
        Choice(c.zero, "as set", c.config.replace(**kept))
        for c in found
        if c.offload == "none" and all(NEEDS[name].is_met_by(c.config.states) for name in kept)
    ]


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"


# -------------------------------------------------------------------- the memory check


def check_memory_together(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    config: ZeroConfig,
    hardware: Hardware,
    gather: Gather,
) -> None:
    """Raises on every rank if model states do not fit on one. Collective."""
    memory = _measure_memory(hardware, config, gather)
    with failing_together("start", gather=gather):  # models are not compared yet
        check_memory_fits(module, optimizers, config, memory, hardware)


def check_memory_fits(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    config: ZeroConfig,
    memory: AvailableMemory,
    hardware: Hardware,
) -> None:
    """Raises a ValueError if model states alone exceed the memory. See [Note: Memory check].

    The error lists the three fastest changes that fit.
    """
    if any(offload is not None and offload.device == _AUTO for offload in config.offloads):
        return  # offload "auto" adapts to the memory

    def option(choice: Choice, full_optimizers: Collection[int]) -> _Option:
        return _option(
            choice,
            module,
            optimizers,
            hardware,
            full_optimizers=full_optimizers,
            fallback=StateSpec(),
        )

    given = Choice("", "", config)
    # Optimizers are probed, which takes time, only if the answer may depend on it.
    every = range(len(optimizers))
    if not any(_missing(option(given, full), memory) for full in (every, ())):
        return
    full = find_full_optimizers(optimizers, config)
    missing = _missing(option(given, full), memory)
    if not missing:
        return
    changes = [option(choice, full) for choice in all_choices(config, stages=AUTO_STAGES)]
    # Files are suggested only if a folder is set and has enough free space.
    possible = [o for o in changes if not _missing(o, memory) and o.disk_bytes <= memory.disk_free]
    possible.sort(key=partial(_slowness, accumulates=False))
    lines = [f"\n    {as_arguments(o.choice.config)}: {_needs(o)}" for o in possible[:3]]
    advice = "".join(lines) or "\n    more ranks, or a smaller model"
    raise ValueError(
        f"model states do not fit: {missing}. Changes that would fit, fastest first:{advice}"
    )


def _missing(option: _Option, memory: AvailableMemory) -> str:
    """Describes the memory that is too small for states alone; empty if they may fit."""
    per_node = option.hardware.ranks_per_node
    device = option.ranks.most_bytes(Tier.DEVICE)
    host = option.ranks.node_bytes(Tier.CPU, per_node)
    if not option.hardware.has_device_memory:
        device, host = 0, host + option.ranks.node_bytes(Tier.DEVICE, per_node)
    if device > memory.device_total:
        return f"{_gib(device)} on each device, which has {_gib(memory.device_total)}"
    if host > memory.host_total:
        ranks = f"{per_node} rank(s) of a machine"
        return f"{_gib(host)} in the memory of {ranks}, which has {_gib(memory.host_total)}"
    return ""  # disks are checked when files are created, after files of dead jobs are deleted


def _needs(option: _Option) -> str:
    parts = {
        "on each device": option.ranks.most_bytes(Tier.DEVICE),
        "of CPU memory for each rank": option.ranks.most_bytes(Tier.CPU),
        "of files for each rank": option.ranks.most_bytes(Tier.NVME),
    }
    return ", ".join(f"{_gib(nbytes)} {where}" for where, nbytes in parts.items() if nbytes)
