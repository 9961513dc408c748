"""What cannot be trained, refused by name before any rank waits for another.

That is a layout which SLURM did not give, and modules and callbacks that need whole parameters. A
rank that SLURM did not start never comes, and the others would wait for it until the timeout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.stage import State
from lightning_zero.tensors.guarded import has_placement
from lightning_zero.tensors.meta import is_left_out

__all__ = ["check_slurm_layout", "refuse_callbacks", "refuse_module"]


def check_slurm_layout(
    environment: Mapping[str, str], *, num_devices: int, num_nodes: int, on_cuda: bool
) -> None:
    """Compares nodes, tasks per node and GPUs. Reads the environment only.

    Args:
        environment: As srun sets it for a task, or sbatch for its script.
        num_devices: The Trainer's, of one node.
        num_nodes: The Trainer's.
        on_cuda: Whether the devices are GPUs.

    Raises:
        ValueError: They differ, or the script was not started by srun; with the lines to use.
    """
    given_nodes = int(_first(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "1"))
    packed = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "")
    tasks = _tasks_of_nodes(packed) or [int(environment.get("SLURM_NTASKS_PER_NODE", num_devices))]
    num_tasks = int(environment.get("SLURM_NTASKS", "1"))
    asked = f"Trainer(num_nodes={num_nodes}, devices={num_devices})"
    lines = _lines(num_devices, num_nodes, on_cuda)
    if on_cuda and "SLURM_GPUS_PER_TASK" in environment:
        lines += (
            "\n--gpus-per-task shows each task its own GPUs only, but devices counts all of a "
            "node, which every task must see: ask with --gpus-per-node, and set devices to that."
        )
    if given_nodes != num_nodes or any(count != num_devices for count in tasks):
        counts = str(tasks[0]) if len(set(tasks)) == 1 else ", ".join(map(str, tasks))
        raise ValueError(
            f"{asked} needs {num_nodes} node(s) with {num_devices} task(s) each, one for every "
            f"device, but SLURM gave {given_nodes} node(s) with {counts} task(s).\n{lines}"
        )
    if num_tasks > 1 and "SLURM_PROCID" in environment and "SLURM_STEP_ID" not in environment:
        raise ValueError(
            f"SLURM gave {num_tasks} tasks, but this process was started without srun, so that the "
            f"other ranks would never come.\n{lines}"
        )
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_cuda and gpus.isdigit() and int(gpus) < num_devices:
        raise ValueError(
            f"{asked} needs {num_devices} GPU(s) on every node, but SLURM gave {gpus}.\n{lines}"
        )


def _first(environment: Mapping[str, str], *names: str) -> str:
    """The first variable that is set; the last of `names` is the value if none is."""
    *variables, default = names
    return next((environment[name] for name in variables if name in environment), default)


def _tasks_of_nodes(packed: str) -> list[int]:
    """`2(x3),1` as [2, 2, 2, 1]."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", packed):
        counts += [int(count)] * int(times or 1)
    return counts


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


def refuse_module(module: LightningModule, *, is_ours: bool) -> None:
    """Raises where there is nothing to train here.

    Args:
        module: As it is given to the Trainer.
        is_ours: The strategy's own engine may hold it.

    Raises:
        ValueError: Another engine holds it, or it has no parameters and will have none.
    """
    for name, parameter in module.named_parameters():
        is_held = has_placement(parameter) and not is_left_out(parameter)
        if is_held and not is_ours:
            raise ValueError(
                f"parameter {name} is already held by another engine; one module trains under one "
                "strategy at a time: let the other fit end first."
            )
    builds_later = any(is_overridden(hook, module) for hook in ("setup", "configure_model"))
    if not builds_later and not any(True for _ in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has no parameters, so there is nothing to shard; build "
            "its layers in __init__, setup() or configure_model()."
        )


def refuse_callbacks(callbacks: Iterable[Callback], config: ZeroConfig) -> None:
    """Raises where a callback would fail in the middle of training.

    Raises:
        ValueError: Pruning, where no rank has the whole parameters whose least elements it seeks.
    """
    if not config.states.has_shard(State.PARAM):
        return
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} ranks the elements of whole parameters and replaces "
                f"parameters by masked ones, and in {config.states} they rest as shards; use stage "
                "1 or 2, where they rest whole."
            )
