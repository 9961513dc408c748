"""The slow tests in slices, each a bounded time, and how far a long run has come.

`pytest -m slow` runs all of them and prints its progress from time to time.

`pytest --slow-slice HEAD` runs one slice: the slow tests are dealt to as many slices as it takes
for each to need `--slow-budget-s`, shared by the workers of `-n`, and a commit's number in its
history picks one, so that as many consecutive commits as there are slices run all. A slice stops
when its budget is used up.

A slow test has the mark, or is listed in `tests/covered.txt`: what it executes, others
execute too that take less time together. These have the mark `covered` as well.

`--write-durations` runs the selected tests and writes what each slow test took to
`tests/slow_durations.json`; a test that is not in there is taken for one that needs what those of
its file do.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["COVERED", "DURATIONS", "Slices", "deal", "estimates", "number_of"]

DURATIONS = Path(__file__).with_name("slow_durations.json")
COVERED = Path(__file__).with_name("covered.txt")  # tools/choose.py writes it
_UNKNOWN_S = 15.0
_SAY_EVERY_S = 30.0
_SPARE = 1.5  # times its budget, a slice may take where the machine is slow; then it stops


def number_of(commit: str, root: Path) -> int:
    """The number of a commit in its history; of what is no commit here, one that it alone gives.

    Args:
        commit: A number, or a commit as git takes it, such as a hash.
        root: A folder of the repository.
    """
    command = ["git", "rev-list", "--count", "--first-parent", commit, "--"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode == 0:
        return int(done.stdout)
    if commit.isdecimal() and len(commit) < 7:
        return int(commit)
    return int.from_bytes(hashlib.sha256(commit.encode()).digest()[:4], "big")


def estimates(names: Sequence[str], recorded: Mapping[str, float]) -> dict[str, float]:
    """Seconds that each test will take."""
    of_file: dict[str, list[float]] = {}
    for name, duration_s in recorded.items():
        of_file.setdefault(name.partition("::")[0], []).append(duration_s)
    means = {file: statistics.mean(durations) for file, durations in of_file.items()}
    return {
        name: recorded.get(name, means.get(name.partition("::")[0], _UNKNOWN_S)) for name in names
    }


def deal(needed_s: Mapping[str, float], budget_s: float) -> list[list[str]]:
    """Slices of about equal time, none above the budget that a single test does not exceed."""
    # By what they need, longest first; among equals in an order independent of the file.
    order = sorted(needed_s, key=lambda name: (-needed_s[name], _scattered(name)))
    num = max(1, -int(-sum(needed_s.values()) // budget_s))
    while True:
        slices: list[list[str]] = [[] for _ in range(num)]
        filled = [0.0] * num
        for name in order:
            least = filled.index(min(filled))
            slices[least].append(name)
            filled[least] += needed_s[name]
        if all(f <= budget_s or len(s) == 1 for f, s in zip(filled, slices, strict=True)):
            return slices
        num += 1


def _scattered(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the covered tests, before `-m` chooses."""
    covered = set(COVERED.read_text().splitlines())
    for item in items:
        if item.nodeid in covered or item.nodeid.partition("[")[0] in covered:
            item.add_marker("covered")
            item.add_marker("slow")


class Slices:
    """Chooses the tests of a slice, keeps to its time, and reports the progress of a run of slow
    tests.

    Args:
        config: Configuration of the test run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._commit: str | None = config.getoption("slow_slice")
        self._budget_s: float = config.getoption("slow_budget_s")
        self._recorded: dict[str, float] = json.loads(DURATIONS.read_text())
        self._needed_s: dict[str, float] = {}  # of the slow tests that are left to run
        self._num_slow = 0
        self._num_left_out = 0
        self._taken: dict[str, float] = {}
        self._begin_s = self._said_s = 0.0
        self._title = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """After `-m` and `-k`."""
        slow = [item for item in items if item.get_closest_marker("slow") is not None]
        if self._commit is not None:
            slow = [item for item in slow if item.get_closest_marker("alone") is None]
            needed_s = estimates([item.nodeid for item in slow], self._recorded)
            num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
            slices = deal(needed_s, self._budget_s * num_workers)
            number = number_of(self._commit, self._config.rootpath) % len(slices)
            chosen = set(slices[number])
            left = [item for item in slow if item.nodeid in chosen]
            self._config.hook.pytest_deselected(items=[i for i in items if i not in left])
            items[:] = slow = left
            duration_s = sum(needed_s[name] for name in chosen)
            self._title = f"slice {number + 1} of {len(slices)}, about {duration_s / 60:.0f} min"
        self._needed_s = estimates([item.nodeid for item in slow], self._recorded)
        self._num_slow = len(slow)

    def pytest_report_collectionfinish(self) -> list[str]:
        return [f"slow tests: {self._title}"] if self._title else []

    def pytest_runtestloop(self) -> None:
        self._begin_s = self._said_s = time.monotonic()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._commit is not None and self._elapsed_s() > _SPARE * self._budget_s:
            self._num_left_out += 1
            pytest.skip(f"the slice has used {_SPARE} times its {self._budget_s:g} s")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "slow" in report.keywords and not report.skipped:
            taken = self._taken.get(report.nodeid, 0.0) + report.duration
            self._taken[report.nodeid] = round(taken, 1)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._needed_s.pop(nodeid, None)
        now = time.monotonic()
        if self._num_slow and now - self._said_s > _SAY_EVERY_S:
            self._said_s = now
            self._say(self._progress())

    def pytest_terminal_summary(self) -> None:
        if self._num_left_out:
            self._say(f"{self._num_left_out} slow tests of the slice were left out: no time", red=1)

    def pytest_sessionfinish(self) -> None:
        is_worker = hasattr(self._config, "workerinput")  # of pytest-xdist
        if self._config.getoption("write_durations") and not is_worker:
            merged = {**self._recorded, **self._taken}
            DURATIONS.write_text(json.dumps(dict(sorted(merged.items())), indent=0) + "\n")

    def _progress(self) -> str:
        """How many are done, and how long the rest takes where it goes on as it went."""
        done_s = sum(estimates([*self._taken], self._recorded).values())
        pace = min(10.0, max(0.1, self._elapsed_s() / done_s)) if done_s else 1.0
        left_s = pace * sum(self._needed_s.values())
        num_done = self._num_slow - len(self._needed_s)
        return (
            f"slow tests: {num_done} of {self._num_slow} in {self._elapsed_s() / 60:.0f} min, "
            f"about {left_s / 60:.0f} min left"
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _say(self, text: str, **markup: bool) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(text, **markup)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption("--slow-slice", metavar="COMMIT", help="run the slow tests that it picks")
    group.addoption("--slow-budget-s", type=float, default=600.0, help="for a slice")
    group.addoption(
        "--write-durations", action="store_true", help=f"of slow tests, into {DURATIONS.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Slices(config), "slices")
