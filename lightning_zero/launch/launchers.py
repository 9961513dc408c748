"""Lightning's launchers, which start the ranks of a node and run the Trainer's method in each.

Rank 0 of a node starts the script once for each other rank of the node, unless torchrun or srun
have started the ranks.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning import used_by_children
from lightning_zero._lightning.fabric import (
    ClusterEnvironment,
    SLURMEnvironment,
    _set_num_threads_if_needed,
)
from lightning_zero._lightning.pytorch import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning_zero.launch.children import Children, ProcessSnapshot
from lightning_zero.launch.hydra import check_launch, child_command, current_job
from lightning_zero.launch.slurm import check_slurm_layout

__all__ = ["ProcessLauncher", "ScriptLauncher", "Wrap", "end_earlier_job"]

# Wraps a method of the Trainer, such as fit, on every rank before the method runs.
Wrap: TypeAlias = Callable[[Callable[..., Any], pl.Trainer | None], Callable[..., Any]]


def end_earlier_job() -> None:
    """Ends the ranks that this process has started for an earlier Hydra job, and restores it."""
    children = Children.current()
    if children is not None and children.job != current_job():
        children.end()
        children.before.restore()


class ProcessLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of processes that run a function, with the Trainer's method wrapped."""

    def __init__(self, strategy: pl.ParallelStrategy, *, start_method: Any, wrap: Wrap) -> None:
        super().__init__(strategy, start_method=start_method)
        self._wrap = wrap

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with used_by_children():  # a spawned process imports this module before the Trainer's
            return super().launch(function, *args, **kwargs)

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        *rest: Any,
    ) -> None:
        super()._wrapping_function(process_idx, trainer, self._wrap(function, trainer), *rest)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of processes that run the script, with support for Hydra and SLURM.

    Children get rank 0's Hydra job instead of its command line. A wrong SLURM layout is an error
    with the correct lines.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        on_cuda: bool,
        wrap: Wrap,
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self.on_cuda = on_cuda
        self._wrap = wrap

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
        with children.needed() if children is not None else nullcontext():
            return self._wrap(function, trainer)(*args, **kwargs)

    def _start_children(self) -> None:
        environment = self.cluster_environment
        check_launch(self.num_processes)
        commands = [child_command(local_rank) for local_rank in range(1, self.num_processes)]
        first_rank = environment.node_rank() * self.num_processes + 1
        children = Children(current_job(), first_rank=first_rank, before=ProcessSnapshot.take())
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank, (command, cwd) in enumerate(commands, 1):
            variables = {**os.environ, "LOCAL_RANK": str(local_rank)}
            children.processes.append(subprocess.Popen(command, env=variables, cwd=cwd))
        children.start()
