"""Where shards rest: tiers, what a user asks for, and which bucket gets which tier.

    offload_optimizer="cpu"              every optimizer shard in CPU memory, stepped there
    OffloadConfig("cpu", ratio=0.5)      every second bucket; the others stay on the device
    OffloadConfig("auto", ...)           device, then CPU, then NVMe, each up to its budget

A bucket is the unit: one state of a model may span three tiers, the shard of one bucket may not.
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

PAGE_BYTES = 4096  # what O_DIRECT wants memory, offsets and lengths to be a multiple of
MAX_GRADS_IN_FLIGHT = 2  # of gradients that leave the device
UPLOAD_BLOCK_BYTES = 2**23  # in which what was stepped on the CPU goes to a device
NUM_UPLOAD_BLOCKS = 2
_DEVICES = ("cpu", "nvme", "auto")
_PATH_VARIABLES = ("LIGHTNING_ZERO_NVME_PATH", "SLURM_TMPDIR")


def padded_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of `numel` elements, rounded up to whole pages."""
    return -(-numel * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES


class Tier(Enum):
    """Where a shard rests between its uses."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"

    def is_offloaded(self, *, has_device_memory: bool) -> bool:
        """Whether a tensor of the device must travel to rest here.

        `has_device_memory`: CPU memory is other memory than the device's.
        """
        return self is Tier.NVME or (self is Tier.CPU and has_device_memory)


@dataclass(frozen=True)
class OffloadConfig:
    """Where the shards of one state rest, and with which buffers they travel.

    Bytes may be written as 8589934592, 8e9, "8GB" (of 10^9) or "8GiB" (of 2^30).

    Attributes:
        device: "cpu", "nvme", or "auto": fill the device, then CPU memory, then NVMe.
        nvme_path: Folder on a local disk. None: `$LIGHTNING_ZERO_NVME_PATH`, `$SLURM_TMPDIR` or the
            temporary folder of the system.
        pin_memory: Page-lock CPU memory, so that transfers from and to a CUDA device run beside its
            computation. Without CUDA it has no effect.
        buffer_count: NVMe: number of CPU buffers through which shards travel.
        buffer_size: NVMe: elements of 4 bytes in each buffer.
        ratio: Share of the elements that is offloaded, by buckets; the others stay on the device.
        max_in_cpu_bytes: CPU memory of this rank for shards at rest. "nvme": for gradients, which
            go to NVMe beyond it; None: no bound. "auto": for the CPU tier; None: half of what is
            available, divided by the ranks of the machine.
        max_in_device_bytes: "auto": device memory for shards; None: half of what is free at set-up.

    Raises:
        ValueError: A value out of range, or one that has no meaning with this device.
        TypeError: A value of the wrong type.
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
                "max_in_cpu_bytes needs device 'nvme' or 'auto': with 'cpu' everything offloaded "
                "is in CPU memory; use 'auto' to go on to NVMe beyond it."
            )
        if self.max_in_device_bytes is not None and self.device != "auto":
            raise ValueError(
                f"max_in_device_bytes needs device 'auto', got {self.device!r}; use ratio to keep "
                "a share on the device."
            )
        if self.ratio != 1.0 and self.device == "auto":
            raise ValueError(
                "ratio needs device 'cpu' or 'nvme', got 'auto', which divides by budgets; use "
                "max_in_device_bytes."
            )

    @property
    def buffer_size_bytes(self) -> int:
        """`buffer_size` in bytes."""
        return 4 * self.buffer_size

    @property
    def total_buffer_bytes(self) -> int:
        """Of all buffers."""
        return self.buffer_count * self.buffer_size_bytes

    @classmethod
    def of(cls, name: str, value: object) -> OffloadConfig | None:
        """What a user gave for setting `name`: None, a device, a mapping or a config.

        Raises:
            ValueError: An unknown device or key.
            TypeError: Something else.
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
        """Somebody has said where files may go."""
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
    """Whose buffers a step uses: it moves states in files, or else parameters in files."""
    chosen = optimizer if optimizer is not None and optimizer.device != "cpu" else param
    return chosen or OffloadConfig()


@dataclass(frozen=True)
class ShardBytes:
    """Bytes of one bucket's shards on one rank."""

    param: int  # 0 where they rest whole
    # Master, where it is a tensor of its own, and two moments as Adam keeps them: how much an
    # optimizer keeps is known after its first step only.
    optim: int
    grad: int  # the mean
    # The optimizer steps it from the beginning. What is frozen takes its parameters until it is
    # unfrozen, and a master where they have lost bits.
    is_trainable: bool = True


