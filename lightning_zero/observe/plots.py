"""Plots of one step on several ranks, and of the memory of every rank.

One colour for one thing, on white; inches downwards, seconds to the right. matplotlib is imported
when a plot is drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.sizes import byte_unit
from lightning_zero.layout.stage import State
from lightning_zero.observe.recordings import CPU_TIMING_NOTE, Rows, chrome_trace, lanes_of
from lightning_zero.record.spans import Kind, Recording, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ALARM",
    "MATPLOTLIB_HINT",
    "INK",
    "STATE_COLOURS",
    "Scale",
    "titled_axes",
    "blank_figure",
    "has_matplotlib",
    "legend",
    "lay_out_rank",
    "style_axes",
    "plot_memory",
    "plot_timeline",
    "legend_entries",
    "write_trace",
]

MATPLOTLIB_HINT = 'plots need matplotlib: pip install "lightning-zero[plot]"'
INK = "#222222"
ALARM = "#D55E00"  # lost time, missing memory
# Colours of Okabe and Ito and of Tol's muted scheme, which are safe for colour blindness. Transfers
# have the colour of the state that they move; compute is grey, so that transfers stand out.
STATE_COLOURS = {State.PARAM: "#0072B2", State.GRAD: "#E69F00", State.OPTIM: "#009E73"}
_KIND_COLOURS = {
    Kind.FORWARD: "#B4B4B4",
    Kind.BACKWARD: "#7C7C7C",
    Kind.STEP: STATE_COLOURS[State.OPTIM],
    Kind.ALL_GATHER: STATE_COLOURS[State.PARAM],
    Kind.REDUCE_SCATTER: STATE_COLOURS[State.GRAD],
    Kind.ALL_REDUCE: "#F0E442",
    Kind.ALL_TO_ALL: "#999933",
    Kind.AGREE: "#CC79A7",
    Kind.TO_DEVICE: "#56B4E9",
    Kind.TO_CPU: "#332288",
    Kind.READ: "#44AA99",
    Kind.WRITE: "#882255",
}
_WAIT: dict[str, Any] = {"facecolor": "#FFE9DC", "edgecolor": ALARM, "hatch": "/////"}


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def write_trace(recordings: Sequence[Recording], folder: Path) -> list[Path]:
    """Writes the trace of a step, and its plot if matplotlib is installed; returns the paths."""
    path = folder / f"trace_step_{recordings[0].step}.json"
    path.write_text(json.dumps(chrome_trace(recordings)))
    if not has_matplotlib():
        return [path]
    plot = path.with_suffix(".png")
    plot_timeline(recordings, plot)
    return [path, plot]


# ------------------------------------------------------------------------ figures


@contextlib.contextmanager
def blank_figure(path: Path, size: tuple[float, float], *, dpi: int = 100) -> Iterator[Figure]:
    """White figure of `size` in inches, written to `path` if the block ends without an exception.

    The user's matplotlib style and backend are neither used nor changed.

    Raises:
        ValueError: The suffix of the file is not an image format.
        OSError: The file cannot be written.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        figure = Figure(figsize=size, dpi=dpi, facecolor="white")
        yield figure
        figure.savefig(path, dpi=dpi)


@contextlib.contextmanager
def titled_axes(
    title: str,
    path: Path,
    *,
    width: float,
    height: float,
    margins: tuple[float, float, float, float],
    fontsize: float = 12,
) -> Iterator[Axes]:
    """Axes in a `blank_figure` with a title.

    Args:
        title: Text in the upper margin.
        path: File of the plot.
        width: Width of the figure in inches.
        height: Height of the axes in inches.
        margins: Margins around the axes in inches: left, right, above, below.
        fontsize: Font size of the title.
    """
    left, right, above, below = margins
    total = above + height + below
    with blank_figure(path, (width, total)) as figure:
        where = (left / width, below / total, (width - left - right) / width, height / total)
        axes = figure.add_axes(where)
        at = (0.12 / width, 1 - 0.14 / total)
        figure.text(*at, title, va="top", fontsize=fontsize, weight="bold")
        yield axes


