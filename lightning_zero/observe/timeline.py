"""A picture of one step, from which a person sees what was hidden behind computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lightning_zero.observe.lanes import offsets_of
from lightning_zero.observe.strips import GAP, Block, Scale, place
from lightning_zero.observe.style import ALARM, INK, KIND_COLOURS, ON_CPU, blank_figure, ink_on
from lightning_zero.record.spans import Kind, Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_timeline", "totals"]

_MAX_NUM_RANKS = 4
# Inches: of the picture, and around its axes.
_WIDTH, _LEFT, _RIGHT = 15.0, 0.8, 0.2
_TITLE, _AXIS, _LEGEND_LINE = 0.5, 0.65, 0.22
_BEYOND = 0.02  # of the window is shown before and after it


def plot_timeline(
    recordings: Sequence[Recording], path: Path, offsets_s: Sequence[float] | None = None
) -> None:
    """Draws one step: for each rank the computation, and below it what travels meanwhile.

    Where the computation stood still for something it is hatched, and so is the time below it
    tinted. Beyond four ranks only rank 0, the slowest and the fastest are shown. What matplotlib is
    set to is left as it is.

    Args:
        recordings: Of one step, at most one of each rank.
        path: Of the picture; its ending names the format.
        offsets_s: When each one's window began, in seconds on a clock that all share; None: all at
            once.

    Raises:
        ValueError: There is no recording, the offsets are not as many, or the file's ending is no
            format of pictures.
        OSError: It cannot be written.
    """
    offsets = offsets_of(recordings, offsets_s)
    shown, which = _chosen(recordings)
    first = min(offsets[index] for index in shown)
    windows = [(recordings[index], offsets[index] - first) for index in shown]
    scale = _scale(windows)
    blocks: list[Block] = []
    for recording, offset_s in windows:
        blocks.append(place(recording, offset_s, blocks[-1].bottom if blocks else 0.0, scale))
    labels = list(totals(recordings))
    height = blocks[-1].bottom + GAP
    below = _AXIS + _LEGEND_LINE * ((len(labels) + 1) // 2) + 0.15
    whole = _TITLE + height + below
    with blank_figure(path, (_WIDTH, whole)) as figure:
        sides = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
        axes = figure.add_axes((_LEFT / _WIDTH, below / whole, sides, height / whole))
        _set_up(axes, blocks, scale, height)
        for block in blocks:
            _draw(axes, block, scale)
        _legend(axes, labels, top=-(_AXIS - 0.1) / height)
        title = f"Step {recordings[0].step} on {recordings[0].world_size} ranks{which}"
        figure.text(0.12 / _WIDTH, 1 - 0.14 / whole, title, va="top", fontsize=13, weight="bold")
        figure.text(1 - _RIGHT / _WIDTH, 0.12 / whole, ON_CPU, ha="right", fontsize=8.5, color=INK)


def _chosen(recordings: Sequence[Recording]) -> tuple[list[int], str]:
    """Which to draw, and how to say so."""
    everyone = range(len(recordings))
    if len(recordings) <= _MAX_NUM_RANKS:
        return list(everyone), ""
    slowest = min(everyone, key=lambda index: recordings[index].waited_for_others_s)
    fastest = max(everyone, key=lambda index: recordings[index].waited_for_others_s)
    wanted = {index for index in everyone if recordings[index].rank == 0} | {slowest, fastest}
    which = (
        f": rank {recordings[slowest].rank} waited least (the slowest), "
        f"rank {recordings[fastest].rank} most (the fastest)"
    )
    return sorted(wanted, key=lambda index: recordings[index].rank), which


def _scale(windows: Sequence[tuple[Recording, float]]) -> Scale:
    begin = min(offset_s for _, offset_s in windows)
    end = max(offset_s + recording.seconds for recording, offset_s in windows)
    beyond = _BEYOND * (end - begin) or 1e-6
    inches = _WIDTH - _LEFT - _RIGHT
    return Scale(begin - beyond, end + beyond, inches / (end - begin + 2 * beyond))


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
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    lanes = [lane for block in blocks for lane in block.lanes]
    axes.set_yticks([(lane.top + lane.bottom) / 2 for lane in lanes], [one.name for one in lanes])
    axes.tick_params(axis="y", length=0, labelsize=9)


def _draw(axes: Axes, block: Block, scale: Scale) -> None:
    recording = block.recording
    head = (
        f"rank {recording.rank}: {recording.seconds * 1e3:.1f} ms, "
        f"of which it waits {recording.waited_s * 1e3:.1f} ms"
    )
    axes.text(scale.begin_s * 1e3, block.top + 0.2, head, va="center", fontsize=10, weight="bold")
    for edge in (block.offset_s, block.offset_s + recording.seconds):
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


def _legend(axes: Axes, labels: Sequence[tuple[Kind | None, str]], top: float) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor="#FFE9DC", edgecolor=ALARM, hatch="/////", label=text)
        if kind is None
        else Patch(facecolor=KIND_COLOURS[kind], label=text)
        for kind, text in labels
    ]
    axes.legend(
        handles=patches,
        ncols=2,
        loc="upper left",
        bbox_to_anchor=(0, top),
        frameon=False,
        fontsize=9.5,
        borderpad=0,
        labelspacing=0.35,
    )
