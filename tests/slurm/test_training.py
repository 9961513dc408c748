"""Training on a real SLURM of two nodes: srun, torchrun, wrong layouts, preemption and requeue."""

from __future__ import annotations

import contextlib
import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.slurm.cluster import wait_for
from tests.slurm.train import train
from tests.support.fault_matrix import SLOWDOWN
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "train.py"

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120 + 120 * SLOWDOWN)]


def batch_script(*arguments, launcher="srun", before=""):
    words = " ".join(map(str, arguments))
    return (
        "#!/bin/bash\n#SBATCH --signal=SIGUSR1@90\n#SBATCH --requeue\n"
        f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n{before}"
        f"{launcher} {sys.executable} {SCRIPT} {words}\n"
    )


def saved(folder):
    """Full parameters, and losses of all runs, of each rank."""
    files = sorted(Path(folder).glob("rank*.npz"))
    losses = [np.loadtxt(file) for file in sorted(Path(folder).glob("losses-*"))]
    return [{"losses": seen, **np.load(file)} for seen, file in zip(losses, files, strict=True)]


def notes(folder, rank=0, without=()):
    lines = (Path(folder) / f"notes-{rank}").read_text().splitlines()
    return [line for line in lines if line.split()[0] not in without]


def assert_equal(ours, reference, **tolerance):
    assert len(ours) == len(reference) == 2
    for one, other in zip(ours, reference, strict=True):
        assert list(one) == list(other)
        assert len(one["losses"]) == 12
        for name in one:
            np.testing.assert_allclose(one[name], other[name], **tolerance, err_msg=name)


def _train(rank, world_size, strategy, folder):
    train(strategy, world_size, 1, folder)


@pytest.fixture(scope="module")
def never_interrupted(tmp_path_factory):
    """DDP with the environment of torchrun."""
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(2, _train, "ddp", folder, has_group=False)
    return folder


@pytest.mark.shows("launch by srun", stages=(3,))
def test_srun_on_two_nodes_trains_as_torchrun_and_as_ddp(slurm, tmp_path, never_interrupted):
    job = slurm.submit(
        batch_script("zero3", 1, 2, tmp_path), "--nodes=2", "--ntasks-per-node=1", cwd=tmp_path
    )
    (tmp_path / "torchrun").mkdir()
    run_ranks(2, _train, "zero3", tmp_path / "torchrun", has_group=False)
    slurm.wait(job, 60)
    assert_equal(saved(tmp_path), saved(tmp_path / "torchrun"), rtol=0, atol=0)
    assert_equal(saved(tmp_path), saved(never_interrupted), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "devices", "nodes", "launcher", "text"),
    [
        (["--nodes=1", "--ntasks-per-node=1"], 2, 1, "srun", "gave 1 node(s) with 1 task(s)"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["--nodes=2", "--ntasks-per-node=1"], 1, 1, "srun", "gave 2 node(s) with 1 task"),
                (["--nodes=1", "--ntasks-per-node=2"], 2, 1, "", "started without srun"),
            )
        ),
    ],
)
def test_a_wrong_layout_ends_at_once_with_the_lines_to_use(
    slurm, tmp_path, options, devices, nodes, launcher, text
):
    script = batch_script("zero3", devices, nodes, tmp_path, launcher=launcher)
    job = slurm.submit(script, *options, cwd=tmp_path)
    slurm.wait(job, 60, ["FAILED"])
    output = slurm.output(job)
    assert "ValueError" in output
    assert text in output
    assert f"#SBATCH --nodes={nodes}\n    #SBATCH --ntasks-per-node={devices}" in output


@contextlib.contextmanager
def paused(slurm, job, folder, step):
    """Rank 0 waits at `step`."""
    reached = folder / f"paused-{step}"
    wait_for(reached.exists, 60, lambda: slurm.output(job))
    yield
    (folder / f"pause-{step}").unlink()


@pytest.mark.slow
@pytest.mark.shows("requeue in SLURM", stages=(2,))
def test_a_job_that_is_signalled_and_then_preempted_ends_as_if_never_interrupted(
    slurm, tmp_path, never_interrupted
):
    for step in (3, 8):
        (tmp_path / f"pause-{step}").touch()
    layout = ["--nodes=2", "--ntasks-per-node=1", "--exclusive"]
    job = slurm.submit(batch_script("zero2", 1, 2, tmp_path), *layout, cwd=tmp_path)
    with paused(slurm, job, tmp_path, 3):
        slurm.run("scancel", "--signal=USR1", job)
    with paused(slurm, job, tmp_path, 8):
        assert slurm.field(job, "Restarts") == "1"
        (checkpoint,) = tmp_path.glob("requeue-*.ckpt")
        urgent = slurm.submit("#!/bin/sh\nsleep 1\n", *layout, "--partition=urgent", cwd=tmp_path)
        wait_for(lambda: slurm.field(job, "PreemptTime") != "None", 20)
    slurm.wait(urgent, 30)
    slurm.wait(job, 60)
    assert slurm.field(job, "Restarts") == "2"
    assert_equal(saved(tmp_path), saved(never_interrupted), rtol=1e-6, atol=1e-6)
    for rank in (0, 1):
        assert notes(tmp_path, rank, ["start"]) == notes(never_interrupted, rank, ["start"])
        assert [line.split()[2] for line in notes(tmp_path, rank) if "start" in line] == list("049")
    assert not checkpoint.exists()
    with open(tmp_path / "csv" / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert steps == list(range(12))
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["metrics.csv"]


@pytest.mark.slow
def test_a_cancelled_job_is_not_queued_again(slurm, tmp_path):
    (tmp_path / "pause-2").touch()
    script = batch_script("zero1", 1, 2, tmp_path)
    job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=1", cwd=tmp_path)
    with paused(slurm, job, tmp_path, 2):
        slurm.run("scancel", job)
    slurm.wait(job, 30, ["CANCELLED"])
    assert slurm.field(job, "Restarts") == "0"
    assert list(tmp_path.glob("requeue-*.ckpt"))
