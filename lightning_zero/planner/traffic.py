"""Bytes that one rank moves in one step, between ranks and between tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero.layout.offload import Tier, padded_bytes
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.layout.stage import State
from lightning_zero.planner.memory import MemoryEstimator

__all__ = ["Rates", "Traffic", "traffic_of"]


@dataclass(frozen=True)
class Rates:
    """Bytes per second of one rank, if it has the link for itself.

    The defaults are assumptions: a 200 Gbit/s network card or 25 GB/s of NVLink for each rank, PCIe
    3.0 x16, one NVMe disk and the memory of a server of two sockets for all ranks of a machine.

    Attributes:
        link: Between ranks, in each direction.
        cpu_link: Between a device and CPU memory, in each direction.
        nvme: Of a machine's disk, reading and writing together.
        memory: Of a machine's CPU memory, for what is stepped on the CPU.
    """

    link: float = 25e9
    cpu_link: float = 12e9
    nvme: float = 3e9
    memory: float = 100e9


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank in one optimizer step.

    Attributes:
        wire: Sent to other ranks; as much is received.
        to_cpu: From the device to CPU memory.
        from_cpu: From CPU memory to the device.
        nvme_read: From files.
        nvme_written: To files.
        stepped: Read and written in CPU memory by the optimizer.
    """

    wire: int = 0
    to_cpu: int = 0
    from_cpu: int = 0
    nvme_read: int = 0
    nvme_written: int = 0
    stepped: int = 0

    def seconds(self, rates: Rates, ranks_per_node: int) -> dict[str, float]:
        """How long each kind of transfer, and stepping on the CPU, takes at least, by itself."""
        return {
            "wire": self.wire / rates.link,
            "cpu link": max(self.to_cpu, self.from_cpu) / rates.cpu_link,
            "nvme": (self.nvme_read + self.nvme_written) * ranks_per_node / rates.nvme,
            "cpu step": self.stepped * ranks_per_node / rates.memory,
        }


def traffic_of(
    estimator: MemoryEstimator,
    num_all_gathers: Mapping[str, int],
    *,
    on_gloo: bool = False,
    num_micro_batches: int = 1,
    rank: int = 0,
) -> Traffic:
    """Sums over the buckets of a plan.

    Args:
        estimator: Of the plan.
        num_all_gathers: By bucket, gathers before use in one micro-batch, as a replay counts them.
        on_gloo: Gradients travel in the parameters' dtype; else in that of the sum.
        num_micro_batches: In a step.
        rank: Whose shards, where they differ.
    """
    sums = [0] * 6
    for bucket in estimator.plan.buckets:
        gathers = num_all_gathers.get(bucket.name, 0) * num_micro_batches
        gathers += bucket.stage.all_gathers_after_step and bucket.is_trainable
        reductions = num_micro_batches if bucket.stage.reduces_every_backward else 1
        parts = (
            _wire(estimator, bucket, rank, gathers, reductions, on_gloo),
            *_tiers(estimator, bucket, rank, gathers, reductions),
        )
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return Traffic(*sums)


def _wire(
    estimator: MemoryEstimator,
    bucket: BucketPlan,
    rank: int,
    gathers: int,
    reductions: int,
    on_gloo: bool,
) -> int:
    """Sent to the others: this rank's shard in a gather, theirs of its gradients in a reduction."""
    mean = estimator.plan.grad_dtype(bucket).itemsize
    is_wide = not on_gloo or (estimator.accumulates and not bucket.stage.has_shard(State.GRAD))
    if not bucket.stage.has_shard(State.OPTIM):
        gradients = 2 * mean  # an all-reduce is a reduce-scatter and a gather
    else:
        gradients = mean if is_wide else bucket.dtype.itemsize
    own = len(bucket.layout.shard(rank))
    gathered = (bucket.layout.world_size - 1) * own * gathers * bucket.dtype.itemsize
    reduced = (bucket.layout.numel - own) * reductions * gradients * bucket.is_trainable
    return gathered + reduced


def _tiers(
    estimator: MemoryEstimator, bucket: BucketPlan, rank: int, gathers: int, reductions: int
) -> tuple[int, int, int, int, int]:
    """To and from CPU memory, read from and written to files, stepped on the CPU."""
    numel, tiers, has_device_memory = (
        len(bucket.layout.shard(rank)),
        bucket.tiers,
        estimator.has_device_memory,
    )
    param = numel * bucket.dtype.itemsize
    mean = numel * estimator.plan.grad_dtype(bucket).itemsize
    to_cpu = from_cpu = read = written = stepped = 0
    if bucket.stage.has_shard(State.PARAM):
        from_cpu += (
            gathers
            * param
            * tiers.param.is_offloaded(has_device_memory=has_device_memory)
            * has_device_memory
        )
        if tiers.param is Tier.NVME:
            read += gathers * padded_bytes(numel, bucket.dtype)
    if not bucket.is_trainable:
        return to_cpu, from_cpu, read, written, stepped
    for is_read, is_written, nbytes in estimator.stepped_files(bucket, rank):
        read += nbytes * is_read
        written += nbytes * is_written
    if tiers.grad is Tier.NVME:
        nbytes = padded_bytes(numel, estimator.plan.grad_dtype(bucket))
        written += reductions * nbytes
        read += (reductions - 1) * nbytes
    if tiers.optim is not Tier.DEVICE:
        to_cpu += reductions * mean * has_device_memory
        from_cpu += param * (tiers.param is Tier.DEVICE) * has_device_memory
        states = estimator.states.of(estimator.parameter(bucket, 0), bucket.master_dtype)
        stepped += mean + 2 * numel * (bucket.master_dtype.itemsize + states.element_bytes)
    return to_cpu, from_cpu, read, written, stepped
