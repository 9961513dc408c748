"""Translates a DeepSpeed configuration into a `ZeroConfig` and arguments for the Trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.deepspeed.file import STAGE3_PREFIX, Section, read
from lightning_zero.deepspeed.optimizer import refuse_optimizer
from lightning_zero.layout.config import MAY_BE_ZERO, NEEDS, SIZES, ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES, Stage

__all__ = ["Translation", "translate"]

_PRECISIONS = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}


@dataclass(frozen=True)
class Translation:
    """A DeepSpeed configuration in the settings of this package and of Lightning.

    Attributes:
        config: Settings of the engine.
        trainer_kwargs: Arguments of the Trainer that the file sets, among precision,
            accumulate_grad_batches and gradient_clip_val.
        batch_size_per_device: Samples of one micro-batch on one device, for the DataLoader. None:
            the file does not determine it, or only with a world size.
        grad_scaler_kwargs: Arguments of `torch.amp.GradScaler`; empty unless fp16 is on.
        train_batch_size: Samples of one optimizer step on all devices; None: not in the file.
        autos: Settings that are "auto", and what to set in their place.
        ignored: Settings as written that have no effect, and the reasons.
        warnings: Sentences about actions of the user that the same training requires.
    """

    config: ZeroConfig
    trainer_kwargs: dict[str, Any]
    batch_size_per_device: int | None = None
    grad_scaler_kwargs: dict[str, Any] = field(default_factory=dict)
    train_batch_size: int | None = None
    autos: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def check_batch_size(self, world_size: int, num_micro_batches: int) -> None:
        """Checks the batch sizes of the file against a run.

        Args:
            world_size: Number of data-parallel ranks.
            num_micro_batches: Micro-batches per optimizer step, of the Trainer.

        Raises:
            ValueError: `train_batch_size` is not the product with the size of a micro-batch.
        """
        total, micro = self.train_batch_size, self.batch_size_per_device
        if total is None:
            return
        quotient, rest = divmod(total, num_micro_batches * world_size)
        if rest or quotient != (micro or quotient):
            raise ValueError(
                f"train_batch_size {total} of the DeepSpeed file must be batch size x "
                f"accumulate_grad_batches x ranks, got {micro or '?'} x {num_micro_batches} x "
                f"{world_size}; pass **strategy.trainer_kwargs to the Trainer, use another number "
                "of ranks, or correct or remove train_batch_size."
            )

    def message(self) -> str:
        """Text with all warnings and ignored settings, for one log entry; empty without any."""
        lines = list(self.warnings)
        others = {k: v for k, v in self.ignored.items() if not any(w.startswith(k) for w in lines)}
        for title, settings in (
            ('"auto" is filled in by Hugging Face\'s Trainer only; set here:', self.autos),
            ("these settings have no effect here:", others),
        ):
            lines += [title] if settings else []
            lines += [f"  {setting}: {text}" for setting, text in settings.items()]
        return "\n".join(("DeepSpeed configuration:", *lines)) if lines else ""


def translate(
    source: str | os.PathLike[str] | Mapping[str, Any], *, world_size: int | None = None
) -> Translation:
    """Translates a DeepSpeed configuration.

    Args:
        source: Path of a JSON file, or its content as a mapping. null and "auto" mean that a
            setting has no value; each "auto" is in `Translation.autos`.
        world_size: Number of data-parallel ranks, to check batch sizes. None: not known yet.

    Raises:
        ValueError: A key is unknown, a value is out of range, batch sizes are inconsistent, a
            setting would change the training and is not supported, or there is an optimizer or a
            scheduler section (the message has the lines of torch that replace them).
        TypeError: `source` is neither a path nor a mapping.
        OSError: The file cannot be read.
    """
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}.")
    file = read(source)
    refuse_optimizer(file)
    file.note_ignored_keys()
    warnings: list[str] = []
    dtype, grad_scaler_kwargs = _precision(file)
    itemsize = dtype.itemsize if dtype in _PRECISIONS else torch.float32.itemsize
    config = _zero_config(file, _reduce_dtype(file, dtype), itemsize)
    steps, batch_size = _batch(file, world_size, warnings)
    removed = file.removed_keys()
    if isinstance(file.values.get("zero_optimization"), dict):
        removed += file.section("zero_optimization").removed_keys()
    if removed:
        warnings.append(
            f"{', '.join(removed)}: DeepSpeed refuses these keys since 0.19.8; here they are still "
            "read."
        )
    if "gradient_clipping" not in file.values:
        warnings.append(
            "gradient_clipping is not in the file: DeepSpeed clips at 1.0 since 0.19.3 and did not "
            "clip before; here Trainer(gradient_clip_val=...) decides. Set it to be sure."
        )
    trainer_kwargs = {
        "precision": _PRECISIONS.get(dtype),
        "accumulate_grad_batches": steps,
        "gradient_clip_val": file.number("gradient_clipping") or None,  # 0 means no clipping
    }
    return Translation(
        config=config,
        trainer_kwargs={key: value for key, value in trainer_kwargs.items() if value is not None},
        batch_size_per_device=batch_size,
        grad_scaler_kwargs=grad_scaler_kwargs,
        train_batch_size=file.integer("train_batch_size", minimum=1),
        autos=_autos(file),
        ignored=file.ignored,
        warnings=tuple(warnings),
    )


# -------------------------------------------------------------------- "auto"

_LOADER = "batch_size of your DataLoader, in samples of one rank"
_AUTO = {
    "bf16": 'Trainer(precision="bf16-mixed")',
    "fp16": 'Trainer(precision="16-mixed")',
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...), their max_grad_norm, by default 1.0",
    "train_batch_size": _LOADER,
    "train_micro_batch_size_per_gpu": _LOADER,
}


def _autos(file: Section) -> dict[str, str]:
    """Settings that are "auto", by their path in the file, and what to set in their place."""
    autos: dict[str, str] = {}

    def search(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                search(value, f"{path}.")
            elif value == "auto":
                argument = _AUTO.get(path.removesuffix(".enabled"))
                autos[path] = argument or "nothing: the default of ZeroStrategy is used"

    search(file.values, "")
    return autos


# -------------------------------------------------------------------- dtypes

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


def _precision(file: Section) -> tuple[torch.dtype, dict[str, Any]]:
    """Dtype of training, and arguments of the loss scaler."""
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
                    f"{section.path(key)} = True would change the training and is not supported: "
                    "masters and optimizer states are float32; set it to false."
                )
    if not enabled:
        is_open = fp16.values.get("enabled") == "auto"
        return torch.float32, _grad_scaler_kwargs(fp16) if is_open else {}
    enabled[0].note_ignored_keys()
    if enabled[0] is autocast:
        return _dtype(autocast, "dtype") or torch.bfloat16, {}
    if enabled[0] is fp16:
        return torch.float16, _grad_scaler_kwargs(fp16)
    for key in ("check_grad_overflow", "check_overflow"):
        if bf16.flag(key):
            bf16.ignore(key, "bf16 does not skip steps with infinite gradients")
    return torch.bfloat16, {}


def _grad_scaler_kwargs(fp16: Section) -> dict[str, Any]:
    """Arguments of `torch.amp.GradScaler`; a static loss scale has factors that round to 1."""
    power = fp16.integer("initial_scale_power")
    window = fp16.integer("loss_scale_window", minimum=1)
    if static := fp16.number("loss_scale"):
        # GradScaler requires factors above and below 1; these two have no effect in float32.
        up, down = math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)
        return {"init_scale": static, "growth_factor": up, "backoff_factor": down}
    return {
        "init_scale": 2.0 ** (16 if power is None else power),
        "growth_interval": 1000 if window is None else window,
    }


def _reduce_dtype(file: Section, dtype: torch.dtype) -> torch.dtype | None:
    """Dtype in which gradients are reduced and accumulated; None if the file sets neither.

    DeepSpeed has two dtypes; here there is one, to which both are promoted.
    """
    types = file.section("data_types")
    if types.has("buffer_dtype"):
        raise types.error("buffer_dtype", "null (buffers keep their dtype)")
    if types.has("param_dtype"):
        if _dtype(types, "param_dtype") is not dtype:
            raise types.error("param_dtype", f"the dtype of training, {dtype},")
        types.ignore("param_dtype", "precision decides")
    reduce_dtype = _dtype(file, "communication_data_type")
    accum_dtype = _dtype(types, "grad_accum_dtype")
    if reduce_dtype is None or accum_dtype is None:
        return reduce_dtype or accum_dtype
    promoted = torch.promote_types(reduce_dtype, accum_dtype)
    why = f"gradients are reduced and accumulated in one dtype, here {promoted}"
    if reduce_dtype is not promoted:
        file.ignore("communication_data_type", why)
    if accum_dtype is not promoted:
        types.ignore("grad_accum_dtype", why)
    return promoted


# -------------------------------------------------------------------- batch sizes


def _batch(
    file: Section, world_size: int | None, warnings: list[str]
) -> tuple[int | None, int | None]:
    """Micro-batches per step and samples per micro-batch, inferred in the same way as DeepSpeed."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total = file.integer("train_batch_size", minimum=1)
    micro, steps = (file.integer(key, minimum=1) for key in keys)
    is_open = any(file.values.get(key) == "auto" for key in keys)
    if steps is None and not is_open and (total is None) != (micro is None):
        steps = 1
    if total is None:
        return steps, micro
    sizes = (micro, steps, world_size)
    known = [size for size in sizes if size is not None]
    quotient, rest = divmod(total, math.prod(known))
    if rest or quotient == 0 or (len(known) == 3 and quotient != 1):
        got = " x ".join("?" if size is None else str(size) for size in sizes)
        raise ValueError(
            f"train_batch_size must be train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps x world size, got {total} and {got}; correct one of them."
        )
    if world_size is None and micro is None:
        warnings.append(
            f"train_batch_size {total} covers all devices and micro-batches: use a DataLoader with "
            f"batch_size = {total} / ({steps or 'accumulate_grad_batches'} x number of devices)."
        )
    elif world_size is None and steps is None and not is_open:
        raise ValueError(
            f"gradient_accumulation_steps follows from train_batch_size {total}, "
            f"train_micro_batch_size_per_gpu {micro} and the world size, which is not known; "
            "pass world_size=... or set gradient_accumulation_steps."
        )
    elif len(known) == 2 and world_size is not None:
        return (quotient, micro) if steps is None else (steps, quotient)
    return steps, micro


