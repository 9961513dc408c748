"""Estimate of a choice of stage and offload: its memory, its traffic, and whether it fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from lightning_zero.engine.expected import MemoryByRank, Tiers, expected_bytes
from lightning_zero.layout.flat import OwnedLayout
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import Plan
from lightning_zero.layout.stage import State
from lightning_zero.planner.choices import Choice, plan_of
from lightning_zero.planner.counts import Counts
from lightning_zero.planner.engine_run import EngineRuns, RankOfGroup

__all__ = ["Estimate", "Machine", "Rates", "estimate", "exchanged_bytes", "with_recompute"]


@dataclass(frozen=True)
class Rates:
    """Bandwidths in bytes per second.

    The defaults are assumptions. Each rank has a 200 Gbit/s network card or 25 GB/s of NVLink, and
    PCIe 3.0 x16. The ranks of a node share one NVMe disk and the memory of a two-socket server.

    Attributes:
        link: Bandwidth of one rank to other ranks, in each direction.
        cpu_link: Bandwidth of one rank between device and CPU memory, in each direction.
        nvme: Bandwidth of a node's disk, reads and writes together.
        memory: Bandwidth of a node's CPU memory, for optimizer steps on the CPU.
    """

    link: float = 25e9
    cpu_link: float = 12e9
    nvme: float = 3e9
    memory: float = 100e9


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
class Estimate:
    """Memory and traffic of one choice, on the rank that needs most.

    Attributes:
        choice: Stage and offload.
        ranks: Model states between steps, on every rank.
        counts: Bytes of one rank, from a run of the engine.
        of: That rank.
        sent_bytes: Bytes that the rank sends to other ranks in a step; it receives as many.
        module_buffer_bytes: Bytes of the module's buffers, which are replicated on the devices.
        machine: Hardware of the job.
    """

    choice: Choice
    ranks: MemoryByRank
    counts: Counts
    of: RankOfGroup
    sent_bytes: int
    module_buffer_bytes: int
    machine: Machine

    @property
    def tiers(self) -> Tiers:
        """Model states between steps, on the rank that has most."""
        return self.ranks.by_rank[self.ranks.largest]

    @property
    def device_bytes(self) -> int:
        """Peak of device memory on one rank; on the CPU, of all its memory."""
        own = self.ranks.most_bytes(Tier.DEVICE) + self._step_bytes
        cpu = self.ranks.most_bytes(Tier.CPU) + self._cpu_buffer_bytes
        return own if self.machine.has_device_memory else own + cpu

    @property
    def _step_bytes(self) -> int:
        return self.module_buffer_bytes + self.counts.peak.total_bytes

    @property
    def _cpu_buffer_bytes(self) -> int:
        return self.counts.nvme_buffer_bytes + self.counts.staging_bytes

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
        rates, counts, per_node = self.machine.rates, self.counts, self.machine.ranks_per_node
        seconds = (
            self.sent_bytes / rates.link,
            max(counts.to_cpu, counts.from_cpu) / rates.cpu_link,
            (counts.read + counts.written) * per_node / rates.nvme,
            counts.cpu_step * per_node / rates.memory,
        )
        return max(seconds), sum(seconds)

    @property
    def cost(self) -> tuple[float, bool, int, int]:
        """Sort key: least time first, then no all-gathers in forward, then fewest bytes."""
        shards_params = self.choice.config.states.shards_params
        nbytes = sum(map(self.ranks.most_bytes, Tier))
        return self.transfer_seconds[1], shards_params, nbytes, self.choice.config.stage


def estimate(choice: Choice, runs: EngineRuns, machine: Machine) -> Estimate:
    """Estimates memory and traffic of `choice`.

    Raises:
        ValueError: The module cannot be planned, see `make_plan`; or its step cannot run.
    """
    config, rank = choice.config, 0
    size = config.group_size(local_world_size=machine.ranks_per_node) or machine.num_ranks
    owned: MemoryByRank | None = None
    exchanged = 0
    if runs.full_optimizers and config.states.has_shard(State.OPTIM):
        plan = plan_of(config, runs.module, runs.optimizers, size, runs.full_optimizers)
        owned = expected_bytes(
            plan,
            parameters_by_name(runs.module),
            runs.optimizers,
            has_device_memory=machine.has_device_memory,
            accumulates=runs.num_micro_batches > 1,
        )
        rank = owned.largest
        exchanged = exchanged_bytes(plan, rank)
    of = RankOfGroup(rank, size, machine.has_device_memory)
    counts = runs.count(config, of)
    return Estimate(
        choice,
        MemoryByRank(tuple(counts.with_averages(t) for t in (owned or counts).by_rank)),
        counts,
        of,
        counts.sent + exchanged,
        sum(b.numel() * b.element_size() for b in runs.module.buffers()),
        machine,
    )


def with_recompute(plain: Estimate, runs: EngineRuns) -> Estimate:
    """The same choice with activation checkpointing of the repeated blocks.

    Raises:
        ValueError: As for `estimate`.
    """
    choice = plain.choice
    peak = runs.recomputed_peak(choice.config, plain.of)
    config = choice.config.replace(activation_checkpointing=True)
    return dataclasses.replace(
        plain,
        choice=dataclasses.replace(choice, config=config),
        counts=dataclasses.replace(plain.counts, peak=peak),
    )


def exchanged_bytes(plan: Plan, rank: int) -> int:
    """Bytes of full tensors that a rank sends in a step.

    It sends the slices of parameters and gradients that it has to their owners, and the new values
    of its own tensors to the ranks that have slices of them. A run does not show what other ranks
    own, nor what this rank owns among all blocks.
    """
    nbytes = 0
    for bucket in plan.buckets:
        if bucket.is_trainable and bucket.layout.has_tensor_owners:
            owned, itemsize = OwnedLayout(bucket.layout, rank), bucket.master_dtype.itemsize
            sent, returned = (
                sum(numels) - numels[rank] for numels in (owned.shard_numels, owned.numels)
            )
            nbytes += sent * (itemsize + plan.grad_dtype(bucket).itemsize) + returned * itemsize
    return nbytes
