"""Slices of the slow tests: each within its time, and together all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.slices import deal, estimates, number_of

ROOT = Path(__file__).parents[1]
DURATIONS_S = st.lists(st.floats(0.1, 900.0), min_size=1, max_size=60)
SESSION = """
import time, pytest
from tests.slices import *
from tests import slices
slices._SAY_EVERY_S, slices._SPARE = 0.0, {spare}
class Plugin:
    pytest_addoption = staticmethod(slices.pytest_addoption)
    pytest_configure = staticmethod(slices.pytest_configure)
raise SystemExit(pytest.main({arguments!r}, plugins=[Plugin()]))
"""
TESTS = """
import pytest, time
@pytest.mark.slow
@pytest.mark.parametrize("i", range(6))
def test_slow(i):
    time.sleep(0.02)
@pytest.mark.slow
@pytest.mark.alone
def test_alone():
    pass
def test_fast():
    pass
"""


@given(DURATIONS_S)
def test_every_test_is_in_one_slice_and_none_takes_longer_than_its_budget(durations):
    needed_s = {f"test_{i}": duration for i, duration in enumerate(durations)}
    slices = deal(needed_s, 600.0)
    assert sorted(name for one in slices for name in one) == sorted(needed_s)
    assert all(len(one) == 1 or sum(map(needed_s.get, one)) <= 600.0 for one in slices)
    assert slices == deal(dict(reversed(needed_s.items())), 600.0)


def test_an_unknown_test_is_taken_for_one_of_its_file():
    recorded = {"a.py::one": 10.0, "a.py::two": 20.0}
    found = estimates(["a.py::two", "a.py::three", "b.py::one"], recorded)
    assert found["a.py::two"] == 20.0
    assert found["a.py::three"] == 15.0
    assert found["b.py::one"] > 0.0


def test_consecutive_commits_have_consecutive_numbers(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init")
    hashes = []
    for _ in range(3):
        git("commit", "--allow-empty", "-m", "one more")
        hashes.append(git("rev-parse", "HEAD"))
    assert [number_of(commit, tmp_path) for commit in (*hashes, "HEAD")] == [1, 2, 3, 3]
    assert number_of("7", tmp_path) == 7
    assert number_of("f" * 40, tmp_path) == number_of("f" * 40, tmp_path.parent)


def _run(folder, *arguments, spare=1.5):
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  alone\n")
    (folder / "session.py").write_text(SESSION.format(arguments=[*arguments], spare=spare))
    done = subprocess.run(
        [sys.executable, "session.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _durations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_slice_runs_slow_tests_only_and_all_slices_run_all(tmp_path):
    seen = []
    for number in range(3):  # 6 tests of 15 s: 30 s are two of them
        options = ["--slow-slice", str(number), "--slow-budget-s", "30"]
        printed = _run(tmp_path, *options, "-v")
        assert f"slice {number + 1} of 3" in printed
        assert "2 passed, 6 deselected" in printed
        seen += [line.split()[0] for line in printed.splitlines() if "PASSED" in line]
    assert sorted(seen) == [f"test_it.py::test_slow[{i}]" for i in range(6)]


def test_a_slice_stops_when_its_time_is_over_and_reports_it(tmp_path):
    options = ["--slow-slice", "0", "--slow-budget-s", "90"]
    printed = _run(tmp_path, *options, spare=0.05 / 90)
    assert "slow tests of the slice were left out: no time" in printed
    assert "skipped" in printed


def test_a_run_of_slow_tests_reports_its_progress(tmp_path):
    printed = _run(tmp_path, "-m", "slow")
    assert "slow tests: 6 of 7 in 0 min, about 0 min left" in printed
