"""Report at the end of a job: memory of each rank, throughput and communication."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
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
_EVERY_N_STEPS = 50  # between two measurements of `MemoryTable`
# A rank is called a straggler from this skew, as a share of a step, and this share of steps on.
_MIN_SKEW, _MIN_SHARE = 0.02, 2 / 3


class MemoryTable(pl.Callback):
    """Prints on rank 0, when training ends, the MiB of each model state on every rank.

    The memory is that right before an optimizer step, with all gradients. The last row is plain
    data parallel at the same moment, with the same on every rank; the last column is the ratio to
    it. With more than 8 ranks, the rows are the minimum
    and the maximum of each column over the ranks. A state on several tiers has a column for each,
    except for columns of zeros. With shards on NVMe, a line has the bytes that rank 0 has read and
    written there. `ZeroMonitor` prints this table, too.

    Collective: every rank, in `on_train_end`.

    Raises:
        TypeError: The strategy is not a `ZeroStrategy`. Raised before training.
    """

    _at_step: MemoryReport | None = None  # before the last measured step

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        zero_strategy(trainer, self)
        self._at_step = None

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        # Optimizers make their states in their first step.
        if trainer.global_step % _EVERY_N_STEPS <= 1:
            self._at_step = zero_strategy(trainer, self).memory_report()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reports = memory_reports(zero_strategy(trainer, self), self._at_step)
        if trainer.is_global_zero:
            print("\n" + memory_table(reports, trainer.global_step))


def zero_strategy(trainer: pl.Trainer, callback: pl.Callback) -> ZeroStrategy:
    """Strategy of the Trainer, for a callback that needs a `ZeroStrategy`.

    Raises:
        TypeError: The strategy is not a `ZeroStrategy`.
    """
    strategy, name = trainer.strategy, type(callback).__name__
    if not isinstance(strategy, ZeroStrategy):
        raise TypeError(
            f"{name} needs a ZeroStrategy, got {type(strategy).__name__}; use strategy='zero3' or "
            f"another strategy of lightning_zero, or remove {name}."
        )
    return strategy


def memory_reports(strategy: ZeroStrategy, at_step: MemoryReport | None) -> list[MemoryReport]:
    """Memory of each rank, by rank; empty except on rank 0. Collective: every rank.

    `at_step`: memory of this rank before an optimizer step, to which the disk traffic until now is
    added; None: the memory now, for a fit without steps.
    """
    engine = strategy.engine
    engine.lockstep.barrier("the memory table")  # raises if a rank has failed
    now = strategy.memory_report()
    report = (
        now
        if at_step is None
        else replace(
            at_step, nvme_read_bytes=now.nvme_read_bytes, nvme_written_bytes=now.nvme_written_bytes
        )
    )
    return engine.comm.control.collect_objects(report)


def memory_table(reports: Sequence[MemoryReport], num_steps: int) -> str:
    """Text of `MemoryTable` for the reports of all ranks, after `num_steps` optimizer steps."""
    tiers = list(dict.fromkeys(tier for report in reports for tier in report.tiers))
    columns: dict[str, list[int]] = {}  # bytes of every rank, and of plain data parallel
    for tier in tiers:
        for state in State:
            name = f"{state.value} ({tier})" if len(tiers) > 1 else state.value
            ranks = [report.tiers.get(tier, {}).get(state, 0) for report in reports]
            # Plain data parallel keeps everything on the first tier, the device.
            replicated = reports[0].data_parallel.get(state, 0) if tier == tiers[0] else 0
            columns[name] = [*ranks, replicated]
    columns["total"] = [sum(row) for row in zip(*columns.values(), strict=True)]
    labels = [f"rank {rank}" for rank in range(len(reports))]
    if len(reports) > _MAX_NUM_RANKS:
        labels = [f"min of {len(reports)} ranks", f"max of {len(reports)} ranks"]
        columns = {
            name: [min(ranks), max(ranks), replicated]
            for name, (*ranks, replicated) in columns.items()
        }
    if len(tiers) > 1:
        columns = {name: c for name, c in columns.items() if any(c) or name == "total"}
    data_parallel_total = columns["total"][-1] or 1
    rows = zip([*labels, "plain data parallel"], zip(*columns.values(), strict=True), strict=True)
    lines = [
        [label, *(f"{count / _MIB:.2f}" for count in row), f"{row[-1] / data_parallel_total:.3f}"]
        for label, row in rows
    ]
    text = table([["MiB at the optimizer step", *columns, "ratio"], *lines])
    read, written = reports[0].nvme_read_bytes / _GIB, reports[0].nvme_written_bytes / _GIB
    if not written:
        return text
    return (
        f"{text}\nNVMe traffic of rank 0: {read:.2f} GiB read, {written:.2f} GiB written, "
        f"{written / max(num_steps, 1):.3f} GiB written per step"
    )


@dataclass(frozen=True)
class TransferStats:
    """One kind of communication or transfer in a step; means over ranks and steps.

    NaN: not measured.
    """

    kind: str
    in_flight_s: float  # seconds in which at least one was in flight
    overlapped_s: float  # seconds of these that overlapped with compute
    exposed_s: float  # seconds in which compute waited
    gib: float  # sent by a rank, or moved between tiers

    @classmethod
    def from_means(cls, kind: Kind, means: Mapping[str, float]) -> TransferStats:
        """Statistics from the means of a step by metric; NaN where there is no metric."""
        ends = ("_s", "_overlapped_s", "_exposed_s", "_gib")
        name = "optimizer" if kind is Kind.STEP else kind.value
        parts = ("comm", "tier", "time")  # the metrics of a kind are in one of these
        keys = ([f"zero_{part}/{name}{end}" for part in parts] for end in ends)
        return cls(name, *(_first(means, of_end) for of_end in keys))

    @property
    def gb_per_s(self) -> float:
        return self.gib * _GIB / 1e9 / self.in_flight_s if self.in_flight_s else math.nan


def _first(means: Mapping[str, float], keys: Iterable[str]) -> float:
    return next((means[key] for key in keys if key in means), math.nan)


@dataclass(frozen=True)
class JobReport:
    """Result of a fit. NaN: not measured; null in the file."""

    description: Mapping[str, Any]  # stage, model, device, versions, date
    metrics: Mapping[str, float]  # of the module, last values
    peak_bytes: Sequence[float]  # by rank, see `allocated_and_peak_bytes`
    world_size: int
    num_steps: int  # optimizer steps, including those before a resumption
    memory: Sequence[MemoryReport]  # by rank, before the last recorded step
    speed: Speed  # without the first step
    num_recorded: int  # recorded steps; the next four are means over them
    step_s: float
    waited_s: float  # seconds of a step in which a rank waited
    skew_s: float  # seconds of a step in which the other ranks waited for the last one
    straggler: tuple[int, int] | None  # rank that was last most often, and in how many steps
    transfers: Sequence[TransferStats]
    is_on_cpu: bool  # the end of a collective is not observed there: rates are lower bounds

    def text(self) -> str:
        """Text for the terminal."""
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
                "no steps recorded after the first one: the run was shorter than every_n_steps "
                "(default: the Trainer's log_every_n_steps)"
            )
        elif self.transfers:
            count = self.num_recorded
            recorded = "one recorded step" if count == 1 else f"mean of {count} recorded steps"
            yield paragraph(
                f"communication: {recorded} of "
                f"{self.step_s * 1e3:.1f} ms (overlapped with compute; exposed: compute waited)"
            )
            # Less than the sum if a wait was for several kinds at once.
            waits = ["total", "", "", *self._time(self.waited_s), "", ""]
            yield table([_HEADER, *map(self._row, self.transfers), waits])
            if self.world_size > 1:
                yield self._straggler()
            if self.is_on_cpu:
                yield paragraph(
                    "on CPU the end of a collective is only seen when it is waited for, so "
                    "overlapped time is an upper bound, and rates (>=) are lower bounds"
                )

    def _straggler(self) -> str:
        skew_ms, of_step = self._time(self.skew_s)
        if self.straggler is None or self.skew_s < _MIN_SKEW * self.step_s:
            return f"no straggler: ranks waited {skew_ms} ms ({of_step}) for the last one"
        rank, times = self.straggler
        if times < _MIN_SHARE * self.num_recorded:
            return f"ranks waited {skew_ms} ms ({of_step}) for the last one, which changes"
        often = "" if times == self.num_recorded else f" in {times} of {self.num_recorded} steps"
        return f"rank {rank} is the straggler{often}: the others waited {skew_ms} ms ({of_step})"

    def _row(self, transfer: TransferStats) -> list[str]:
        cells = [transfer.kind, *self._time(transfer.overlapped_s), *self._time(transfer.exposed_s)]
        if not transfer.gib > 0:
            return [*cells, "", ""]
        bound = ">= " if self.is_on_cpu and transfer.kind in _COLLECTIVES else ""
        return [*cells, f"{transfer.gib * 1024:.2f}", f"{bound}{transfer.gb_per_s:.3g}"]

    def _time(self, seconds: float) -> list[str]:
        if math.isnan(seconds):
            return ["", ""]
        return [f"{seconds * 1e3:.2f}", f"{seconds / self.step_s:.1%}"]

    def write(self, folder: Path) -> list[Path]:
        """Writes `report.json` and `memory.json` into `folder`; returns their paths."""
        values = {**vars(self)}
        description, ranks = values.pop("description"), values.pop("memory")
        transfers = {
            transfer.kind: {**vars(transfer), "gb_per_s": transfer.gb_per_s}
            for transfer in self.transfers
        }
        states = {
            "largest_rank_bytes": max((rank.total_bytes for rank in ranks), default=None),
            "data_parallel_bytes": ranks[0].data_parallel_bytes if ranks else None,
            "peak_bytes": max(self.peak_bytes, default=None),
        }
        values |= {"speed": vars(self.speed), "transfers": transfers, "memory": states}
        report = _without_nan({**description, **values})
        memory = [
            {
                **vars(rank),
                "tiers": {tier: _by_name(states) for tier, states in rank.tiers.items()},
                "data_parallel": _by_name(rank.data_parallel),
            }
            for rank in ranks
        ]
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "report.json", folder / "memory.json"]
        for path, content in zip(paths, (report, memory), strict=True):
            path.write_text(json.dumps(content, indent=1) + "\n")
        return paths


_COLLECTIVES = {
    kind.value for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL)
}
_HEADER = ["per step", "overlapped ms", "of step", "exposed ms", "of step", "MiB", "GB/s"]


def _without_nan(value: Any) -> Any:
    """The value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_name(states: Mapping[State, int]) -> dict[str, int]:
    return {state.value: nbytes for state, nbytes in states.items()}
