"""Recordings in the Trace Event Format, which Perfetto and chrome://tracing show.

Its lanes, of spans that stand in one line, are those of the pictures too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.record.spans import Kind, Recording, Span

__all__ = ["ON_CPU", "Lane", "chrome_trace", "lanes_of", "pack"]

# What nobody has waited for yet counts as in flight there.
ON_CPU = "on CPU, hidden time is at most and a rate at least what is given"

_KINDS = {
    "compute": (Kind.FORWARD, Kind.BACKWARD),
    "step": (Kind.STEP,),
    "gather": (Kind.GATHER,),
    "reduce": (Kind.REDUCE, Kind.AVERAGE),
    "agree": (Kind.AGREE,),
    "copies": (Kind.TO_DEVICE, Kind.TO_CPU),
    "files": (Kind.READ, Kind.WRITE),
}
_NESTED = ("compute", "step")  # a module's forward contains those of its units


@dataclass(frozen=True)
class Lane:
    """Spans of one sort.

    Attributes:
        name: "compute", "step", "gather", "reduce", "agree", "copies", "files" or "waits".
        rows: By start. Spans of one row do not overlap, but in "compute" and "step" one may
            contain others.
    """

    name: str
    rows: tuple[tuple[Span, ...], ...]


def lanes_of(recording: Recording) -> list[Lane]:
    """The lanes in which there is something, always in one order, the waits last."""
    work = [span for span in recording.spans if not span.is_wait]
    lanes = [
        Lane(name, pack((s for s in work if s.kind in kinds), may_nest=name in _NESTED))
        for name, kinds in _KINDS.items()
    ]
    lanes.append(Lane("waits", pack(span for span in recording.spans if span.is_wait)))
    return [lane for lane in lanes if lane.rows]


def pack(spans: Iterable[Span], *, may_nest: bool = False) -> tuple[tuple[Span, ...], ...]:
    """Every span in the first row that has room for it.

    Args:
        spans: In any order.
        may_nest: A span may stand inside another one.
    """
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


_GIB = 1024**3


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """A trace with a process for each rank and a thread for each lane; `json.dump` it.

    Viewers want the events of one thread to nest, so spans of a lane that overlap have further
    threads: "gather", "gather 2". The steps of all ranks begin at once; time begins where the
    earliest span does.

    Args:
        recordings: Of one step, at most one of each rank.

    Returns:
        The JSON object form: "traceEvents", with times in microseconds, and "otherData".

    Raises:
        ValueError: There is no recording.
    """
    if not recordings:
        raise ValueError("expected the recording of one rank at least, got none.")
    starts = [span.start_s for recording in recordings for span in recording.spans]
    first = min(0.0, *starts)
    events = [event for recording in recordings for event in _events(recording, -first)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step": recordings[0].step,
            "world_size": recordings[0].world_size,
            "note": ON_CPU,
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
    for lane in lanes_of(recording):
        for number, row in enumerate(lane.rows, start=1):
            thread += 1
            name = lane.name if number == 1 else f"{lane.name} {number}"
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
