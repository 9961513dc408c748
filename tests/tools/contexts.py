"""Lines by the file of tests that ran them, where pytest runs under coverage.

`-p tests.tools.contexts` loads it. The ranks of `run_ranks` count too, with what they ran until
their function returned or raised; what a test kills is not counted.
"""

from __future__ import annotations

import coverage
import pytest

__all__ = ["pytest_runtest_setup"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid.partition("::")[0])
