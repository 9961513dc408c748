"""The engine's settings: as given, or chosen for the run where `stage="auto"`; and a look ahead.

The planner's numbers are compared with this machine's memory.

[Note: Every rank alike] Ranks compare what they have and go on with the least of it, so that each
comes to the same choice, and all of them raise or none does.

[Note: Certain] A run is refused only where model states alone are more than the memory there is,
all of it, whoever uses it now. Activations, buffers and what other programs hold are not counted,
nor states that the optimizer does not show on a toy. `check_memory=False` asks nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.world import failing_together, gather_objects
from lightning_zero.engine.consistency import describe_config
from lightning_zero.layout.config import NEEDS, ZeroConfig
from lightning_zero.layout.offload import OffloadConfig, Tier
from lightning_zero.optim.probe import find_full_optimizers
from lightning_zero.planner import Choice, Estimate, Job, Machine, all_choices, cheapest, estimate
from lightning_zero.planner.optimizers import StateSpec
from lightning_zero.strategy.precision import ZeroPrecision
from lightning_zero.tiers.disk import free_bytes
from lightning_zero.tiers.memory import available_memory_bytes

__all__ = [
    "AutoChoice",
    "Hardware",
    "AvailableMemory",
    "Settings",
    "as_arguments",
    "auto_base",
    "choose",
    "check_memory_fits",
]

_AUTO = "auto"
_OTHER_COMPARED = (
    "check_memory",
    "checkpoint",
    "async_save",
    "unshard_after_fit",
)  # not the engine's
_STAGES = (1, 2, 3)  # 0 is the control
_SHARE = 0.7  # of the free memory: activations, which nobody knows yet, take the rest
_GIB = 1024**3
# Adam's, where an optimizer does not show its own on a toy.
_TWO_MOMENTS = StateSpec({"exp_avg": 4, "exp_avg_sq": 4})


@dataclass(frozen=True)
class Hardware:
    """Where a run computes: the device of this rank, ranks of the world and of this machine."""

    device: torch.device
    num_ranks: int
    ranks_per_node: int

    @property
    def has_device_memory(self) -> bool:
        """The device has memory of its own."""
        return self.device.type != "cpu"


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes of memory, of the rank that has least."""

    device_free: int  # on the CPU, this rank's share of what is available
    device_total: int  # on the CPU, as `host_total`
    host_free: int  # of a machine
    host_total: int  # of a machine, with its swap space
    disk_free: int  # of a machine's folder for files; 0 where none is named


@dataclass(frozen=True)
class AutoChoice:
    """What `stage="auto"` has come to, and why, in a sentence."""

    config: ZeroConfig
    reason: str

    def as_hyperparameters(self) -> dict[str, Any]:
        """For loggers."""
        param, optimizer = self.config.offloads
        return {
            "zero_stage": self.config.stage,
            "zero_offload_optimizer": None if optimizer is None else optimizer.device,
            "zero_offload_param": None if param is None else param.device,
        }


