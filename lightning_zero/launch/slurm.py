"""SLURM: check of a job's layout against the Trainer's, and the command that requeues the job.

The ranks would wait until the timeout for a rank that SLURM has not started. So a layout that
differs from the Trainer's is an error, with the correct lines.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

__all__ = ["check_slurm_layout", "requeue_job"]


def check_slurm_layout(
    environment: Mapping[str, str], *, num_devices: int, num_nodes: int, on_cuda: bool
) -> None:
    """Compares nodes, tasks per node and GPUs with the Trainer's. Reads the environment only.

    Args:
        environment: Environment that srun sets for a task, or sbatch for its script.
        num_devices: Devices per node of the Trainer.
        num_nodes: Nodes of the Trainer.
        on_cuda: Whether the devices are GPUs.

    Raises:
        ValueError: The layouts differ.
    """
    get = environment.get
    given_nodes = int(get("SLURM_STEP_NUM_NODES", get("SLURM_NNODES", "1")))
    packed = get("SLURM_STEP_TASKS_PER_NODE", get("SLURM_TASKS_PER_NODE", ""))  # `2(x3),1`
    tasks = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", packed)
        for _ in range(int(times or 1))
    ] or [int(get("SLURM_NTASKS_PER_NODE", num_devices))]
    num_tasks = int(get("SLURM_NTASKS", "1"))
    trainer = f"Trainer(num_nodes={num_nodes}, devices={num_devices})"
    lines = _lines(num_devices, num_nodes, on_cuda)
    if on_cuda and "SLURM_GPUS_PER_TASK" in environment:
        lines += (
            "\n--gpus-per-task makes only a task's own GPUs visible to it, but every task must see "
            "all devices of its node: use --gpus-per-node, and set devices to that number."
        )
    if given_nodes != num_nodes or any(count != num_devices for count in tasks):
        counts = str(tasks[0]) if len(set(tasks)) == 1 else ", ".join(map(str, tasks))
        raise ValueError(
            f"{trainer} needs {num_nodes} node(s) with {num_devices} task(s) each, one for every "
            f"device, but SLURM gave {given_nodes} node(s) with {counts} task(s).\n{lines}"
        )
    if num_tasks > 1 and "SLURM_PROCID" in environment and "SLURM_STEP_ID" not in environment:
        raise ValueError(
            f"SLURM gave {num_tasks} tasks, but this process was started without srun, so that the "
            f"other ranks are not running.\n{lines}"
        )
    gpus = get("SLURM_GPUS_ON_NODE", "")
    if on_cuda and gpus.isdigit() and int(gpus) < num_devices:
        raise ValueError(
            f"{trainer} needs {num_devices} GPU(s) on every node, but SLURM gave {gpus}.\n{lines}"
        )


def _lines(num_devices: int, num_nodes: int, on_cuda: bool) -> str:
    lines = [f"#SBATCH --nodes={num_nodes}", f"#SBATCH --ntasks-per-node={num_devices}"]
    if on_cuda:
        lines.append(f"#SBATCH --gpus-per-node={num_devices}")
    return (
        "Use these lines in the batch script, and start Python with srun:\n"
        + "\n".join(f"    {line}" for line in [*lines, "srun python ..."])
        + "\nWith Hydra's submitit launcher: hydra.launcher.nodes="
        f"{num_nodes} hydra.launcher.tasks_per_node={num_devices}"
    )


def requeue_job(*, only_if_running: bool) -> str | None:
    """Asks SLURM to requeue the job of this process; returns the reason if it does not.

    On rank 0 only. `only_if_running`: a job that ends, since it was cancelled or its time is over,
    is not requeued.
    """
    job = number = os.environ["SLURM_JOB_ID"]
    if only_if_running:
        shown = _scontrol("show", "job", "-o", number)
        state = re.search(r"\bJobState=(\w+)", shown.stdout)
        if state is None:
            return f"its state is unknown: {shown.stderr.strip() or shown.stdout}"
        if state[1] != "RUNNING":
            return f"it is {state[1]}"
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # by the number alone, SLURM may take all of it
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    done = _scontrol("requeue", job)
    if done.returncode == 0:
        return None
    return f"scontrol requeue {job}: {done.stderr.strip() or done.returncode}"


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs scontrol; if it cannot run, returns status 1 with the reason as stderr."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=str(error))
