"""The picture of a plan: what every choice takes on a device, beside what there is.

A choice is drawn as it would be trained, with activation checkpointing where only so it fits.
Choices that take the same on the device share a bar, as tall as they are many; what tells them
apart stands in the columns of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lightning_zero.cli.plan_text import Row
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import in_words, unit_of
from lightning_zero.layout.stage import State
from lightning_zero.observe.plots import (
    ALARM,
    HOW_TO_DRAW,
    INK,
    STATE_COLOURS,
    blank_figure,
    has_matplotlib,
    legend,
    plain,
)
from lightning_zero.planner import Machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "draw"]

_AGAIN = "activations, checkpointed"
_COLOURS = {
    "parameters": STATE_COLOURS[State.PARAM],
    "gradients": STATE_COLOURS[State.GRAD],
    "optimizer": STATE_COLOURS[State.OPTIM],
    "gathered units": "#56B4E9",
    "gradient buckets": "#F0E442",
    "activations": "#CC79A7",
    _AGAIN: "#E8C4D8",
    "in CPU memory": "#999999",  # where that is the device
}
_WINNER = "#DCEFE3"
_MOST_OF_LIMIT = 3.0  # longer bars are cut, or the line would be at the edge; and vice versa
_WITHOUT = "without\nckpt."
_COLUMNS = ("peak", _WITHOUT, "CPU", "disk")  # of which the last two are of a machine
# Inches.
_WIDTH, _LEFT, _COLUMN = 12.0, 2.7, 0.7
_TITLE, _ROW, _BELOW = 1.0, 0.32, 1.1


def check_plot(path: Path) -> None:
    """Refuses before anything is computed.

    Raises:
        ValueError: matplotlib is not installed, or cannot write a picture there.
    """
    if not has_matplotlib():
        raise ValueError(f"{HOW_TO_DRAW}; or leave --plot out.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    endings = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in endings:
        raise ValueError(f"--plot {path} must end in one of {', '.join(endings)}.")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}.")


def draw(rows: Sequence[Row], winner: str | None, machine: Machine, title: str, path: Path) -> None:
    """Writes stacked bars, a line at the device's memory, and numbers.

    Args:
        rows: Choices.
        winner: Name of the cheapest that fits; None: nothing does.
        machine: What there is.
        title: Above it.
        path: Its ending names the format.

    Raises:
        OSError: It cannot be written.
    """
    title = fill(title, 110)
    above = _TITLE + 0.2 * title.count("\n")
    height = _ROW * len(rows)
    whole = above + height + _BELOW
    bars: dict[Any, list[Row]] = {}
    for row in rows:
        bars.setdefault((row.plain.choice.zero, *_parts(row).items()), []).append(row)
    rows = [row for alike in bars.values() for row in alike]
    with blank_figure(path, (_WIDTH, whole)) as figure:
        width = _WIDTH - _LEFT - len(_COLUMNS) * _COLUMN - 0.15
        axes = figure.add_axes((_LEFT / _WIDTH, _BELOW / whole, width / _WIDTH, height / whole))
        unit, size = unit_of(max(row.used.device_bytes for row in rows))
        _bars(axes, list(bars.values()), machine, size)
        axes.set_xlabel(f"{unit} on the device of one rank, at most in a step", labelpad=2)
        _names(axes, rows, winner)
        for index, name in enumerate(_COLUMNS, start=1):
            _column(axes, rows, name, 1 + index * _COLUMN / width, (unit, size))
        handles, _ = axes.get_legend_handles_labels()
        handles.sort(key=lambda handle: handle.get_label() not in _COLOURS)
        legend(axes, handles, (-0.12, -0.5 / height), ncols=4)
        figure.text(0.12 / _WIDTH, 1 - 0.12 / whole, title, va="top", fontsize=12, weight="bold")


def _bars(axes: Axes, bars: Sequence[Sequence[Row]], machine: Machine, size: int) -> None:
    limit = machine.device_bytes
    totals = [alike[0].used.device_bytes for alike in bars]
    end: float = max(totals)
    if limit is not None and limit < _MOST_OF_LIMIT * end:
        end = min(max(end, limit), _MOST_OF_LIMIT * limit)
    firsts = list(accumulate((len(alike) for alike in bars), initial=0))[:-1]
    places = [first + (len(alike) - 1) / 2 for first, alike in zip(firsts, bars, strict=True)]
    heights = [len(alike) - 0.3 for alike in bars]
    left = [0.0] * len(bars)
    for part, colour in _COLOURS.items():
        sizes = [_parts(alike[0]).get(part, 0) / size for alike in bars]
        if any(sizes):
            axes.barh(
                places,
                sizes,
                heights,
                left,
                color=colour,
                edgecolor="white",
                linewidth=0,
                hatch="///" if part == _AGAIN else "",
                label=part,
                zorder=2,
            )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if limit is not None:
        where = (
            "far to the right" if limit >= _MOST_OF_LIMIT * max(totals) else "red: more than that"
        )
        label = f"there are {in_words(limit)}; {where}"
        axes.axvline(limit / size, color=ALARM, linestyle="--", label=label, zorder=3)
    for place, total in zip(places, totals, strict=True):
        if total > end * 1.02:  # torn off
            axes.plot(end * 1.01 / size, place, ">", color="white", markersize=9, zorder=4)
    axes.set_xlim(0, end * 1.02 / size)


def _names(axes: Axes, rows: Sequence[Row], winner: str | None) -> None:
    """The name of each choice to the left of its bar; the winner's in bold, on a ground."""
    names = [row.plain.choice.name for row in rows]
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), names)
    plain(axes, labelsize=9.5)
    if winner is not None:
        place = names.index(winner)
        axes.get_yticklabels()[place].set_fontweight("bold")
        edges = (place - 0.5, place + 0.5)
        axes.axhspan(*edges, color=_WINNER, label="the cheapest that fits", zorder=1)


def _column(axes: Axes, rows: Sequence[Row], name: str, x: float, unit: tuple[str, int]) -> None:
    """Numbers to the right of the bars; those that are too much in colour."""
    where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "fontsize": 9}
    header = f"{name}\n{unit[0]}"
    axes.text(x, -0.6, header, color=INK, weight="bold", va="bottom", **where)
    for place, row in enumerate(rows):
        used = row.used
        if name == _WITHOUT and used is row.plain:
            continue
        shown = row.plain if name == _WITHOUT else used
        nbytes, lacking = {
            "CPU": (shown.host_bytes, "host memory"),
            "disk": (shown.disk_bytes, "disk"),
        }.get(name, (shown.device_bytes, "device memory"))
        number = nbytes / unit[1]
        text = f"{number:.1f}" if number < 100 else f"{number:.0f}"
        colour = ALARM if lacking in shown.excess else INK
        axes.text(x, place, text if nbytes else "-", color=colour, va="center", **where)


def _parts(row: Row) -> dict[str, int]:
    """Bytes on the device, of which bars are made."""
    estimate = row.used
    held = estimate.resting.tiers[Tier.DEVICE]
    parts = {
        "parameters": held[State.PARAM] + estimate.resting.module_buffer_bytes,
        "gradients": held[State.GRAD],
        "optimizer": held[State.OPTIM],
        "gathered units": estimate.peak.gathered_bytes,
        "gradient buckets": estimate.peak.bucket_bytes,
        "activations" if estimate is row.plain else _AGAIN: estimate.peak.activation_bytes,
    }
    return parts | {"in CPU memory": estimate.device_bytes - sum(parts.values())}