def style_axes(axes: Axes, **tick_params: float) -> None:
    """Styles axes with horizontal bars: a faint grid behind them, and no frame."""
    axes.tick_params(axis="y", length=0, **tick_params)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, handles: Sequence[Any], corner: tuple[float, float], **style: float) -> None:
    """Legend without a frame; `corner`: its upper left corner in axes coordinates."""
    style = {"fontsize": 9, "borderpad": 0, **style}
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=corner, frameon=False, **style)


def _ink_on(colour: str) -> str:
    """Black or white, for the better contrast on a colour such as "#0072B2"."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "white"


# ------------------------------------------------------------------------ memory

_MAX_NUM_RANKS = 16
_TIER_HATCHES = {"device": "", "cpu": "///", "nvme": "..."}
_DATA_PARALLEL = "data parallel"
_Bars = list[tuple[str, dict[tuple[str, State], int]]]  # label, and bytes by tier and state


def plot_memory(reports: Sequence[MemoryReport], path: Path) -> None:
    """Draws a bar for each rank, by state and tier, above a bar for plain data parallel.

    With more than 16 ranks, only those with the fewest and the most bytes are drawn.

    Args:
        reports: Reports of all ranks at one moment.
        path: File of the plot; its suffix sets the format.

    Raises:
        ValueError: There is no report, or the suffix of the file is not an image format.
        OSError: The file cannot be written.
    """
    if not reports:
        raise ValueError("expected the report of at least one rank, got none.")
    selected = [(f"rank {report.rank}", report) for report in reports]
    if len(reports) > _MAX_NUM_RANKS:
        by_size = attrgetter("total_bytes")
        least, most = min(reports, key=by_size), max(reports, key=by_size)
        selected = [(f"rank {least.rank}, min", least), (f"rank {most.rank}, max", most)]
    bars: _Bars = [
        (label, {(t, s): n for t, states in report.tiers.items() for s, n in states.items()})
        for label, report in selected
    ]
    replicated = {("device", state): n for state, n in reports[0].data_parallel.items()}
    bars.append((_DATA_PARALLEL, replicated))
    height = 0.3 * len(bars) + 0.2
    title = f"Model states of each of {len(reports)} ranks at the optimizer step"
    margins = (1.5, 0.3, 0.5, 0.85)
    with titled_axes(title, path, width=9.0, height=height, margins=margins) as axes:
        _draw_memory(axes, bars)
        _legend_of_states(axes, bars, below=-0.48 / height)


def _draw_memory(axes: Axes, bars: _Bars) -> None:
    totals = [sum(parts.values()) for _, parts in bars]
    unit, size = byte_unit(max(totals))
    for row, (label, parts) in enumerate(bars):
        left = 0.0
        for (tier, state), nbytes in parts.items():
            axes.barh(
                row,
                nbytes / size,
                left=left,
                height=0.72,
                facecolor=STATE_COLOURS[state],
                edgecolor="white",
                linewidth=0.6,
                hatch=_TIER_HATCHES.get(tier),
            )
            left += nbytes / size
        text = f"{left:.4g} {unit}"
        if label != _DATA_PARALLEL:
            text += f", {totals[row] / (totals[-1] or 1.0):.3g} of data parallel"
        axes.annotate(
            text, (left, row), (5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, max(totals) / size * 1.12)
    axes.set_xlabel(unit, loc="right", labelpad=-2)
    style_axes(axes)


def _legend_of_states(axes: Axes, bars: _Bars, below: float) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=s.value) for s, colour in STATE_COLOURS.items()]
    tiers = dict.fromkeys(tier for _, parts in bars for tier, _ in parts)
    if len(tiers) > 1:
        patches += [
            Patch(facecolor="white", edgecolor=INK, hatch=_TIER_HATCHES.get(tier), label=tier)
            for tier in tiers
        ]
    legend(axes, patches, (0, below), ncols=len(patches))


# ------------------------------------------------------------------------ layout of spans

_GAP = 0.09  # between lanes
_HEAD = 0.36  # height of a line of text above the lanes of a rank
_LANE, _MAX_LANE, _ROW = 0.3, 0.75, 0.19
_MIN_WIDTH = 0.01  # of a bar: a pixel
_MIN_TEXT_HEIGHT, _CHARACTER, _MARGIN = 0.14, 0.07, 0.06
_WAITS = {
    Kind.ALL_GATHER: "all_gather",
    Kind.REDUCE_SCATTER: "reduce",
    Kind.ALL_REDUCE: "reduce",
    Kind.ALL_TO_ALL: "all_to_all",
    Kind.AGREE: "agree",
    Kind.TO_DEVICE: "copy",
    Kind.TO_CPU: "copy",
    Kind.READ: "read",
    Kind.WRITE: "write",
}


@dataclass(frozen=True)
class Scale:
    """Time range of the plot, and inches per second."""

    begin_s: float
    end_s: float
    inches_per_s: float


@dataclass(frozen=True)
class Bar:
    """One span to draw, clipped to the time range; positions in inches from above."""

    span: Span
    top: float
    height: float
    text: str  # part of the name that fits; may be empty
    text_s: float  # centre of the text, in the widest gap between waits
    is_outer: bool = False  # whether bars of its units are drawn on it


@dataclass(frozen=True)
class LaneBox:
    """Vertical position of a lane, in inches from above."""

    name: str
    top: float
    bottom: float


@dataclass(frozen=True)
class RankBlock:
    """Plot of one rank: a line of text with lanes below it; positions in inches from above."""

    recording: Recording
    top: float
    bottom: float
    lanes: tuple[LaneBox, ...]
    bars: tuple[Bar, ...]  # in the order of drawing
    waits: tuple[Span, ...]  # of compute


def lay_out_rank(recording: Recording, top: float, scale: Scale) -> RankBlock:
    """Lays out the lanes of one rank from `top` downwards."""
    visible = dataclasses.replace(recording, spans=tuple(_visible(recording, scale)))
    waits = tuple(span for span in visible.spans if span.is_wait)
    waits_on: dict[str, list[Span]] = {"compute": [], "step": []}
    for wait in waits:
        lane = "step" if _is_of_step(wait, visible) else "compute"
        waits_on[lane].append(wait)
    boxes: list[LaneBox] = []
    bars: list[Bar] = []
    y = top + _HEAD
    for name, rows in lanes_of(visible).items():
        if name == "waits":  # drawn on the lane that waits
            continue
        boxes.append(LaneBox(name, y, y + min(max(_LANE, len(rows) * _ROW), _MAX_LANE)))
        lane_waits = waits_on.get(name, [])
        bars += _bars(rows, boxes[-1], lane_waits, scale)
        bars += [_bar(wait, y, boxes[-1].bottom - y, (), scale) for wait in lane_waits]
        y = boxes[-1].bottom + _GAP
    return RankBlock(recording, top, y - _GAP / 2, tuple(boxes), tuple(bars), waits)


def _visible(recording: Recording, scale: Scale) -> Iterator[Span]:
    for span in recording.spans:
        start = max(span.start_s, scale.begin_s)
        stop = min(span.stop_s, scale.end_s)
        if stop >= start:
            yield dataclasses.replace(span, start_s=start, stop_s=stop)


def _is_of_step(wait: Span, visible: Recording) -> bool:
    """Whether the optimizer step waits, not a forward or backward that runs at the same time."""
    middle = (wait.start_s + wait.stop_s) / 2
    around = {s.kind for s in visible.spans if not s.is_wait and s.start_s <= middle <= s.stop_s}
    return Kind.STEP in around and not around & {Kind.FORWARD, Kind.BACKWARD}


def _bars(rows: Rows, box: LaneBox, waits: Sequence[Span], scale: Scale) -> Iterator[Bar]:
    height = (box.bottom - box.top) / len(rows)
    for number, row in enumerate(rows):
        for index, span in enumerate(row):
            # In a row, the spans inside a span come right after it.
            contains = index + 1 < len(row) and row[index + 1].start_s < span.stop_s
            bar = _bar(span, box.top + number * height, height, waits, scale)
            if contains:
                bar = dataclasses.replace(bar, text="", is_outer=not span.name)
            yield bar


def _bar(span: Span, top: float, height: float, waits: Sequence[Span], scale: Scale) -> Bar:
    start, stop = _widest_gap(span, waits)
    name = _WAITS.get(span.kind, span.kind.value) if span.is_wait else span.name or span.kind.value
    text = _fitting(name, (stop - start) * scale.inches_per_s, height)
    return Bar(span, top, height, text, (start + stop) / 2)


def _widest_gap(span: Span, waits: Sequence[Span]) -> tuple[float, float]:
    """Start and stop of the widest part of a span without waits."""
    gaps, reached = [], span.start_s
    for wait in sorted(waits, key=lambda wait: wait.start_s):
        if reached < wait.stop_s and wait.start_s < span.stop_s:
            gaps.append((reached, wait.start_s))
            reached = wait.stop_s
    gaps.append((reached, span.stop_s))
    return max(gaps, key=lambda gap: gap[1] - gap[0])


def _fitting(name: str, inches: float, height: float) -> str:
    """Longest end of a dotted name that fits and does not begin with a number."""
    parts = name.split(".") if height >= _MIN_TEXT_HEIGHT else []
    ends = (".".join(parts[i:]) for i, part in enumerate(parts) if i == 0 or not part.isdigit())
    return next((end for end in ends if len(end) * _CHARACTER + _MARGIN <= inches), "")


# ------------------------------------------------------------------------ timeline of a step

_MAX_NUM_BLOCKS = 4
# Inches: width of the figure, and margins of its axes.
_WIDTH, _LEFT, _RIGHT = 15.0, 0.8, 0.2
_TITLE, _AXIS, _LEGEND_LINE = 0.5, 0.65, 0.22
_BEYOND = 0.02  # share of the window that is added before and after it


def plot_timeline(recordings: Sequence[Recording], path: Path) -> None:
    """Draws one step: for each rank compute, and below it communication and transfers.

    Where compute waited, its bar is hatched and the time below it is tinted. With more than four
    ranks, only rank 0, the slowest and the fastest rank are drawn.

    Args:
        recordings: Recordings of one step, at most one of each rank.
        path: File of the plot; its suffix sets the format.

    Raises:
        ValueError: There is no recording, or the suffix of the file is not an image format.
        OSError: The file cannot be written.
    """
    if not recordings:
        raise ValueError("expected the recording of at least one rank, got none.")
    selected, suffix = _selected(recordings)
    seconds = max(recording.seconds for recording in selected)
    beyond = _BEYOND * seconds or 1e-6
    inches = _WIDTH - _LEFT - _RIGHT
    scale = Scale(-beyond, seconds + beyond, inches / (seconds + 2 * beyond))
    blocks: list[RankBlock] = []
    for recording in selected:
        blocks.append(lay_out_rank(recording, blocks[-1].bottom if blocks else 0.0, scale))
    labels = list(legend_entries(recordings))
    height = blocks[-1].bottom + _GAP
    below = _AXIS + _LEGEND_LINE * ((len(labels) + 1) // 2) + 0.15
    title = f"Step {recordings[0].step} on {recordings[0].world_size} ranks{suffix}"
    margins = (_LEFT, _RIGHT, _TITLE, below)
    with titled_axes(
        title, path, width=_WIDTH, height=height, margins=margins, fontsize=13
    ) as axes:
        _set_up(axes, blocks, scale, height)
        for block in blocks:
            _draw_block(axes, block, scale)
        _legend_of_kinds(axes, labels, top=-(_AXIS - 0.1) / height)
        at = (1 - _RIGHT / _WIDTH, 0.12 / (_TITLE + height + below))
        axes.figure.text(*at, CPU_TIMING_NOTE, ha="right", fontsize=8.5, color=INK)


def _selected(recordings: Sequence[Recording]) -> tuple[list[Recording], str]:
    """Recordings to draw, and the end of the title that names them."""
    if len(recordings) <= _MAX_NUM_BLOCKS:
        return list(recordings), ""
    by_wait = attrgetter("waited_for_others_s")
    slowest, fastest = min(recordings, key=by_wait), max(recordings, key=by_wait)
    ranks = {0, slowest.rank, fastest.rank}
    suffix = f": rank {slowest.rank} is the slowest, rank {fastest.rank} the fastest"
    selected = [recording for recording in recordings if recording.rank in ranks]
    return sorted(selected, key=lambda recording: recording.rank), suffix


def legend_entries(recordings: Sequence[Recording]) -> Iterator[tuple[Kind | None, str]]:
    """Kind and text of each entry of the legend; None: waits alone. Means over the ranks."""
    step_s = fmean(recording.seconds for recording in recordings) or 1.0

    def share(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms ({seconds / step_s:.0%})"

    for kind in Kind:
        in_flight = fmean(recording.in_flight_s(kind) for recording in recordings)
        exposed = fmean(recording.exposed_s(kind) for recording in recordings)
        if kind.is_compute and in_flight:
            text = f"{kind.value}: {share(in_flight)}"
            if exposed:
                text += f", {share(exposed)} exposed"
            yield kind, text
        elif in_flight:
            overlapped = fmean(recording.overlapped_s(kind) for recording in recordings)
            yield kind, f"{kind.value}: {share(overlapped)} overlapped, {share(exposed)} exposed"
        elif exposed:
            yield None, f"{kind.value}: {share(exposed)} exposed"
    waited = fmean(recording.waited_s for recording in recordings)
    yield None, f"compute waits: {share(waited)} in total"


def _set_up(axes: Axes, blocks: Sequence[RankBlock], scale: Scale, height: float) -> None:
    axes.set_xlim(scale.begin_s * 1e3, scale.end_s * 1e3)
    axes.set_ylim(height, 0)
    axes.set_xlabel("ms", loc="right", labelpad=-4)
    lanes = [lane for block in blocks for lane in block.lanes]
    axes.set_yticks([(lane.top + lane.bottom) / 2 for lane in lanes], [lane.name for lane in lanes])
    style_axes(axes, labelsize=9)
    axes.spines["left"].set_visible(False)


def _draw_block(axes: Axes, block: RankBlock, scale: Scale) -> None:
    recording, top = block.recording, block.top + _HEAD - _GAP / 2
    head = (
        f"rank {recording.rank}: {recording.seconds * 1e3:.1f} ms, "
        f"waiting for {recording.waited_s * 1e3:.1f} ms"
    )
    axes.text(scale.begin_s * 1e3, block.top + 0.2, head, va="center", fontsize=10, weight="bold")
    for edge in (0.0, recording.seconds):
        axes.vlines(edge * 1e3, top, block.bottom, INK, linewidth=1, linestyle=":")
    low, high = top / axes.get_ylim()[0], block.bottom / axes.get_ylim()[0]
    for wait in block.waits:
        start, stop = wait.start_s * 1e3, wait.stop_s * 1e3
        axes.axvspan(start, stop, 1 - high, 1 - low, color=ALARM, alpha=0.12, lw=0)
    for bar in block.bars:
        _draw_bar(axes, bar, scale)


def _draw_bar(axes: Axes, bar: Bar, scale: Scale) -> None:
    span, colour = bar.span, _KIND_COLOURS[bar.span.kind]
    seconds = max(span.seconds, _MIN_WIDTH / scale.inches_per_s)
    is_wide = seconds * scale.inches_per_s > 0.04
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white"}
    if bar.is_outer:
        look["alpha"] = 0.35
    axes.broken_barh(
        [(span.start_s * 1e3, seconds * 1e3)],
        (bar.top, bar.height),
        linewidth=0.6 if is_wide or span.is_wait else 0.0,
        zorder=3 if span.is_wait else 2,
        **(_WAIT if span.is_wait else look),
    )
    if bar.text:
        colour_of_text = INK if bar.is_outer else _ink_on(colour)
        if span.is_wait:
            colour_of_text = ALARM
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        axes.text(
            bar.text_s * 1e3,
            bar.top + bar.height / 2,
            bar.text,
            ha="center",
            va="center",
            fontsize=8,
            color=colour_of_text,
            bbox=box if span.is_wait else None,
            clip_on=True,
            zorder=4,
        )


def _legend_of_kinds(axes: Axes, labels: Sequence[tuple[Kind | None, str]], top: float) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(**(_WAIT if kind is None else {"facecolor": _KIND_COLOURS[kind]}), label=text)
        for kind, text in labels
    ]
    legend(axes, patches, (0, top), ncols=2, fontsize=9.5, labelspacing=0.35)
