"""What a job says when it ends: memory, speed and communication, as text and as files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.observe.memory_table import aligned, memory_table
from lightning_zero.record.spans import Kind

__all__ = ["JobReport", "Speed", "Flow"]


@dataclass(frozen=True)
class Speed:
    """Of all ranks together, without the first step and evaluation; NaN: unknown.

    Attributes:
        num_steps: That were timed.
        steps_per_s: Batches with an optimizer step.
        batches_per_s: Of one rank.
        samples_per_s: Of all ranks.
    """

    num_steps: int
    steps_per_s: float
    batches_per_s: float
    samples_per_s: float

    @classmethod
    def of(cls, everyone: Sequence[Sequence[float]]) -> Speed:
        """From each rank's (steps, batches, samples, seconds)."""
        steps, batches, _, _ = everyone[0]
        seconds = max(rank[3] for rank in everyone) or math.nan
        samples = sum(rank[2] for rank in everyone)
        return cls(int(steps), steps / seconds, batches / seconds, samples / seconds)


@dataclass(frozen=True)
class Flow:
    """One kind of communication or transfer in a step, as the mean over ranks and steps.

    Attributes:
        kind: Its name.
        in_flight_s: Seconds in which some of it was under way.
        hidden_s: Of these, behind computation.
        exposed_s: For which the computation stood still.
        gib: Sent, or moved.
    """

    kind: str
    in_flight_s: float
    hidden_s: float
    exposed_s: float
    gib: float

    @classmethod
    def of(cls, kind: Kind, means: Mapping[str, float]) -> Flow:
        """From the means of a step by metric; what has no such metric is 0."""
        ends = ("_s", "_hidden_s", "_exposed_s", "_gib")
        name = "optimizer" if kind is Kind.STEP else kind.value
        keys = ([f"zero/{part}/{name}{end}" for part in ("comm", "tier", "time")] for end in ends)
        return cls(name, *(sum(means.get(key, 0.0) for key in both) for both in keys))

    @property
    def gib_per_s(self) -> float:
        """While it was under way."""
        return self.gib / self.in_flight_s if self.in_flight_s else 0.0


@dataclass(frozen=True)
class JobReport:
    """A fit that has ended.

    Attributes:
        world_size: Number of ranks.
        num_steps: Optimizer steps that have been taken, those before a resumption among them.
        memory: By rank, when training ended.
        speed: Of the whole job.
        num_recorded: Steps from which the following are.
        step_s: Mean length of a step.
        waited_s: For which a rank waited in it for anything.
        flows: By kind.
        is_on_cpu: Nobody is told there when data arrives: rates of collectives are lower bounds.
    """

    world_size: int
    num_steps: int
    memory: Sequence[MemoryReport]
    speed: Speed
    num_recorded: int
    step_s: float
    waited_s: float
    flows: Sequence[Flow]
    is_on_cpu: bool

    def text(self) -> str:
        """For a terminal."""
        return "\n".join([memory_table(self.memory, self.num_steps), "", *self._lines()])

    def _lines(self) -> Iterator[str]:
        speed = self.speed
        if speed.num_steps:
            rates = [f"{speed.steps_per_s:.2f} steps/s", f"{speed.batches_per_s:.2f} batches/s"]
            if not math.isnan(speed.samples_per_s):
                rates.append(f"{speed.samples_per_s:.1f} samples/s")
            yield (
                f"throughput of {self.world_size} rank(s): {', '.join(rates)} "
                f"(over {speed.num_steps} steps, without the first one and evaluation)"
            )
        if not self.num_recorded:
            yield "no step after the first one was recorded: every_n_steps is more than there were"
        elif self.flows:
            yield (
                f"communication, mean of {self.num_recorded} recorded steps of "
                f"{self.step_s * 1e3:.1f} ms; exposed is time for which the computation waited"
            )
            yield aligned([_HEADER, *map(self._row, self.flows), self._waits()])
            if self.is_on_cpu:
                yield (
                    "on CPU a collective ends where it is waited for: what is hidden is at most "
                    "that, and rates (>=) are at least those"
                )

    def _row(self, flow: Flow) -> list[str]:
        cells = [flow.kind, *self._time(flow.hidden_s), *self._time(flow.exposed_s)]
        if not flow.gib:
            return [*cells, "", ""]
        bound = ">= " if self.is_on_cpu and flow.kind in _COLLECTIVES else ""
        return [*cells, f"{flow.gib * 1024:.2f}", f"{bound}{flow.gib_per_s:.3g}"]

    def _waits(self) -> list[str]:
        """Less than the sum, where one wait was for several kinds at once."""
        return ["all together", "", "", *self._time(self.waited_s), "", ""]

    def _time(self, seconds: float) -> list[str]:
        return [f"{seconds * 1e3:.2f}", f"{seconds / self.step_s:.1%}"]

    def write(self, folder: Path) -> list[Path]:
        """Writes `report.json` and `memory.json` into `folder`, and says where."""
        speed = {name: _known(value) for name, value in vars(self.speed).items()}
        flows = {flow.kind: {**vars(flow), "gib_per_s": flow.gib_per_s} for flow in self.flows}
        report = {**vars(self), "speed": speed, "flows": flows}
        del report["memory"]
        files = {"report.json": report, "memory.json": [_plain(one) for one in self.memory]}
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")
        return [folder / name for name in files]


_COLLECTIVES = {kind.value for kind in (Kind.GATHER, Kind.REDUCE, Kind.AVERAGE)}
_HEADER = ["per step", "hidden ms", "of step", "exposed ms", "of step", "MiB", "GiB/s"]


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _plain(report: MemoryReport) -> dict[str, Any]:
    """Bytes of one rank, with states by name."""
    tiers = {
        tier: {state.value: nbytes for state, nbytes in states.items()}
        for tier, states in report.tiers.items()
    }
    alone = {state.value: nbytes for state, nbytes in report.data_parallel.items()}
    return {**vars(report), "tiers": tiers, "data_parallel": alone}
