"""Files of recordings, and traces of them for Perfetto and chrome://tracing.

A run has one file for each traced step and rank, `zero/recordings/step_<n>_rank_<r>.json`, which
contains {"recording": Recording.to_dict()}. Traces and plots have the same lanes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_zero.record.spans import Kind, Recording, Span

__all__ = [
    "CPU_TIMING_NOTE",
    "chrome_trace",
    "find_recordings",
    "lanes_of",
    "pack",
    "read_step",
    "steps_in",
    "write_recording",
]

_NAME = re.compile(r"step_(\d+)_rank_(\d+)\.json")


def write_recording(folder: Path, recording: Recording) -> None:
    """Writes the recording of one rank below `folder`, which is `<run>/zero`."""
    path = folder / "recordings" / f"step_{recording.step}_rank_{recording.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"recording": recording.to_dict()}))


def find_recordings(run: Path) -> Path:
    """Finds the only directory of recordings at or below `run`.

    Raises:
        FileNotFoundError: The directory does not exist, or has no recordings.
        ValueError: There are several directories of recordings.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is not a directory; pass the directory of a run.")
    found = [run, run / "recordings", *sorted(run.rglob("zero/recordings"))]
    found = [path for path in dict.fromkeys(found) if path.is_dir() and steps_in(path)]
    if not found:
        raise FileNotFoundError(
            f"{run} has no zero/recordings; record steps with the callback "
            "ZeroMonitor(trace_steps=[10])."
        )
    if len(found) > 1:
        paths = ", ".join(str(path.parent) for path in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(
            f"{run} has recordings of {len(found)} runs; pass one of them: {paths}{more}."
        )
    return found[0]


def steps_in(folder: Path) -> list[int]:
    """Numbers of all recorded steps, in ascending order."""
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in matches if match})


def read_step(folder: Path, step: int) -> list[Recording]:
    """Reads the recordings of one step, by rank.

    Raises:
        FileNotFoundError: Files of some or all ranks are missing.
        ValueError: A file is invalid, or the files are from different runs.
    """
    paths = {
        int(match[2]): path
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == step
    }
    if not paths:
        recorded = ", ".join(map(str, steps_in(folder)))
        raise FileNotFoundError(f"{folder} has no step {step}; recorded steps: {recorded}.")
    read = {rank: _read(paths[rank]) for rank in sorted(paths)}
    sizes = {recording.world_size for recording in read.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} has step {step} of runs on {' and '.join(map(str, sorted(sizes)))} ranks; "
            "delete the files of the older one."
        )
    if missing := [rank for rank in range(sizes.pop()) if rank not in read]:
        raise FileNotFoundError(
            f"{folder / f'step_{step}_rank_{missing[0]}.json'} does not exist (missing ranks: "
            f"{', '.join(map(str, missing))}). If nodes have separate disks, copy their files into "
            "one directory. A rank that exited before the end of the step has no file."
        )
    return list(read.values())


