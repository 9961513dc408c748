"""Every fault soon ends the entire job, with a nonzero status and a text that names the cause.

CI runs a few cells. To run all of them, two at a time, use one half in each of two shells:

    pytest tests/health/test_fault_matrix.py -k popen
    pytest tests/health/test_fault_matrix.py -k torchrun

The names of values select cells, too: `-k "SIGKILL and zero3"`, `-k "save and of2"`, `-k of4`.
"""

from __future__ import annotations

import pytest

from tests.support.fault_matrix import (
    AXES,
    SLOWDOWN,
    Cell,
    all_cells,
    cover,
    problems_of,
    run_cell,
    tuples_of,
)

pytestmark = pytest.mark.timeout(60 + 120 * SLOWDOWN)

SAMPLE = [
    Cell("exception", "mid_forward", "2workers", "zero3", "popen", 1),
    Cell("sys.exit", "setup", "0workers", "zero3", "popen", 0),
    Cell("os._exit", "between_batches", "2persistent", "zero3", "torchrun", 0),
    Cell("SIGKILL", "backward", "0workers", "zero1", "popen", 1),
    Cell("SIGINT", "validation", "2persistent", "zero1", "popen", 1),
    Cell("SIGTERM", "step", "2workers", "zero1", "popen", 0),
]
ALL_CELLS = all_cells(AXES, world_size=2)
CELLS = cover(ALL_CELLS, SAMPLE, count=160, seed=0)
ON_FOUR = cover(all_cells({**AXES, "rank": (0, 3)}, world_size=4), [], count=12, seed=0)[:12]


def _param(cell):
    return pytest.param(cell, marks=() if cell in SAMPLE else pytest.mark.slow, id=str(cell))


@pytest.mark.default_cases(
    "exception-mid_forward-2workers-zero3-popen-rank1-of2",
    "SIGKILL-backward-0workers-zero1-popen-rank1-of2",
)
@pytest.mark.parametrize("cell", list(map(_param, [*CELLS, *ON_FOUR])))
def test_a_fault_on_one_rank_ends_the_job_and_is_named(cell, fault_server, tmp_path):
    report = run_cell(cell, fault_server, tmp_path)
    problems = problems_of(cell, report)
    assert not problems, "\n".join([*problems, "--- output:", report.output])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["popen", "torchrun"])
def test_without_a_fault_the_same_script_trains_to_its_end(launcher, fault_server, tmp_path):
    cell = Cell("none", "save", "2workers", "zero3", launcher, 0)
    report = run_cell(cell, fault_server, tmp_path)
    assert not problems_of(cell, report), report.output
    assert [len(batches) for batches in report.batches] == [12, 12]


_BETWEEN = """
import os, sys
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
module = MLPModule(ranks=2)
trainer = make_trainer(settings(1), devices=2, limit_train_batches=1)
trainer.fit(module)
if trainer.global_rank == FAULTY:
    FAULT
try:
    trainer.validate(module)
except BaseException as error:
    print("the other rank printed:", error, flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("rank", "fault", "text"),
    [
        pytest.param(
            *(0, "raise ArithmeticError('out of luck')", "raised ArithmeticError: out of luck"),
            marks=pytest.mark.slow,
        ),
        (1, "os._exit(3)", "ended with exit code 3"),
    ],
)
def test_a_rank_that_ends_between_two_runs_is_named_by_the_next_one(
    rank, fault, text, fault_server, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(_BETWEEN.replace("FAULTY", str(rank)).replace("FAULT", fault))
    status, output = fault_server.run_script([script], tmp_path, num_started=1)
    assert status != 0
    assert f"the other rank printed: rank {1 - rank} stops because rank {rank} {text}" in output, (
        output
    )


def test_the_cells_cover_each_pair_of_values():
    possible = set().union(*(tuples_of(cell, 2) for cell in ALL_CELLS))
    assert set().union(*(tuples_of(cell, 2) for cell in CELLS)) == possible
    sizes = [len(values) for values in AXES.values()]
    num_pairs = (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
    assert len(possible) == num_pairs - 1, "all but a worker where there is none"
    assert len(CELLS) == len(set(CELLS)) >= 150
    assert set(SAMPLE) < set(CELLS)


def test_on_four_ranks_each_fault_and_each_place_is_covered():
    assert len(ON_FOUR) == 12
    assert {cell.fault for cell in ON_FOUR} == set(AXES["fault"])
    assert {cell.place for cell in ON_FOUR} == set(AXES["place"])
