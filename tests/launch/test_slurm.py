"""Layouts of the Trainer and of SLURM."""

import pytest

from lightning_zero.launch.slurm import check_slurm_layout


def srun(nodes, tasks, num_tasks, **more):
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        **more,
    }


def check(environment, devices, nodes, on_cuda=False):
    check_slurm_layout(environment, num_devices=devices, num_nodes=nodes, on_cuda=on_cuda)


@pytest.mark.parametrize(
    ("environment", "devices", "nodes"),
    [
        (srun(1, "1", 1), 1, 1),
        (srun(2, "4(x2)", 8), 4, 2),
        (srun(3, "2(x2),2", 6), 2, 3),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 1, 1),  # no srun
    ],
)
def test_a_layout_that_fits_passes(environment, devices, nodes):
    check(environment, devices, nodes)


@pytest.mark.parametrize(
    ("environment", "devices", "nodes", "given"),
    [
        (srun(1, "1", 1), 2, 1, r"gave 1 node\(s\) with 1 task\(s\)"),
        (srun(2, "1(x2)", 2), 2, 1, r"gave 2 node\(s\) with 1 task\(s\)"),
        (srun(2, "2(x2)", 4), 2, 1, r"gave 2 node\(s\) with 2 task\(s\)"),
        (srun(2, "2,1", 3), 2, 2, r"gave 2 node\(s\) with 2, 1 task\(s\)"),
    ],
)
def test_another_layout_is_an_error_with_the_lines_to_use(environment, devices, nodes, given):
    with pytest.raises(ValueError, match=given) as caught:
        check(environment, devices, nodes)
    text = str(caught.value)
    assert f"    #SBATCH --nodes={nodes}\n    #SBATCH --ntasks-per-node={devices}\n" in text
    assert "    srun python ..." in text
    assert f"hydra.launcher.nodes={nodes} hydra.launcher.tasks_per_node={devices}" in text
    assert "gpus" not in text


def test_a_batch_script_without_srun_is_an_error():
    environment = srun(1, "2", 2)
    environment = {k: v for k, v in environment.items() if "STEP" not in k}
    with pytest.raises(ValueError, match="without srun"):
        check(environment | {"SLURM_TASKS_PER_NODE": "2"}, 2, 1)


def test_too_few_gpus_are_an_error_that_names_the_line():
    with pytest.raises(ValueError, match=r"gave 1\.\n(.*\n)*    #SBATCH --gpus-per-node=2"):
        check(srun(1, "2", 2, SLURM_GPUS_ON_NODE="1"), 2, 1, on_cuda=True)
    check(srun(1, "2", 2, SLURM_GPUS_ON_NODE="1"), 2, 1)


def test_an_error_about_gpus_per_task_suggests_gpus_per_node():
    """Each of two tasks sees one GPU, so that the Trainer accepts only devices=1."""
    environment = srun(1, "2", 2, SLURM_GPUS_ON_NODE="2", SLURM_GPUS_PER_TASK="1")
    with pytest.raises(ValueError, match=r"gave 1 node\(s\) with 2 task\(s\)") as caught:
        check(environment, 1, 1, on_cuda=True)
    assert "use --gpus-per-node, and" in str(caught.value)
    with pytest.raises(ValueError) as caught:
        check(srun(1, "2", 2), 1, 1, on_cuda=True)
    assert "--gpus-per-task" not in str(caught.value)
