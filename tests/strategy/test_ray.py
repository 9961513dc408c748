"""A training function of Ray Train on a cluster of two nodes; skipped without Ray."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support.pages import PAGES, ROOT

pytest.importorskip("ray", reason="needs the extra ray")


def run(script, *arguments, folder):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, ROOT / script, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.shows("Ray Train", stages=[3])
@pytest.mark.timeout(400)
def test_a_killed_worker_and_fewer_workers_resume(tmp_path):
    """After a worker is killed, all resume from the newest checkpoint; then fewer resume it."""
    run("tests/support/scripts/ray_job.py", str(tmp_path), folder=tmp_path)
    plain, killed, fewer = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "killed", "fewer")
    )
    assert killed["num_nodes"] == 2
    assert (tmp_path / "killed").exists()
    assert killed["resumed"]
    for name, value in plain["values"].items():
        np.testing.assert_allclose(killed["values"][name], value, rtol=1e-5, atol=1e-6)
    assert (fewer["num_ranks"], fewer["resumed"], len(fewer["losses"])) == (2, True, 3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_of_the_page(tmp_path):
    (command,) = re.findall(
        r"^python (examples/ray_train.py .*)$", PAGES["docs/guides/clusters.md"], re.M
    )
    assert "checkpoint: " in run(*command.split(), folder=tmp_path)


def test_what_ray_decides_is_refused_by_name():
    from lightning_zero.ray import RayZeroStrategy

    with pytest.raises(ValueError, match=r"process_group_backend is decided by Ray, got 'gloo'"):
        RayZeroStrategy(process_group_backend="gloo")
    with pytest.raises(ValueError, match="async_save=True is not possible under Ray"):
        RayZeroStrategy(async_save=True)


def test_outside_of_a_training_function_it_is_refused():
    from lightning_zero.ray import RayZeroStrategy

    with pytest.raises(RuntimeError, match="found no process group of Ray"):
        RayZeroStrategy()
