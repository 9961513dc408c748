"""What a job says when it ends: the memory of each rank, speed and communication."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
from typing_extensions import override

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.stage import State
from lightning_zero.observe.metrics import Speed
from lightning_zero.observe.tables import paragraph, table
from lightning_zero.record.spans import Kind
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = [
    "TransferStats",
    "JobReport",
    "MemoryTable",
    "memory_reports",
    "memory_table",
    "zero_strategy",
]

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
        zero_strategy(trainer, self)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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
    engine.lockstep.barrier("the memory table")  # else ranks would wait for one that has failed
    return engine.comm.control.collect_objects(strategy.memory_report())


def memory_table(reports: Sequence[MemoryReport], num_steps: int) -> str:
    """What `MemoryTable` prints of all ranks, after so many optimizer steps."""
    tiers = list(dict.fromkeys(tier for report in reports for tier in report.tiers))
    columns: dict[str, list[int]] = {}  # bytes of every rank, and of plain data parallel
    for tier in tiers:
        for state in State:
            name = f"{state.value} ({tier})" if len(tiers) > 1 else state.value
            ranks = [report.tiers.get(tier, {}).get(state, 0) for report in reports]
            # Plain data parallel keeps everything on the first tier, the device.
            alone = reports[0].data_parallel.get(state, 0) if tier == tiers[0] else 0
            columns[name] = [*ranks, alone]
    columns["total"] = [sum(row) for row in zip(*columns.values(), strict=True)]
    labels = [f"rank {rank}" for rank in range(len(reports))]
    if len(reports) > _MAX_NUM_RANKS:
        labels = [f"least of {len(reports)} ranks", f"most of {len(reports)} ranks"]
        columns = {
            name: [min(ranks), max(ranks), alone] for name, (*ranks, alone) in columns.items()
        }
    if len(tiers) > 1:
        columns = {name: c for name, c in columns.items() if any(c) or name == "total"}
    of_data_parallel = columns["total"][-1] or 1
    rows = zip([*labels, "plain data parallel"], zip(*columns.values(), strict=True), strict=True)
    lines = [
        [label, *(f"{count / _MIB:.2f}" for count in row), f"{row[-1] / of_data_parallel:.3f}"]
        for label, row in rows
    ]
    text = table([["MiB at rest", *columns, "ratio"], *lines])
    read, written = reports[0].nvme_read_bytes / _GIB, reports[0].nvme_written_bytes / _GIB
    if not written:
        return text
    return (
        f"{text}\nNVMe traffic of rank 0: {read:.2f} GiB read, {written:.2f} GiB written, "
        f"{written / max(num_steps, 1):.3f} GiB written per step"
    )


@dataclass(frozen=True)
class TransferStats:
    """One kind of communication or transfer in a step, as the mean over ranks and steps."""

    kind: str
    in_flight_s: float  # in which some of it was under way
    hidden_s: float  # of these, behind computation
    exposed_s: float  # for which the computation stood still
    gib: float  # sent, or moved

    @classmethod
    def from_means(cls, kind: Kind, means: Mapping[str, float]) -> TransferStats:
        """From the means of a step by metric; what has no such metric is 0."""
        ends = ("_s", "_hidden_s", "_exposed_s", "_gib")
        name = "optimizer" if kind is Kind.STEP else kind.value
        keys = ([f"zero/{part}/{name}{end}" for part in ("comm", "tier", "time")] for end in ends)
        return cls(name, *(sum(means.get(key, 0.0) for key in both) for both in keys))

    @property
    def gib_per_s(self) -> float:
        return self.gib / self.in_flight_s if self.in_flight_s else 0.0


@dataclass(frozen=True)
class JobReport:
    """A fit that has ended."""

    world_size: int
    num_steps: int  # of the optimizer, those before a resumption among them
    memory: Sequence[MemoryReport]  # by rank, when training ended
    speed: Speed  # without the first step
    num_recorded: int  # steps of which the next four are means
    step_s: float
    waited_s: float  # for which a rank waited in a step for anything
    skew_s: float  # for which the others waited in it for the rank that was last
    transfers: Sequence[TransferStats]
    is_on_cpu: bool  # nobody is told there when data arrives: rates are lower bounds

    def text(self) -> str:
        return "\n".join([memory_table(self.memory, self.num_steps), "", *self._lines()])

    def _lines(self) -> Iterator[str]:
        speed = self.speed
        if speed.num_steps:
            rates = [
                f"{value:{form}} {unit}"
                for value, form, unit in (
                    (speed.steps_per_s, ".2f", "steps/s"),
                    (speed.batches_per_s, ".2f", "batches/s"),
                    (speed.samples_per_s, ".1f", "samples/s"),
                    (speed.tokens_per_s, ".0f", "tokens/s"),
                    (speed.tflops_per_device, ".3g", "TFLOPS per device"),
                    (speed.mfu, ".1%", "MFU"),
                )
                if not math.isnan(value)
            ]
            yield paragraph(
                f"throughput of {self.world_size} rank(s): {', '.join(rates)} "
                f"(over {speed.num_steps} steps, without the first one and evaluation)"
            )
        if not self.num_recorded:
            yield paragraph(
                "no step after the first one was recorded: every_n_steps, by default the Trainer's "
                "log_every_n_steps, is more than there were"
            )
        elif self.transfers:
            yield paragraph(
                f"communication, mean of {self.num_recorded} recorded steps of "
                f"{self.step_s * 1e3:.1f} ms; exposed is time for which the computation waited"
            )
            # Less than the sum, where one wait was for several kinds at once.
            waits = ["all together", "", "", *self._time(self.waited_s), "", ""]
            yield table([_HEADER, *map(self._row, self.transfers), waits])
            if self.world_size > 1:
                skew_ms, of_step = self._time(self.skew_s)
                yield f"skew: the other ranks waited {skew_ms} ms ({of_step}) for the last one"
            if self.is_on_cpu:
                yield paragraph(
                    "on CPU a collective ends where it is waited for: what is hidden is at most "
                    "that, and rates (>=) are at least those"
                )

    def _row(self, flow: TransferStats) -> list[str]:
        cells = [flow.kind, *self._time(flow.hidden_s), *self._time(flow.exposed_s)]
        if not flow.gib:
            return [*cells, "", ""]
        bound = ">= " if self.is_on_cpu and flow.kind in _COLLECTIVES else ""
        return [*cells, f"{flow.gib * 1024:.2f}", f"{bound}{flow.gib_per_s:.3g}"]

    def _time(self, seconds: float) -> list[str]:
        return [f"{seconds * 1e3:.2f}", f"{seconds / self.step_s:.1%}"]

    def write(self, folder: Path) -> list[Path]:
        """Writes `report.json` and `memory.json` into `folder`, and says where."""
        # JSON has no NaN.
        speed = {k: None if math.isnan(value) else value for k, value in vars(self.speed).items()}
        transfers = {
            flow.kind: {**vars(flow), "gib_per_s": flow.gib_per_s} for flow in self.transfers
        }
        report = {**vars(self), "speed": speed, "transfers": transfers}
        memory = [
            {
                **vars(rank),
                "tiers": {tier: _by_name(states) for tier, states in rank.tiers.items()},
                "data_parallel": _by_name(rank.data_parallel),
            }
            for rank in report.pop("memory")
        ]
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "report.json", folder / "memory.json"]
        for path, content in zip(paths, (report, memory), strict=True):
            path.write_text(json.dumps(content, indent=1) + "\n")
        return paths


_COLLECTIVES = {kind.value for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)}
_HEADER = ["per step", "hidden ms", "of step", "exposed ms", "of step", "MiB", "GiB/s"]


def _by_name(states: Mapping[State, int]) -> dict[str, int]:
    return {state.value: nbytes for state, nbytes in states.items()}
