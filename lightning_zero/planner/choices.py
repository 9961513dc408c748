"""Choices of stage and offload, as settings and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_zero.layout.config import NEEDS, SELECTIVE, ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.plan import Plan, make_plan
from lightning_zero.layout.stage import STAGES
from lightning_zero.optim.blocks import state_blocks
from lightning_zero.optim.clone import parameters_of

__all__ = ["AUTO_STAGES", "Choice", "all_choices", "as_arguments", "auto_base", "plan_of"]

AUTO_STAGES = (1, 2, 3)  # 0 is the baseline
_STAGE_NAMES = {0: "off", 1: "stage1", 2: "stage2", 3: "stage3"}


@dataclass(frozen=True)
class Choice:
    """A stage with an offload.

    Attributes:
        zero: Stage, by its name for `zero=` in conf.
        offload: Offload, by its name for `offload=` in conf; "nvme with gradients" is nvme with
            `max_in_cpu_bytes=0`.
        config: Settings of this stage and offload.
    """

    zero: str
    offload: str
    config: ZeroConfig

    @property
    def name(self) -> str:
        return self.zero if self.offload == "none" else f"{self.zero}, offload={self.offload}"


def all_choices(
    base: ZeroConfig | None = None, *, stages: Sequence[int] = (0, 1, 2, 3)
) -> list[Choice]:
    """Every stage with every offload it supports; all other settings are those of `base`.

    Settings of `base` without a meaning in a stage are dropped there. NVMe path and buffers are
    those of `base`.
    """
    base = base or ZeroConfig()
    plain = base.replace(offload_optimizer=None, offload_param=None)
    nvme = _nvme_settings(base)
    both = {"offload_optimizer": nvme, "offload_param": nvme}
    offloads: dict[str, dict[str, Any]] = {
        "none": {},
        "cpu_optimizer": {"offload_optimizer": "cpu"},
        "cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"},
        "nvme_optimizer": {"offload_optimizer": nvme},
        "nvme": both,
        "nvme with gradients": {
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


def _nvme_settings(base: ZeroConfig) -> OffloadConfig:
    """NVMe path and buffers of the first offload in `base` that has them, else the defaults."""
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


def plan_of(
    config: ZeroConfig,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    world_size: int,
    full_optimizers: Collection[int],
) -> Plan:
    """Plan that an engine would make; for `full_optimizers` see `make_plan`."""
    return make_plan(
        module,
        config,
        world_size=world_size,
        optimizer_of={
            parameter: index
            for index, optimizer in enumerate(optimizers)
            for parameter in parameters_of(optimizer)
        },
        full_optimizers=full_optimizers,
        state_blocks=state_blocks(optimizers),
    )


def auto_base(settings: Mapping[str, Any]) -> ZeroConfig:
    """Checks settings given with `stage="auto"`: there must be a stage that has all of them."""
    failure: ValueError | None = None
    for stage in reversed(AUTO_STAGES):
        try:
            return ZeroConfig(stage=stage, **settings)
        except ValueError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def as_arguments(config: ZeroConfig) -> str:
    """Text of the call of `ZeroStrategy` that makes `config`."""
    arguments = [f"stage={config.stage}"]
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(config, name)
        if offload is not None and offload.max_in_cpu_bytes is not None:
            arguments.append(f'{name}=OffloadConfig("nvme", max_in_cpu_bytes=0)')
        elif offload is not None:
            arguments.append(f"{name}={offload.device!r}")
    checkpointed = config.checkpointed_modules
    if checkpointed is True:
        value = f'"{SELECTIVE}"' if config.saves_matmuls else "True"
        arguments.append(f"activation_checkpointing={value}")
    elif checkpointed:
        kinds = [k.__name__ if isinstance(k, type) else repr(k) for k in checkpointed]
        kinds += [repr(SELECTIVE)] if config.saves_matmuls else []
        arguments.append(f"activation_checkpointing=[{', '.join(kinds)}]")
    return f"ZeroStrategy({', '.join(arguments)})".replace("'", '"')
