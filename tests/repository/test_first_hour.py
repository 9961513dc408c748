"""The script for the first hour on a GPU works where there is none, with tiny cases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu.first_hour import PIECES

SCRIPT = Path(__file__).parents[1] / "gpu" / "run.sh"


@pytest.mark.slow
def test_the_script_runs_every_piece(tmp_path):
    pieces = [*PIECES, "page"]
    subprocess.run([SCRIPT, "--dry", *pieces], env={**os.environ, "OUT": str(tmp_path)}, check=True)
    (written,) = tmp_path.glob("*.md")
    assert all(f"## {piece.capitalize()}" in written.read_text() for piece in PIECES)
    assert "error" not in written.read_text()
