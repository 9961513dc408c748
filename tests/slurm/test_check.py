"""`lightning-zero check` under srun, on two nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_check_runs_on_two_nodes_and_writes_one_report(slurm, tmp_path):
    script = (
        f"#!/bin/bash\nexport PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n"
        f"srun {sys.executable} -m lightning_zero check --quick --on-cpu\n"
    )
    job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=1", cwd=tmp_path)
    slurm.wait(job, 500)
    found = json.loads((tmp_path / "lightning-zero-check.json").read_text())["checks"]
    results = {line["check"]: line["result"] for line in found}
    assert [name for name, result in results.items() if result != "ok"] == ["own model", "disk"]
    assert found[0]["numbers"]["nodes"] == 2
    assert " disk ... skipped (" in slurm.output(job)
    text = (tmp_path / "lightning-zero-check.md").read_text()
    assert str(tmp_path) not in text
