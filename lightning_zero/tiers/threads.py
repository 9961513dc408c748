"""Threads of a CPU that steps offloaded shards."""

from __future__ import annotations

import os

import torch

from lightning_zero.tiers.memory import local_world_size

__all__ = ["own_cores", "set_step_threads"]


def own_cores() -> int:
    """Returns the number of CPU cores for each rank of this machine, at least 1."""
    cores = len(os.sched_getaffinity(0))
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return max(min(int(per_task), cores), 1)  # a task of srun is a rank
    return max(cores // local_world_size(), 1)


def set_step_threads(device: torch.device) -> list[str]:
    """Lets the CPU step offloaded shards with all cores of this rank, if nothing else is set.

    torchrun sets OMP_NUM_THREADS=1 where it is unset, so that a step would use one core of many.

    Args:
        device: Device on which the module computes. On a CPU, the ranks share their cores anyway.

    Returns:
        A warning if the step has one thread, and more cores are free.
    """
    if device.type == "cpu" or torch.get_num_threads() > 1 or own_cores() == 1:
        return []
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(own_cores())
        return []
    return [
        f"the CPU steps offloaded shards with 1 thread, and has {own_cores()} cores for each rank; "
        f"set OMP_NUM_THREADS={own_cores()}."
    ]
