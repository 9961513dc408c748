"""From a DeepSpeed configuration to a `ZeroConfig` and arguments for the Trainer.

Offload sections with the flags that came before them, precision and loss scale, and the rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
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
from lightning_zero.deepspeed.optimizer import Parameters, build_optimizer, build_scheduler
from lightning_zero.layout.config import MAY_BE_ZERO, NEEDS, SIZES, ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES, Stage, State

__all__ = ["Translation", "offload_settings", "precision", "reduce_dtype", "translate"]

_DEVICES = ("none", "cpu", "nvme")
_LEAST = {"buffer_count": 2, "buffer_size": 2**16}
_PIPELINE = "reads, steps and writes always overlap"
_WITHOUT_EFFECT = {
    "pipeline": _PIPELINE,
    "pipeline_read": _PIPELINE,
    "pipeline_write": _PIPELINE,
    "fast_init": "files are filled when the engine takes the parameters over, with all threads",
    "super_offload": "overlap_step=True of ZeroStrategy steps beside the next forward",
    "cpuadam_cores_perc": "the step takes torch's number of threads",
}
# Old names, and why it has no effect in some stages.
_OFFLOADS = {
    "offload_optimizer": ("cpu_offload", "it needs a stage above 0"),
    "offload_param": (
        *("cpu_offload_param", "cpu_offload_params"),
        "it needs stage 3, as in DeepSpeed",
    ),
}
_NVME_ONLY = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")


def offload_settings(
    zero: Section, stage: Stage, param_itemsize: int, ignored: dict[str, str]
) -> dict[str, OffloadConfig]:
    """Settings of `ZeroConfig` for what the file offloads.

    DeepSpeed's meaning holds: parameters are offloaded in stage 3 only, and below stage 3 an
    optimizer "on NVMe" is in CPU memory, as a whole.

    Args:
        zero: The zero_optimization section.
        stage: What the file asks for.
        param_itemsize: Bytes of a parameter, for `max_in_cpu`.
        ignored: Takes what has no effect, and why.

    Raises:
        ValueError: A value out of range, or a setting and its old name at once.
    """
    settings = {}
    for name, (*old_names, why_not) in _OFFLOADS.items():
        section = _section(zero, name, old_names)
        if section is None:
            continue
        if not NEEDS[name].is_met_by(stage):
            given = next(key for key in (*old_names, name) if zero.has(key))
            ignored[given] = why_not
        elif name == "offload_optimizer":
            settings[name] = _optimizer(section, stage, ignored)
        else:
            settings[name] = _param(section, param_itemsize, ignored)
    if zero.flag("cpu_offload_use_pin_memory") is not None and not settings:
        ignored["cpu_offload_use_pin_memory"] = "nothing is offloaded"
    return settings


def _section(zero: Section, name: str, old_names: Sequence[str]) -> Section | None:
    """The section `name`, or what an old flag means; None where nothing is offloaded.

    Raises:
        ValueError: Both are there, or the device is unknown.
    """
    old = [key for key in old_names if zero.flag(key)]
    section = Section({}, zero.path(name))
    if zero.values.get(name) is not False:
        section = zero.section(name)
    if old and section.values:
        raise ValueError(
            f"{zero.path(old[0])} is the old name of {zero.path(name)}; keep the section only."
        )
    if old:
        section = Section({"device": "cpu"}, zero.path(name))
    if (is_pinned := zero.flag("cpu_offload_use_pin_memory")) is not None:
        section = Section({"pin_memory": is_pinned, **section.values}, section.name)
    device = section.values["device"] if section.has("device") else "none"
    if device not in _DEVICES:
        raise section.error("device", '"none", "cpu" or "nvme"')
    return None if device == "none" else section


def _optimizer(section: Section, stage: Stage, ignored: dict[str, str]) -> OffloadConfig:
    device, ratio = section.values["device"], section.number("ratio")
    if ratio is not None and ratio > 1:
        raise section.error("ratio", "a number from 0 to 1")
    is_stage_3 = stage.has_shard(State.PARAM)
    if ratio is not None and not is_stage_3:
        ignored["offload_optimizer.ratio"] = "it needs stage 3, as in DeepSpeed; all is offloaded"
        ratio = None
    if device == "nvme" and not is_stage_3:
        ignored["offload_optimizer.nvme_path"] = (
            "below stage 3 DeepSpeed keeps the optimizer in CPU memory; ZeroStrategy's "
            "offload_optimizer='nvme' would not"
        )
        device = "cpu"
    common = _common(section, "offload_optimizer", device, ignored)
    if ratio is not None:
        common["ratio"] = ratio
    return OffloadConfig(device, **common)


def _param(section: Section, itemsize: int, ignored: dict[str, str]) -> OffloadConfig:
    device, numel = section.values["device"], section.whole("max_in_cpu")
    common = _common(section, "offload_param", device, ignored)
    if device == "cpu" or not numel:
        return OffloadConfig(device, **common)
    # CPU memory first, NVMe for the rest: what "auto" does with no room on the device.
    return OffloadConfig("auto", **common, max_in_device_bytes=0, max_in_cpu_bytes=numel * itemsize)


def _common(section: Section, name: str, device: str, ignored: dict[str, str]) -> dict[str, Any]:
    """Settings that both sections have. DeepSpeed takes any number of buffers of any size."""
    for key, why in _WITHOUT_EFFECT.items():
        if section.has(key):
            ignored[f"{name}.{key}"] = why
    settings: dict[str, Any] = {}
    if (is_pinned := section.flag("pin_memory")) is not None:
        settings["pin_memory"] = is_pinned
    for key in filter(section.has, _NVME_ONLY):
        value: Any = _path(section) if key == "nvme_path" else section.whole(key)
        if device == "cpu":
            ignored.setdefault(f"{name}.{key}", "it needs device nvme")
        elif key != "max_in_cpu":
            settings[key] = max(value, _LEAST[key]) if key in _LEAST else value
    return settings


def _path(section: Section) -> str:
    path = section.values["nvme_path"]
    if not isinstance(path, str):
        raise section.error("nvme_path", "the path of a folder")
    return path


_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


def _dtype(section: Section, key: str) -> torch.dtype | None:
    if not section.has(key):
        return None
    dtype = _DTYPES.get(str(section.values[key]).lower())
    if dtype is None:
        raise section.error(key, "fp16, bf16 or fp32")
    return dtype


def precision(file: Section, ignored: dict[str, str]) -> tuple[torch.dtype, dict[str, Any]]:
    """The dtype of training and the settings of the loss scaler."""
    fp16, autocast = file.section("fp16"), file.section("torch_autocast")
    bf16 = file.section("bf16" if "bf16" in file.values else "bfloat16")
    enabled = [section for section in (fp16, bf16, autocast) if section.flag("enabled")]
    if len(enabled) > 1:
        names = " and ".join(section.name for section in enabled)
        raise ValueError(f"{names} are enabled together; enable one of them.")
    for section in (fp16, bf16):
        for key in section.values:
            if key.endswith(("master_weights_and_grads", "optimizer_states")) and section.flag(key):
                raise ValueError(
                    f"{section.path(key)} = True changes the training and is not available here: "
                    "masters and optimizer state are float32; set it to false."
                )
    if autocast.flag("enabled"):
        if autocast.has("lower_precision_safe_modules"):
            key = autocast.path("lower_precision_safe_modules")
            ignored[key] = "torch's own list of operations decides"
        return _dtype(autocast, "dtype") or torch.bfloat16, {}
    if bf16.flag("enabled"):
        if bf16.has("immediate_grad_update"):
            ignored[bf16.path("immediate_grad_update")] = "gradients are added as they arrive"
        for key in ("check_grad_overflow", "check_overflow"):
            if bf16.flag(key):
                why = "a step with infinite gradients is not skipped in bf16"
                ignored[bf16.path(key)] = why
        return torch.bfloat16, {}
    if fp16.flag("enabled"):
        return torch.float16, _grad_scaler_kwargs(fp16, ignored)
    return torch.float32, {}


def _grad_scaler_kwargs(fp16: Section, ignored: dict[str, str]) -> dict[str, Any]:
    """Arguments for `torch.amp.GradScaler`; a static scale is one whose factors round to 1."""
    without_equal = {
        "auto_cast": "inputs of matrix products are cast by autocast",
        "hysteresis": "GradScaler lowers the scale at the first overflow",
        "consecutive_hysteresis": "GradScaler lowers the scale at the first overflow",
        "min_loss_scale": "GradScaler has no lowest scale",
    }
    for key, why in without_equal.items():
        if fp16.has(key):
            ignored[fp16.path(key)] = why
    power = fp16.whole("initial_scale_power")
    window = fp16.whole("loss_scale_window", least=1)
    if static := fp16.number("loss_scale"):
        # GradScaler wants factors on either side of 1; in float32 these two change nothing.
        up, down = math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)
        return {"init_scale": static, "growth_factor": up, "backoff_factor": down}
    return {
        "init_scale": 2.0 ** (16 if power is None else power),
        "growth_interval": 1000 if window is None else window,
    }


def reduce_dtype(file: Section, dtype: torch.dtype, ignored: dict[str, str]) -> torch.dtype | None:
    """The dtype in which gradients travel and are kept; None where the file leaves both open.

    DeepSpeed has a dtype for each; here it is one, so the one that holds both.
    """
    types = file.section("data_types")
    if types.has("buffer_dtype"):
        raise types.error("buffer_dtype", "left out (buffers keep their dtype)")
    if types.has("param_dtype"):
        if _dtype(types, "param_dtype") is not dtype:
            raise types.error("param_dtype", f"the dtype of training, {dtype},")
        ignored[types.path("param_dtype")] = "precision decides"
    wire, kept = _dtype(file, "communication_data_type"), _dtype(types, "grad_accum_dtype")
    if wire is None or kept is None or wire is kept:
        return wire or kept
    both = torch.promote_types(wire, kept)
    for section, key, own in (
        (file, "communication_data_type", wire),
        (types, "grad_accum_dtype", kept),
    ):
        if own is not both:
            why = f"gradients travel and are kept in one dtype, {both}, which holds both"
            ignored[section.path(key)] = why
    return both


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
    sizes = {}
    for name in SIZES:
        need = NEEDS.get(name)
        keys = [key for key in (name, STAGE3_PREFIX + name) if zero.has(key)]
        values = {zero.whole(key) for key in keys}
        if len(values) > 1:
            raise ValueError(f"{' and '.join(keys)} are one setting with two values; keep one.")
        for value in values:
            if need is not None and not need.is_met_by(STAGES[stage]):
                notes.ignored[keys[0]] = f"it needs {need.stages}; the file asks for stage {stage}"
            elif value is not None:
                sizes[name] = value if name in MAY_BE_ZERO else max(value, 1)
    return sizes
