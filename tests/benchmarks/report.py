"""What a run of the benchmark was, what it found, and how that is printed."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.gpt import GPT, GPTConfig

__all__ = ["BATCH", "PHASES", "SIZES", "Result", "Run", "memory_line", "record", "table", "title"]

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "2m": GPTConfig(vocab_size=512, context=128, width=192, num_layers=4, num_heads=6),
    "25m": GPTConfig(vocab_size=6144, context=128, width=512, num_layers=6, num_heads=8),
    "85m": GPTConfig(vocab_size=6144, context=128, width=1024, num_layers=6, num_heads=16),
}
PHASES = ("forward", "backward", "update", "cpu", "step")
BATCH = 4  # sequences per rank
MIB = 1024**2


@dataclass(frozen=True)
class Run:
    """What is run, from the command line."""

    systems: list[str]
    rounds: int
    warmup: int
    steps_per_turn: int
    ranks: int
    size: str
    precision: str
    has_memory: bool
    store: str = ""


@dataclass
class Result:
    """One system: ms of every round; bytes on rank 0 above what its process had before."""

    times: dict[str, list[float]] = field(default_factory=dict)  # by phase
    loss: float = math.nan  # of the last round, mean of the ranks
    bytes: dict[str, int] = field(default_factory=dict)  # storage, resident, peak


def title(run: Run) -> str:
    """What was run, in two lines."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(SIZES[run.size]).parameters())
    return (
        f"{numel / 1e6:.1f} M parameters, {run.precision}, {run.ranks} ranks, one thread each, "
        f"{BATCH} x {SIZES[run.size].context} tokens per rank,\nAdamW fused, "
        f"{run.rounds} rounds of {run.steps_per_turn} after {run.warmup}, torch {torch.__version__}"
    )


def table(run: Run, results: dict[str, Result]) -> str:
    """Times of all systems, and the head of the table of bytes where that follows."""
    base = dict.fromkeys(PHASES, math.nan)
    if "ddp" in results:
        base = {phase: statistics.median(results["ddp"].times[phase]) for phase in PHASES}
    lines = [
        "Milliseconds: medians; quartiles are of the step; cpu is what all threads of a rank used,",
        "the steadier number on a machine that others share.",
        f"{'system':<18}{'step':>8}{'quartiles':>18}{'/ ddp':>7}{'forward':>9}{'backward':>10}"
        f"{'update':>8}{'cpu':>8}{'/ ddp':>7}{'loss':>9}",
    ]
    for name, result in results.items():
        median = {phase: statistics.median(result.times[phase]) for phase in PHASES}
        low, high = _quartiles(result.times["step"])
        lines.append(
            f"{name:<18}{median['step']:>8.1f}{f'{low:.1f} - {high:.1f}':>18}"
            f"{median['step'] / base['step']:>7.2f}{median['forward']:>9.1f}"
            f"{median['backward']:>10.1f}{median['update']:>8.1f}{median['cpu']:>8.1f}"
            f"{median['cpu'] / base['cpu']:>7.2f}{result.loss:>9.4f}"
        )
    if run.has_memory:
        lines += [
            "MiB on rank 0: storage of live tensors between steps, with gradients; resident "
            "between steps; resident at the peak of a step.",
            f"{'system':<18}{'storage':>8}{'resident':>10}{'peak':>8}",
        ]
    return "\n".join(lines)


def memory_line(name: str, count: dict[str, int]) -> str:
    """The bytes of one system."""
    return (
        f"{name:<18}{count['storage'] / MIB:>8.0f}{count['resident'] / MIB:>10.0f}"
        f"{count['peak'] / MIB:>8.0f}"
    )


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def record(run: Run, results: dict[str, Result]) -> dict[str, Any]:
    """Everything, for a file."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": sys.argv,
        "commit": commit,
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "run": asdict(run),
        "results": {name: asdict(result) for name, result in results.items()},
    }
