"""The picture of a plan: what every choice takes on a device, beside what there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lightning_zero.cli.plan_text import Row
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import unit_of
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
from lightning_zero.planner import Estimate, Machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "draw"]

_GIB = 1024**3
_COLOURS = {
    "parameters": STATE_COLOURS[State.PARAM],
    "gradients": STATE_COLOURS[State.GRAD],
    "optimizer": STATE_COLOURS[State.OPTIM],
    "gathered units": "#56B4E9",
    "gradient buckets": "#F0E442",
    "activations": "#CC79A7",
    "in CPU memory": "#999999",  # where that is the device
}
_MOST_OF_LIMIT = 3.0  # longer bars are cut, or the line would be at the edge; and vice versa
_COLUMNS = ("peak", "checkp.", "host", "disk")  # of which the last two are of a machine
# Inches.
_WIDTH, _LEFT, _COLUMN = 12.0, 2.7, 0.66
_TITLE, _ROW, _BELOW = 0.75, 0.32, 1.15


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


def draw(rows: Sequence[Row], machine: Machine, title: str, path: Path) -> None:
    """Writes stacked bars, one for each choice, a line at the device's memory, and numbers.

    Raises:
        OSError: It cannot be written.
    """
    title = fill(title, 110)
    above = _TITLE + 0.2 * title.count("\n")
    height = _ROW * len(rows)
    whole = above + height + _BELOW
    with blank_figure(path, (_WIDTH, whole)) as figure:
        width = _WIDTH - _LEFT - len(_COLUMNS) * _COLUMN - 0.15
        axes = figure.add_axes((_LEFT / _WIDTH, _BELOW / whole, width / _WIDTH, height / whole))
        unit, size = unit_of(max(row.plain.device_bytes for row in rows))
        _bars(axes, rows, machine, size)
        axes.set_xlabel(f"{unit} on the device of one rank, at most in a step", labelpad=2)
        for index, name in enumerate(_COLUMNS, start=1):
            _column(axes, rows, name, 1 + index * _COLUMN / width, size)
        handles, _ = axes.get_legend_handles_labels()
        handles.sort(key=lambda handle: handle.get_label() not in _COLOURS)
        legend(axes, handles, (-0.12, -0.5 / height), ncols=4)
        figure.text(0.12 / _WIDTH, 1 - 0.12 / whole, title, va="top", fontsize=12, weight="bold")


def _bars(axes: Axes, rows: Sequence[Row], machine: Machine, size: int) -> None:
    limit = machine.device_bytes
    totals = [row.plain.device_bytes for row in rows]
    end: float = max(totals)
    if limit is not None and limit < _MOST_OF_LIMIT * end:
        end = min(max(end, limit), _MOST_OF_LIMIT * limit)
    left = [0.0] * len(rows)
    for part, colour in _COLOURS.items():
        sizes = [_parts(row.plain).get(part, 0) / size for row in rows]
        if any(sizes):
            places = range(len(rows))
            axes.barh(places, sizes, left=left, color=colour, label=part, height=0.7, zorder=2)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    _lines(axes, rows, size, limit)
    for place, total in enumerate(totals):
        if total > end * 1.02:  # torn off
            axes.plot(end * 1.01 / size, place, ">", color="white", markersize=9, zorder=4)
    axes.set_xlim(0, end * 1.02 / size)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.plain.choice.name for row in rows])
    plain(axes, labelsize=9.5)


def _lines(axes: Axes, rows: Sequence[Row], size: int, limit: int | None) -> None:
    """Totals with checkpointing, and the device's memory."""
    less = {place: row.checkpointed for place, row in enumerate(rows)}
    marks = {place: one.device_bytes / size for place, one in less.items() if one is not None}
    if marks:
        tops = [place - 0.43 for place in marks]
        bottoms = [place + 0.43 for place in marks]
        label = "with activation checkpointing"
        axes.vlines(list(marks.values()), tops, bottoms, INK, linewidth=2, label=label, zorder=3)
    if limit is not None:
        is_beyond = limit >= _MOST_OF_LIMIT * max(row.plain.device_bytes for row in rows)
        where = "far to the right" if is_beyond else "red: more than there is"
        label = f"there are {limit / _GIB:.4g} GiB; {where}"
        axes.axvline(limit / size, color=ALARM, linestyle="--", label=label, zorder=3)


def _column(axes: Axes, rows: Sequence[Row], name: str, x: float, size: int) -> None:
    """Numbers to the right of the bars; those that are too much in colour."""
    where: dict[str, Any] = {
        "transform": axes.get_yaxis_transform(),
        "ha": "right",
        "va": "center",
        "fontsize": 9,
    }
    axes.text(x, -0.75, name, color=INK, weight="bold", **where)
    for place, row in enumerate(rows):
        estimate = row.checkpointed if name == "checkp." else row.plain
        if estimate is None:
            continue
        nbytes, lacking = {
            "host": (estimate.host_bytes, "host memory"),
            "disk": (estimate.disk_bytes, "disk"),
        }.get(name, (estimate.device_bytes, "device memory"))
        is_much = lacking in estimate.excess
        text = f"{nbytes / size:.1f}" if nbytes < 100 * size else f"{nbytes / size:.0f}"
        axes.text(x, place, text if nbytes else "-", color=ALARM if is_much else INK, **where)


def _parts(estimate: Estimate) -> dict[str, int]:
    held = estimate.resting.tiers[Tier.DEVICE]
    parts = {
        "parameters": held[State.PARAM] + estimate.resting.module_buffer_bytes,
        "gradients": held[State.GRAD],
        "optimizer": held[State.OPTIM],
        "gathered units": estimate.peak.gathered_bytes,
        "gradient buckets": estimate.peak.bucket_bytes,
        "activations": estimate.peak.activation_bytes,
    }
    return parts | {"in CPU memory": estimate.device_bytes - sum(parts.values())}
