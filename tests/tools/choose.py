"""Chooses the tests that run by default, so that the others need not; see `records`.

    python -m tests.tools.records -- -n 3 -m "not slow or covered"
    python -m tests.tools.choose

Some tests are marked slow where they are defined. Among the others, these run by default:

- tests that take less than `--cheap-s`;
- tests that together execute every line and branch that all tests execute, in the fewest seconds;
- the quickest case of every function without a chosen case, if it takes less than `--case-s`;
- `ALWAYS`.

The remaining tests run with the slow ones. They are written to `tests/covered.txt`, and their
durations to `tests/slow_durations.json`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.slices import COVERED, DURATIONS
from tests.tools.records import FOLDER, Arc, Records

__all__ = ["ALWAYS", "choose", "cover", "main"]

ALWAYS = (
    "tests/health/test_fault_matrix.py",
    "tests/launch/test_launch.py::test_the_subprocess_launcher_trains_on_two_ranks_as_ddp",
    "tests/launch/test_launch.py::test_torchrun_trains_on_two_ranks_as_ddp",
    "tests/engine/test_memory.py::TestModelStates::test_have_the_bytes_of_the_stage_and_are_reported",
    "tests/strategy/test_parity.py::test_losses_and_parameters_equal_ddp[conv-3-1",
    "tests/strategy/test_parity.py::test_losses_and_parameters_equal_ddp[gpt-2-4",
    "tests/slurm/test_training.py::test_srun_on_two_nodes_trains_as_torchrun_and_as_ddp",
)


def cover(
    arcs: Mapping[str, Collection[Arc]], durations_s: Mapping[str, float], done: set[Arc]
) -> list[str]:
    """Tests that execute what all do, of which each adds the most per second to those before it.

    The greedy algorithm for weighted set cover: Chvatal, "A greedy heuristic for the set-covering
    problem", 1979.

    Args:
        arcs: By test.
        durations_s: By test, positive.
        done: Executed in any case. Those of the tests that are returned are added.
    """
    chosen = []
    heap = [(-len(set(arcs[test]) - done) / durations_s[test], test) for test in sorted(arcs)]
    heapq.heapify(heap)
    while heap:
        _, test = heapq.heappop(heap)
        rate = -len(set(arcs[test]) - done) / durations_s[test]
        if not rate:
            continue
        if heap and rate > heap[0][0]:
            heapq.heappush(heap, (rate, test))  # others have taken what it would add
            continue
        chosen.append(test)
        done |= set(arcs[test])
    return chosen


def choose(records: Records, cheap_s: float, case_s: float) -> set[str]:
    """The tests that run by default."""
    durations_s = {test: max(s, 0.001) for test, s in records.durations_s.items()}
    kept = {test for test, s in durations_s.items() if s < cheap_s or test.startswith(ALWAYS)}
    done = set().union(*(records.arcs.get(test, ()) for test in kept))
    rest = {test: records.arcs.get(test, set()) for test in durations_s.keys() - kept}
    kept.update(cover(rest, durations_s, done))
    functions: dict[str, list[str]] = {}
    for test in sorted(durations_s, key=durations_s.__getitem__):
        functions.setdefault(_function(test), []).append(test)
    for cases in functions.values():
        if kept.isdisjoint(cases) and durations_s[cases[0]] < case_s:
            kept.add(cases[0])
    return kept


def _function(test: str) -> str:
    return test.partition("[")[0]


def shortened(tests: Collection[str], all_tests: Collection[str]) -> list[str]:
    """Functions of which all cases are in, for these cases."""
    others = {_function(test) for test in set(all_tests) - set(tests)}
    return sorted({test if _function(test) in others else _function(test) for test in tests})


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="choose", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="what records wrote")
    parser.add_argument("--cheap-s", type=float, default=0.25)
    parser.add_argument("--case-s", type=float, default=4.0)
    options = parser.parse_args(words)
    records = Records.read(options.folder)
    kept = choose(records, options.cheap_s, options.case_s)
    others = records.durations_s.keys() - kept
    COVERED.write_text("".join(f"{name}\n" for name in shortened(others, records.durations_s)))
    recorded = json.loads(DURATIONS.read_text())
    recorded |= {test: round(records.durations_s[test], 1) for test in others}
    DURATIONS.write_text(json.dumps(dict(sorted(recorded.items())), indent=0) + "\n")
    for name, tests in (("by default", kept), ("with the slow", others)):
        print(
            f"{name}: {len(tests)} tests, {sum(map(records.durations_s.__getitem__, tests)):.0f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
