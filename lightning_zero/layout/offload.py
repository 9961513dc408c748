"""Tiers of shards: the user's options, and the tier of each bucket.

    offload_optimizer="cpu"              every optimizer shard in CPU memory, stepped by the CPU
    OffloadConfig("cpu", ratio=0.5)      every second bucket; the others stay on the device
    OffloadConfig("auto", ...)           device, then CPU, then NVMe, each up to its budget

A bucket is not divided: one model state may span three tiers, but a shard of one bucket is in one.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from lightning_zero.layout.sizes import as_integer

__all__ = [
    "MAX_GRADS_IN_FLIGHT",
    "NUM_UPLOAD_BLOCKS",
    "PAGE_BYTES",
    "UPLOAD_BLOCK_BYTES",
    "BucketTiers",
    "Budgets",
    "OffloadConfig",
    "ShardBytes",
    "Tier",
    "assign_tiers",
    "padded_bytes",
    "step_buffer_config",
]

PAGE_BYTES = 4096  # O_DIRECT needs memory, offsets and lengths that are multiples of this
MAX_GRADS_IN_FLIGHT = 2  # gradients that are copied from the device at a time
UPLOAD_BLOCK_BYTES = 2**23  # per block, when parameters stepped on the CPU are copied to a device
NUM_UPLOAD_BLOCKS = 2
_DEVICES = ("cpu", "nvme", "auto")
_PATH_VARIABLES = ("LIGHTNING_ZERO_NVME_PATH", "SLURM_TMPDIR")


def padded_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of `numel` elements, rounded up to pages."""
    return -(-numel * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES


class Tier(Enum):
    """Memory in which a shard is stored between its uses."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"

    def is_offloaded(self, *, has_device_memory: bool) -> bool:
        """Whether a tensor of the device must be copied to be stored here.

        `has_device_memory`: the device has memory of its own, separate from CPU memory.
        """
        return self is Tier.NVME or (self is Tier.CPU and has_device_memory)


@dataclass(frozen=True)
class OffloadConfig:
    """Tier of the shards of parameters or of optimizer states, and the buffers for transfers.

    Bytes are an int, a float such as 8e9, or text such as "8GB" (8 * 10^9) or "8GiB" (8 * 2^30).

    Attributes:
        device: str, default "cpu". "cpu", "nvme", or "auto": fill the device, then CPU memory, then
            NVMe, each up to its budget.
        nvme_path: str, default None. Folder on a local disk for shards on NVMe. None:
            `$LIGHTNING_ZERO_NVME_PATH`, `$SLURM_TMPDIR` or the temporary folder of the system.
            Devices "nvme" and "auto".
        pin_memory: bool, default True. Page-lock CPU memory, so that copies from and to a CUDA
            device overlap with its computation. No effect without CUDA.
        buffer_count: int, default 4. Number of CPU buffers for transfers from and to NVMe, at least
            2.
        buffer_size: int (elements of 4 bytes), default 2^24. Size of each of these buffers, at
            least 2^16.
        ratio: float from 0 to 1, default 1. Share of the elements that is offloaded, by buckets;
            the others stay on the device. Devices "cpu" and "nvme".
        max_in_cpu_bytes: int (bytes), default None. CPU memory of this rank for shards. Device
            "nvme": limit for gradients, which are on NVMe beyond it; None: no limit. Device "auto":
            budget of the CPU tier; None: half of the available memory, divided by the ranks of the
            node.
        max_in_device_bytes: int (bytes), default None. Budget of the device tier. None: half of the
            memory that is free when the engine is made. Device "auto".

    Raises:
        ValueError: A value is out of range, or does not apply to this device.
        TypeError: A value has the wrong type.
    """

    device: str = "cpu"
    nvme_path: str | None = None
    pin_memory: bool = True
    buffer_count: int = 4
    buffer_size: int = 2**24
    ratio: float = 1.0
    max_in_cpu_bytes: int | None = None
    max_in_device_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise ValueError(
                f"device of an offload must be one of {_DEVICES}, got {self.device!r}."
            )
        if not isinstance(self.pin_memory, bool):
            raise TypeError(f"pin_memory must be True or False, got {self.pin_memory!r}.")
        for name, least in (("buffer_count", 2), ("buffer_size", 2**16)):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least=least))
        for name in ("max_in_cpu_bytes", "max_in_device_bytes"):
            if (limit := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_integer(name, limit, least=0))
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)):
            raise TypeError(f"ratio must be a number from 0 to 1, got {self.ratio!r}.")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be from 0 (nothing) to 1 (all), got {self.ratio}.")
        if self.nvme_path is not None:
            object.__setattr__(self, "nvme_path", os.fspath(self.nvme_path))
        self._check_meaning()

    def _check_meaning(self) -> None:
        if self.nvme_path is not None and self.device == "cpu":
            raise ValueError(
                f"nvme_path needs device 'nvme' or 'auto', got 'cpu' and {self.nvme_path!r}; leave "
                "nvme_path out or change the device."
            )
        if self.max_in_cpu_bytes is not None and self.device == "cpu":
            raise ValueError(
                "max_in_cpu_bytes needs device 'nvme' or 'auto': with 'cpu' all offloaded shards "
                "are in CPU memory; use 'auto' to store the rest on NVMe."
            )
        if self.max_in_device_bytes is not None and self.device != "auto":
            raise ValueError(
                f"max_in_device_bytes needs device 'auto', got {self.device!r}; use ratio to keep "
                "a share on the device."
            )
        if self.ratio != 1.0 and self.device == "auto":
            raise ValueError(
                "ratio needs device 'cpu' or 'nvme', got 'auto', which fills tiers by budgets; use "
                "max_in_device_bytes."
            )

    @property
    def buffer_size_bytes(self) -> int:
        """`buffer_size` in bytes."""
        return 4 * self.buffer_size

    @property
    def total_buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.buffer_count * self.buffer_size_bytes

    @classmethod
    def of(cls, name: str, value: object) -> OffloadConfig | None:
        """Parses the value of setting `name`: None, a device, a mapping or a config.

        Raises:
            ValueError: The device or a key is unknown.
            TypeError: The value has another type.
        """
        if value is None or isinstance(value, OffloadConfig):
            return value
        if isinstance(value, str):
            if value == "none":
                return None
            if value not in _DEVICES:
                raise ValueError(f"{name} must be None or one of {_DEVICES}, got {value!r}.")
            return cls(value)
        if isinstance(value, Mapping):
            return cls._of_mapping(name, value)
        raise TypeError(
            f"{name} must be None, one of {_DEVICES}, a mapping or an OffloadConfig, got {value!r}."
        )

    @classmethod
    def _of_mapping(cls, name: str, value: Mapping[Any, Any]) -> OffloadConfig | None:
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(str(key) for key in value if key not in known)
        if unknown:
            raise ValueError(f"{name} has no {', '.join(unknown)}; it has {', '.join(known)}.")
        if value.get("device") in (None, "none"):
            return None
        return cls(**value)

    @property
    def has_named_folder(self) -> bool:
        """Whether the user or the environment names a folder for files."""
        return self.nvme_path is not None or any(map(os.environ.get, _PATH_VARIABLES))

    @property
    def folder(self) -> str:
        """`nvme_path` or its default."""
        if self.nvme_path is not None:
            return self.nvme_path
        named = (os.environ.get(variable) for variable in _PATH_VARIABLES)
        return next((path for path in named if path), tempfile.gettempdir())


def step_buffer_config(
    param: OffloadConfig | None, optimizer: OffloadConfig | None
) -> OffloadConfig:
    """Config of the buffers of a step: of the optimizer if it uses files, else of parameters."""
    chosen = optimizer if optimizer is not None and optimizer.device != "cpu" else param
    return chosen or OffloadConfig()


@dataclass(frozen=True)
class ShardBytes:
    """Bytes of one bucket's shards on one rank."""

    param: int  # 0 if parameters are replicated
    # The main parameter, if it is a separate tensor, and two moments, as for Adam, or the states of
    # `StateBlocks`: the true size of an optimizer's states is known only after its first step.
    optim: int
    grad: int  # the averaged gradient
    # The optimizer steps it from the beginning. A frozen bucket stores only its parameters until
    # it is unfrozen; also main parameters, if the cast to `param_dtype` was not exact.
    is_trainable: bool = True


@dataclass(frozen=True)
class BucketTiers:
    """Tiers of the shards of one bucket: parameters, optimizer states and gradients."""

    param: Tier = Tier.DEVICE
    optim: Tier = Tier.DEVICE
    grad: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Budgets:
    """Bytes that "auto" may use, of this rank's share of the memory."""

    device_bytes: int = 0
    cpu_bytes: int = 0


def assign_tiers(
    shards: Sequence[ShardBytes],
    offload_param: OffloadConfig | None,
    offload_optimizer: OffloadConfig | None,
    budgets: Budgets,
) -> list[BucketTiers]:
    """Assigns a tier to every shard of every bucket, in layout order. Pure.

    Parameters come first: they are transferred several times in a step, optimizer states once.
    `budgets` are for "auto", if the configuration sets none.
    """
    left = _auto_budgets(offload_param, offload_optimizer, budgets)
    params = list(_choose([(s.param, s.param) for s in shards], offload_param, left))
    # Optimizer states that "auto" stores on the device or the CPU have their gradient there, too.
    trained = [(s.optim, s.optim + s.grad) for s in shards if s.is_trainable]
    chosen = _choose(trained, offload_optimizer, left)
    frozen = Tier.DEVICE  # for frozen buckets, if they are unfrozen later
    if offload_optimizer is not None:
        device = offload_optimizer.device
        frozen = Tier.CPU if device == "auto" else Tier(device)
    optims = []
    for shard in shards:
        if shard.is_trainable:
            optims.append(next(chosen))
        else:
            optims.append(frozen if shard.optim else Tier.DEVICE)
    cpu_bytes: float = left[Tier.CPU]
    if offload_optimizer is not None and offload_optimizer.device == "nvme":
        limit = offload_optimizer.max_in_cpu_bytes
        cpu_bytes = math.inf if limit is None else limit
    tiers = []
    for shard, param, optim in zip(shards, params, optims, strict=True):
        grad = optim
        if optim is Tier.NVME and shard.grad <= cpu_bytes:
            if shard.is_trainable:
                cpu_bytes -= shard.grad
            grad = Tier.CPU
        tiers.append(BucketTiers(param, optim, grad))
    return tiers


def _auto_budgets(
    param: OffloadConfig | None, optim: OffloadConfig | None, budgets: Budgets
) -> dict[Tier, int]:
    """Bytes that "auto" may use, by tier, the fastest first."""
    autos = [config for config in (param, optim) if config and config.device == "auto"]
    devices = [c.max_in_device_bytes for c in autos if c.max_in_device_bytes is not None]
    cpus = [c.max_in_cpu_bytes for c in autos if c.max_in_cpu_bytes is not None]
    return {
        Tier.DEVICE: max(devices, default=budgets.device_bytes),
        Tier.CPU: max(cpus, default=budgets.cpu_bytes),
    }


def _allocate(left: dict[Tier, int], nbytes: int) -> Tier:
    """Allocates `nbytes` of the fastest tier that has enough left."""
    for tier, free in left.items():
        if nbytes <= free:
            left[tier] -= nbytes
            return tier
    return Tier.NVME


def _choose(
    sizes: Sequence[tuple[int, int]], config: OffloadConfig | None, left: dict[Tier, int]
) -> Iterator[Tier]:
    """Yields the tier of each shard.

    `sizes`: by bucket, bytes of the shard, and bytes of the shard with its gradient, if it has one.
    """
    offloaded = seen = 0
    for nbytes, memory_bytes in sizes:
        if config is None or nbytes == 0:
            yield Tier.DEVICE
        elif config.device == "auto":
            yield _allocate(left, memory_bytes)
        else:
            # Spread evenly, so that the device steps its buckets while others are transferred.
            seen += nbytes
            if config.ratio > 0 and offloaded + nbytes / 2 <= config.ratio * seen:
                offloaded += nbytes
                yield Tier(config.device)
            else:
                yield Tier.DEVICE
