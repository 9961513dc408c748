"""Rank 0 of large groups, in one process: states to the byte, the peak within a tenth."""

import pytest

from tests.benchmarks.fake_group import Case, compare
from tests.support.ranks import run_ranks

LARGE = [Case("gpt_1b", 8), Case("gpt_1b", 64), Case("llama2_7b", 64)]


def _compare(rank, world_size, case):
    return compare(case)


def check(case):
    (found,) = run_ranks(1, _compare, case, has_group=False, timeout_s=1100)
    assert found.states == found.reported == found.allocated
    assert found.peak == pytest.approx(found.measured_peak, rel=0.1)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_small_model_on_rank_0_of_64(stage):
    check(Case("tiny", 64, stage))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case.model}-{case.num_ranks}")
def test_a_large_model_on_rank_0(case):
    check(case)
