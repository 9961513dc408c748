"""The script for the first hour on a GPU works where there is none, with tiny cases."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu.first_hour import PIECES, cases, measure, page
from tests.support.ranks import run_ranks

SCRIPT = Path(__file__).parents[1] / "gpu" / "run.sh"


def _measure(rank, world_size, case):
    return measure(case, Path())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if piece == "memory" else [])
        for piece in PIECES
        for case in cases(piece, is_dry=True)
    ],
    ids=lambda case: f"{case.piece} {case.system}",
)
def test_a_case_is_measured(case):
    (found,) = run_ranks(1, _measure, case, has_group=False)
    assert found
    if case.piece == "memory":
        assert found["states"] == found["allocated"]
    else:
        assert found["tokens_per_s"] > 0


def test_a_page_lists_measurements_and_failures(tmp_path):
    rows = [
        {"piece": "offload", "system": "zero3-cpu", "model": "1.1b", "step_ms": 12.5},
        {"piece": "offload", "system": "torchao", "model": "1.1b", "error": "not installed"},
    ]
    (tmp_path / "offload.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page(tmp_path)
    assert "## Offload" in text
    assert "12.5" in text
    assert "not installed" in text


@pytest.mark.slow
def test_the_script_runs_every_piece(tmp_path):
    pieces = [*PIECES, "page"]
    subprocess.run([SCRIPT, "--dry", *pieces], env={**os.environ, "OUT": str(tmp_path)}, check=True)
    (written,) = tmp_path.glob("*.md")
    assert all(f"## {piece.capitalize()}" in written.read_text() for piece in PIECES)
    assert "error" not in written.read_text()
