"""No use of memory is left to chance, and the host waits no more than it must."""

from __future__ import annotations

import pytest

from tests.streams.checker import Checker
from tests.streams.limits import LEAST_BESIDE, MOST_WAITS, complaints
from tests.streams.scenarios import ALL, CHOSEN, Scenario

SCENARIOS = [
    pytest.param(one, id=one.name, marks=() if one.name in CHOSEN else pytest.mark.slow)
    for one in ALL
]


@pytest.mark.default_cases(
    "stage 1, device, fp32, overlap",
    "stage 3, device, fp32, plain",
    "stage 3, device, fp32, failures in groups",
    "stage 3, cpu parameters, bf16, accumulate",
    "stage 3, nvme both, bf16, overlap",
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_use_of_memory_comes_after_the_one_before(checker: Checker, scenario: Scenario):
    outcome = checker.run(scenario)
    assert complaints(scenario, outcome) == []
    assert outcome.num_checks > 500


def test_the_chosen_scenarios_are_there():
    assert {one.name for one in ALL} >= CHOSEN | MOST_WAITS.keys() | LEAST_BESIDE.keys()