@dataclass(frozen=True)
class BucketTiers:
    """Where the shards of one bucket rest. The gradient goes to where the optimizer steps."""

    param: Tier = Tier.DEVICE
    optim: Tier = Tier.DEVICE
    grad: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Budgets:
    """What "auto" may use of this rank's share of the memory, in bytes."""

    device_bytes: int = 0
    cpu_bytes: int = 0


def assign_tiers(
    shards: Sequence[ShardBytes],
    offload_param: OffloadConfig | None,
    offload_optimizer: OffloadConfig | None,
    budgets: Budgets,
) -> list[BucketTiers]:
    """A tier for every shard of every bucket, in layout order. Pure.

    Parameters choose first: they travel several times in a step, optimizer states once. `budgets`
    are for "auto", where the configuration names none.
    """
    left = _room(offload_param, offload_optimizer, budgets)
    params = list(_choose([(s.param, s.param) for s in shards], offload_param, left))
    # What "auto" puts on the device or into CPU memory brings its gradient along.
    trained = [(s.optim, s.optim + s.grad) for s in shards if s.is_trainable]
    chosen = _choose(trained, offload_optimizer, left)
    frozen = Tier.DEVICE  # where what is frozen would rest once it is unfrozen
    if offload_optimizer is not None:
        device = offload_optimizer.device
        frozen = Tier.CPU if device == "auto" else Tier(device)
    optims = [
        next(chosen) if s.is_trainable else frozen if s.optim else Tier.DEVICE for s in shards
    ]
    cpu_bytes: float = left[Tier.CPU]
    if offload_optimizer is not None and offload_optimizer.device == "nvme":
        limit = offload_optimizer.max_in_cpu_bytes
        cpu_bytes = math.inf if limit is None else limit
    tiers = []
    for shard, param, optim in zip(shards, params, optims, strict=True):
        grad = optim
        if optim is Tier.NVME and shard.grad <= cpu_bytes:
            cpu_bytes -= shard.grad * shard.is_trainable
            grad = Tier.CPU
        tiers.append(BucketTiers(param, optim, grad))
    return tiers


def _room(
    param: OffloadConfig | None, optim: OffloadConfig | None, budgets: Budgets
) -> dict[Tier, int]:
    """Bytes for "auto", the fastest tier first."""
    asked = [config for config in (param, optim) if config and config.device == "auto"]
    devices = [c.max_in_device_bytes for c in asked if c.max_in_device_bytes is not None]
    cpus = [c.max_in_cpu_bytes for c in asked if c.max_in_cpu_bytes is not None]
    return {
        Tier.DEVICE: max(devices, default=budgets.device_bytes),
        Tier.CPU: max(cpus, default=budgets.cpu_bytes),
    }


def _pay(left: dict[Tier, int], nbytes: int) -> Tier:
    """The fastest tier that still has room, of which so many are taken."""
    for tier, room in left.items():
        if nbytes <= room:
            left[tier] -= nbytes
            return tier
    return Tier.NVME


def _choose(
    sizes: Sequence[tuple[int, int]], config: OffloadConfig | None, left: dict[Tier, int]
) -> Iterator[Tier]:
    """By bucket, a tier for its shard.

    `sizes` are, by bucket, bytes of the shard, and bytes in memory with what comes along.
    """
    offloaded = seen = 0
    for nbytes, memory_bytes in sizes:
        if config is None or nbytes == 0:
            yield Tier.DEVICE
        elif config.device == "auto":
            yield _pay(left, memory_bytes)
        else:
            # Spread evenly, so that the device steps its buckets while others travel.
            seen += nbytes
            is_offloaded = config.ratio > 0 and offloaded + nbytes / 2 <= config.ratio * seen
            offloaded += nbytes * is_offloaded
            yield Tier(config.device) if is_offloaded else Tier.DEVICE
