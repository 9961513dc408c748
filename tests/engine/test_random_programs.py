"""Random programs give the numbers of plain torch; see tests/support/programs.py."""

from __future__ import annotations

import pytest

from tests.support.cells import slow_but
from tests.support.programs import Program, differences, run_plain, run_sharded
from tests.support.warm import run_ranks

_NUM_EACH = 5
# World size and the first of its seeds; `python -m tests.tools.random_programs` runs others.
# The programs of these have every operation, block, optimizer and setting.
_BY_DEFAULT = [(1, 0), (2, 100), (3, 300)]
_FIRST = [(1, 0), (2, 100), (2, 200), (3, 300), (4, 400), (2, 500), (3, 600)]
_CASES = [(size, seed + more) for size, seed in _FIRST for more in (0, _NUM_EACH)]


@pytest.mark.parametrize(("world_size", "first"), slow_but(_BY_DEFAULT, _CASES))
def test_random_programs_are_equal_to_plain_torch(world_size, first):
    seeds = range(first, first + _NUM_EACH)
    ranks = run_ranks(world_size, run_sharded, seeds, timeout_s=200)
    for index, seed in enumerate(seeds):
        program = Program.of(seed, world_size=world_size)
        found = list(differences(run_plain(program), [seen[index] for seen in ranks]))
        assert not found, f"{found[0]}\n{program}"
