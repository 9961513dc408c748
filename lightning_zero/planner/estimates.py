"""Estimates for every choice of stage and offload: which fit, and which of those is cheapest."""

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
from lightning_zero.layout.stage import STAGES, State
from lightning_zero.optim.state_sizes import StateSpec
from lightning_zero.planner.engine_run import EngineRuns, Peak, RankOfGroup
from lightning_zero.planner.memory import MemoryByRank, MemoryEstimator, RankMemory
from lightning_zero.planner.no_step import peak_without_step
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


@dataclass(frozen=True)
class Machine:
    """Hardware of a job.

    Attributes:
        num_ranks: Number of ranks on all nodes.
        ranks_per_node: Number of ranks that share the memory and the disk of one node.
        device_bytes: Device memory of each rank; None: unlimited.
        host_bytes: CPU memory of one node; None: unlimited.
        disk_bytes: Disk of one node; None: unlimited.
        has_device_memory: Whether the device has memory of its own. False: the device is the CPU.
        rates: Bandwidths.
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
    """Model, optimizers and step of a job.

    Attributes:
        module: Model; its tensors may be on the meta device.
        optimizers: Optimizers of its parameters.
        runs: Runs of the engine with a step of the job; None: formulas, without activations.
        num_micro_batches: Number of micro-batches in an optimizer step.
        steps_by_bucket: Whether optimizer states may be stored on NVMe.
        full_optimizers: Indices of the optimizers that step full tensors; see `make_plan`.
        averages: Averages of the weights; see `MemoryEstimator`.
        fallback: States assumed for an optimizer that cannot be probed; None: such an optimizer
            raises an error.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]
    runs: EngineRuns | None = None
    num_micro_batches: int = 1
    steps_by_bucket: bool = True
    full_optimizers: Collection[int] = ()
    averages: Sequence[Tier] = ()
    fallback: StateSpec | None = None


@dataclass(frozen=True)
class Estimate:
    """Memory and traffic of one choice, on the rank that needs most.

    Attributes:
        choice: Stage and offload.
        ranks: Model states between steps, on every rank.
        peak: Peak of device memory during a step, without the model states.
        staging_bytes: CPU memory for tensors in transfer, without the NVMe buffers.
        traffic: Bytes that one step transfers.
        seconds: Seconds of one step by kind of transfer, and of the optimizer step on the CPU.
        machine: Hardware of the job.
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
        """Model states between steps, on the rank that has most."""
        return self.ranks.by_rank[self.ranks.largest]

    @property
    def device_bytes(self) -> int:
        """Peak of device memory on one rank; on the CPU, of all its memory."""
        own = self.rank_memory.tier_bytes(Tier.DEVICE) + self._step_bytes
        cpu = self.rank_memory.tier_bytes(Tier.CPU) + self._cpu_buffer_bytes
        return own if self.machine.has_device_memory else own + cpu

    @property
    def _step_bytes(self) -> int:
        return self.rank_memory.module_buffer_bytes + self.peak.total_bytes

    @property
    def _cpu_buffer_bytes(self) -> int:
        return self.rank_memory.nvme_buffer_bytes + self.staging_bytes

    @property
    def host_bytes(self) -> int:
        """CPU memory of one node, for all its ranks."""
        per_node = self.machine.ranks_per_node
        nbytes = self.ranks.node_bytes(Tier.CPU, per_node)
        nbytes += self._cpu_buffer_bytes * per_node
        if not self.machine.has_device_memory:
            nbytes += self.ranks.node_bytes(Tier.DEVICE, per_node)
            nbytes += self._step_bytes * per_node
        return nbytes

    @property
    def disk_bytes(self) -> int:
        """NVMe files of all ranks of one node."""
        return self.ranks.node_bytes(Tier.NVME, self.machine.ranks_per_node)

    @property
    def missing_bytes(self) -> dict[str, int]:
        """Missing bytes by name of the memory that is too small; empty if the choice fits."""
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
        """Whether all memory is large enough."""
        return not self.missing_bytes

    @property
    def transfer_seconds(self) -> tuple[float, float]:
        """Seconds of all transfers and CPU steps of a step: fully overlapped, and in sequence."""
        return max(self.seconds.values()), sum(self.seconds.values())

    @property
    def cost(self) -> tuple[float, bool, int, int]:
        """Sort key: least time first, then no all-gathers in forward, then fewest bytes."""
        shards_params = self.choice.config.states.shards_params
        nbytes = sum(self.rank_memory.tier_bytes(tier) for tier in Tier)
        return sum(self.seconds.values()), shards_params, nbytes, self.choice.config.stage


def make_memory_estimator(choice: Choice, job: Job, machine: Machine) -> MemoryEstimator:
    """Estimator of the model states on each rank under `choice`.

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
    """Estimates memory and traffic of `choice`.

    Raises:
        ValueError: The module cannot be planned, see `make_plan`; or its step cannot run.
    """
    estimator = make_memory_estimator(choice, job, machine)
    plan, ranks, on_gloo = estimator.plan, estimator.ranks(), not machine.has_device_memory
    rank, memory = ranks.largest, ranks.by_rank[ranks.largest]
    if job.runs is None:
        peak = peak_without_step(plan, choice.config, on_gloo=on_gloo, rank=rank)
    else:
        grad_bytes = memory.tiers[Tier.DEVICE][State.GRAD]
        of = RankOfGroup(rank, plan.world_size, machine.has_device_memory, grad_bytes)
        peak = job.runs.peak(choice.config, of)
    traffic = traffic_of(
        estimator,
        peak.num_all_gathers,
        on_gloo=on_gloo,
        num_micro_batches=job.num_micro_batches,
        rank=rank,
    )
    staging = _staging_bytes(plan, estimator.accumulates) if machine.has_device_memory else 0
    seconds = traffic.seconds(machine.rates, machine.ranks_per_node)
    return Estimate(choice, ranks, peak, staging, traffic, seconds, machine)


def _staging_bytes(plan: Plan, accumulates: bool) -> int:
    """CPU memory for gradients in transfer or accumulation, and for stepped parameters."""
    grad_bytes = [
        bucket.layout.shard_numel * plan.grad_dtype(bucket).itemsize
        for bucket in plan.buckets
        if bucket.tiers.grad is Tier.NVME or (bucket.tiers.grad is Tier.CPU and accumulates)
    ]
    is_uploaded = any(
        b.tiers.optim is not Tier.DEVICE and b.tiers.param is Tier.DEVICE for b in plan.buckets
    )
    nbytes = MAX_GRADS_IN_FLIGHT * max(grad_bytes, default=0)
    if is_uploaded:
        nbytes += NUM_UPLOAD_BLOCKS * UPLOAD_BLOCK_BYTES
    return nbytes


def cheapest(estimates: Sequence[Estimate], count: int = 1) -> list[Estimate]:
    """The `count` cheapest estimates that fit, cheapest first."""
    return sorted((e for e in estimates if e.fits), key=lambda e: e.cost)[:count]
