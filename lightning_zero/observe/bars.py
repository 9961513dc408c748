"""A picture of the bytes that every rank keeps, beside those of plain data parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.stage import Stage, State
from lightning_zero.observe.style import INK, STATE_COLOURS, TIER_HATCHES, blank_figure, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_memory"]

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
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


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
    axes.legend(
        handles=patches,
        ncols=len(patches),
        loc="upper left",
        bbox_to_anchor=(0, below),
        frameon=False,
        fontsize=9,
        borderpad=0,
    )
