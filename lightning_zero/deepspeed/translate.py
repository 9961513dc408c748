"""From a DeepSpeed configuration to a `ZeroConfig` and arguments for the Trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.deepspeed.file import Section, check_keys, read
from lightning_zero.deepspeed.keys import (
    IGNORED,
    REFUSED,
    STAGE3_PREFIX,
    ZERO_IGNORED,
    ZERO_KNOWN,
    ZERO_REFUSED,
)
from lightning_zero.deepspeed.offload import offload_settings
from lightning_zero.deepspeed.optimizer import Parameters, build_optimizer
from lightning_zero.deepspeed.precision import precision, reduce_dtype
from lightning_zero.deepspeed.schedule import build_scheduler
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.stage import STAGES

__all__ = ["Translation", "translate"]

_PRECISIONS = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}


@dataclass(frozen=True)
class Translation:
    """A DeepSpeed configuration in the terms of this package and of Lightning.

    Attributes:
        config: Settings of the engine.
        trainer_kwargs: What the Trainer owns, as far as the file sets it: precision,
            accumulate_grad_batches, gradient_clip_val.
        batch_size_per_device: Samples of one micro-batch on one device, for the DataLoader. None:
            the file does not say, or not without a world size.
        grad_scaler_kwargs: Arguments for `torch.amp.GradScaler`; empty unless fp16 is on.
        optimizer: The section as written, or None. See `configure_optimizers`.
        scheduler: The section as written, or None.
        ignored: Setting as written -> why it has no effect here.
        warnings: Sentences about what the user must do or know for the same training.
    """

    config: ZeroConfig
    trainer_kwargs: dict[str, Any]
    batch_size_per_device: int | None = None
    grad_scaler_kwargs: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    ignored: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def configure_optimizers(
        self, parameters: Parameters, *, total_num_steps: int | None = None
    ) -> dict[str, Any]:
        """What `LightningModule.configure_optimizers` returns for the file's sections.

        Args:
            parameters: Parameters or parameter groups, as for any torch optimizer.
            total_num_steps: Optimizer steps of the run, where the file says "auto"
                (`trainer.estimated_stepping_batches`).

        Raises:
            ValueError: The file has no optimizer section, or one that cannot be built.
        """
        if self.optimizer is None:
            raise ValueError("the file has no optimizer section; build the optimizer yourself.")
        optimizer = build_optimizer(self.optimizer, parameters)
        if self.scheduler is None:
            return {"optimizer": optimizer}
        scheduler = build_scheduler(self.scheduler, optimizer, total_num_steps=total_num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def message(self) -> str:
        """Warnings and ignored settings as one text, to be logged once; empty if there are none."""
        lines = list(self.warnings)
        unsaid = [k for k in self.ignored if not any(w.startswith(k) for w in self.warnings)]
        if unsaid:
            lines.append("these settings have no effect here:")
            lines += [f"  {setting}: {self.ignored[setting]}" for setting in unsaid]
        return "\n".join(("DeepSpeed configuration:", *lines)) if lines else ""


@dataclass
class _Notes:
    ignored: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def translate(
    source: str | os.PathLike[str] | Mapping[str, Any], *, world_size: int | None = None
) -> Translation:
    """Translate a DeepSpeed configuration.

    Args:
        source: Path of a JSON file, or the same as a mapping. null and "auto" leave a setting open.
        world_size: Data parallel ranks, for the batch arithmetic. None: not known yet.

    Raises:
        ValueError: An unknown key, a value out of range, batch sizes that do not multiply, or a
            setting that changes the training and is not available here.
        TypeError: `source` is neither a path nor a mapping.
        OSError: The file cannot be read.
    """
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}.")
    file, notes = read(source), _Notes()
    file.refuse(REFUSED)
    notes.ignored.update((key, why) for key, why in IGNORED.items() if file.has(key))
    dtype, grad_scaler_kwargs = precision(file, notes.ignored)
    itemsize = dtype.itemsize if dtype in _PRECISIONS else torch.float32.itemsize
    config = _zero_config(file, reduce_dtype(file, dtype, notes.ignored), itemsize, notes)
    steps, batch_size = _batch(file, world_size, notes)
    clip = _gradient_clipping(file, notes)
    optimizer, scheduler = file.section("optimizer").values, file.section("scheduler").values
    if "legacy_fusion" in optimizer:
        notes.ignored["optimizer.legacy_fusion"] = "it chooses a kernel"
    if optimizer or scheduler:
        notes.warnings.append(
            "the optimizer and scheduler sections are used only if configure_optimizers returns "
            "strategy.translation.configure_optimizers(self.parameters())."
        )
    trainer_kwargs = {
        "precision": _PRECISIONS.get(dtype),
        "accumulate_grad_batches": steps,
        "gradient_clip_val": clip,
    }
    return Translation(
        config=config,
        trainer_kwargs={key: value for key, value in trainer_kwargs.items() if value is not None},
        batch_size_per_device=batch_size,
        grad_scaler_kwargs=grad_scaler_kwargs,
        optimizer=optimizer or None,
        scheduler=scheduler or None,
        ignored=notes.ignored,
        warnings=tuple(notes.warnings),
    )


def _gradient_clipping(file: Section, notes: _Notes) -> float | None:
    if "gradient_clipping" not in file.values:
        notes.warnings.append(
            "gradient_clipping is not in the file: DeepSpeed clips at 1.0 since 0.19.3 and did not "
            "before; here Trainer(gradient_clip_val=...) decides. Write it to be sure."
        )
    return file.number("gradient_clipping") or None  # 0 means no clipping


def _batch(file: Section, world_size: int | None, notes: _Notes) -> tuple[int | None, int | None]:
    """Micro-batches per step and samples per micro-batch, inferred as DeepSpeed infers them."""
    total, micro, steps = (
        file.whole(key, least=1)
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    is_open = "auto" in (
        file.values.get("train_micro_batch_size_per_gpu"),
        file.values.get("gradient_accumulation_steps"),
    )
    if steps is None and not is_open and (total is None) != (micro is None):
        steps = 1
    if total is None:
        return steps, micro
    known = [size for size in (micro, steps, world_size) if size is not None]
    quotient, rest = divmod(total, math.prod(known))
    if rest or quotient == 0 or (len(known) == 3 and quotient != 1):
        raise ValueError(
            f"train_batch_size {total} must be train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps x world size, got "
            f"{_or_open(micro)} x {_or_open(steps)} x {_or_open(world_size)}; correct one of them."
        )
    if world_size is None:
        return _without_world_size(total, micro, steps, notes)
    if micro is None and steps is not None:
        micro = quotient
    elif steps is None and micro is not None:
        steps = quotient
    return steps, micro


def _or_open(size: int | None) -> str:
    return "?" if size is None else str(size)


def _without_world_size(
    total: int, micro: int | None, steps: int | None, notes: _Notes
) -> tuple[int | None, int | None]:
    if micro is None:
        notes.warnings.append(
            f"train_batch_size {total} counts all devices and micro-batches: give the DataLoader "
            f"batch_size = {total} / ({steps or 'accumulate_grad_batches'} x number of devices)."
        )
    elif steps is None:
        raise ValueError(
            f"gradient_accumulation_steps follows from train_batch_size {total}, "
            f"train_micro_batch_size_per_gpu {micro} and the world size, which is not known; "
            "pass world_size=... or write gradient_accumulation_steps."
        )
    return steps, micro


def _zero_config(
    file: Section, dtype: torch.dtype | None, param_itemsize: int, notes: _Notes
) -> ZeroConfig:
    zero = _zero_section(file, notes)
    check_keys(zero, ZERO_KNOWN)
    zero.refuse(ZERO_REFUSED)
    if zero.values.get("stage") == "auto":
        raise zero.error("stage", "0, 1, 2 or 3")
    stage = zero.whole("stage") or 0
    if stage not in STAGES:
        raise zero.error("stage", "0, 1, 2 or 3")
    for key in zero.values:
        why = ZERO_IGNORED.get(key.removeprefix(STAGE3_PREFIX))
        if why is not None and zero.has(key):
            notes.ignored[key] = why
    settings: dict[str, Any] = _sizes(zero, stage, notes)
    settings.update(offload_settings(zero, STAGES[stage], param_itemsize, notes.ignored))
    overlap = zero.flag("overlap_comm")
    if overlap is not None:
        settings["overlap_comm"] = overlap
    settings["sharding_group_size"] = _group_size(zero, stage, notes)
    return ZeroConfig(stage=stage, reduce_dtype=dtype, **settings)


def _zero_section(file: Section, notes: _Notes) -> Section:
    """The zero_optimization section; before it was one, true meant stage 1."""
    value = file.values.get("zero_optimization")
    if isinstance(value, int):  # a bool is one
        old = {"stage": int(value), "allgather_bucket_size": file.values.get("allgather_size")}
        return Section(old, "zero_optimization")
    if file.has("allgather_size"):
        notes.ignored["allgather_size"] = "zero_optimization.allgather_bucket_size decides"
    return file.section("zero_optimization")


def _group_size(zero: Section, stage: int, notes: _Notes) -> int | None:
    """Ranks of a group of MiCS, which DeepSpeed has in stage 3; -1 is all."""
    size = zero.whole("mics_shard_size", least=-1)
    if size is None or size < 1:
        return None
    if not STAGES[stage].gathers_before_use:
        notes.ignored["mics_shard_size"] = f"it needs stage 3; the file asks for stage {stage}"
        return None
    return size


def _sizes(zero: Section, stage: int, notes: _Notes) -> dict[str, int]:
    """Sizes with a meaning in this stage. A bucket of 0 in DeepSpeed is one of 1 here."""
    states = STAGES[stage]
    needs = {
        "reduce_bucket_size": (True, ""),
        "allgather_bucket_size": (states.gathers_after_step, "it needs stage 1 or 2"),
        "prefetch_bucket_size": (states.gathers_before_use, "it needs stage 3"),
        "param_persistence_threshold": (states.gathers_before_use, "it needs stage 3"),
        "max_live_parameters": (states.gathers_before_use, "it needs stage 3"),
    }
    sizes = {}
    for name, (has_meaning, need) in needs.items():
        keys = [key for key in (name, STAGE3_PREFIX + name) if zero.has(key)]
        values = {zero.whole(key) for key in keys}
        if len(values) > 1:
            raise ValueError(f"{' and '.join(keys)} are one setting with two values; keep one.")
        for value in values:
            if not has_meaning:
                notes.ignored[keys[0]] = f"{need}; the file asks for stage {stage}"
            elif value is not None:
                may_be_zero = name in ("prefetch_bucket_size", "param_persistence_threshold")
                sizes[name] = value if may_be_zero else max(value, 1)
    return sizes
