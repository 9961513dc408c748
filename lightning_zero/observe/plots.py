"""Pictures of one step on some ranks, and of the bytes that every rank keeps.

One colour for one thing, on white; inches downwards, seconds to the right.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.sizes import unit_of
from lightning_zero.layout.stage import Stage, State
from lightning_zero.observe.chrome import ON_CPU, Lane, lanes_of
from lightning_zero.record.spans import Kind, Recording, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ALARM",
    "DPI",
    "GAP",
    "HOW_TO_DRAW",
    "INK",
    "KIND_COLOURS",
    "STATE_COLOURS",
    "TIER_HATCHES",
    "Bar",
    "Block",
    "Scale",
    "Strip",
    "blank_figure",
    "has_matplotlib",
    "ink_on",
    "legend",
    "place",
    "plain",
    "plot_memory",
    "plot_timeline",
    "totals",
]

HOW_TO_DRAW = 'pictures need matplotlib: pip install "lightning-zero[plot]"'
DPI = 100
INK = "#222222"
ALARM = "#D55E00"  # time that is lost, memory that there is not
# All of Okabe and Ito, or of Tol's muted scheme, which most people can tell apart. What moves a
# state has the state's colour; computation is grey, so that transfers stand out.
STATE_COLOURS = {State.PARAM: "#0072B2", State.GRAD: "#E69F00", State.OPTIM: "#009E73"}
KIND_COLOURS = {
    Kind.FORWARD: "#B4B4B4",
    Kind.BACKWARD: "#7C7C7C",
    Kind.STEP: STATE_COLOURS[State.OPTIM],
    Kind.GATHER: STATE_COLOURS[State.PARAM],
    Kind.REDUCE: STATE_COLOURS[State.GRAD],
    Kind.AVERAGE: "#F0E442",
    Kind.AGREE: "#CC79A7",
    Kind.TO_DEVICE: "#56B4E9",
    Kind.TO_CPU: "#332288",
    Kind.READ: "#44AA99",
    Kind.WRITE: "#882255",
}
TIER_HATCHES = {"device": "", "cpu": "///", "nvme": "..."}


def has_matplotlib() -> bool:
    """Whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


