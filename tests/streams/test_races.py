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
IN_FILES = {"device": "nvme", "nvme_path": ".", "buffer_count": 2, "buffer_size": 2**16}
OVERLAP = {"stage": 3, "overlap_step": True}
ON_CPU = {"stage": 3, "offload_optimizer": "cpu"}
AT_ONCE = {**ON_CPU, "assume_elementwise": True}
BY_STEP = ("unscaled by the step",)
BROKEN = [  # and what is found then
    (Scenario(config={"stage": 2}, broken="side stream"), "RACE"),
    (Scenario(config={"stage": 3}, broken="gather"), "RACE"),
    (Scenario(config=OVERLAP, options=("looks",), broken="drain"), "RACE"),
    (Scenario(config={"stage": 2}, options=("failures",), broken="forget"), "FREE"),
    (Scenario(config=ON_CPU, precision="fp16", broken="copies"), "RACE"),
    (Scenario(config=ON_CPU, precision="fp16", broken="numbers"), "RACE"),
    (Scenario(config=AT_ONCE, precision="fp16", options=BY_STEP, broken="numbers at once"), "RACE"),
    (Scenario(config=ON_CPU, broken="arrival"), "RACE"),
    (Scenario(config={"stage": 1, "offload_optimizer": IN_FILES}, broken="file"), "RACE"),
]


@pytest.mark.default_cases(
    "stage 1, device, fp32, overlap",
    "stage 1, device, bf16, groups",
    "stage 2, device, fp16, accumulate",
    "stage 3, device, fp32, plain",
    "stage 3, device, fp32, overlap",
    "stage 3, device, fp32, failures in groups",
    "stage 3, device, bf16, muon",
    "stage 3, cpu optimizer, bf16, overlap beside replicated",
    "stage 3, cpu parameters, bf16, accumulate",
    "stage 3, nvme both, bf16, overlap",
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_use_of_memory_comes_after_the_one_before(checker: Checker, scenario: Scenario):
    outcome = checker.run(scenario)
    assert complaints(scenario, outcome) == []
    assert outcome.num_checks > 500


@pytest.mark.default_cases("side stream", "forget")
@pytest.mark.parametrize(("scenario", "kind"), BROKEN, ids=[one.broken for one, _ in BROKEN])
def test_a_wait_that_is_left_out_is_found(checker: Checker, scenario: Scenario, kind: str):
    found = checker.run(scenario).problems
    assert any(text.startswith(f"{kind}:") for text in found), found


def test_the_chosen_scenarios_are_there():
    assert {one.name for one in ALL} >= CHOSEN | MOST_WAITS.keys() | LEAST_BESIDE.keys()
