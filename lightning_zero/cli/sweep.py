"""`lightning-zero sweep`: one line for each job of a sweep, from its report."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # required by Lightning

from lightning_zero.layout.foreign_names import printable
from lightning_zero.observe.tables import table

__all__ = ["run"]

_GIB = 1024**3


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns 1 if a job has no report."""
    folder: Path = args.directory
    jobs = sorted(_jobs(folder), key=lambda job: _natural(str(job.relative_to(folder))))
    if not jobs:
        raise ValueError(
            f"{folder} holds no job: expected the directory of a sweep, whose jobs have .hydra/ or "
            "the zero/report.json of ZeroMonitor."
        )
    metric = args.metric or _optimized_metric(jobs)
    reports = [_report(job) for job in jobs]
    lines = [
        [str(job.relative_to(folder)), _overrides(job), *_cells(report, metric)]
        for job, report in zip(jobs, reports, strict=True)
    ]
    header = ["job", "overrides", "stage", "ranks", "states\nGiB", "peak\nGiB", "samples/s"]
    shown = [[printable(cell) for cell in line] for line in lines]
    print(table([[*header, metric or ""], *shown], left=(0, 1)))
    return int(any(report is None for report in reports))


def _jobs(folder: Path) -> set[Path]:
    """Directories of jobs in `folder`, or of `folder` itself."""
    reports = {path.parents[1] for path in folder.rglob("zero/report.json")}
    started = {path.parent for path in folder.rglob(".hydra") if path.is_dir()}
    # A logger may put the report into a directory below that of the job.
    return reports | {job for job in started if not any(job in path.parents for path in reports)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Key that sorts 9 before 10."""
    return [(int(part or 0), text) for part, text in re.findall(r"(\d*)(\D*)", name)]


def _report(job: Path) -> dict[str, Any] | None:
    path = job / "zero" / "report.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a report of ZeroMonitor.")
    return found


def _hydra(job: Path, name: str) -> Any:
    """File `name` of Hydra for the job; None: it was not started by Hydra."""
    for folder in (job, *job.parents):
        if (path := folder / ".hydra" / name).is_file():
            return yaml.safe_load(path.read_text())
    return None


def _optimized_metric(jobs: Sequence[Path]) -> str | None:
    config = _hydra(jobs[0], "config.yaml")
    return config.get("optimized_metric") if isinstance(config, dict) else None


def _overrides(job: Path) -> str:
    return " ".join(map(str, _hydra(job, "overrides.yaml") or ()))


def _cells(report: Mapping[str, Any] | None, metric: str | None) -> list[str]:
    if report is None:
        return ["no report", "", "", "", "", ""]
    memory, speed = report.get("memory", {}), report.get("speed", {})
    value = report.get("metrics", {}).get(metric)
    return [
        str(report.get("stage", "")),
        str(report.get("world_size", "")),
        *(_number(memory.get(key), 1 / _GIB) for key in ("largest_rank_bytes", "peak_bytes")),
        _number(speed.get("samples_per_s")),
        _number(value),
    ]


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.4g}"
