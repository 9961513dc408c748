"""What each test executes and how long it takes: written by a run under coverage, read by tools.

    python -m tests.tools.records -- -n 3 -m "not slow or covered"

What stands after `--` is for pytest. The ranks of `run_ranks` and other processes count too, with
what they ran until their function returned or raised; what a test kills is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["FOLDER", "Arc", "Records", "main", "record"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "outputs" / "test-records"
PACKAGE = "lightning_zero"
_DURATIONS = "durations.json"

Arc = tuple[str, int, int]  # file relative to the repository, line, next line; negative: in, out


@dataclasses.dataclass(frozen=True)
class Records:
    """Record of one run.

    Attributes:
        arcs: By test; without what is executed when modules are imported.
        durations_s: By test.
    """

    arcs: dict[str, set[Arc]]
    durations_s: dict[str, float]

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Records:
        """What `record` wrote; raises FileNotFoundError without."""
        durations_s = json.loads((folder / _DURATIONS).read_text())
        arcs: dict[str, set[Arc]] = defaultdict(set)
        same: dict[Arc, Arc] = {}
        for file in folder.glob("arcs.*"):
            for test, arc in _read(file):
                arcs[test].add(same.setdefault(arc, arc))
        at_import = arcs.pop("", set())
        return cls({test: found - at_import for test, found in arcs.items()}, durations_s)

    def tests_of(self, path: str, lines: range) -> list[str]:
        """The tests that execute one of the lines: the quickest of each file, then the second..."""
        found = set().union(*(self._by_line.get((path, line), ()) for line in lines))
        num_before: Counter[str] = Counter()
        order: dict[str, tuple[int, float]] = {}
        for test in sorted(found, key=lambda test: (self.durations_s.get(test, 0.0), test)):
            file = test.partition("::")[0]
            order[test] = (num_before[file], self.durations_s.get(test, 0.0))
            num_before[file] += 1
        return sorted(order, key=order.__getitem__)

    @functools.cached_property
    def _by_line(self) -> dict[tuple[str, int], set[str]]:
        found: dict[tuple[str, int], set[str]] = defaultdict(set)
        for test, arcs in self.arcs.items():
            for file, line, next_line in arcs:
                found[file, line].add(test)
                found[file, next_line].add(test)
        return found


def _read(file: Path) -> Iterator[tuple[str, Arc]]:
    """Records of one process; none where it was killed while it wrote."""
    database = sqlite3.connect(file)
    try:
        tests = dict(database.execute("select id, context from context"))
        names = {id_: _inside(name) for id_, name in database.execute("select id, path from file")}
        rows = database.execute("select context_id, file_id, fromno, tono from arc").fetchall()
    except sqlite3.DatabaseError:
        return
    finally:
        database.close()
    for context, name, a, b in rows:
        yield tests[context], (names[name], a, b)


def _inside(name: str) -> str:
    parts = Path(name).parts
    at = max((i for i, part in enumerate(parts) if part == PACKAGE), default=0)
    return "/".join(parts[at:])


def record(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Runs pytest under coverage. Its exit code."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ini = Path(__file__).with_name("coverage.ini")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={ini}"]
    command += [f"--data-file={folder / 'arcs'}", "-m", "pytest", "-p", "tests.tools.contexts"]
    # The ids of tests must be those of the other workers.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "TEST_DURATIONS": str(folder / _DURATIONS)}
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment).returncode


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="records", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args(words)
    return record(options.pytest, options.folder.absolute())


if __name__ == "__main__":
    sys.exit(main())
