"""The server of scenarios."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.streams.checker import Checker, compiler, missing
from tests.streams.libraries import build


@pytest.fixture(scope="session")
def checker(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checker]:
    if reason := missing():
        pytest.skip(reason)
    found = compiler()
    assert found is not None
    folder = tmp_path_factory.mktemp("streams")
    cache = getattr(pytestconfig, "cache", None)
    checker = Checker(build(found, cache.mkdir("streams") if cache else folder), folder / "log")
    yield checker
    checker.close()