@contextlib.contextmanager
def blank_figure(path: Path, size: tuple[float, float], *, dpi: int = DPI) -> Iterator[Figure]:
    """An empty white figure, written to `path` when the block ends well.

    Whatever the user has set for pictures of their own (a dark style, a backend) neither shows here
    nor is changed.

    Args:
        path: Its ending names the format.
        size: Width and height in inches.
        dpi: Pixels to an inch.

    Raises:
        ValueError: The file's ending is no format of pictures.
        OSError: It cannot be written.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        figure = Figure(figsize=size, dpi=dpi, facecolor="white")
        yield figure
        figure.savefig(path, dpi=dpi)


def plain(axes: Axes, **of_ticks: float) -> None:
    """Axes of bars that lie: faint lines behind them, and no frame."""
    axes.tick_params(axis="y", length=0, **of_ticks)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, handles: Sequence[Any], place: tuple[float, float], **how: float) -> None:
    """Without a frame, its upper left corner at `place`: 0 to 1 in the axes."""
    how = {"fontsize": 9, "borderpad": 0, **how}
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=place, frameon=False, **how)


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on a colour such as "#0072B2"."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "white"


_MAX_NUM_RANKS = 16
_WIDTH, _LEFT, _RIGHT = 9.0, 1.5, 0.3  # inches, as are the next
_TITLE, _BAR, _BELOW = 0.5, 0.3, 0.85
_Parts = Mapping[tuple[str, State], float]  # bytes by tier and state


@dataclass(frozen=True)
class _Row:
    label: str
    parts: _Parts
    is_outline: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def plot_memory(
    reports: Sequence[MemoryReport], path: Path, *, stage: Stage | None = None, title: str = ""
) -> None:
    """Draws a bar for each rank, by state and tier, above that of plain data parallel.

    Beyond 16 ranks those of the least and of the most bytes stand for all. What matplotlib is set
    to is left as it is.

    Args:
        reports: Of all ranks, at one moment.
        path: Of the picture; its ending names the format.
        stage: Adds a bar of its formula: each state that is sharded is 1/N of data parallel's.
        title: Above it.

    Raises:
        ValueError: There is no report, or the file's ending is no format of pictures.
        OSError: It cannot be written.
    """
    if not reports:
        raise ValueError("expected the report of one rank at least, got none.")
    rows = [*_ranks(reports), _data_parallel(reports[0])]
    if stage is not None:
        rows.append(_formula(reports[0], stage))
    height = _BAR * len(rows) + 0.2
    whole = _TITLE + height + _BELOW
    with blank_figure(path, (_WIDTH, whole)) as figure:
        sides = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
        axes = figure.add_axes((_LEFT / _WIDTH, _BELOW / whole, sides, height / whole))
        _draw(axes, rows)
        _legend(axes, rows, below=-0.48 / height)
        text = title or f"Model states of each of {len(reports)} ranks, at rest"
        figure.text(0.12 / _WIDTH, 1 - 0.14 / whole, text, va="top", fontsize=12, weight="bold")


def _ranks(reports: Sequence[MemoryReport]) -> list[_Row]:
    rows = [
        _Row(
            f"rank {report.rank}",
            {(t, s): float(n) for t, states in report.tiers.items() for s, n in states.items()},
        )
        for report in reports
    ]
    if len(rows) <= _MAX_NUM_RANKS:
        return rows
    least, most = min(rows, key=lambda row: row.total), max(rows, key=lambda row: row.total)
    return [
        _Row(f"{least.label}, least", least.parts),
        _Row(f"{most.label}, most", most.parts),
    ]


def _data_parallel(report: MemoryReport) -> _Row:
    parts = {("device", state): float(n) for state, n in report.data_parallel.items()}
    return _Row("data parallel", parts)


def _formula(report: MemoryReport, stage: Stage) -> _Row:
    """As if all rested on the device, without padding or gradients that are wider on the way."""
    parts = {
        ("device", state): nbytes / (report.world_size if stage.has_shard(state) else 1)
        for state, nbytes in report.data_parallel.items()
    }
    return _Row("formula", parts, is_outline=True)


# ------------------------------------------------------------------------ with matplotlib


def _draw(axes: Axes, rows: Sequence[_Row]) -> None:
    unit, size = unit_of(max(row.total for row in rows))
    data_parallel = next(row.total for row in rows if row.label == "data parallel") or 1.0
    for place, row in enumerate(rows):
        left = 0.0
        for (tier, state), nbytes in row.parts.items():
            colour = STATE_COLOURS[state]
            axes.barh(
                place,
                nbytes / size,
                left=left,
                height=0.72,
                facecolor=(colour, 0.25 if row.is_outline else 1.0),
                edgecolor=colour if row.is_outline else "white",
                linewidth=1.2 if row.is_outline else 0.6,
                hatch=TIER_HATCHES.get(tier),
            )
            left += nbytes / size
        text = f"{left:.4g} {unit}"
        if row.label != "data parallel":
            text += f", {row.total / data_parallel:.3g} of data parallel"
        axes.annotate(
            text, (left, place), (5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(row.total for row in rows) / size * 1.12)
    axes.set_xlabel(unit, loc="right", labelpad=-2)
    plain(axes)


def _legend(axes: Axes, rows: Sequence[_Row], below: float) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, label=state.value) for state, colour in STATE_COLOURS.items()
    ]
    tiers = dict.fromkeys(tier for row in rows for tier, _ in row.parts)
    if len(tiers) > 1:
        patches += [
            Patch(facecolor="white", edgecolor=INK, hatch=TIER_HATCHES.get(tier), label=tier)
            for tier in tiers
        ]
    legend(axes, patches, (0, below), ncols=len(patches))


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
        top: Where its line of text begins.
        lanes_top: Where its lanes begin.
        bottom: Where they end.
        lanes: From above.
        bars: In the order of drawing.
        stood_still: Times in which the computation waited.
    """

    recording: Recording
    top: float
    lanes_top: float
    bottom: float
    lanes: tuple[Strip, ...]
    bars: tuple[Bar, ...]
    stood_still: tuple[tuple[float, float], ...]