# -------------------------------------------------------------------- zero_optimization


def _zero_config(file: Section, dtype: torch.dtype | None, param_itemsize: int) -> ZeroConfig:
    value = file.values.get("zero_optimization")
    if isinstance(value, int):  # or a bool: in old files true means stage 1
        old = {"stage": int(value), "allgather_bucket_size": file.values.get("allgather_size")}
        zero = Section(old, "zero_optimization", file.ignored)
    else:
        if file.has("allgather_size"):
            file.ignore("allgather_size", "zero_optimization.allgather_bucket_size decides")
        zero = file.section("zero_optimization")
    is_open = zero.values.get("stage") == "auto"
    number = 0 if is_open else zero.integer("stage") or 0
    if is_open or number not in STAGES:
        raise zero.error("stage", "0, 1, 2 or 3")
    zero.note_ignored_keys()
    stage = STAGES[number]
    settings: dict[str, Any] = _sizes(zero, stage) | _offloads(zero, stage, param_itemsize)
    if (overlaps := zero.flag("overlap_comm")) is not None:
        settings["overlap_comm"] = overlaps
    group_size = zero.integer("mics_shard_size", minimum=-1) or -1  # -1 means all ranks
    if group_size > 0 and stage.shards_params:
        settings["sharding_group_size"] = group_size
    elif group_size > 0:
        zero.ignore("mics_shard_size", f"it needs stage 3; the file asks for {stage}")
    return ZeroConfig(stage=number, reduce_dtype=dtype, **settings)


