"""Reads a DeepSpeed configuration: a table of the keys that are translated, one of those refused.

Source of the keys: DeepSpeed's configuration page (https://www.deepspeed.ai/docs/config-json) and
the classes that read the file, up to release 0.19.8.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zero.layout.config import SIZES

__all__ = ["File", "read", "with_hint"]

_ZERO = "zero_optimization."
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


class _Kind(NamedTuple):
    """Values that a key may have."""

    expected: str
    convert: Callable[[Any], Any]  # None: the value is not one of them


def _number(value: Any, least: float = 0.0, most: float = float("inf")) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and least <= value <= most and value < float("inf") else None


def _integer(value: Any, least: int = 0) -> int | None:
    number = _number(value, least)
    return int(number) if number is not None and number.is_integer() else None


def _section(value: Any) -> dict[str, Any] | None:
    """An optimizer or a scheduler, whose params are always there."""
    if not isinstance(value, Mapping) or not isinstance(value.get("params") or {}, Mapping):
        return None
    return {**value, "params": dict(value.get("params") or {})} if value else {}


_FLAG = _Kind("true or false", lambda value: value if isinstance(value, bool) else None)
_CPU = _Kind(
    "true or false",
    lambda value: ("cpu" if value else "none") if isinstance(value, bool) else None,
)
_NUMBER = _Kind("a number that is not negative", _number)
_RATIO = _Kind("a number from 0 to 1", lambda value: _number(value, most=1))
_SIZE = _Kind("an integer of at least 0", _integer)
_COUNT = _Kind("an integer of at least 1", lambda value: _integer(value, least=1))
_GROUP = _Kind("an integer of at least -1", lambda value: _integer(value, least=-1))
_STAGE = _Kind(
    "0, 1, 2 or 3", lambda value: _integer(value) if _number(value, most=3) is not None else None
)
_DTYPE = _Kind("fp16, bf16 or fp32", lambda value: _DTYPES.get(str(value).lower()))
_PATH = _Kind("the path of a folder", lambda value: value if isinstance(value, str) else None)
_DEVICE = _Kind(
    '"none", "cpu" or "nvme"', lambda value: value if value in ("none", "cpu", "nvme") else None
)
_SECTION = _Kind("a section in braces", _section)
_OFFLOAD = {"device": _DEVICE, "nvme_path": _PATH, "pin_memory": _FLAG, "buffer_count": _SIZE}

# Every key that is translated, with its path in the file.
_KEYS = {
    "optimizer": _SECTION,
    "scheduler": _SECTION,
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "gradient_clipping": _NUMBER,
    "communication_data_type": _DTYPE,
    "data_types.grad_accum_dtype": _DTYPE,
    "bf16.enabled": _FLAG,
    "torch_autocast.enabled": _FLAG,
    "torch_autocast.dtype": _DTYPE,
    "fp16.enabled": _FLAG,
    "fp16.loss_scale": _NUMBER,
    "fp16.initial_scale_power": _SIZE,
    "fp16.loss_scale_window": _COUNT,
    _ZERO + "stage": _STAGE,
    _ZERO + "overlap_comm": _FLAG,
    _ZERO + "mics_shard_size": _GROUP,
    **{_ZERO + name: _SIZE for name in SIZES},
    **{f"{_ZERO}offload_optimizer.{key}": kind for key, kind in _OFFLOAD.items()},
    _ZERO + "offload_optimizer.ratio": _RATIO,
    **{f"{_ZERO}offload_param.{key}": kind for key, kind in _OFFLOAD.items()},
    _ZERO + "offload_param.buffer_size": _SIZE,
    _ZERO + "offload_param.max_in_cpu": _SIZE,
}
# Every key that is read, with its path in `_KEYS`.
_READ = {
    **{path: (kind, path) for path, kind in _KEYS.items()},
    "bfloat16.enabled": (_FLAG, "bf16.enabled"),
    "allgather_size": (_SIZE, _ZERO + "allgather_bucket_size"),
    **{f"{_ZERO}stage3_{name}": (_SIZE, _ZERO + name) for name in SIZES},
    _ZERO + "cpu_offload": (_CPU, _ZERO + "offload_optimizer.device"),
    _ZERO + "cpu_offload_param": (_CPU, _ZERO + "offload_param.device"),
    _ZERO + "cpu_offload_params": (_CPU, _ZERO + "offload_param.device"),
}

# Keys with which the training would be another: patterns, the values that are off, what to do.
_REFUSED = (
    ("amp.enabled", (False,), "use the fp16 or bf16 section"),
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


@dataclass
class File:
    """Checked values of a file, by the paths of `_KEYS`.

    Attributes:
        values: Converted values. A key that is absent or null is not in it.
        written: Paths of these keys as they are in the file.
        autos: Paths of the keys that are "auto", as they are in the file.
        ignored: Paths of keys without effect; those of `values` are removed when they are taken.
    """

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    autos: list[str] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)

    def take(self, path: str, default: Any = None) -> Any:
        """Value of a key, which has an effect now."""
        self.ignored.pop(self.written.get(path, ""), None)
        return self.values.get(path, default)

    def add(self, path: str, value: Any) -> None:
        """Adds one entry of the file.

        Raises:
            ValueError: The value is wrong, or would change the training.
        """
        if value is None or (value == "auto" and path != f"{_ZERO}stage"):
            self.autos += [path] if value else []
            return
        if path not in _READ:
            is_section = any(key.startswith(f"{path}.") for key in _READ)
            if is_section and value is not False:
                raise ValueError(f"{path} must be a section in braces, got {value!r}; correct it.")
            if not is_section and not _is_off(path, value):
                self.ignored[path] = None
            return
        kind, name = _READ[path]
        converted = kind.convert(value)
        if converted is None:
            raise ValueError(
                f"{path} must be {kind.expected}, got {value!r}; correct or remove it."
            )
        if converted == "none":
            return
        if name not in self.values:
            self.values[name], self.written[name] = converted, path
            self.ignored[path] = None
        elif self.values[name] != converted:
            raise ValueError(
                f"{path} and {self.written[name]} are the same setting with two values; remove one."
            )


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


def with_hint(path: str) -> str:
    """The path of a key without effect, with the key of this section that may be meant."""
    section, _, key = path.rpartition(".")
    keys = [other.rpartition(".")[2] for other in _READ if other.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.85) if key not in keys else ()
    return f"{path} (did you mean {near[0]}?)" if near else path


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> File:
    """Reads a file, or its content."""
    values = _parse(Path(source)) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        if values is source:
            raise TypeError(f"expected a path or a mapping, got {source!r} ({kind}).")
        raise ValueError(f"{source} must be one section in braces, got {kind}.")
    stage = values.get("zero_optimization")
    if isinstance(stage, int):  # or a bool: in old files, true is stage 1
        values = {**values, "zero_optimization": {"stage": int(stage)}}
    file = File()
    _add_section(file, values, "")
    return file


def _add_section(file: File, section: Mapping[str, Any], prefix: str) -> None:
    for key, value in section.items():
        path = f"{prefix}{key}"
        if not isinstance(value, Mapping) or path in _READ:
            file.add(path, value)
        elif value.get("enabled") is not False:
            _add_section(file, value, f"{path}.")


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
