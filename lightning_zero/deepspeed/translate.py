"""Translates a DeepSpeed configuration into a `ZeroConfig` and arguments for the Trainer.

Source of the keys: DeepSpeed's configuration page (https://www.deepspeed.ai/docs/config-json) and
the classes that read the file, up to release 0.19.8.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zero.deepspeed.optimizer import refuse_optimizer
from lightning_zero.layout.config import MAY_BE_ZERO, NEEDS, SIZES, ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES, Stage

__all__ = ["Translation", "translate"]

_OFF = "none"  # a value that means as much as no key
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}
_PRECISIONS = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}


def _number(value: Any, least: float = 0.0, most: float = float("inf")) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and least <= value <= most and value < float("inf") else None


def _integer(value: Any, least: int = 0) -> int | None:
    number = _number(value, least)
    return int(number) if number is not None and number.is_integer() else None


def _group(value: Any) -> int | str | None:
    size = _integer(value, least=-1)
    return size if size is None or size > 0 else _OFF


def _section(value: Any) -> dict[str, Any] | str | None:
    """An optimizer or a scheduler, whose params are always there."""
    if not isinstance(value, Mapping) or not isinstance(value.get("params") or {}, Mapping):
        return None
    return {**value, "params": dict(value.get("params") or {})} if value else _OFF


class _Kind(NamedTuple):
    """Values that a key may have."""

    expected: str
    convert: Callable[[Any], Any]  # None: the value is not one of them


_FLAG = _Kind("true or false", lambda value: value if isinstance(value, bool) else None)
_NUMBER = _Kind("a number that is not negative", _number)
_RATIO = _Kind("a number from 0 to 1", lambda value: _number(value, most=1))
_SIZE = _Kind("an integer of at least 0", _integer)
_COUNT = _Kind("an integer of at least 1", lambda value: _integer(value, least=1))
_GROUP = _Kind("an integer of at least -1", _group)
_STAGE = _Kind("0, 1, 2 or 3", lambda value: _integer(_number(value, most=3)))
_DTYPE = _Kind("fp16, bf16 or fp32", lambda value: _DTYPES.get(str(value).lower()))
_PATH = _Kind("the path of a folder", lambda value: value if isinstance(value, str) else None)
_DEVICE = _Kind(
    '"none", "cpu" or "nvme"',
    lambda value: value if value in (_OFF, "cpu", "nvme") else None,
)
_SECTION = _Kind("a section in braces", _section)

_ZERO = "zero_optimization."
_OFFLOADS = ("offload_optimizer", "offload_param")
# Every key that is translated, by its path in the file: values, and name in `_File.values`.
_KEYS = {
    **{
        name: (kind, name)
        for name, kind in {
            "optimizer": _SECTION,
            "scheduler": _SECTION,
            "train_batch_size": _COUNT,
            "train_micro_batch_size_per_gpu": _COUNT,
            "gradient_accumulation_steps": _COUNT,
            "gradient_clipping": _NUMBER,
            "bf16.enabled": _FLAG,
            "fp16.enabled": _FLAG,
            "torch_autocast.enabled": _FLAG,
            "torch_autocast.dtype": _DTYPE,
        }.items()
    },
    "bfloat16.enabled": (_FLAG, "bf16.enabled"),
    "communication_data_type": (_DTYPE, "reduce_dtype"),
    "data_types.grad_accum_dtype": (_DTYPE, "reduce_dtype"),
    **{
        f"{_ZERO}{prefix}{name}": (_SIZE if name in MAY_BE_ZERO else _COUNT, name)
        for name in SIZES
        for prefix in ("", "stage3_")
    },
    _ZERO + "stage": (_STAGE, "stage"),
    _ZERO + "overlap_comm": (_FLAG, "overlap_comm"),
    _ZERO + "mics_shard_size": (_GROUP, "sharding_group_size"),
    **{
        f"{_ZERO}{name}.{key}": (kind, f"{name}.{key}")
        for name in _OFFLOADS
        for key, kind in (("device", _DEVICE), ("nvme_path", _PATH), ("pin_memory", _FLAG))
    },
    _ZERO + "offload_optimizer.ratio": (_RATIO, "offload_optimizer.ratio"),
}

# Keys with which the training would be another: patterns, the values that are off, what to do.
_REFUSED = (
    ("amp.enabled", (False,), "use the fp16 or bf16 section"),
    ("fp16.loss_scale", (0,), "use 0, for a dynamic loss scale"),
    ("*.cpu_offload", (False,), "use offload_optimizer with device cpu"),
    ("*.cpu_offload_param *.cpu_offload_params", (False,), "use offload_param with device cpu"),
    ("*.*master_weights_and_grads *.bf16_optimizer_states", (False,), "states are float32"),
    ("data_types.param_dtype data_types.buffer_dtype", (), "precision decides; remove it"),
    ("sparse_gradients", (False,), "gradients are dense"),
    ("gradient_allreduce_op", ("mean",), "gradients are averaged"),
    ("managed_gradient_accumulation", (True,), "set gradient_accumulation_steps"),
    ("curriculum_learning*enabled data_efficiency*enabled", (False,), "use your own sampler"),
    ("elasticity.enabled autotuning.enabled", (False,), "set the batch size"),
    ("compression_training*enabled", (False,), "build it into the module"),
    ("progressive_layer_drop.enabled eigenvalue.enabled", (False,), "build it into the module"),
    ("quantize_training* weight_quantization* sparse_attention*", (False,), "remove it"),
    ("pipeline* hybrid_engine.enabled *.zenflow* *.zeropp_loco_param*", (False,), "remove it"),
    ("tensor_parallel.enabled expert_parallel.enabled", (False,), "remove it"),
    ("tensor_parallel*size expert_parallel*size sequence_parallel_size", (0, 1), "use 1"),
    ("*.zero_quantized_*", (False,), "collectives are not quantized"),
    ("*.zero_hpz_partition_size", (0, 1), "use 1, or mics_shard_size for groups of ranks"),
)

_LOADER = "batch_size of your DataLoader, in samples of one rank"
_AUTO = {  # what to set where the file has "auto"
    "bf16": 'Trainer(precision="bf16-mixed")',
    "fp16": 'Trainer(precision="16-mixed")',
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...), their max_grad_norm, by default 1.0",
    "train_batch_size": _LOADER,
    "train_micro_batch_size_per_gpu": _LOADER,
}
_NOTHING = "nothing: the default of ZeroStrategy is used"


@dataclass(frozen=True)
class Translation:
    """A DeepSpeed configuration in the settings of this package and of Lightning.

    Attributes:
        config: Settings of the engine.
        trainer_kwargs: Arguments of the Trainer that the file sets, among precision,
            accumulate_grad_batches and gradient_clip_val.
        batch_size_per_device: Samples of one micro-batch on one device, for the DataLoader. None:
            the file does not determine it, or only with a world size.
        train_batch_size: Samples of one optimizer step on all devices; None: not in the file.
        autos: Settings that are "auto", and what to set in their place.
        ignored: Settings as written that have no effect.
        warnings: Sentences about actions of the user that the same training requires.
    """

    config: ZeroConfig
    trainer_kwargs: dict[str, Any]
    batch_size_per_device: int | None = None
    train_batch_size: int | None = None
    autos: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def check_batch_size(self, world_size: int, num_micro_batches: int) -> None:
        """Raises a ValueError if `train_batch_size` does not match a run.

        Args:
            world_size: Number of data-parallel ranks.
            num_micro_batches: Micro-batches per optimizer step, of the Trainer.
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
            listed = ", ".join(map(_with_hint, self.ignored))
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
    file = _read(source)
    refuse_optimizer(file.take("optimizer", {}), file.take("scheduler", {}))
    total, micro, steps = _batch_sizes(file, world_size)
    trainer_kwargs = {
        "precision": _precision(file),
        "accumulate_grad_batches": steps,
        "gradient_clip_val": file.take("gradient_clipping") or None,  # 0 means no clipping
    }
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
    translation = Translation(
        config=_zero_config(file),
        trainer_kwargs={key: value for key, value in trainer_kwargs.items() if value is not None},
        batch_size_per_device=micro,
        train_batch_size=total,
        autos={path: _AUTO.get(path.removesuffix(".enabled"), _NOTHING) for path in file.autos},
        ignored=tuple(file.ignored),
        warnings=tuple(warnings),
    )
    if steps is not None and world_size is not None:
        translation.check_batch_size(world_size, steps)
    return translation