def _sizes(zero: Section, stage: Stage) -> dict[str, int]:
    """Sizes that apply to this stage. A bucket size of 0 in DeepSpeed becomes 1."""
    sizes = {}
    for name in SIZES:
        need = NEEDS.get(name)
        keys = [key for key in (name, STAGE3_PREFIX + name) if zero.has(key)]
        values = {zero.integer(key) for key in keys}
        if len(values) > 1:
            raise ValueError(
                f"{' and '.join(keys)} are the same setting with two values; remove one."
            )
        for value in values:
            if need is not None and not need.is_met_by(stage):
                zero.ignore(keys[0], f"it needs {need.stages}; the file asks for {stage}")
            elif value is not None:
                sizes[name] = value if name in MAY_BE_ZERO else max(value, 1)
    return sizes


# Old names of a section, and the reason why it has no effect in some stages.
_OFFLOADS = {
    "offload_optimizer": ("cpu_offload", "it needs a stage above 0"),
    "offload_param": (
        *("cpu_offload_param", "cpu_offload_params"),
        "it needs stage 3, as in DeepSpeed",
    ),
}
_NVME_ONLY = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
_MINIMUMS = {"buffer_count": 2, "buffer_size": 2**16}  # DeepSpeed has no minimum


def _offloads(zero: Section, stage: Stage, param_itemsize: int) -> dict[str, OffloadConfig]:
    """Offload settings of `ZeroConfig`.

    They follow DeepSpeed: parameters are offloaded in stage 3 only, and below stage 3 "nvme" means
    that the entire optimizer is in CPU memory.
    """
    settings = {}
    for name, (*old_names, why_not) in _OFFLOADS.items():
        section = _offload_section(zero, name, old_names)
        if section is None:
            continue
        if NEEDS[name].is_met_by(stage):
            settings[name] = _offload(section, stage, param_itemsize)
        else:
            zero.ignore(next(key for key in (*old_names, name) if zero.has(key)), why_not)
    if zero.flag("cpu_offload_use_pin_memory") is not None and not settings:
        zero.ignore("cpu_offload_use_pin_memory", "nothing is offloaded")
    return settings


