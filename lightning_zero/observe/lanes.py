"""Which spans of a rank stand in one line, and in how many rows where they overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_zero.record.spans import Kind, Recording, Span

__all__ = ["Lane", "lanes_of", "offsets_of", "pack"]

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


def offsets_of(recordings: Sequence[Recording], offsets_s: Sequence[float] | None) -> list[float]:
    """The offsets, one for each recording.

    Raises:
        ValueError: There is no recording, or the offsets are not as many.
    """
    if not recordings:
        raise ValueError("expected the recording of one rank at least, got none.")
    offsets = [0.0] * len(recordings) if offsets_s is None else list(offsets_s)
    if len(offsets) != len(recordings):
        raise ValueError(
            f"expected an offset for each of {len(recordings)} recordings, got {len(offsets)}."
        )
    return offsets
