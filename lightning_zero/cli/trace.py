"""`lightning-zero trace`: compute, communication and waits of a recorded step."""

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

_MIB = 1024**2


def run(args: argparse.Namespace) -> int:
    folder = find_recordings(args.run_directory)
    out: Path = args.out or folder.parent
    for step in steps_in(folder) if args.step is None else [args.step]:
        recordings = read_step(folder, step)
        out.mkdir(parents=True, exist_ok=True)
        paths = write_trace(recordings, out)
        print("\n".join([*_text(recordings), *map(str, paths), ""]))
    if not has_matplotlib():
        print(f"no plot: {MATPLOTLIB_HINT}")
    return 0


def _text(recordings: Sequence[Recording]) -> Iterator[str]:
    seconds = max(recording.seconds for recording in recordings)
    ranks = f"mean of {len(recordings)} ranks" if len(recordings) > 1 else "1 rank"
    yield f"step {recordings[0].step}: {seconds * 1e3:.1f} ms, {ranks}"
    lines = [["", "MiB", "in flight ms", "overlapped ms", "exposed ms", "GB/s"]]
    for kind in Kind:
        rows = [_values(recording, kind) for recording in recordings]
        values = [fmean(column) for column in zip(*rows, strict=True)]
        if any(values):
            lines.append([kind.value, *(f"{value:.2f}" if value else "-" for value in values)])
    yield table(lines)
    yield CPU_TIMING_NOTE
    yield _waits(recordings)
    hits, misses = sum(r.hits for r in recordings), sum(r.misses for r in recordings)
    if hits or misses:
        yield f"prefetched: {hits} of {hits + misses} units"
    hits, misses = sum(r.read_hits for r in recordings), sum(r.read_misses for r in recordings)
    if hits or misses:
        yield f"read before use: {hits} of {hits + misses} shards"


def _values(recording: Recording, kind: Kind) -> tuple[float, ...]:
    """Values in the order of the columns. Compute is never overlapped, but may be exposed."""
    return (
        recording.nbytes(kind) / _MIB,
        recording.in_flight_s(kind) * 1e3,
        0.0 if kind.is_compute else recording.overlapped_s(kind) * 1e3,
        recording.exposed_s(kind) * 1e3,
        recording.gb_per_s(kind),
    )


def _waits(recordings: Sequence[Recording]) -> str:
    by_wait = sorted(recordings, key=lambda recording: recording.waited_for_others_s)
    least, others = by_wait[0], by_wait[1:]
    if not others:
        return f"compute waited {least.waited_for_others_s * 1e3:.1f} ms"
    more = fmean(rank.waited_for_others_s for rank in others) - least.waited_for_others_s
    share = more / (max(recording.seconds for recording in recordings) or 1)
    return (
        f"rank {least.rank} was last: the others waited {more * 1e3:.1f} ms longer "
        f"({share:.1%} of the step)"
    )
