"""How a strategy starts its ranks, and the check that the ranks are as many as were asked for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_zero.comm.world import has_world, world_size
from lightning_zero.strategy.children import Children
from lightning_zero.strategy.command import current_job
from lightning_zero.strategy.script import ScriptLauncher

if TYPE_CHECKING:
    from lightning_zero.strategy.processes import ProcessStrategy

__all__ = ["START_METHODS", "StartMethod", "check_numbering", "check_world_size", "make_launcher"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
START_METHODS = ("popen", "spawn", "fork", "forkserver")


def make_launcher(
    strategy: ProcessStrategy, environment: ClusterEnvironment, start_method: StartMethod
) -> ScriptLauncher | _MultiProcessingLauncher:
    """The launcher for a start method.

    One is always attached, also where the ranks are started by torchrun or srun: it is what asks
    the environment whether its layout is the one that the Trainer was told.
    """
    if start_method == "popen":
        children = Children.current()
        if children is not None and children.job != current_job():
            children.end()  # before anything asks the environment who this process is
        return ScriptLauncher(
            environment,
            strategy.num_processes,
            strategy.num_nodes,
            on_cuda=any(device.type == "cuda" for device in strategy.parallel_devices or ()),
        )
    return _MultiProcessingLauncher(strategy, start_method=start_method)


def check_world_size(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Compares what the Trainer was told with what the launcher has started.

    Raises:
        ValueError: They differ; training would go on with the wrong number of ranks.
    """
    asked = num_devices * num_nodes
    given = world_size() if has_world() else environment.world_size()
    if given == asked:
        return
    expects = f"Trainer(devices={num_devices}, num_nodes={num_nodes}) expects {asked} ranks, but "
    if isinstance(environment, LightningEnvironment):  # nothing else has started them
        raise ValueError(
            f"{expects}an earlier Trainer of this script has begun with {given}, and a script "
            "starts its ranks once; give all of its Trainers the same devices and num_nodes, or "
            "run them as scripts of their own. Where you set LOCAL_RANK and WORLD_SIZE yourself, "
            "start as many."
        )
    raise ValueError(
        f"{expects}{type(environment).__name__} started {given}; make devices x num_nodes equal to "
        "the number of processes of torchrun (--nproc-per-node x --nnodes) or srun (--ntasks)."
    )


def check_numbering(rank: int, node_rank: int, num_devices: int) -> None:
    """Warns on a rank that is not among the consecutive ones of its node."""
    if rank // num_devices != node_rank:
        warnings.warn(
            f"rank {rank} runs on node {node_rank}, expected on node {rank // num_devices}: groups "
            "of consecutive ranks are spread over nodes and gathers leave them; number ranks node "
            "by node (SLURM's --distribution=block).",
            stacklevel=2,
        )
