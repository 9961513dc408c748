"""The batch scripts of examples/slurm and the submission from Hydra, on a real SLURM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import wait_for
from tests.slurm.test_training import ROOT
from tests.support.fault_matrix import SLOWDOWN

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
SMALL = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "data.num_validation_windows=16",
    "data.batch_size=4",
    "data.context=32",
    "model=tiny",
]
# Resources of the scripts that these nodes lack: GPUs, and more than two processors.
LAYOUT = ["--gpus-per-node=0", "--cpus-per-task=1", "--time=10", "--tmp=0"]

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150 + 150 * SLOWDOWN)]


def submit(slurm, folder, name, *overrides, options=()):
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = (ROOT / "examples" / "slurm" / name).read_text()
    settings = [f"--export=ALL,PATH={path},PYTHONPATH={ROOT},TMPDIR={folder}"]
    (folder / "job.sbatch").write_text(script)
    arguments = [*settings, *LAYOUT, *options, folder / "job.sbatch", *SMALL, *overrides]
    return slurm.run("sbatch", "--parsable", *map(str, arguments), cwd=folder)


@pytest.mark.slow
def test_the_script_for_several_nodes_trains_and_keeps_its_directory(slurm, tmp_path):
    job = submit(slurm, tmp_path, "multi_node.sbatch", options=["--ntasks-per-node=1"])
    slurm.wait(job, 90)
    run_dir = tmp_path / "outputs" / f"slurm-{job}"
    assert {path.name for path in run_dir.glob("*.log")} == {"train.log", "train_rank1.log"}
    assert len(list((run_dir / "checkpoints").glob("step_*.ckpt"))) == 1
    output = slurm.output(job)
    assert "rank 1" in output
    assert output.count("a continuation of") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["single_node.sbatch", "array_sweep.sbatch", "offload_nvme.sbatch"]
)
def test_the_other_scripts_train(slurm, tmp_path, name):
    job = submit(slurm, tmp_path, name, options=["--ntasks-per-node=2"])
    is_array = "array" in name
    dirs = [f"slurm-{job}_{i}" for i in range(3)] if is_array else [f"slurm-{job}"]
    for run_dir in dirs:
        folder = tmp_path / "outputs" / run_dir
        checkpoints = folder / "checkpoints"
        wait_for(
            lambda c=checkpoints: list(c.glob("*.ckpt")),
            120,
            lambda: "\n".join(p.read_text() for p in tmp_path.glob("*.out")),
        )
    wait_for(lambda: job not in slurm.run("squeue", "-h", "-o", "%A %F"), 60)


@pytest.mark.slow
def test_the_script_with_torchrun_trains_on_two_nodes(slurm, tmp_path):
    job = submit(slurm, tmp_path, "torchrun.sbatch")
    slurm.wait(job, 200)
    run_dir = tmp_path / "outputs" / f"slurm-{job}"
    assert {path.name for path in run_dir.glob("*.log")} == {"train.log", "train_rank1.log"}
    assert len(list((run_dir / "checkpoints").glob("step_*.ckpt"))) == 1


def test_every_script_is_correct_shell_and_documents_its_use():
    assert [path.stem for path in SCRIPTS] == [
        *("array_sweep", "multi_node", "offload_nvme", "single_node", "torchrun")
    ]
    for path in [*SCRIPTS, SCRIPTS[0].parent / "env.sh"]:
        subprocess.run(["bash", "-n", path], check=True)
    for path in SCRIPTS:
        text = path.read_text()
        assert f"examples/slurm/{path.name} [overrides]" in text.splitlines()[1]
        assert "##SBATCH --account=" in text
        if path.stem != "torchrun":
            assert "#SBATCH --requeue" in text
            assert "#SBATCH --signal=SIGUSR1@" in text


def multirun(slurm, folder, *overrides):
    environment = {**slurm.environment, "PYTHONPATH": f"{ROOT}:{ROOT}/examples"}
    command = [sys.executable, ROOT / "examples" / "train.py", "-m", "hydra/launcher=slurm"]
    settings = [f"hydra.sweep.dir={folder}/sweep", "callbacks=batch", *SMALL, *overrides]
    return subprocess.Popen(
        [*command, *settings],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_sweep_from_hydra_is_signalled_requeued_and_ends_in_its_own_directories(slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")
    steps = ["trainer.max_steps=120", "trainer.val_check_interval=120", "trainer.devices=2"]
    with multirun(slurm, tmp_path, "zero=stage2,stage3", *steps) as sweep:
        logs = [tmp_path / "sweep" / str(i) / "train.log" for i in range(2)]
        marks = [tmp_path / "sweep" / str(i) / "csv" / "metrics.csv" for i in range(2)]
        wait_for(marks[0].exists, 90, lambda: str(list(tmp_path.rglob("*"))))
        listed = slurm.run("squeue", "-h", "-o", "%A %K %T").splitlines()
        job = next(line.split()[0] for line in listed if " 0 " in line)
        assert slurm.field(job, "Requeue") == "1"
        slurm.run("scancel", "--signal=USR1", job)
        printed, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 0, printed
    assert slurm.field(job, "Restarts") == "1"
    for log in logs:
        assert log.exists()
        checkpoints = {path.name for path in (log.parent / "checkpoints").glob("*.ckpt")}
        assert checkpoints == {"step_000120.ckpt", "last.ckpt"}


@pytest.mark.slow
def test_a_sweep_with_too_few_tasks_names_the_setting(slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")
    wrong = ["trainer.devices=2", "hydra.launcher.tasks_per_node=1"]
    with multirun(slurm, tmp_path, *wrong) as sweep:
        printed, _ = sweep.communicate(timeout=120)
    assert sweep.returncode != 0
    assert "gave 1 node(s) with 1 task(s)" in printed
    assert "hydra.launcher.tasks_per_node=2" in printed
