"""The table of seeded faults fits the code."""

from __future__ import annotations

import pytest

from tests.streams.seeded_faults import FAULTS, Fault, scenario_of


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.breaks for fault in FAULTS])
def test_a_seeded_fault_replaces_a_text_that_occurs_once(fault: Fault):
    assert fault.num_places == 1
    assert fault.old != fault.new
    assert fault.scenarios or fault.tests
    for name in fault.scenarios:
        scenario_of(name)
