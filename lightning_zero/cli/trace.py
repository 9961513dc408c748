"""`lightning-zero trace`: what computed, travelled and waited in a recorded step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from lightning_zero.observe.plots import MATPLOTLIB_HINT, has_matplotlib, write_trace
from lightning_zero.observe.recordings import CPU_TIMING_NOTE, find_recordings, read_step, steps_in
from lightning_zero.observe.tables import table
from lightning_zero.record.spans import Kind, Recording

__all__ = ["run"]

_GIB = 1024**3


def run(args: argparse.Namespace) -> int:
    folder = find_recordings(args.run_directory)
    out: Path = args.out or folder.parent
    for step in steps_in(folder) if args.step is None else [args.step]:
        recordings = read_step(folder, step)
        out.mkdir(parents=True, exist_ok=True)
        paths = write_trace(recordings, out)
        print("\n".join([*_text(recordings), *map(str, paths), ""]))
    if not has_matplotlib():
        print(f"no picture: {MATPLOTLIB_HINT}")
    return 0


def _text(recordings: Sequence[Recording]) -> Iterator[str]:
    seconds = max(recording.seconds for recording in recordings)
    ranks = f"{len(recordings)} ranks, means over them" if len(recordings) > 1 else "1 rank"
    yield f"step {recordings[0].step}: {seconds:.4f} s, {ranks}"
    lines = [["", "GiB", "in flight s", "hidden s", "exposed s", "GiB/s"]]
    for kind in Kind:
        rows = [_values(recording, kind) for recording in recordings]
        values = [fmean(column) for column in zip(*rows, strict=True)]
        if any(values):
            lines.append([kind.value, *(f"{value:.4f}" if value else "-" for value in values)])
    yield table(lines)
    yield CPU_TIMING_NOTE
    yield _waits(recordings)
    hits, misses = sum(r.hits for r in recordings), sum(r.misses for r in recordings)
    if hits or misses:
        yield f"gathered ahead of use: {hits} of {hits + misses} units"
    hits, misses = sum(r.read_hits for r in recordings), sum(r.read_misses for r in recordings)
    if hits or misses:
        yield f"read ahead of use: {hits} of {hits + misses} shards"


def _values(recording: Recording, kind: Kind) -> tuple[float, ...]:
    """In the order of the columns; computation is not hidden, but a step may be waited for."""
    return (
        recording.nbytes(kind) / _GIB,
        recording.in_flight_s(kind),
        0.0 if kind.is_compute else recording.hidden_s(kind),
        recording.exposed_s(kind),
        recording.gib_per_s(kind),
    )


def _waits(recordings: Sequence[Recording]) -> str:
    by_wait = sorted(recordings, key=lambda recording: recording.waited_for_others_s)
    least, most = by_wait[0], by_wait[-1]
    if least is most:
        return f"the computation waited {least.waited_for_others_s:.4f} s"
    more = most.waited_for_others_s - least.waited_for_others_s
    share = more / (most.seconds or 1)
    return (
        f"rank {least.rank} waited least, {least.waited_for_others_s:.4f} s; "
        f"rank {most.rank} longest, {more:.4f} s more ({share:.1%} of the step)"
    )
