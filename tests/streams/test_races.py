"""No use of memory is left to chance, and the host waits no more than it must."""

from __future__ import annotations

import pytest

from tests.streams.conftest import Checker
from tests.streams.scenarios import ALL, CHOSEN, Scenario

SCENARIOS = [
    pytest.param(one, id=one.name, marks=() if one.name in CHOSEN else pytest.mark.slow)
    for one in ALL
]
# Waits of the host in one step of four buckets. They must not increase.
MOST_WAITS = {
    "stage 3, cpu both, fp32, no group": 8,
    "stage 3, nvme both, fp32, no group": 10,
    "stage 1, cpu optimizer, fp32, clip": 6,
    "stage 1, cpu optimizer, fp16, plain": 6,
    "stage 2, cpu optimizer, bf16, overlap": 3,
    "stage 3, cpu optimizer, fp16, clip": 20,
    "stage 3, cpu optimizer, fp16, at once": 11,
    "stage 3, cpu parameters, bf16, accumulate": 8,
    "stage 3, cpu both, fp32, overlap": 8,
    "stage 3, cpu both, bf16, activations": 8,
    "stage 3, nvme optimizer, fp32, average": 16,
    "stage 3, nvme both, bf16, overlap": 10,
    "stage 3, half, fp16, plain": 5,
}
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


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_use_of_memory_comes_after_the_one_before(checker: Checker, scenario: Scenario):
    outcome = checker.run(scenario)
    assert outcome.num_checks > 500
    assert outcome.problems == {}
    # A scaler that may have to leave out a step looks whether, where torch's step cannot.
    waits = {why: count for why, count in outcome.syncs.items() if not why.endswith("[outside]")}
    if scenario.is_on_device:
        assert waits == {}
    elif scenario.name in MOST_WAITS:
        assert sum(waits.values()) <= MOST_WAITS[scenario.name], waits


@pytest.mark.default_cases("side stream", "forget", "numbers at once", "file")
@pytest.mark.parametrize(("scenario", "kind"), BROKEN, ids=[one.broken for one, _ in BROKEN])
def test_a_wait_that_is_left_out_is_found(checker: Checker, scenario: Scenario, kind: str):
    found = checker.run(scenario).problems
    assert any(text.startswith(f"{kind}:") for text in found), found


def test_the_chosen_scenarios_are_there():
    assert {one.name for one in ALL} >= CHOSEN | MOST_WAITS.keys()
