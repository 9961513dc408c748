"""How many threads step offloaded shards on the CPU."""

import os

import pytest
import torch

from lightning_zero.tiers.threads import own_cores, set_step_threads
from tests.support.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CORES = len(os.sched_getaffinity(0))


def _threads(rank, world_size, device, environment):
    torch.set_num_threads(1)
    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        os.environ.pop(name, None)
    os.environ |= environment
    warned = set_step_threads(device)
    return torch.get_num_threads(), warned


def _run(device, **environment):
    return run_ranks(1, _threads, device, environment, has_group=False)[0]


BY_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}


def test_torchruns_one_thread_becomes_the_cores_of_a_rank():
    per_node = {"SLURM_CPUS_PER_TASK": "1"}  # of the task that runs torchrun
    assert _run(CUDA, **BY_TORCHRUN, **per_node) == (CORES, [])
    assert _run(CPU, **BY_TORCHRUN, **per_node) == (1, [])


@pytest.mark.skipif(CORES == 1, reason="needs two cores")
def test_one_thread_by_choice_is_kept_with_a_warning():
    count, (text,) = _run(CUDA, OMP_NUM_THREADS="1", SLURM_CPUS_PER_TASK="1000")
    assert count == 1
    assert f"{CORES} cores for each rank; set OMP_NUM_THREADS={CORES}" in text
    assert _run(CUDA, OMP_NUM_THREADS="1", SLURM_CPUS_PER_TASK="1") == (1, [])


def _cores_of_two_ranks(rank, world_size):
    os.environ.pop("SLURM_CPUS_PER_TASK", None)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    alone = own_cores()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return alone, own_cores()


def test_the_ranks_of_a_machine_share_its_cores():
    alone, shared = run_ranks(1, _cores_of_two_ranks, has_group=False)[0]
    assert shared == max(alone // 2, 1)
