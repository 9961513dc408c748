"""Rank 0 of 8 and of 64 on one GPU: the plan of models of 1 and 7 B parameters holds there."""

from __future__ import annotations

import pytest

from tests.benchmarks.fake_group import Case, compare
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

CASES = [
    *(Case("gpt_1b", size, stage, device="cuda") for size in (8, 64) for stage in (1, 2, 3)),
    *(Case("llama2_7b", size, stage, device="cuda") for size in (8, 64) for stage in (2, 3)),
]


def _compare(rank, world_size, case):
    return compare(case)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.model}-{case.num_ranks}-stage{case.stage}"
)
def test_states_and_peak_are_those_of_the_plan(case):
    (found,) = run_ranks(1, _compare, case, has_group=False, timeout_s=280)
    assert found.states == found.reported
    assert found.allocated == pytest.approx(found.states, rel=0.01)
    assert found.measured_peak == pytest.approx(found.peak, rel=0.1)