def _precision(file: _File) -> str | None:
    """Precision of the Trainer; None: float32."""
    names = ("fp16", "bf16", "torch_autocast")
    enabled = [name for name in names if file.take(f"{name}.enabled")]
    if len(enabled) > 1:
        raise ValueError(f"{' and '.join(enabled)} are enabled together; enable one of them.")
    if enabled == ["torch_autocast"]:
        return _PRECISIONS.get(file.take("torch_autocast.dtype", torch.bfloat16))
    return _PRECISIONS[_DTYPES[enabled[0]]] if enabled else None


def _batch_sizes(file: _File, world_size: int | None) -> tuple[int | None, int | None, int | None]:
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


def _zero_config(file: _File) -> ZeroConfig:
    number = file.take("stage", 0)
    stage = STAGES[number]
    settings = {name: file.take(name) for name in ("overlap_comm", "reduce_dtype")}
    for name in SIZES:
        if name not in NEEDS or NEEDS[name].is_met_by(stage):
            settings[name] = file.take(name)
    for name in _OFFLOADS:
        if NEEDS[name].is_met_by(stage):
            settings[name] = _offload(file, name, stage)
    if stage.shards_params:
        settings["sharding_group_size"] = file.take("sharding_group_size")
    return ZeroConfig(stage=number, **_given(settings))


