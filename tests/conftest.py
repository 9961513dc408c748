"""What holds for every test.

Nothing here imports torch or Lightning: the process that only distributes tests needs neither.
"""

import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.support import features
from tests.support.cells import mark_slow_cases
from tests.support.features import pytest_sessionfinish

__all__ = ["pytest_sessionfinish"]

pytest_plugins = ["tests.support.disks", "tests.support.fault_matrix"]

_BEGIN_S = pytest.StashKey[float]()
_NO_TIME = "no time left: --stop-after-s"


def pytest_addoption(parser: pytest.Parser) -> None:
    features.pytest_addoption(parser)
    help_text = "skips tests that would begin later"
    parser.addoption("--stop-after-s", type=float, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    features.pytest_configure(config)
    config.stash[_BEGIN_S] = time.monotonic()
    settings.register_profile("busy machine", deadline=None)
    settings.load_profile("busy machine")
    os.environ["COLUMNS"] = "120"  # tables are as in a file; pytest-xdist sets 80


def pytest_collectstart() -> None:
    """Only processes that run tests collect them."""
    importlib.import_module("tests.support.metrics")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks slow cases before `-m` selects; a name without a case is an error of collection."""
    missing = mark_slow_cases(items)
    if any("[" in argument for argument in config.args):
        return  # other cases are not collected
    for function, names in missing.items():
        text = f"default_cases names cases that do not exist: {sorted(names)}"
        report = pytest.CollectReport(function, "failed", text, [])
        config.hook.pytest_collectreport(report=report)


def pytest_collection_finish() -> None:
    """Garbage is not looked for in the modules that are imported by now."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("stop_after_s")
    if limit_s is not None and time.monotonic() - item.config.stash[_BEGIN_S] > limit_s:
        pytest.skip(f"{_NO_TIME} {limit_s:g}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.getreports("skipped")
    num_left = sum(_NO_TIME in str(report.longrepr) for report in skipped)
    if num_left:
        terminalreporter.write_line(f"{num_left} tests did not run: {_NO_TIME}", yellow=True)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Under pytest-xdist a worker gets neighbouring tests, which have fixtures in common."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: ranks wait for each other, and leave cores idle half the time."""
    return max(2, len(os.sched_getaffinity(0)) * 3 // 2) if hasattr(os, "sched_getaffinity") else 2


@pytest.fixture(autouse=True)
def nothing_of_a_launch_is_left() -> Iterator[None]:
    """A Trainer of one device makes the test's own process its rank 0, for good.

    The group, and variables such as MASTER_PORT, would lead the next test's processes to it.
    """
    before, hook = dict(os.environ), sys.excepthook
    yield
    if (launch := sys.modules.get("lightning_zero.launch.children")) is not None:
        while (children := launch.Children.current()) is not None:
            children.end()
            children.before.restore()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook  # every process group wraps it
    os.environ.clear()
    os.environ.update(before)