class Settings:
    """What a strategy was told, and what has come of it.

    Args:
        given: Arguments of `ZeroStrategy`; `stage` may be "auto".

    Attributes:
        config: To train with; where the stage is "auto", a stand-in until `decide`.
        choice: What "auto" has come to; None else, and before.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._is_auto = given["stage"] == _AUTO
        own = {field.name: given[field.name] for field in fields(ZeroConfig)}
        stage = own.pop("stage")
        self._given = auto_base(own) if self._is_auto else ZeroConfig(stage, **own)
        self._checks_memory = given["check_memory"]
        if not isinstance(self._checks_memory, bool):
            raise TypeError(f"check_memory must be True or False, got {self._checks_memory!r}.")
        self._others = {name: str(given[name]) for name in _OTHER_COMPARED}
        self.config = self._given
        self.choice: AutoChoice | None = None

    def describe(self) -> dict[str, str]:
        """What was given, to be compared between ranks."""
        stage = {"stage": _AUTO} if self._is_auto else {}
        return describe_config(self._given) | stage | self._others

    def decide(
        self,
        trainer: Trainer,
        optimizers: Sequence[Optimizer],
        hardware: Hardware,
        precision: ZeroPrecision | None,
    ) -> ZeroConfig:
        """The settings of one run: nothing in them is left to be found out. Collective."""
        group_size = self._given.group_size(local_world_size=hardware.ranks_per_node)
        config = self._given.replace(
            sharding_group_size=group_size, param_dtype=self._param_dtype(precision)
        )
        if precision is not None and precision.is_autocast:
            config = config.under_autocast()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        is_checked = is_fitting and self._checks_memory
        if not (self._is_auto or is_checked):
            return config
        memory = _measure_memory(hardware, config)
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
        if is_checked:
            with failing_together("begin"):  # models are not compared yet
                check_memory_fits(trainer.lightning_module, optimizers, config, memory, hardware)
        return config

    def _param_dtype(self, precision: ZeroPrecision | None) -> torch.dtype | None:
        chosen = self._given.param_dtype or (precision.param_dtype if precision else None)
        assert not isinstance(chosen, str)
        if self._given.keep_float32_items and (
            chosen is None or chosen.itemsize >= torch.float32.itemsize
        ):
            rank_zero_warn(
                "keep_float32 has no effect: no parameter is cast, as precision='32-true' and "
                "'bf16-true', or param_dtype='float32', have it."
            )
        return chosen


def auto_base(settings: Mapping[str, Any]) -> ZeroConfig:
    """Checks settings that are given beside `stage="auto"`: some stage must have each of them."""
    failure: ValueError | None = None
    for stage in reversed(_STAGES):
        try:
            return ZeroConfig(stage=stage, **settings)
        except ValueError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _measure_memory(hardware: Hardware, base: ZeroConfig) -> AvailableMemory:
    """The least that any rank has. Collective. See [Note: Every rank alike]."""
    host_free, host_total = available_memory_bytes(), _physical_bytes()
    if hardware.device.type == "cuda":
        device_free, device_total = torch.cuda.mem_get_info(hardware.device)
    else:
        device_free, device_total = host_free // hardware.ranks_per_node, host_total
    folder = _named_folder(base)
    disk_free = 0
    if folder is not None:
        with suppress(OSError):  # it must not keep this rank from the others
            disk_free = free_bytes(folder)
    own = [device_free, device_total, host_free, host_total, disk_free]
    return AvailableMemory(*(min(values) for values in zip(*gather_objects(own), strict=True)))


def _physical_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total += sum(int(x.split()[1]) * 1024 for x in lines if x.startswith("SwapTotal"))
    except OSError:
        pass  # not Linux
    return total


def _named_folder(base: ZeroConfig) -> Path | None:
    """Where files may go, if anybody has said it: a temporary folder may be in memory."""
    for config in base.offloads:
        if config is not None and config.nvme_path is not None:
            return _existing(Path(config.nvme_path))
    default = OffloadConfig("nvme")
    return _existing(Path(default.folder)) if default.has_named_folder else None


def _existing(path: Path) -> Path:
    """The folder itself, or the first one above it that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


# -------------------------------------------------------------------- the choice


def choose(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    base: ZeroConfig,
    memory: AvailableMemory,
    hardware: Hardware,
    num_micro_batches: int = 1,
) -> AutoChoice:
    """The cheapest stage and offload that fit. Local; the same where `memory` is.

    Where `base` offloads, its offloads are kept and the stage alone is chosen.
    """
    machine = Machine(
        hardware.num_ranks,
        hardware.ranks_per_node,
        device_bytes=int(_SHARE * memory.device_free),
        host_bytes=int(_SHARE * memory.host_free) if hardware.has_device_memory else None,
        disk_bytes=memory.disk_free or (None if any(base.offloads) else 0),
        has_device_memory=hardware.has_device_memory,
    )
    whole = find_full_optimizers(optimizers, base)
    job = Job(
        module, optimizers, None, num_micro_batches, full_optimizers=whole, fallback=_TWO_MOMENTS
    )
    estimates = [
        estimate(choice, job, machine) for choice in _candidates(base, hardware.has_device_memory)
    ]
    fitting = cheapest(estimates)
    best = fitting[0] if fitting else min(estimates, key=lambda e: e.device_bytes)
    return AutoChoice(best.choice.config, _reason(best, estimates, memory, hardware.num_ranks))


def _candidates(base: ZeroConfig, has_device_memory: bool) -> list[Choice]:
    found = all_choices(base, stages=_STAGES)
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