def _offload(file: _File, name: str, stage: Stage) -> OffloadConfig | None:
    """Offload as in DeepSpeed, where "nvme" below stage 3 is CPU memory, for all elements."""
    device = file.take(f"{name}.device")
    if device is None:
        return None
    keys = ["pin_memory"]
    if not stage.shards_params:
        device = "cpu"
    else:
        keys += ["ratio", "nvme_path"] if device == "nvme" else ["ratio"]
    return OffloadConfig(device, **_given({key: file.take(f"{name}.{key}") for key in keys}))


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


# ------------------------------------------------------------------------------------ the file


@dataclass
class _File:
    """Checked values of a file.

    Attributes:
        values: Converted values, by the names in `_KEYS`; without keys that are absent or null.
        written: Paths of these keys as they are in the file.
        autos: Paths of the keys that are "auto".
        ignored: Paths of keys without effect; those of `values` are removed when they are taken.
    """

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    autos: list[str] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)

    def take(self, name: str, default: Any = None) -> Any:
        """Value of a key, which has an effect now."""
        self.ignored.pop(self.written.get(name, ""), None)
        return self.values.get(name, default)

    def add(self, path: str, value: Any) -> None:
        """Adds one entry; raises a ValueError if it is wrong, or would change the training."""
        if value is None or (value == "auto" and path != f"{_ZERO}stage"):
            self.autos += [path] if value else []
        elif path in _KEYS:
            self._add_value(path, value)
        elif any(key.startswith(f"{path}.") for key in _KEYS):
            if value is not False:
                raise ValueError(f"{path} must be a section in braces, got {value!r}; correct it.")
        elif not _is_off(path, value):
            self.ignored[path] = None

    def _add_value(self, path: str, value: Any) -> None:
        kind, name = _KEYS[path]
        converted = kind.convert(value)
        if converted is None:
            raise ValueError(
                f"{path} must be {kind.expected}, got {value!r}; correct or remove it."
            )
        if converted == _OFF:
            return
        if self.values.setdefault(name, converted) != converted:
            raise ValueError(
                f"{path} and {self.written[name]} are the same setting with two values; remove one."
            )
        if name not in self.written:
            self.written[name] = path
            self.ignored[path] = None


def _is_off(path: str, value: Any) -> bool:
    """Whether this is one of the keys of `_REFUSED`, turned off; a ValueError if it is on."""
    for patterns, off, cure in _REFUSED:
        if any(fnmatchcase(path, pattern) for pattern in patterns.split()):
            if value in off:
                return True
            raise ValueError(
                f"{path} = {value!r} would change the training and is not supported: {cure}."
            )
    return False


def _with_hint(path: str) -> str:
    """The path of a key without effect, with the key of this section that may be meant."""
    section, _, key = path.rpartition(".")
    keys = [other.rpartition(".")[2] for other in _KEYS if other.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.85) if key not in keys else ()
    return f"{path} (did you mean {near[0]}?)" if near else path


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> _File:
    values = _parse(Path(source)) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        if values is source:
            raise TypeError(f"expected a path or a mapping, got {source!r} ({kind}).")
        raise ValueError(f"{source} must be one section in braces, got {kind}.")
    file = _File()
    for path, value in _entries(values, ""):
        file.add(path, value)
    return file


def _entries(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Paths and values of the sections that are not disabled."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if not isinstance(value, Mapping) or path in _KEYS:
            yield path, value
        elif value.get("enabled") is not False:
            yield from _entries(value, f"{path}.")


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON: {error}. Remove comments and trailing commas, which "
            "DeepSpeed accepts."
        ) from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key} appears twice in one section; remove one.")
        values[key] = value
    return values
