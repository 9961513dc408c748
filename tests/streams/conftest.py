"""The server of scenarios."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.streams.libraries import build
from tests.streams.scenarios import Scenario
from tests.streams.server import Outcome

_HERE = Path(__file__).parent


class Checker:
    """Trains scenarios under the clocks."""

    def __init__(self, libraries: Path, log: Path) -> None:
        preloaded = str(libraries / "libaccelerator.so")
        self._log = log
        with log.open("w") as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.streams.server", str(libraries)],
                cwd=_HERE.parents[1],
                env={**os.environ, "LD_PRELOAD": preloaded, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, scenario: Scenario) -> Outcome:
        """What was seen of one."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(dataclasses.asdict(scenario)) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, self._log.read_text()
        outcome = Outcome(**json.loads(answer))
        assert not outcome.error, outcome.error
        return outcome

    def close(self) -> None:
        """Ends the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


@pytest.fixture(scope="session")
def checker(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checker]:
    if sys.platform != "linux":
        pytest.skip("one library is preloaded, as Linux does")
    if torch.version.cuda is not None:
        pytest.skip("a build of torch for CUDA has a device of its own")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("streams")
    cache = getattr(pytestconfig, "cache", None)
    checker = Checker(build(compiler, cache.mkdir("streams") if cache else folder), folder / "log")
    yield checker
    checker.close()
