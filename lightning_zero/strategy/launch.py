"""How ranks start: the script once for each of this node, unless torchrun or srun have."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from typing_extensions import override

from lightning_zero.comm.world import has_world, world_size
from lightning_zero.strategy.checks import check_slurm_layout
from lightning_zero.strategy.children import Children, Untouched
from lightning_zero.strategy.hydra import check_launch, child_command, current_job
from lightning_zero.strategy.signals import Requeueing

__all__ = [
    "START_METHODS",
    "ScriptLauncher",
    "StartMethod",
    "check_numbering",
    "check_world_size",
    "make_launcher",
]


class ScriptLauncher(_SubprocessScriptLauncher):
    """As Lightning's own, but for Hydra and SLURM.

    Children are given rank 0's Hydra job, not its command line; a SLURM layout is refused with the
    lines that would be right; and a fit under SLURM is requeued.

    Args:
        environment: Says which ranks there are.
        num_processes: Ranks on this node.
        num_nodes: How many.
        on_cuda: Whether the devices are GPUs.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        on_cuda: bool = False,
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self.on_cuda = on_cuda

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.job_id() is not None:
            check_slurm_layout(
                os.environ,
                num_devices=self.num_processes,
                num_nodes=self.num_nodes,
                on_cuda=self.on_cuda,
            )
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._start_children()
        children = Children.current()
        self.procs = children.processes if children is not None else []
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with children.needed() if children is not None else contextlib.nullcontext():
            if trainer is not None and Requeueing.is_wanted(trainer):
                return Requeueing(trainer).run(function, *args, **kwargs)
            return function(*args, **kwargs)

    def _start_children(self) -> None:
        environment = self.cluster_environment
        check_launch(self.num_processes)
        commands = [child_command(local_rank) for local_rank in range(1, self.num_processes)]
        first_rank = environment.node_rank() * self.num_processes + 1
        children = Children(current_job(), first_rank=first_rank, before=Untouched.now())
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank, (command, cwd) in enumerate(commands, 1):
            children.add(command, {**os.environ, "LOCAL_RANK": str(local_rank)}, cwd)
        children.start()


StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
START_METHODS = ("popen", "spawn", "fork", "forkserver")


def make_launcher(
    strategy: ParallelStrategy,
    environment: ClusterEnvironment,
    start_method: StartMethod,
    num_nodes: int,
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
            len(strategy.parallel_devices or ()),
            num_nodes,
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
