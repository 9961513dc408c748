"""Every choice of stage and offload, what each takes, which fit, and the cheapest of those."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_zero.layout.config import NEEDS, ZeroConfig
from lightning_zero.layout.offload import (
    MAX_GRADS_IN_FLIGHT,
    NUM_UPLOAD_BLOCKS,
    UPLOAD_BLOCK_BYTES,
    OffloadConfig,
    Tier,
)
from lightning_zero.layout.plan import Plan, make_plan
from lightning_zero.layout.stage import STAGES
from lightning_zero.planner.memory import MemoryByRank, MemoryEstimator, RankMemory
from lightning_zero.planner.optimizers import StateSpec
from lightning_zero.planner.simulation import Peak, simulate_step
from lightning_zero.planner.trace import StepTrace, trace_without_activations
from lightning_zero.planner.traffic import Rates, Traffic, traffic_of

__all__ = [
    "Choice",
    "Estimate",
    "Job",
    "Machine",
    "all_choices",
    "cheapest",
    "estimate",
    "make_memory_estimator",
]

_STAGE_NAMES = {0: "off", 1: "stage1", 2: "stage2", 3: "stage3"}


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        zero: The stage, as `zero=` in conf names it.
        offload: As `offload=` in conf names it; "nvme with gradients" is nvme with
            `max_in_cpu_bytes=0`.
        config: The same as settings.
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


@dataclass(frozen=True)
class Machine:
    """What there is.

    Attributes:
        num_ranks: In all.
        ranks_per_node: That share one machine's memory and disk.
        device_bytes: For each rank; None: no bound.
        host_bytes: CPU memory of one machine; None: no bound.
        disk_bytes: Of one machine; None: no bound.
        has_device_memory: The device has memory of its own; else it is the CPU.
        rates: How fast bytes travel.
    """

    num_ranks: int
    ranks_per_node: int
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    has_device_memory: bool = True
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
        module: Meta tensors will do.
        optimizers: Over its parameters.
        trace: Of one micro-batch; None: activations are not counted.
        num_micro_batches: In one optimizer step.
        steps_by_bucket: Whether the optimizers' states may go to files.
        full_optimizers: Which of the optimizers must step whole tensors, as `make_plan`.
        averages: Of the weights; see `MemoryEstimator`.
        fallback: What optimizers are taken to keep that cannot step a toy; None: they are refused.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]
    trace: StepTrace | None = None
    num_micro_batches: int = 1
    steps_by_bucket: bool = True
    full_optimizers: Collection[int] = ()
    averages: Sequence[Tier] = ()
    fallback: StateSpec | None = None


@dataclass(frozen=True)
class Estimate:
    """What one choice takes, on the rank that takes most.

    Attributes:
        choice: Which.
        ranks: Between steps, on every rank.
        peak: On the device beside that, at most.
        staging_bytes: CPU memory for tensors on their way, beside the buffers of files.
        traffic: In one step.
        seconds: In one step, by kind of transfer, and of stepping on the CPU.
        machine: What there is.
    """

    choice: Choice
    ranks: MemoryByRank
    peak: Peak
    staging_bytes: int
    traffic: Traffic
    seconds: Mapping[str, float]
    machine: Machine

    @property
    def rank_memory(self) -> RankMemory:
        """Between steps, on the largest rank."""
        return self.ranks.by_rank[self.ranks.largest]

    @property
    def device_bytes(self) -> int:
        """The most on the device; on the CPU, the most in memory."""
        own = self.rank_memory.tier_bytes(Tier.DEVICE) + self._beside_states
        cpu = self.rank_memory.tier_bytes(Tier.CPU) + self._buffers
        return own if self.machine.has_device_memory else own + cpu

    @property
    def _beside_states(self) -> int:
        return self.rank_memory.module_buffer_bytes + self.peak.total_bytes

    @property
    def _buffers(self) -> int:
        return self.rank_memory.nvme_buffer_bytes + self.staging_bytes

    @property
    def host_bytes(self) -> int:
        """CPU memory of one machine, for all its ranks."""
        per_node = self.machine.ranks_per_node
        nbytes = self.ranks.node_bytes(Tier.CPU, per_node) + self._buffers * per_node
        if not self.machine.has_device_memory:
            nbytes += self.ranks.node_bytes(Tier.DEVICE, per_node)
            nbytes += self._beside_states * per_node
        return nbytes

    @property
    def disk_bytes(self) -> int:
        """Files of all ranks of one machine."""
        return self.ranks.node_bytes(Tier.NVME, self.machine.ranks_per_node)

    @property
    def missing_bytes(self) -> dict[str, int]:
        """By what is too small, bytes that are missing; empty where all fits."""
        limits = {
            "device memory": (self.device_bytes, self.machine.device_bytes),
            "host memory": (self.host_bytes, self.machine.host_bytes),
            "disk": (self.disk_bytes, self.machine.disk_bytes),
        }
        return {
            name: needed - limit
            for name, (needed, limit) in limits.items()
            if limit is not None and needed > limit
        }

    @property
    def fits(self) -> bool:
        """Nothing is too small."""
        return not self.missing_bytes

    @property
    def transfer_seconds(self) -> tuple[float, float]:
        """All transfers of a step, and stepping on the CPU: all at once, and one after another."""
        return max(self.seconds.values()), sum(self.seconds.values())

    @property
    def cost(self) -> tuple[float, bool, int, int]:
        """What is cheaper sorts first: less time, nothing to wait for in forward, fewer bytes."""
        gathers = self.choice.config.states.shards_params
        nbytes = sum(self.rank_memory.tier_bytes(tier) for tier in Tier)
        return sum(self.seconds.values()), gathers, nbytes, self.choice.config.stage


def make_memory_estimator(choice: Choice, job: Job, machine: Machine) -> MemoryEstimator:
    """Counts what rests on each rank under `choice`.

    Raises:
        ValueError: The module cannot be planned; see `make_plan`.
    """
    config = choice.config
    plan = make_plan(
        job.module,
        config,
        world_size=config.group_size(local_world_size=machine.ranks_per_node) or machine.num_ranks,
        optimizer_of={
            parameter: index
            for index, optimizer in enumerate(job.optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        },
        full_optimizers=job.full_optimizers,
    )
    return MemoryEstimator(
        plan,
        job.module,
        job.optimizers,
        offloads=config.offloads,
        has_device_memory=machine.has_device_memory,
        accumulates=job.num_micro_batches > 1,
        steps_by_bucket=job.steps_by_bucket,
        averages=job.averages,
        fallback=job.fallback,
    )


def estimate(choice: Choice, job: Job, machine: Machine) -> Estimate:
    """What `choice` takes.

    Raises:
        ValueError: The module cannot be planned; see `make_plan`.
    """
    estimator = make_memory_estimator(choice, job, machine)
    plan, ranks, on_gloo = estimator.plan, estimator.ranks(), not machine.has_device_memory
    peak = simulate_step(
        plan,
        choice.config,
        job.trace or trace_without_activations(plan),
        on_gloo=on_gloo,
        has_device_memory=machine.has_device_memory,
        accumulates=estimator.accumulates,
        rank=ranks.largest,
    )
    traffic = traffic_of(
        estimator,
        peak.num_all_gathers,
        on_gloo=on_gloo,
        num_micro_batches=job.num_micro_batches,
        rank=ranks.largest,
    )
    staging = _staging_bytes(plan, estimator.accumulates) if machine.has_device_memory else 0
    seconds = traffic.seconds(machine.rates, machine.ranks_per_node)
    return Estimate(choice, ranks, peak, staging, traffic, seconds, machine)


def _staging_bytes(plan: Plan, accumulates: bool) -> int:
    """CPU memory for means on their way to files or to be added, and for stepped parameters."""
    means = [
        bucket.layout.shard_numel * plan.grad_dtype(bucket).itemsize
        for bucket in plan.buckets
        if bucket.tiers.grad is Tier.NVME or (bucket.tiers.grad is Tier.CPU and accumulates)
    ]
    is_uploaded = any(
        b.tiers.optim is not Tier.DEVICE and b.tiers.param is Tier.DEVICE for b in plan.buckets
    )
    of_blocks = NUM_UPLOAD_BLOCKS * UPLOAD_BLOCK_BYTES
    return MAX_GRADS_IN_FLIGHT * max(means, default=0) + of_blocks * is_uploaded


def cheapest(estimates: Sequence[Estimate], count: int = 1) -> list[Estimate]:
    """The cheapest of those that fit, the best first."""
    return sorted((e for e in estimates if e.fits), key=lambda e: e.cost)[:count]
