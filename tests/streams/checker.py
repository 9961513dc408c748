"""A process of its own in which scenarios are trained: the client of `server`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.streams.scenarios import Scenario
from tests.streams.server import Outcome

__all__ = ["Checker", "missing"]

_ROOT = Path(__file__).parents[2]


def missing() -> str:
    """What the clocks need and this machine lacks; empty if there is all."""
    if sys.platform != "linux":
        return "one library is preloaded, as Linux does"
    if torch.version.cuda is not None:
        return "a build of torch for CUDA has a device of its own"
    return "" if compiler() else "there is no C++ compiler"


def compiler() -> str | None:
    """The C++ compiler."""
    return shutil.which(os.environ.get("CXX", "g++"))


class Checker:
    """Trains scenarios under the clocks.

    Args:
        libraries: Folder of the libraries, see libraries.py.
        log: File of the server's errors.
        root: Top folder of the code that is trained with.
    """

    def __init__(self, libraries: Path, log: Path, root: Path = _ROOT) -> None:
        preloaded = {"LD_PRELOAD": str(libraries / "libaccelerator.so")}
        self._log = log
        with log.open("w") as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.streams.server", str(libraries)],
                cwd=root,
                env={**os.environ, **preloaded, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, scenario: Scenario) -> Outcome:
        """What was seen of one, or the error of its training."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(dataclasses.asdict(scenario)) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, self._log.read_text()
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        """Ends the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
