"""Recordings as files, and as traces that Perfetto and chrome://tracing show.

Those of a run are `zero/recordings/step_<n>_rank_<r>.json`, one for each rank, which holds
{"recording": Recording.to_dict()}. The lanes of a trace are those of the pictures too.
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
    """Writes one rank's recording below `<run>/zero`, which is `folder`."""
    path = folder / "recordings" / f"step_{recording.step}_rank_{recording.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"recording": recording.to_dict()}))


def find_recordings(run: Path) -> Path:
    """The one folder of recordings at or below `run`.

    Raises:
        FileNotFoundError: There is no such directory, or there are no recordings in it.
        ValueError: There are several folders of recordings.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is no directory; give the directory of a run.")
    found = [run, run / "recordings", *sorted(run.rglob("zero/recordings"))]
    found = [path for path in dict.fromkeys(found) if path.is_dir() and steps_in(path)]
    if not found:
        raise FileNotFoundError(
            f"{run} holds no zero/recordings; record some steps with the callback "
            "ZeroMonitor(trace_steps=[10])."
        )
    if len(found) > 1:
        shown = ", ".join(str(path.parent) for path in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(f"{run} holds recordings of {len(found)} runs; give one: {shown}{more}.")
    return found[0]


def steps_in(folder: Path) -> list[int]:
    """Numbers of the steps of which some rank has a recording, in order."""
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in matches if match})


def read_step(folder: Path, step: int) -> list[Recording]:
    """One step, by rank.

    Raises:
        FileNotFoundError: Of some ranks, or of all, there is none.
        ValueError: A file is broken, or the files are not of one run.
    """
    paths = {
        int(match[2]): path
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == step
    }
    if not paths:
        there_are = ", ".join(map(str, steps_in(folder)))
        raise FileNotFoundError(f"{folder} holds no step {step}; there are {there_are}.")
    read = {rank: _read(paths[rank]) for rank in sorted(paths)}
    sizes = {recording.world_size for recording in read.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} holds step {step} of runs on {' and '.join(map(str, sorted(sizes)))} ranks; "
            "delete the files of the older one."
        )
    if missing := [rank for rank in range(sizes.pop()) if rank not in read]:
        raise FileNotFoundError(
            f"{folder / f'step_{step}_rank_{missing[0]}.json'} does not exist (missing ranks: "
            f"{', '.join(map(str, missing))}). Where ranks write to disks of their own, copy their "
            "files together; a rank that ended before the step was over has written none."
        )
    return list(read.values())


def _read(path: Path) -> Recording:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); it was cut off while it was written, or edited."
        ) from error
    try:
        return Recording.from_dict(content["recording"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no recording of this version: {error}") from error


# ------------------------------------------------------------------------ lanes

_LANES = {
    "compute": (Kind.FORWARD, Kind.BACKWARD),
    "step": (Kind.STEP,),
    "gather": (Kind.ALL_GATHER,),
    "reduce": (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE),
    "agree": (Kind.AGREE,),
    "copies": (Kind.TO_DEVICE, Kind.TO_CPU),
    "files": (Kind.READ, Kind.WRITE),
}
_NESTED = ("compute", "step")  # a module's forward contains those of its units
Rows = tuple[tuple[Span, ...], ...]  # each by start


def lanes_of(recording: Recording) -> dict[str, Rows]:
    """By name the lanes in which there is something, always in one order, "waits" last.

    Spans of one row do not overlap, but in "compute" and "step" one may contain others.
    """
    work = [span for span in recording.spans if not span.is_wait]
    lanes = {
        name: pack((span for span in work if span.kind in kinds), may_nest=name in _NESTED)
        for name, kinds in _LANES.items()
    }
    lanes["waits"] = pack(span for span in recording.spans if span.is_wait)
    return {name: rows for name, rows in lanes.items() if rows}


def pack(spans: Iterable[Span], *, may_nest: bool = False) -> Rows:
    """Every span in the first row that has room for it; `may_nest`: or inside another one."""
    rows: list[list[Span]] = []
    open_ends: list[list[float]] = []  # of each row, outermost first
    for span in sorted(spans, key=lambda s: (s.start_s, -s.stop_s)):
        has_room = (_has_room(ends, span, may_nest) for ends in open_ends)
        place = next((index for index, yes in enumerate(has_room) if yes), len(rows))
        if place == len(rows):
            rows.append([])
            open_ends.append([])
        rows[place].append(span)
        open_ends[place].append(span.stop_s)
    return tuple(map(tuple, rows))


def _has_room(open_ends: list[float], span: Span, may_nest: bool) -> bool:
    while open_ends and open_ends[-1] <= span.start_s:
        open_ends.pop()
    return not open_ends or (may_nest and span.stop_s <= open_ends[-1])


# ------------------------------------------------------------------------ Trace Event Format

# What nobody has waited for yet counts as in flight there.
CPU_TIMING_NOTE = "on CPU, hidden time is at most and a rate at least what is given"
_GIB = 1024**3


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """A trace with a process for each rank and a thread for each lane; `json.dump` it.

    Viewers want the events of one thread to nest, so spans of a lane that overlap have further
    threads: "gather", "gather 2". The steps of all ranks begin at once; time, in microseconds,
    begins where the earliest span does.

    Args:
        recordings: Of one step, at most one of each rank.

    Raises:
        ValueError: There is no recording.
    """
    if not recordings:
        raise ValueError("expected the recording of one rank at least, got none.")
    starts = [span.start_s for recording in recordings for span in recording.spans]
    first = min([0.0, *starts])
    return {
        "traceEvents": [event for one in recordings for event in _events(one, -first)],
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
            args["gib_per_s"] = round(span.nbytes / _GIB / span.seconds, 4)
    return {**event, "args": args}


def _when(start_s: float, stop_s: float, shift_s: float) -> dict[str, float]:
    # Rounding both ends, not the duration: what nests before nests after.
    start, stop = (round((time + shift_s) * 1e9) for time in (start_s, stop_s))
    return {"ts": start / 1e3, "dur": (stop - start) / 1e3}
