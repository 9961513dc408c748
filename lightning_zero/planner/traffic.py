"""Bytes that one rank transfers in one step, between ranks and between tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero.layout.flat import OwnedLayout
from lightning_zero.layout.offload import Tier, padded_bytes
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.layout.stage import State
from lightning_zero.planner.memory import MemoryEstimator

__all__ = ["Rates", "Traffic", "traffic_of"]


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
class Traffic:
    """Bytes that one rank transfers in one optimizer step.

    Attributes:
        wire: Bytes sent to other ranks; the rank receives as many.
        to_cpu: Bytes copied from the device to CPU memory.
        from_cpu: Bytes copied from CPU memory to the device.
        nvme_read: Bytes read from NVMe files.
        nvme_written: Bytes written to NVMe files.
        cpu_step: Bytes that optimizer steps on the CPU read and write in CPU memory.
    """

    wire: int = 0
    to_cpu: int = 0
    from_cpu: int = 0
    nvme_read: int = 0
    nvme_written: int = 0
    cpu_step: int = 0

    def seconds(self, rates: Rates, ranks_per_node: int) -> dict[str, float]:
        """Minimum seconds of each kind of transfer, and of optimizer steps on the CPU."""
        return {
            "wire": self.wire / rates.link,
            "cpu link": max(self.to_cpu, self.from_cpu) / rates.cpu_link,
            "nvme": (self.nvme_read + self.nvme_written) * ranks_per_node / rates.nvme,
            "cpu step": self.cpu_step * ranks_per_node / rates.memory,
        }


def traffic_of(
    estimator: MemoryEstimator,
    num_all_gathers: Mapping[str, int],
    *,
    on_gloo: bool = False,
    num_micro_batches: int = 1,
    rank: int = 0,
) -> Traffic:
    """Traffic of all buckets of a plan.

    Args:
        estimator: Memory estimator of the plan.
        num_all_gathers: Number of all-gathers before use in one micro-batch, by bucket, as in
            `Peak`.
        on_gloo: Whether gradients are sent in the dtype of the parameters (gloo) or in that of the
            reduced gradient (NCCL).
        num_micro_batches: Number of micro-batches in a step.
        rank: Rank whose shards are counted, where ranks differ.
    """
    sums = [0] * 6
    for bucket in estimator.plan.buckets:
        all_gathers = num_all_gathers.get(bucket.name, 0) * num_micro_batches
        if bucket.stage.all_gathers_after_step and bucket.is_trainable:
            all_gathers += 1
        reductions = num_micro_batches if bucket.stage.reduces_every_backward else 1
        parts = (
            _wire(estimator, bucket, rank, all_gathers, reductions, on_gloo),
            *_tiers(estimator, bucket, rank, all_gathers, reductions),
        )
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return Traffic(*sums)


def _wire(
    estimator: MemoryEstimator,
    bucket: BucketPlan,
    rank: int,
    all_gathers: int,
    reductions: int,
    on_gloo: bool,
) -> int:
    """Bytes sent to other ranks: own shards in all-gathers, gradients of theirs in reductions.

    With tensor owners also slices of parameters and gradients, and the new values of full tensors.
    """
    grad_itemsize = estimator.plan.grad_dtype(bucket).itemsize
    is_wide = not on_gloo or (estimator.accumulates and not bucket.stage.has_shard(State.GRAD))
    if not bucket.stage.has_shard(State.OPTIM):
        itemsize = 2 * grad_itemsize  # an all-reduce is a reduce-scatter and an all-gather
    else:
        itemsize = grad_itemsize if is_wide else bucket.dtype.itemsize
    own = len(bucket.layout.shard(rank))
    nbytes = (bucket.layout.world_size - 1) * own * all_gathers * bucket.dtype.itemsize
    if bucket.is_trainable:
        nbytes += (bucket.layout.numel - own) * reductions * itemsize
        if bucket.stage.has_shard(State.OPTIM) and bucket.layout.has_tensor_owners:
            owned = OwnedLayout(bucket.layout, rank)
            sent, returned = (
                sum(numels) - numels[rank] for numels in (owned.shard_numels, owned.numels)
            )
            nbytes += sent * (bucket.master_dtype.itemsize + grad_itemsize)
            nbytes += returned * bucket.master_dtype.itemsize
    return nbytes


def _tiers(
    estimator: MemoryEstimator, bucket: BucketPlan, rank: int, all_gathers: int, reductions: int
) -> tuple[int, int, int, int, int]:
    """Bytes copied to and from CPU memory, read and written on NVMe, and accessed by CPU steps."""
    numel, tiers = len(bucket.layout.shard(rank)), bucket.tiers
    has_device_memory = estimator.has_device_memory
    param = numel * bucket.dtype.itemsize
    grad = numel * estimator.plan.grad_dtype(bucket).itemsize
    to_cpu = from_cpu = read = written = cpu_step = 0
    if bucket.stage.has_shard(State.PARAM):
        if has_device_memory and tiers.param is not Tier.DEVICE:
            from_cpu += all_gathers * param
        if tiers.param is Tier.NVME:
            read += all_gathers * padded_bytes(numel, bucket.dtype)
    if not bucket.is_trainable:
        return to_cpu, from_cpu, read, written, cpu_step
    for is_read, is_written, nbytes in estimator.stepped_files(bucket, rank):
        if is_read:
            read += nbytes
        if is_written:
            written += nbytes
    if tiers.grad is Tier.NVME:
        nbytes = padded_bytes(numel, estimator.plan.grad_dtype(bucket))
        written += reductions * nbytes
        read += (reductions - 1) * nbytes
    if has_device_memory:
        arriving, leaving = _step_copies(bucket, numel)
        to_cpu += arriving
        from_cpu += leaving
    if tiers.optim is not Tier.DEVICE:
        if has_device_memory:
            to_cpu += reductions * grad
        states = estimator.states.of(estimator.parameter(bucket, 0), bucket.master_dtype)
        cpu_step += grad + 2 * numel * (bucket.master_dtype.itemsize + states.element_bytes)
    return to_cpu, from_cpu, read, written, cpu_step


def _step_copies(bucket: BucketPlan, numel: int) -> tuple[int, int]:
    """Bytes of parameters that a step copies to and from CPU memory, for a shard of `numel`.

    The step reads and writes main parameters where they are stored. Values of parameters beside
    them are cast on the CPU, before or after they are copied.
    """
    steps_on_cpu, param_on_cpu = (
        tier is not Tier.DEVICE for tier in (bucket.tiers.optim, bucket.tiers.param)
    )
    if steps_on_cpu is param_on_cpu:
        return 0, 0
    param, master = numel * bucket.dtype.itemsize, numel * bucket.master_dtype.itemsize
    if not bucket.master.is_separate:
        return master, master
    return (0, param) if steps_on_cpu else (master, 0)
