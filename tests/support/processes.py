"""Programs that need a Python process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lightning_zero._lightning import VARIABLE

__all__ = ["SCRIPTS", "run_python", "start_python"]

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def run_python(*command, cwd=None, **variables):
    """Returns the standard output of `python *command`, which must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=_environment() | variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_python(*command):
    """Starts `python *command` with pipes to its input and output, which end it when closed."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _environment():
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
