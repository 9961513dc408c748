"""Starts the script once for each rank of this node, unless torchrun or srun have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_zero.strategy.children import Children
from lightning_zero.strategy.command import check_launch, child_command, current_job
from lightning_zero.strategy.preflight import check_slurm_layout
from lightning_zero.strategy.requeue import Requeueing
from lightning_zero.strategy.untouched import Untouched

__all__ = ["ScriptLauncher"]


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
