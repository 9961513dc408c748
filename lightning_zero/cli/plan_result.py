"""What `lightning-zero plan` has found: a table, a verdict and a picture, and values for JSON.

In the picture a choice is drawn as it would be trained, with activation checkpointing where only so
it fits. Choices that take the same on the device share a bar, as tall as they are many; what tells
them apart stands in the columns of numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import byte_unit, format_bytes
from lightning_zero.layout.stage import State
from lightning_zero.observe.plots import (
    ALARM,
    INK,
    MATPLOTLIB_HINT,
    STATE_COLOURS,
    has_matplotlib,
    legend,
    style_axes,
    titled_axes,
)
from lightning_zero.observe.tables import paragraph, table
from lightning_zero.planner import Estimate, Machine
from lightning_zero.strategy.settings import as_arguments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Row", "as_dict", "as_text", "best_of", "check_plot", "draw"]


@dataclass(frozen=True)
class Row:
    """One choice.

    Attributes:
        plain: As the module is.
        checkpointed: With its repeated blocks under activation checkpointing; None where there are
            none, or activations are unknown.
    """

    plain: Estimate
    checkpointed: Estimate | None

    @property
    def used(self) -> Estimate:
        """Checkpointed where it does not fit as it is."""
        return self.plain if self.plain.fits else self.checkpointed or self.plain


def best_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The cheapest that fits; activation checkpointing computes the forward twice."""
    found = [
        (one, is_checkpointed)
        for is_checkpointed in (False, True)
        for one in (row.checkpointed if is_checkpointed else row.plain for row in rows)
        if one is not None and one.fits
    ]
    if not found:
        return None
    # Time first; at the same time of transfers, the one that computes less.
    best, is_checkpointed = min(found, key=lambda one: (one[0].cost[0], one[1], one[0].cost))
    config = best.choice.config
    if is_checkpointed:
        config = config.replace(activation_checkpointing=True)
    return {
        "choice": best.choice.name,
        "strategy": as_arguments(config),
        "checkpointing": is_checkpointed,
        **_numbers(best),
    }


def _numbers(estimate: Estimate) -> dict[str, Any]:
    least, most = estimate.transfer_seconds
    return {
        "device_bytes": estimate.device_bytes,
        "host_bytes_per_node": estimate.host_bytes,
        "disk_bytes_per_node": estimate.disk_bytes,
        "transfer_seconds": [least, most],
    }


def as_dict(row: Row) -> dict[str, Any]:
    """All numbers of a choice, in bytes and seconds; as the module is, unless a key says more.

    Those of one rank are of the one that takes most.
    """
    plain, less = row.plain, row.checkpointed
    return {
        "zero": plain.choice.zero,
        "offload": plain.choice.offload,
        "fits": plain.fits,
        "fits_with_checkpointing": None if less is None else less.fits,
        **_numbers(plain),
        "device_bytes_with_checkpointing": None if less is None else less.device_bytes,
        "state_bytes_per_rank": {
            tier.value: {state.value: nbytes for state, nbytes in states.items()}
            for tier, states in plain.rank_memory.tiers.items()
        },
        "min_and_max_bytes_of_ranks": {
            tier.value: list(plain.ranks.min_max_bytes(tier)) for tier in plain.rank_memory.tiers
        },
        "module_buffer_bytes": plain.rank_memory.module_buffer_bytes,
        "average_bytes": plain.rank_memory.average_bytes,
        "nvme_buffer_bytes": plain.rank_memory.nvme_buffer_bytes,
        "staging_bytes": plain.staging_bytes,
        "peak_bytes": {
            "unsharded": plain.peak.unsharded_bytes,
            "gradient buckets": plain.peak.grad_bucket_bytes,
            "activations": plain.peak.activation_bytes,
        },
        "step_bytes": dataclasses.asdict(plain.traffic),
        "missing_bytes": plain.missing_bytes,
    }


def as_text(
    facts: Mapping[str, Any], rows: Sequence[Row], machine: Machine, best: Any, note: str
) -> str:
    """For people; `note` says what is not counted, and may be empty."""
    head = (
        f"{facts['model']}: {facts['parameters']:,} parameters, {facts['precision']}, "
        f"{facts['optimizer']}, {machine.num_ranks} ranks, {machine.ranks_per_node} on a machine"
    )
    alone = (
        f"DistributedDataParallel would hold {format_bytes(facts['data_parallel_bytes'])} of states on "
        "each device."
    )
    saving = (
        f"A checkpoint in the full form takes {format_bytes(facts['full_checkpoint_bytes'])} of CPU "
        "memory on rank 0 while it is saved; in the sharded form it takes a few buffers on each "
        "rank, and a copy of the shards of the rank where async_save is on."
    )
    above = [head, note] if note else [head]
    below = [*_legend(rows, machine), alone, saving]
    parts = [*map(paragraph, above), "", _table(rows, best), "", *map(paragraph, below)]
    return "\n".join([*parts, "", *_verdict(rows, best)])


