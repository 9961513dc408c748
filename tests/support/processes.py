"""Programs that need a Python process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lightning_zero._lightning import VARIABLE

__all__ = ["SCRIPTS", "run_python"]

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def run_python(*command, cwd=None, **variables):
    """Returns the standard output of `python *command`, which must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
