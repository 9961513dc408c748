"""The harness itself: a failure on a rank must never look like a success."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks


def _sum_of_ranks(rank, world_size, scale):
    value = torch.tensor([float(rank)]) * scale
    dist.all_reduce(value)
    return value


def _raise_on_rank_1(rank, world_size):
    if rank == 1:
        raise LookupError("no such thing")
    dist.barrier()


def _hang_on_rank_1(rank, world_size):
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


def _die(rank, world_size):
    print("last words", flush=True)
    os._exit(7)


def _environment(rank, world_size):
    Path(f"seen-by-{rank}").touch()
    return os.environ["RANK"], os.environ["WORLD_SIZE"], dist.is_initialized(), os.getcwd()


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_rank_runs_and_returns_its_result(world_size):
    results = run_ranks(world_size, _sum_of_ranks, 2.0)
    expected = 2.0 * sum(range(world_size))
    assert [result.item() for result in results] == [expected] * world_size


def test_ranks_look_launched_by_torchrun_and_share_an_empty_folder():
    first, second = run_ranks(2, _environment, has_group=False)
    assert first[:3] == ("0", "2", False)
    assert second[:3] == ("1", "2", False)
    assert first[3] == second[3]
    assert not Path(first[3]).exists()


def test_an_exception_on_one_rank_fails_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback[\s\S]*no such thing"):
        run_ranks(2, _raise_on_rank_1)


@pytest.mark.slow
def test_a_hang_fails_with_the_stacks_of_the_ranks_that_hang():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 did not return[\s\S]*in _hang_on_rank_1"):
        run_ranks(2, _hang_on_rank_1, timeout_s=3)
    assert time.monotonic() - start < 15


def test_a_rank_that_dies_fails_with_its_exit_code_and_output():
    with pytest.raises(RankError, match=r"exit code 7[\s\S]*last words"):
        run_ranks(1, _die)
