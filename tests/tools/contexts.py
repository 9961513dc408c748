"""Where pytest runs under coverage: a context for each test, and what each took; see `records`.

`-p tests.tools.contexts` loads it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import coverage
import pytest

__all__ = ["pytest_runtest_logreport", "pytest_runtest_setup", "pytest_sessionfinish"]

_durations_s: Counter[str] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations_s[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = os.environ.get("TEST_DURATIONS")
    if file is not None and not hasattr(session.config, "workerinput"):
        durations_s = {test: round(_durations_s[test], 3) for test in sorted(_durations_s)}
        Path(file).write_text(json.dumps(durations_s, indent=0))