def _table(rows: Sequence[Row], best: Any) -> str:
    unit, size = byte_unit(max(row.plain.device_bytes for row in rows))
    is_quick = all(row.plain.transfer_seconds[1] < 1 for row in rows)

    def short(number: float, digits: int = 3) -> str:
        return f"{number:.{digits}g}" if number < 99.5 else f"{number:.0f}"

    def cells(row: Row) -> list[str]:
        plain, less = row.plain, row.checkpointed
        least, most = (seconds * (1e3 if is_quick else 1) for seconds in plain.transfer_seconds)
        span = list(dict.fromkeys([short(least, 2), short(most, 2)]))
        fits = "yes" if plain.fits else "with ckpt." if row.used.fits else ""
        is_best = best is not None and best["choice"] == plain.choice.name
        return [
            f"{plain.choice.zero}{' *' if is_best else ''}",
            plain.choice.offload,
            _in_unit(plain.rank_memory.tier_bytes(Tier.DEVICE), size),
            _in_unit(plain.device_bytes, size),
            "" if less is None else _in_unit(less.device_bytes, size),
            _in_unit(plain.host_bytes, size),
            _in_unit(plain.disk_bytes, size),
            _in_unit(plain.traffic.wire, size),
            "..".join(span) if len(span) > 1 else short(most),
            fits or f"no: {', '.join(row.used.missing_bytes)}".replace(" memory,", ","),
        ]

    times = "ms" if is_quick else "seconds"
    header = [
        unit, "offload", "states", "peak", "peak, ckpt.", "host", "disk", "sent", times, "fits"
    ]  # fmt: skip
    return table([header, *map(cells, rows)], left=(0, 1, len(header) - 1))


def _in_unit(nbytes: float, size: int) -> str:
    return f"{nbytes / size:.1f}" if nbytes < 100 * size else f"{nbytes / size:.0f}"


def _legend(rows: Sequence[Row], machine: Machine) -> Iterator[str]:
    rates = machine.rates
    used = (rates.link, rates.cpu_link, rates.nvme, rates.memory)
    link, cpu_link, disk, memory = (rate / 1e9 for rate in used)
    yield (
        "*: the cheapest that fits; off: stage 0, all replicated; ckpt.: with activation "
        "checkpointing; states, peak, sent: of one rank, on its device, at rest, at most and in a "
        "step; host, disk: of a machine."
    )
    yield (
        "Times are of transfers and of steps on the CPU, at once .. one by one, at "
        f"{link:g} GB/s between ranks, {cpu_link:g} to CPU memory, {disk:g} of disks and "
        f"{memory:g} of CPU memory for these steps (--rates)."
    )
    if machine.has_device_memory:
        yield (
            "What fits may fill the device to the last byte. CUDA, NCCL and gaps between tensors "
            "take 1 to 2 GiB of a GPU beside that: give --device-memory less by as much."
        )
    spans = [row.plain.ranks.min_max_bytes(tier) for row in rows for tier in Tier]
    if any(least != most for least, most in spans):
        yield "Ranks own whole tensors and differ: the numbers are of the one with most."
    limits = {
        "--device-memory": machine.device_bytes,
        "--host-memory": machine.host_bytes,
        "--disk": machine.disk_bytes,
    }
    unbounded = [name for name, limit in limits.items() if limit is None]
    if unbounded:
        yield f"Taken to be without bound, for want of {', '.join(unbounded)}."


