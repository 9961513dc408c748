"""Random programs on a GPU give the numbers of plain torch; see tests/support/programs.py."""

from __future__ import annotations

import pytest

from tests.support.programs import Program, differences, run_plain, run_sharded
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

_NUM_EACH = 10


def _is_comparable(program):
    """ASGD keeps its rate in float32, which a CPU and a GPU round differently."""
    offloads = any("offload_optimizer" in settings for settings in program.settings)
    return program.optimizer != "asgd" or not offloads


def _run_plain(rank, world_size, programs):
    return [run_plain(program, "cuda") for program in programs]


@pytest.mark.parametrize(("world_size", "first"), [(2, 100), (2, 200), (2, 500), (3, 300)])
def test_random_programs_are_equal_to_plain_torch(world_size, first):
    numbers = range(first, first + _NUM_EACH)
    programs = [Program.of(number, world_size=world_size) for number in numbers]
    programs = [program for program in programs if _is_comparable(program)]
    seeds = [program.seed for program in programs]
    (expected,) = run_ranks(1, _run_plain, programs, has_group=False, timeout_s=120)
    ranks = run_ranks(world_size, run_sharded, seeds, "cuda", timeout_s=200)
    for index, program in enumerate(programs):
        found = list(differences(expected[index], [seen[index] for seen in ranks]))
        assert not found, f"{found[0]}\n{program}"
