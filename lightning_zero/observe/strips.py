"""Where in a picture the spans of a rank stand; inches downwards, seconds to the right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_zero.observe.lanes import Lane, lanes_of
from lightning_zero.record.spans import Kind, Recording, Span

__all__ = ["GAP", "Bar", "Block", "Scale", "Strip", "place"]

GAP = 0.09  # between lanes
_HEAD = 0.36  # for a line of text above the lanes of a rank
_LANE, _MAX_LANE, _ROW = 0.3, 0.75, 0.19
_LEAST_WIDTH = 0.01  # of a bar: a pixel
_MIN_TEXT_HEIGHT, _CHARACTER, _MARGIN = 0.14, 0.07, 0.06
_WAITS = {
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.AVERAGE: "reduce",
    Kind.AGREE: "agree",
    Kind.TO_DEVICE: "copy",
    Kind.TO_CPU: "copy",
    Kind.READ: "read",
    Kind.WRITE: "write",
}


@dataclass(frozen=True)
class Scale:
    """What of time is in the picture."""

    begin_s: float
    end_s: float
    inches_per_s: float


@dataclass(frozen=True)
class Bar:
    """One span to draw.

    Attributes:
        kind: Of the span.
        start_s: Where it begins in the picture.
        stop_s: Where it ends there.
        top: Inches from above.
        height: Inches.
        text: What there is room for to write on it; may be empty.
        text_s: Where, in the middle of what nothing stands upon.
        is_wait: The computation stands still.
        is_outer: Bars of its units stand upon it.
    """

    kind: Kind
    start_s: float
    stop_s: float
    top: float
    height: float
    text: str
    text_s: float
    is_wait: bool = False
    is_outer: bool = False


@dataclass(frozen=True)
class Strip:
    """Where a lane is."""

    name: str
    top: float
    bottom: float


@dataclass(frozen=True)
class Block:
    """All of one rank.

    Attributes:
        recording: Of the rank.
        offset_s: When its window begins.
        top: Where its line of text begins.
        lanes_top: Where its lanes begin.
        bottom: Where they end.
        lanes: From above.
        bars: In the order of drawing.
        stood_still: Times in which the computation waited.
    """

    recording: Recording
    offset_s: float
    top: float
    lanes_top: float
    bottom: float
    lanes: tuple[Strip, ...]
    bars: tuple[Bar, ...]
    stood_still: tuple[tuple[float, float], ...]


def place(recording: Recording, offset_s: float, top: float, scale: Scale) -> Block:
    """The lanes of one rank, one below the other."""
    visible = dataclasses.replace(recording, spans=tuple(_visible(recording, offset_s, scale)))
    waits = tuple(span for span in visible.spans if span.is_wait)
    steps_wait = {span for span in waits if _is_of_step(span, visible)}
    strips: list[Strip] = []
    bars: list[Bar] = []
    y = top + _HEAD
    for lane in lanes_of(visible):
        if lane.name == "waits":  # they stand upon what waits
            continue
        bottom = y + min(max(_LANE, len(lane.rows) * _ROW), _MAX_LANE)
        strips.append(Strip(lane.name, y, bottom))
        upon = {"compute": [w for w in waits if w not in steps_wait], "step": list(steps_wait)}
        above = upon.get(lane.name, [])
        bars += _bars(lane, strips[-1], above, scale)
        bars += [_bar(wait, y, bottom - y, (), scale) for wait in above]
        y = bottom + GAP
    return Block(
        recording,
        offset_s,
        top,
        top + _HEAD - GAP / 2,
        y - GAP / 2,
        tuple(strips),
        tuple(bars),
        tuple((span.start_s, span.stop_s) for span in waits),
    )


def _visible(recording: Recording, offset_s: float, scale: Scale) -> Iterator[Span]:
    """Spans on the clock of the picture, cut to it."""
    for span in recording.spans:
        start = max(span.start_s + offset_s, scale.begin_s)
        stop = min(span.stop_s + offset_s, scale.end_s)
        if stop >= start:
            yield dataclasses.replace(span, start_s=start, stop_s=stop)


def _is_of_step(wait: Span, visible: Recording) -> bool:
    """The optimizer waits, not forward or backward, beside which it may run."""
    middle = (wait.start_s + wait.stop_s) / 2
    around = {s.kind for s in visible.spans if not s.is_wait and s.start_s <= middle <= s.stop_s}
    return Kind.STEP in around and not around & {Kind.FORWARD, Kind.BACKWARD}


def _bars(lane: Lane, strip: Strip, waits: Sequence[Span], scale: Scale) -> Iterator[Bar]:
    height = (strip.bottom - strip.top) / len(lane.rows)
    for number, row in enumerate(lane.rows):
        for index, span in enumerate(row):
            # In the order of a row, what a span contains comes right after it.
            contains = index + 1 < len(row) and row[index + 1].start_s < span.stop_s
            bar = _bar(span, strip.top + number * height, height, waits, scale)
            if contains:
                bar = dataclasses.replace(bar, text="", is_outer=not span.name)
            yield bar


def _bar(span: Span, top: float, height: float, waits: Sequence[Span], scale: Scale) -> Bar:
    start, stop = _widest_gap(span, waits)
    name = _WAITS.get(span.kind, span.kind.value) if span.is_wait else span.name or span.kind.value
    text = _fitting(name, (stop - start) * scale.inches_per_s, height)
    end = max(span.stop_s, span.start_s + _LEAST_WIDTH / scale.inches_per_s)
    return Bar(
        span.kind, span.start_s, end, top, height, text, (start + stop) / 2, is_wait=span.is_wait
    )


def _widest_gap(span: Span, waits: Sequence[Span]) -> tuple[float, float]:
    """Of what nothing waits upon."""
    gaps, reached = [], span.start_s
    for wait in sorted(waits, key=lambda wait: wait.start_s):
        if reached < wait.stop_s and wait.start_s < span.stop_s:
            gaps.append((reached, wait.start_s))
            reached = wait.stop_s
    gaps.append((reached, span.stop_s))
    return max(gaps, key=lambda gap: gap[1] - gap[0])


def _fitting(name: str, inches: float, height: float) -> str:
    """As much of the end of a dotted name as there is room for, beginning with a word."""
    parts = name.split(".") if height >= _MIN_TEXT_HEIGHT else []
    ends = (".".join(parts[i:]) for i, part in enumerate(parts) if i == 0 or not part.isdigit())
    return next((end for end in ends if len(end) * _CHARACTER + _MARGIN <= inches), "")
