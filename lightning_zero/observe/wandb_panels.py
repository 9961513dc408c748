"""What a Weights & Biases run shows of the engine beside curves: bars, tables and pictures.

All of it is of the core package, so that it works offline, and goes to the run of rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.observe.report import Flow, JobReport

__all__ = ["Panels"]

_GIB = 1024**3
_MAX_NUM_RANKS = 16
_FLOWS: list[str | int] = ["kind", "in flight s", "hidden s", "exposed s", "GiB", "GiB/s"]


class Panels:
    """Of one run.

    Args:
        logger: Its logger; metrics of the engine are drawn over the steps that it counts.
    """

    def __init__(self, logger: WandbLogger) -> None:
        self._logger = logger
        logger.experiment.define_metric("zero/*", step_metric="trainer/global_step")

    def log_step(self, memory: Sequence[MemoryReport], flows: Sequence[Flow], step: int) -> None:
        """Memory by rank and state, and communication.

        Args:
            memory: By rank.
            flows: By kind.
            step: At which Lightning logs it.
        """
        panels = {"zero/memory_by_rank": _bars(memory), "zero/communication": _table(flows)}
        self._logger.log_metrics(panels, step=step)

    def log_end(self, report: JobReport, timelines: Sequence[Path], step: int) -> None:
        """The same of the whole job, and pictures of the steps that were traced."""
        self.log_step(report.memory, report.flows, step)
        for path in timelines:
            self._logger.log_image(f"zero/{path.stem}", [str(path)], step=step)


def _bars(memory: Sequence[MemoryReport]) -> Any:
    """A bar for each rank and state; of many ranks, for those that keep the least and the most."""
    if len(memory) > _MAX_NUM_RANKS:
        memory = [
            min(memory, key=lambda report: report.total_bytes),
            max(memory, key=lambda report: report.total_bytes),
        ]
    alone = [
        [f"data parallel {state.value}", nbytes / _GIB]
        for state, nbytes in memory[0].data_parallel.items()
    ]
    rows = [
        [f"rank {report.rank} {state.value} ({tier})", nbytes / _GIB]
        for report in memory
        for tier, states in report.tiers.items()
        for state, nbytes in states.items()
    ]
    table = wandb.Table(columns=["state", "GiB"], data=[*rows, *alone])
    return wandb.plot.bar(table, "state", "GiB", title="Model states by rank, GiB")


def _table(flows: Sequence[Flow]) -> wandb.Table:
    rows = [
        [flow.kind, flow.in_flight_s, flow.hidden_s, flow.exposed_s, flow.gib, flow.gib_per_s]
        for flow in flows
    ]
    return wandb.Table(columns=_FLOWS, data=rows)
