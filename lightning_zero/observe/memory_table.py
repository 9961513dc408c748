"""A table of the bytes that each rank keeps, beside those of plain data parallel."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from typing_extensions import override

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.stage import State
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["MemoryTable", "aligned", "memory_reports", "memory_table", "zero_strategy"]

_MIB = 1024**2
_GIB = 1024**3
_MAX_NUM_RANKS = 8


class MemoryTable(pl.Callback):
    """Prints on rank 0, when training ends, how many MiB of each state every rank keeps at rest.

    The last row is what plain data parallel keeps on every rank; the last column is the ratio to
    it. Beyond 8 ranks the rows are the least and the most of each column over the ranks. States
    that rest on more than one tier have a column for each, unless all of it is 0. Where shards rest
    on NVMe, a line says what rank 0 has read and written there. `ZeroMonitor` prints the same.

    Collective: every rank, in `on_train_end`.

    Raises:
        TypeError: The strategy is not a `ZeroStrategy`; raised before anything is trained.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses a strategy that counts no bytes."""
        zero_strategy(trainer, self)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gathers the counts of all ranks and prints the table."""
        reports = memory_reports(zero_strategy(trainer, self))
        if trainer.is_global_zero:
            print("\n" + memory_table(reports, trainer.global_step))


def zero_strategy(trainer: pl.Trainer, callback: pl.Callback) -> ZeroStrategy:
    """The Trainer's strategy, for a callback that needs one of ours.

    Raises:
        TypeError: It is another one.
    """
    strategy, name = trainer.strategy, type(callback).__name__
    if not isinstance(strategy, ZeroStrategy):
        raise TypeError(
            f"{name} needs a ZeroStrategy, got {type(strategy).__name__}; use strategy='zero3' or "
            f"another of lightning_zero, or leave {name} out."
        )
    return strategy


def memory_reports(strategy: ZeroStrategy) -> list[MemoryReport]:
    """What each rank keeps at this moment, by rank, on rank 0. Collective: every rank."""
    engine = strategy.engine
    engine.lockstep.meet_for("the memory table")  # else ranks would wait for one that has failed
    return engine.comm.control.collect_objects(strategy.memory_report())


def memory_table(reports: Sequence[MemoryReport], num_steps: int) -> str:
    """The text to print.

    Args:
        reports: By rank.
        num_steps: Optimizer steps that have been taken.
    """
    tiers = list(dict.fromkeys(tier for report in reports for tier in report.tiers))
    names = [state.value for state in State]
    if len(tiers) > 1:
        names = [f"{name} ({tier})" for tier in tiers for name in names]
    rows = [
        [report.tiers.get(tier, {}).get(state, 0) for tier in tiers for state in State]
        for report in reports
    ]
    rows = [[*row, sum(row)] for row in rows]
    labels = [f"rank {rank}" for rank in range(len(rows))]
    if len(rows) > _MAX_NUM_RANKS:
        labels = [f"least of {len(rows)} ranks", f"most of {len(rows)} ranks"]
        rows = [list(map(min, *rows)), list(map(max, *rows))]
    # Plain data parallel keeps everything on the first tier, the device.
    alone = [reports[0].data_parallel.get(state, 0) for state in State]
    rows.append([*alone, *[0] * (len(names) - len(alone)), sum(alone)])
    labels.append("plain data parallel")
    if len(tiers) > 1:
        names, rows = _without_zeros(names, rows)
    header = ["MiB at rest", *names, "total", "ratio"]
    lines = [
        [label, *(f"{count / _MIB:.2f}" for count in row), f"{row[-1] / (rows[-1][-1] or 1):.3f}"]
        for label, row in zip(labels, rows, strict=True)
    ]
    table = aligned([header, *lines])
    return f"{table}\n{_traffic(reports[0], num_steps)}" if reports[0].nvme_written_bytes else table


def _without_zeros(names: list[str], rows: list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Without the columns of zeros; the total, which has no name, stays."""
    kept = [place for place, column in enumerate(zip(*rows, strict=True)) if any(column)]
    kept = sorted({*kept, len(names)})
    names = [names[place] for place in kept[:-1]]
    return names, [[row[place] for place in kept] for row in rows]


def _traffic(report: MemoryReport, num_steps: int) -> str:
    read, written = report.nvme_read_bytes / _GIB, report.nvme_written_bytes / _GIB
    per_step = written / max(num_steps, 1)
    return (
        f"NVMe traffic of rank 0: {read:.2f} GiB read, {written:.2f} GiB written, "
        f"{per_step:.3f} GiB written per step"
    )


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