def _verdict(rows: Sequence[Row], best: Any) -> Iterator[str]:
    if best is not None:
        how = " with activation checkpointing" if best["checkpointing"] else ""
        needs = [f"{format_bytes(best['device_bytes'])} on each device"]
        for name, where in (("host", "of CPU memory"), ("disk", "on disk")):
            if nbytes := best[f"{name}_bytes_per_node"]:
                needs.append(f"{format_bytes(nbytes)} {where} for each machine")
        yield paragraph(f"cheapest that fits: {best['choice']}{how}: {', '.join(needs)}")
        yield best["strategy"]
        return
    estimates = [row.used for row in rows]
    yield "nothing fits; nearest, with activation checkpointing where that is known:"
    for one in sorted(estimates, key=lambda e: sum(e.missing_bytes.values()))[:3]:
        missing = ", ".join(f"{format_bytes(n)} of {name}" for name, n in one.missing_bytes.items())
        yield paragraph(f"  {one.choice.name}: {missing} too little")


# -------------------------------------------------------------------- the picture

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
_COLUMNS = {  # what has the bytes, and what they are too much for; the last two of a machine
    "peak": ("device_bytes", "device memory"),
    _WITHOUT: ("device_bytes", "device memory"),
    "CPU": ("host_bytes", "host memory"),
    "disk": ("disk_bytes", "disk"),
}
# Inches.
_WIDTH, _LEFT, _COLUMN = 12.0, 2.7, 0.7
_TITLE, _ROW, _BELOW = 1.0, 0.32, 1.1


def check_plot(path: Path) -> None:
    """Refuses before anything is computed.

    Raises:
        ValueError: matplotlib is not installed, or cannot write a picture there.
    """
    if not has_matplotlib():
        raise ValueError(f"{MATPLOTLIB_HINT}; or leave --plot out.")
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
    height = _ROW * len(rows)
    columns = len(_COLUMNS) * _COLUMN + 0.15
    margins = (_LEFT, columns, _TITLE + 0.2 * title.count("\n"), _BELOW)
    bars: dict[Any, list[Row]] = {}
    for row in rows:
        bars.setdefault((row.plain.choice.zero, *_parts(row).items()), []).append(row)
    rows = [row for alike in bars.values() for row in alike]
    unit, size = byte_unit(max(row.used.device_bytes for row in rows))
    with titled_axes(title, path, width=_WIDTH, height=height, margins=margins) as axes:
        _bars(axes, list(bars.values()), machine, size)
        axes.set_xlabel(f"{unit} on the device of one rank, at most in a step", labelpad=2)
        _names(axes, rows, winner)
        for index, name in enumerate(_COLUMNS, start=1):
            x = 1 + index * _COLUMN / (_WIDTH - _LEFT - columns)
            _column(axes, rows, name, x, (unit, size))
        handles, _ = axes.get_legend_handles_labels()
        handles.sort(key=lambda handle: handle.get_label() not in _COLOURS)
        legend(axes, handles, (-0.12, -0.5 / height), ncols=4)


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
        label = f"there are {format_bytes(limit)}; {where}"
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
    style_axes(axes, labelsize=9.5)
    if winner is not None:
        place = names.index(winner)
        axes.get_yticklabels()[place].set_fontweight("bold")
        edges = (place - 0.5, place + 0.5)
        axes.axhspan(*edges, color=_WINNER, label="the cheapest that fits", zorder=1)


def _column(axes: Axes, rows: Sequence[Row], name: str, x: float, unit: tuple[str, int]) -> None:
    """Numbers to the right of the bars; those that are too much in colour."""
    where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "fontsize": 9}
    attribute, lacking = _COLUMNS[name]
    header = f"{name}\n{unit[0]}"
    axes.text(x, -0.6, header, color=INK, weight="bold", va="bottom", **where)
    for place, row in enumerate(rows):
        if name == _WITHOUT and row.used is row.plain:
            continue
        shown = row.plain if name == _WITHOUT else row.used
        nbytes = getattr(shown, attribute)
        text = _in_unit(nbytes, unit[1]) if nbytes else "-"
        colour = ALARM if lacking in shown.missing_bytes else INK
        axes.text(x, place, text, color=colour, va="center", **where)


def _parts(row: Row) -> dict[str, int]:
    """Bytes on the device, of which bars are made."""
    estimate = row.used
    held = estimate.rank_memory.tiers[Tier.DEVICE]
    parts = {
        "parameters": held[State.PARAM] + estimate.rank_memory.module_buffer_bytes,
        "gradients": held[State.GRAD],
        "optimizer": held[State.OPTIM],
        "gathered units": estimate.peak.unsharded_bytes,
        "gradient buckets": estimate.peak.grad_bucket_bytes,
        "activations" if estimate is row.plain else _AGAIN: estimate.peak.activation_bytes,
    }
    return parts | {"in CPU memory": estimate.device_bytes - sum(parts.values())}