def _offload_section(zero: Section, name: str, old_names: Sequence[str]) -> Section | None:
    """The section `name`, or the equivalent of an old flag; None if nothing is offloaded."""
    old = [key for key in old_names if zero.flag(key)]
    values = {} if zero.values.get(name) is False else zero.section(name).values
    if old and values:
        raise ValueError(
            f"{zero.path(old[0])} is the old name of {zero.path(name)}; keep only the section."
        )
    if old:
        values = {"device": "cpu"}
    if (is_pinned := zero.flag("cpu_offload_use_pin_memory")) is not None:
        values = {"pin_memory": is_pinned, **values}
    section = Section(values, zero.path(name), zero.ignored)
    device = section.get("device")
    if device is None or device == "none":
        return None
    if device not in ("cpu", "nvme"):
        raise section.error("device", '"none", "cpu" or "nvme"')
    return section


def _offload(section: Section, stage: Stage, param_itemsize: int) -> OffloadConfig:
    section.note_ignored_keys()
    device = section.values["device"]
    settings: dict[str, Any] = {}
    if (ratio := section.number("ratio")) is not None:
        if ratio > 1:
            raise section.error("ratio", "a number from 0 to 1")
        if stage.shards_params:
            settings["ratio"] = ratio
        else:
            section.ignore("ratio", "it needs stage 3, as in DeepSpeed; everything is offloaded")
    if device == "nvme" and not stage.shards_params:
        why = (
            "below stage 3 DeepSpeed keeps the optimizer in CPU memory; for NVMe use "
            "ZeroStrategy(offload_optimizer='nvme')"
        )
        section.ignore("nvme_path", why)
        device = "cpu"
    if (is_pinned := section.flag("pin_memory")) is not None:
        settings["pin_memory"] = is_pinned
    for key in filter(section.has, _NVME_ONLY):
        value: Any = section.values[key] if key == "nvme_path" else section.integer(key)
        if key == "nvme_path" and not isinstance(value, str):
            raise section.error(key, "the path of a folder")
        if device == "cpu":
            section.ignore(key, "it needs device nvme")
        elif key != "max_in_cpu":
            settings[key] = max(value, _MINIMUMS[key]) if key in _MINIMUMS else value
        elif value:
            # "auto" without device memory fills CPU memory first, and stores the rest on NVMe.
            device, in_cpu = "auto", value * param_itemsize
            settings |= {"max_in_device_bytes": 0, "max_in_cpu_bytes": in_cpu}
    return OffloadConfig(device, **settings)
