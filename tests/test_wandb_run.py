"""One Weights & Biases run per job: ranks, sweeps, and jobs that start again. Offline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from lightning_zero.wandb_run import wandb_logger
from tests.test_examples import SMALL

ROOT = Path(__file__).parents[1]


def train(*overrides):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "examples/train.py", "logger=wandb", *SMALL, *overrides]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def runs(folder):
    """Ids of the runs kept in a job's directory, in order of their start."""
    return [path.name.split("-")[-1] for path in sorted(folder.glob("wandb/offline-run-*"))]


def test_a_job_keeps_its_run_and_another_job_of_the_process_has_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = [wandb_logger(tmp_path / job).experiment.id for job in ("a", "b", "a")]
    wandb.finish()
    assert ids[0] == ids[2] != ids[1]
    assert runs(tmp_path / "a") == [ids[0]] * 2
    monkeypatch.setenv("RANK", "1")
    wandb_logger(tmp_path / "c", name="a rank without a run")
    assert wandb.run is None
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_each_job_of_a_sweep_has_one_run_for_all_its_ranks_and_keeps_it_when_started_again(
    tmp_path,
):
    printed = train("zero=stage1,stage2", f"hydra.sweep.dir={tmp_path}", "-m")
    assert "There is a wandb run already in progress" not in printed
    first, second = (runs(tmp_path / str(job)) for job in range(2))
    assert len(first) == len(second) == 1
    assert first != second
    train(f"hydra.run.dir={tmp_path}/1")
    assert runs(tmp_path / "1") == second * 2
