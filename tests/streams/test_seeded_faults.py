"""The clocks and the limits of scenarios find faults of the engine."""

from __future__ import annotations

import dataclasses

import pytest

from tests.streams.checker import Checker
from tests.streams.limits import complaints
from tests.streams.scenarios import ALL
from tests.streams.seeded_faults import FAULTS

SCENARIOS = {scenario.name: scenario for scenario in ALL}


@pytest.mark.default_cases(
    "no side stream waits for compute", "shards on the CPU are not page-locked"
)
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found(checker: Checker, name: str):
    fault = FAULTS[name]
    scenario = SCENARIOS[fault.scenario]
    outcome = checker.run(dataclasses.replace(scenario, fault=name))
    found = complaints(scenario, outcome)
    assert any(text.startswith(f"{fault.kind}:") for text in found), found
