"""Translates a DeepSpeed configuration into a `ZeroConfig` and arguments for the Trainer."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.deepspeed.file import File, read, with_hint
from lightning_zero.deepspeed.optimizer import refuse_optimizer
from lightning_zero.layout.config import MAY_BE_ZERO, NEEDS, SIZES, ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES, Stage

__all__ = ["Translation", "translate"]

_ZERO = "zero_optimization."
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
        ignored: Settings as written that have no effect.
        warnings: Sentences about actions of the user that the same training requires.
    """

    config: ZeroConfig
    trainer_kwargs: dict[str, Any]
    batch_size_per_device: int | None = None
    grad_scaler_kwargs: dict[str, Any] = field(default_factory=dict)
    train_batch_size: int | None = None
    autos: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
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
                f"{world_size}; pass **strategy.trainer_kwargs to the Trainer and world_size to "
                "from_deepspeed, use another number of ranks, or correct or remove "
                "train_batch_size."
            )

    def message(self) -> str:
        """Text with all warnings and ignored settings, for one log entry; empty without any."""
        lines = list(self.warnings)
        if self.autos:
            lines.append('"auto" is filled in by Hugging Face\'s Trainer only; set here:')
            lines += [f"  {setting}: {text}" for setting, text in self.autos.items()]
        if self.ignored:
            listed = ", ".join(map(with_hint, self.ignored))
            lines.append(f"these settings have no effect here: {listed}")
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
        ValueError: A value is out of range, batch sizes are inconsistent, a setting would change
            the training and is not supported, or there is an optimizer or a scheduler section (the
            message has the lines of torch that replace them).
        TypeError: `source` is neither a path nor a mapping.
        OSError: The file cannot be read.
    """
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}.")
    file = read(source)
    refuse_optimizer(file.take("optimizer", {}), file.take("scheduler", {}))
    dtype, grad_scaler_kwargs = _precision(file)
    config = _zero_config(file, _reduce_dtype(file), dtype.itemsize)
    total, micro, steps = _batch_sizes(file, world_size)
    warnings = []
    if total is not None and micro is None and world_size is None:
        warnings.append(
            f"train_batch_size {total} covers all devices and micro-batches: use a DataLoader with "
            f"batch_size = {total} / ({steps or 'accumulate_grad_batches'} x number of devices)."
        )
    if "gradient_clipping" not in (*file.values, *file.autos):
        warnings.append(
            "gradient_clipping is not in the file: DeepSpeed clips at 1.0 since 0.19.3 and did not "
            "clip before; here Trainer(gradient_clip_val=...) decides. Set it to be sure."
        )
    trainer_kwargs = {
        "precision": _PRECISIONS.get(dtype),
        "accumulate_grad_batches": steps,
        "gradient_clip_val": file.take("gradient_clipping") or None,  # 0 means no clipping
    }
    translation = Translation(
        config=config,
        trainer_kwargs={key: value for key, value in trainer_kwargs.items() if value is not None},
        batch_size_per_device=micro,
        grad_scaler_kwargs=grad_scaler_kwargs,
        train_batch_size=total,
        autos={path: _AUTO.get(path.removesuffix(".enabled"), _NOTHING) for path in file.autos},
        ignored=tuple(file.ignored),
        warnings=tuple(warnings),
    )
    if steps is not None and world_size is not None:
        translation.check_batch_size(world_size, steps)
    return translation


_NOTHING = "nothing: the default of ZeroStrategy is used"
_LOADER = "batch_size of your DataLoader, in samples of one rank"
_AUTO = {  # what to set where the file has "auto"
    "bf16": 'Trainer(precision="bf16-mixed")',
    "fp16": 'Trainer(precision="16-mixed")',
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...), their max_grad_norm, by default 1.0",
    "train_batch_size": _LOADER,
    "train_micro_batch_size_per_gpu": _LOADER,
}


def _precision(file: File) -> tuple[torch.dtype, dict[str, Any]]:
    """Dtype of training, and arguments of the loss scaler."""
    names = ("fp16", "bf16", "torch_autocast")
    enabled = [name for name in names if file.take(f"{name}.enabled")]
    if len(enabled) > 1:
        raise ValueError(f"{' and '.join(enabled)} are enabled together; enable one of them.")
    if enabled == ["fp16"] or (not enabled and "fp16.enabled" in file.autos):
        return torch.float16 if enabled else torch.float32, _grad_scaler_kwargs(file)
    if enabled == ["torch_autocast"]:
        return file.take("torch_autocast.dtype", torch.bfloat16), {}
    return torch.bfloat16 if enabled else torch.float32, {}


def _grad_scaler_kwargs(file: File) -> dict[str, Any]:
    """Arguments of `torch.amp.GradScaler`."""
    power = file.take("fp16.initial_scale_power", 16)
    window = file.take("fp16.loss_scale_window", 1000)
    if static := file.take("fp16.loss_scale"):
        # GradScaler requires factors above and below 1; these two have no effect in float32.
        up, down = math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)
        return {"init_scale": static, "growth_factor": up, "backoff_factor": down}
    return {"init_scale": 2.0**power, "growth_interval": window}


def _reduce_dtype(file: File) -> torch.dtype | None:
    """Dtype in which gradients are reduced and accumulated; None if the file sets neither.

    DeepSpeed has two dtypes; here there is one, to which both are promoted.
    """
    names = ("communication_data_type", "data_types.grad_accum_dtype")
    given = {name: file.values[name] for name in names if name in file.values}
    if not given:
        return None
    promoted: torch.dtype = functools.reduce(torch.promote_types, given.values())
    for name in (name for name, dtype in given.items() if dtype is promoted):
        file.take(name)
    return promoted


def _batch_sizes(file: File, world_size: int | None) -> tuple[int | None, int | None, int | None]:
    """Global batch size, samples per micro-batch and micro-batches per step, as in DeepSpeed."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total = file.take("train_batch_size")
    micro, steps = map(file.take, keys)
    if steps is None and (total is None) != (micro is None) and not {*keys} & {*file.autos}:
        steps = 1
    if total is not None and world_size is not None and (micro is None) != (steps is None):
        quotient = total // ((micro or steps) * world_size)
        micro, steps = micro or quotient, steps or quotient
    return total, micro, steps