def _reason(
    best: Estimate, estimates: Sequence[Estimate], memory: AvailableMemory, num_ranks: int
) -> str:
    offload = best.choice.offload.replace("none", "without offload")
    text = (
        f"stage {best.choice.config.stage}, {offload}: {_gib(best.device_bytes)} of the "
        f"{_gib(memory.device_free)} that are free on each of {num_ranks} devices, before activations"
    )
    if not best.fits:
        return f"{text}; nothing leaves room for them, and this takes least"
    rivals = [e for e in estimates if not e.fits and e.cost < best.cost]
    if rivals:
        rival = min(rivals, key=lambda e: e.device_bytes)
        missing = ", ".join(f"{_gib(n)} of {name}" for name, n in rival.missing_bytes.items())
        return f"{text}; {rival.choice.name} would be faster but lacks {missing}"
    return f"{text}; nothing that fits sends fewer bytes"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"


# -------------------------------------------------------------------- the look before a run


def check_memory_fits(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    config: ZeroConfig,
    memory: AvailableMemory,
    hardware: Hardware,
) -> None:
    """Raises a ValueError where model states alone are more than there is. See [Note: Certain].

    It has the three cheapest changes that fit.
    """
    if any(offload is not None and offload.device == _AUTO for offload in config.offloads):
        return  # it goes where there is room
    machine = Machine(
        hardware.num_ranks, hardware.ranks_per_node, has_device_memory=hardware.has_device_memory
    )
    whole = find_full_optimizers(optimizers, config)
    job = Job(module, optimizers, full_optimizers=whole, fallback=StateSpec())
    found = estimate(Choice("", "", config), job, machine)
    missing = _missing(found, memory)
    if not missing:
        return
    changes = [estimate(c, job, machine) for c in all_choices(config, stages=_STAGES)]
    possible = sorted((e for e in changes if not _missing(e, memory)), key=lambda e: e.cost)
    # Files are offered where somebody has said where they may go, and they have room there.
    possible = [e for e in possible if e.disk_bytes <= memory.disk_free]
    lines = [f"\n    {as_arguments(e.choice.config)}: {_needs(e)}" for e in possible[:3]]
    advice = "".join(lines) or "\n    more ranks, or a smaller model"
    raise ValueError(
        f"model states cannot fit: {missing}. What would, the fastest first:{advice}\n"
        "With check_memory=False this is not checked."
    )


def _missing(found: Estimate, memory: AvailableMemory) -> str:
    """What is too small for states alone; empty where it may fit."""
    per_node = found.machine.ranks_per_node
    device = found.rank_memory.tier_bytes(Tier.DEVICE)
    host = found.ranks.node_bytes(Tier.CPU, per_node)
    if not found.machine.has_device_memory:
        device, host = 0, host + found.ranks.node_bytes(Tier.DEVICE, per_node)
    if device > memory.device_total:
        return f"{_gib(device)} on each device, which has {_gib(memory.device_total)}"
    if host > memory.host_total:
        ranks = f"{per_node} rank(s) of a machine"
        return f"{_gib(host)} in the memory of {ranks}, which has {_gib(memory.host_total)}"
    return ""  # a disk is looked at when its files are made, after those of dead jobs are gone


def _needs(found: Estimate) -> str:
    parts = {
        "on each device": found.rank_memory.tier_bytes(Tier.DEVICE),
        "of CPU memory for each rank": found.rank_memory.tier_bytes(Tier.CPU),
        "of files for each rank": found.rank_memory.tier_bytes(Tier.NVME),
    }
    return ", ".join(f"{_gib(nbytes)} {where}" for where, nbytes in parts.items() if nbytes)


def as_arguments(config: ZeroConfig) -> str:
    """As a user would write it."""
    arguments = [f"stage={config.stage}"]
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(config, name)
        if offload is not None and offload.max_in_cpu_bytes is not None:
            arguments.append(f'{name}=OffloadConfig("nvme", max_in_cpu_bytes=0)')
        elif offload is not None:
            arguments.append(f"{name}={offload.device!r}")
    if (again := config.checkpointed_modules) is True:
        arguments.append("activation_checkpointing=True")
    elif again:
        kinds = (one.__name__ if isinstance(one, type) else repr(one) for one in again)
        arguments.append(f"activation_checkpointing=[{', '.join(kinds)}]")
    return f"ZeroStrategy({', '.join(arguments)})".replace("'", '"')
