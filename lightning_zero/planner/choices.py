"""Every stage with every offload that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.layout.config import NEEDS, ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES

__all__ = ["Choice", "all_choices"]

_STAGE_NAMES = {0: "off", 1: "stage1", 2: "stage2", 3: "stage3"}


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
    plain = base.replace(offload_optimizer=None, offload_param=None)
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
        Choice(_STAGE_NAMES[stage], name, plain.for_stage(stage).replace(**offload))
        for stage in stages
        for name, offload in offloads.items()
        if all(NEEDS[option].is_met_by(STAGES[stage]) for option in offload)
    ]


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
