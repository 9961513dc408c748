"""Every stage with every offload that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES, Stage, State

__all__ = ["Choice", "all_choices"]

_STAGE_NAMES = {0: "off", 1: "stage1", 2: "stage2", 3: "stage3"}
_OF_SOME_STAGES = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "reshard_after_forward",
    "allgather_bucket_size",
    "overlap_step",
    "sharding_group_size",
)


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        zero: The stage, as `zero=` in conf names it.
        offload: As `offload=` in conf names it; "nvme, gradients too" is nvme with
            `max_in_cpu_bytes=0`.
        config: The same as settings.
    """

    zero: str
    offload: str
    config: ZeroConfig

    @property
    def name(self) -> str:
        """Both."""
        return self.zero if self.offload == "none" else f"{self.zero}, offload={self.offload}"


def all_choices(
    base: ZeroConfig | None = None, *, stages: Sequence[int] = (0, 1, 2, 3)
) -> list[Choice]:
    """Every stage with every offload that it has, else as `base`.

    Settings of `base` that have no meaning in a stage are left out there. Folder and buffers of
    files are those of `base`.
    """
    base = base or ZeroConfig()
    nvme = _files_like(base)
    both = {"offload_optimizer": nvme, "offload_param": nvme}
    offloads: dict[str, dict[str, Any]] = {
        "none": {},
        "cpu_optimizer": {"offload_optimizer": "cpu"},
        "cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"},
        "nvme_optimizer": {"offload_optimizer": nvme},
        "nvme": both,
        "nvme, gradients too": {
            **both,
            "offload_optimizer": dataclasses.replace(nvme, max_in_cpu_bytes=0),
        },
    }
    return [
        Choice(_STAGE_NAMES[stage], name, _config(base, stage, offload))
        for stage in stages
        for name, offload in offloads.items()
        if _has_meaning(STAGES[stage], offload)
    ]


def _has_meaning(stage: Stage, offload: Mapping[str, Any]) -> bool:
    wanted = {"offload_optimizer": State.OPTIM, "offload_param": State.PARAM}
    return all(stage.has_shard(wanted[name]) for name in offload)


def _files_like(base: ZeroConfig) -> OffloadConfig:
    """How files are used: as the settings say, wherever they say it."""
    for config in base.offloads:
        if config is not None and config.device != "cpu":
            return OffloadConfig(
                "nvme",
                nvme_path=config.nvme_path,
                buffer_count=config.buffer_count,
                buffer_size=config.buffer_size,
                pin_memory=config.pin_memory,
            )
    return OffloadConfig("nvme")


def _config(base: ZeroConfig, stage: int, offload: Mapping[str, Any]) -> ZeroConfig:
    changes: dict[str, Any] = {"offload_optimizer": None, "offload_param": None, **offload}
    plain = dict.fromkeys(_OF_SOME_STAGES)
    config = base.replace(stage=stage, **{**plain, "overlap_step": False, **changes})
    for name in _OF_SOME_STAGES:
        try:
            config = config.replace(**{name: getattr(base, name)})
        except ValueError:
            continue  # no meaning in this stage
    return config
