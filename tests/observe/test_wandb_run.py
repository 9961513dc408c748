"""One Weights & Biases run per job: with several ranks, in sweeps, after a restart. Offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.observe.loggers import wandb_logger
from tests.repository.test_examples import SMALL
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


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
    long = wandb_logger(tmp_path / "d", name="zero=stage2 " * 20, tags=["x" * 100], group=None)
    assert long.experiment.name == ("zero=stage2 " * 20)[:128]
    assert long.experiment.tags == ("x" * 64,)
    wandb.finish()
    monkeypatch.setenv("RANK", "1")
    wandb_logger(tmp_path / "c", name="a rank without a run")
    assert wandb.run is None
    assert not (tmp_path / "c").exists()


def _fit_monitored(rank, world_size, folder):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    monitor = ZeroMonitor(every_n_steps=2, detail=True, trace_steps=[2])
    logger = wandb_logger(folder)
    trainer = make_trainer("zero2", logger=logger, callbacks=[monitor])
    trainer.fit(MLPModule(ranks=world_size))
    if rank:
        return None
    summary = dict(logger.experiment.summary)
    wandb.finish()
    return logger.version, {k: v for k, v in summary.items() if isinstance(v, (int, float))}


def test_the_run_of_all_ranks_has_bars_tables_and_the_timeline_beside_its_curves(tmp_path):
    (run, summary), none = run_ranks(2, _fit_monitored, tmp_path, has_group=False)
    assert none is None
    assert runs(tmp_path) == [run]
    (files,) = tmp_path.glob("wandb/offline-run-*/files")
    assert summary["trainer/global_step"] == 4
    assert summary["zero_time/step_s/mean"] > 0
    assert summary["zero_straggler/rank"] in (0, 1)
    (image,) = files.glob("media/images/zero_trace/trace_step_2_*.png")
    assert image.read_bytes().startswith(b"\x89PNG")
    tables = [json.loads(path.read_text()) for path in files.rglob("*.table.json")]
    by_columns = {tuple(table["columns"]): table["data"] for table in tables}
    bars = dict(by_columns["state", "GiB"])
    assert bars["rank 1 optimizer (device)"] > 0
    assert bars["data parallel optimizer"] > 1.5 * bars["rank 0 optimizer (device)"]
    flows = by_columns["kind", "in flight s", "overlapped s", "exposed s", "GiB", "GB/s"]
    assert [flow[0] for flow in flows] == [
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "agree",
    ]


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