def place(recording: Recording, top: float, scale: Scale) -> Block:
    """The lanes of one rank, one below the other."""
    visible = dataclasses.replace(recording, spans=tuple(_visible(recording, scale)))
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
        top,
        top + _HEAD - GAP / 2,
        y - GAP / 2,
        tuple(strips),
        tuple(bars),
        tuple((span.start_s, span.stop_s) for span in waits),
    )


def _visible(recording: Recording, scale: Scale) -> Iterator[Span]:
    """Spans, cut to the picture."""
    for span in recording.spans:
        start = max(span.start_s, scale.begin_s)
        stop = min(span.stop_s, scale.end_s)
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


_MAX_NUM_STRIPS = 4
# Inches: of the picture, and around its axes.
_STEP_WIDTH, _STEP_LEFT, _STEP_RIGHT = 15.0, 0.8, 0.2
_AXIS, _LEGEND_LINE = 0.65, 0.22
_BEYOND = 0.02  # of the window is shown before and after it


def plot_timeline(recordings: Sequence[Recording], path: Path) -> None:
    """Draws one step: for each rank the computation, and below it what travels meanwhile.

    Where the computation stood still for something it is hatched, and so is the time below it
    tinted. Beyond four ranks only rank 0, the slowest and the fastest are shown. What matplotlib is
    set to is left as it is.

    Args:
        recordings: Of one step, at most one of each rank.
        path: Of the picture; its ending names the format.

    Raises:
        ValueError: There is no recording, or the file's ending is no format of pictures.
        OSError: It cannot be written.
    """
    if not recordings:
        raise ValueError("expected the recording of one rank at least, got none.")
    shown, which = _chosen(recordings)
    scale = _scale(shown)
    blocks: list[Block] = []
    for recording in shown:
        blocks.append(place(recording, blocks[-1].bottom if blocks else 0.0, scale))
    labels = list(totals(recordings))
    height = blocks[-1].bottom + GAP
    below = _AXIS + _LEGEND_LINE * ((len(labels) + 1) // 2) + 0.15
    whole = _TITLE + height + below
    with blank_figure(path, (_STEP_WIDTH, whole)) as figure:
        sides = (_STEP_WIDTH - _STEP_LEFT - _STEP_RIGHT) / _STEP_WIDTH
        axes = figure.add_axes((_STEP_LEFT / _STEP_WIDTH, below / whole, sides, height / whole))
        _set_up(axes, blocks, scale, height)
        for block in blocks:
            _draw_steps(axes, block, scale)
        _legend_of_kinds(axes, labels, top=-(_AXIS - 0.1) / height)
        title = f"Step {recordings[0].step} on {recordings[0].world_size} ranks{which}"
        figure.text(
            0.12 / _STEP_WIDTH, 1 - 0.14 / whole, title, va="top", fontsize=13, weight="bold"
        )
        figure.text(
            1 - _STEP_RIGHT / _STEP_WIDTH, 0.12 / whole, ON_CPU, ha="right", fontsize=8.5, color=INK
        )


def _chosen(recordings: Sequence[Recording]) -> tuple[list[Recording], str]:
    """Which to draw, and how to say so."""
    if len(recordings) <= _MAX_NUM_STRIPS:
        return list(recordings), ""
    slowest = min(recordings, key=lambda recording: recording.waited_for_others_s)
    fastest = max(recordings, key=lambda recording: recording.waited_for_others_s)
    ranks = {0, slowest.rank, fastest.rank}
    which = (
        f": rank {slowest.rank} waited least (the slowest), rank {fastest.rank} most (the fastest)"
    )
    shown = [recording for recording in recordings if recording.rank in ranks]
    return sorted(shown, key=lambda recording: recording.rank), which


def _scale(shown: Sequence[Recording]) -> Scale:
    seconds = max(recording.seconds for recording in shown)
    beyond = _BEYOND * seconds or 1e-6
    inches = _STEP_WIDTH - _STEP_LEFT - _STEP_RIGHT
    return Scale(-beyond, seconds + beyond, inches / (seconds + 2 * beyond))


def totals(recordings: Sequence[Recording]) -> Iterator[tuple[Kind | None, str]]:
    """Lines of the legend: of each kind, or of mere waits (None); means over the ranks."""
    whole = fmean(recording.seconds for recording in recordings) or 1.0

    def share(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms ({seconds / whole:.0%})"

    for kind in Kind:
        in_flight = fmean(recording.in_flight_s(kind) for recording in recordings)
        exposed = fmean(recording.exposed_s(kind) for recording in recordings)
        if kind.is_compute and in_flight:
            awaited = f", {share(exposed)} of it waited for" if exposed else ""
            yield kind, f"{kind.value}: {share(in_flight)}{awaited}"
        elif in_flight:
            hidden = fmean(recording.hidden_s(kind) for recording in recordings)
            yield kind, f"{kind.value}: {share(hidden)} hidden, {share(exposed)} exposed"
        elif exposed:
            yield None, f"{kind.value}: {share(exposed)} exposed"
    waited = fmean(recording.waited_s for recording in recordings)
    yield None, f"the computation waits: {share(waited)} in all"


# ------------------------------------------------------------------------ with matplotlib


def _set_up(axes: Axes, blocks: Sequence[Block], scale: Scale, height: float) -> None:
    axes.set_xlim(scale.begin_s * 1e3, scale.end_s * 1e3)
    axes.set_ylim(height, 0)
    axes.set_xlabel("ms", loc="right", labelpad=-4)
    lanes = [lane for block in blocks for lane in block.lanes]
    axes.set_yticks([(lane.top + lane.bottom) / 2 for lane in lanes], [one.name for one in lanes])
    plain(axes, labelsize=9)
    axes.spines["left"].set_visible(False)


def _draw_steps(axes: Axes, block: Block, scale: Scale) -> None:
    recording = block.recording
    head = (
        f"rank {recording.rank}: {recording.seconds * 1e3:.1f} ms, "
        f"of which it waits {recording.waited_s * 1e3:.1f} ms"
    )
    axes.text(scale.begin_s * 1e3, block.top + 0.2, head, va="center", fontsize=10, weight="bold")
    for edge in (0.0, recording.seconds):
        axes.vlines(edge * 1e3, block.lanes_top, block.bottom, INK, linewidth=1, linestyle=":")
    for start, stop in block.stood_still:
        low, high = block.lanes_top / axes.get_ylim()[0], block.bottom / axes.get_ylim()[0]
        axes.axvspan(start * 1e3, stop * 1e3, 1 - high, 1 - low, color=ALARM, alpha=0.12, lw=0)
    for bar in block.bars:
        x, width = bar.start_s * 1e3, (bar.stop_s - bar.start_s) * 1e3
        is_wide = (bar.stop_s - bar.start_s) * scale.inches_per_s > 0.04
        colour = KIND_COLOURS[bar.kind]
        axes.broken_barh(
            [(x, width)],
            (bar.top, bar.height),
            facecolor="#FFE9DC" if bar.is_wait else colour,
            alpha=0.35 if bar.is_outer else None,
            edgecolor=ALARM if bar.is_wait else "white",
            linewidth=(0.6 if is_wide or bar.is_wait else 0.0),
            hatch="/////" if bar.is_wait else None,
            zorder=3 if bar.is_wait else 2,
        )
        if bar.text:
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
            axes.text(
                bar.text_s * 1e3,
                bar.top + bar.height / 2,
                bar.text,
                ha="center",
                va="center",
                fontsize=8,
                color=ALARM if bar.is_wait else INK if bar.is_outer else ink_on(colour),
                bbox=box if bar.is_wait else None,
                clip_on=True,
                zorder=4,
            )


def _legend_of_kinds(axes: Axes, labels: Sequence[tuple[Kind | None, str]], top: float) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor="#FFE9DC", edgecolor=ALARM, hatch="/////", label=text)
        if kind is None
        else Patch(facecolor=KIND_COLOURS[kind], label=text)
        for kind, text in labels
    ]
    legend(axes, patches, (0, top), ncols=2, fontsize=9.5, labelspacing=0.35)