def _zero_config(file: File, reduce_dtype: torch.dtype | None, param_itemsize: int) -> ZeroConfig:
    number = file.take(f"{_ZERO}stage", 0)
    stage = STAGES[number]
    settings: dict[str, Any] = {"overlap_comm": file.take(f"{_ZERO}overlap_comm")}
    for name in SIZES:
        if name not in NEEDS or NEEDS[name].is_met_by(stage):
            size = file.take(_ZERO + name)
            is_zero = size == 0 and name not in MAY_BE_ZERO  # in DeepSpeed, a bucket may be of 0
            settings[name] = 1 if is_zero else size
    for name in ("offload_optimizer", "offload_param"):
        if NEEDS[name].is_met_by(stage):
            settings[name] = _offload(file, f"{_ZERO}{name}.", stage, param_itemsize)
    if stage.shards_params:
        group_size = file.take(f"{_ZERO}mics_shard_size", -1)
        settings["sharding_group_size"] = group_size if group_size > 0 else None
    given = {name: value for name, value in settings.items() if value is not None}
    return ZeroConfig(stage=number, reduce_dtype=reduce_dtype, **given)


def _offload(file: File, prefix: str, stage: Stage, param_itemsize: int) -> OffloadConfig | None:
    """Offload as in DeepSpeed, where "nvme" below stage 3 is CPU memory, for all elements."""
    device = file.take(f"{prefix}device")
    if device is None:
        return None
    settings = {"pin_memory": file.take(f"{prefix}pin_memory")}
    if stage.shards_params:
        settings["ratio"] = file.take(f"{prefix}ratio")
    if device == "nvme" and not stage.shards_params:
        device = "cpu"
    if device == "nvme":
        settings["nvme_path"] = file.take(f"{prefix}nvme_path")
        for key, least in (("buffer_count", 2), ("buffer_size", 2**16)):
            size = file.take(prefix + key)
            settings[key] = size if size is None else max(size, least)  # DeepSpeed has no minimum
        if in_cpu := file.take(f"{prefix}max_in_cpu"):
            # "auto" without device memory fills CPU memory first, and stores the rest on NVMe.
            device, in_cpu = "auto", in_cpu * param_itemsize
            settings |= {"max_in_device_bytes": 0, "max_in_cpu_bytes": in_cpu}
    given = {key: value for key, value in settings.items() if value is not None}
    return OffloadConfig(device, **given)