def _read(path: Path) -> Recording:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); it is truncated or was edited.") from error
    try:
        return Recording.from_dict(content["recording"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recording of this version: {error}") from error


# ------------------------------------------------------------------------ lanes

_LANES = {
    "compute": (Kind.FORWARD, Kind.BACKWARD),
    "step": (Kind.STEP,),
    "all_gather": (Kind.ALL_GATHER,),
    "reduce": (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE),
    "all_to_all": (Kind.ALL_TO_ALL,),
    "agree": (Kind.AGREE,),
    "copies": (Kind.TO_DEVICE, Kind.TO_CPU),
    "files": (Kind.READ, Kind.WRITE),
}
_NESTED = ("compute", "step")  # a module's forward contains those of its units
Rows = tuple[tuple[Span, ...], ...]  # each by start


def lanes_of(recording: Recording) -> dict[str, Rows]:
    """Non-empty lanes by name, always in the same order, "waits" last.

    Spans of one row do not overlap, but in "compute" and "step" a span may contain others.
    """
    work = [span for span in recording.spans if not span.is_wait]
    lanes = {
        name: pack((span for span in work if span.kind in kinds), may_nest=name in _NESTED)
        for name, kinds in _LANES.items()
    }
    lanes["waits"] = pack(span for span in recording.spans if span.is_wait)
    return {name: rows for name, rows in lanes.items() if rows}


def pack(spans: Iterable[Span], *, may_nest: bool = False) -> Rows:
    """Puts every span into the first row without overlap; `may_nest`: or inside another span."""
    rows: list[list[Span]] = []
    open_ends: list[list[float]] = []  # of each row, outermost first
    for span in sorted(spans, key=lambda s: (s.start_s, -s.stop_s)):
        fits = (_fits(ends, span, may_nest) for ends in open_ends)
        row = next((index for index, yes in enumerate(fits) if yes), len(rows))
        if row == len(rows):
            rows.append([])
            open_ends.append([])
        rows[row].append(span)
        open_ends[row].append(span.stop_s)
    return tuple(map(tuple, rows))


def _fits(open_ends: list[float], span: Span, may_nest: bool) -> bool:
    while open_ends and open_ends[-1] <= span.start_s:
        open_ends.pop()
    return not open_ends or (may_nest and span.stop_s <= open_ends[-1])


# ------------------------------------------------------------------------ Trace Event Format

# A collective on CPU counts as in flight until it is waited for.
CPU_TIMING_NOTE = "on CPU, overlapped time is an upper bound and rates are lower bounds"
_GB = 1e9


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Trace as an object for `json.dump`, with a process for each rank and a thread for each lane.

    Viewers require the events of a thread to nest, so overlapping spans of a lane are spread over
    several threads: "all_gather", "all_gather 2". The steps of all ranks start at the same time.
    Times are in microseconds from the start of the earliest span.

    Args:
        recordings: Recordings of one step, at most one of each rank.

    Raises:
        ValueError: There is no recording.
    """
    if not recordings:
        raise ValueError("expected the recording of at least one rank, got none.")
    starts = [span.start_s for recording in recordings for span in recording.spans]
    first = min([0.0, *starts])
    return {
        "traceEvents": [event for recording in recordings for event in _events(recording, -first)],
        "displayTimeUnit": "ms",
        "otherData": {
            "step": recordings[0].step,
            "world_size": recordings[0].world_size,
            "note": CPU_TIMING_NOTE,
        },
    }


def _events(recording: Recording, shift_s: float) -> Iterator[dict[str, Any]]:
    rank = recording.rank
    yield _metadata(rank, 0, "process_name", name=f"rank {rank}")
    yield _metadata(rank, 0, "process_sort_index", sort_index=rank)
    yield _metadata(rank, 0, "thread_name", name="window")
    yield {
        "ph": "X",
        "cat": "window",
        "name": f"step {recording.step}",
        **_when(0.0, recording.seconds, shift_s),
        "pid": rank,
        "tid": 0,
        "args": {"hits": recording.hits, "misses": recording.misses},
    }
    thread = 0
    for lane, rows in lanes_of(recording).items():
        for number, row in enumerate(rows, start=1):
            thread += 1
            name = lane if number == 1 else f"{lane} {number}"
            yield _metadata(rank, thread, "thread_name", name=name)
            yield _metadata(rank, thread, "thread_sort_index", sort_index=thread)
            for span in row:
                yield {**_event(span, shift_s), "pid": rank, "tid": thread}


def _metadata(rank: int, thread: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _event(span: Span, shift_s: float) -> dict[str, Any]:
    kind = span.kind.value
    name = f"{kind} {span.name}".rstrip()
    event: dict[str, Any] = {"ph": "X", "cat": kind, "name": name}
    if span.is_wait:
        event |= {"cat": "wait", "name": f"wait for {name}", "cname": "terrible"}
    event |= _when(span.start_s, span.stop_s, shift_s)
    args: dict[str, Any] = {"bucket": span.name} if span.name else {}
    if span.nbytes:
        args["bytes"] = span.nbytes
        if span.seconds > 0:
            args["gb_per_s"] = round(span.nbytes / _GB / span.seconds, 4)
    return {**event, "args": args}


def _when(start_s: float, stop_s: float, shift_s: float) -> dict[str, float]:
    # Rounds both ends instead of the duration, which preserves nesting.
    start, stop = (round((time + shift_s) * 1e9) for time in (start_s, stop_s))
    return {"ts": start / 1e3, "dur": (stop - start) / 1e3}
