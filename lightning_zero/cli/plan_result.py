"""Result of `lightning-zero plan`: a table with a verdict, a plot, and values for JSON.

The bars of the plot show each choice as it would be trained: with activation checkpointing if it
fits only with that. Choices with equal device memory share a bar, whose height grows with their
number; the columns of numbers show how they differ.
"""

from __future__ import annotations

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
from lightning_zero.observe.tables import table
from lightning_zero.planner import Estimate, Machine, as_arguments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Row", "as_dict", "as_text", "best_of", "check_plot", "draw", "heading"]

_TEXT_WIDTH = 80  # columns
_NVME_WITH_GRADIENTS = "nvme with gradients"
# Choices of the group precision in conf.
_PRECISIONS = {
    "bf16-mixed": "bf16_mixed",
    "16-mixed": "fp16_mixed",
    "32-true": "fp32",
    "float8": "float8",
}


@dataclass(frozen=True)
class Row:
    """Estimates of one choice.

    Attributes:
        plain: Estimate for the module as it is.
        checkpointed: Estimate with activation checkpointing of the repeated blocks; None: there
            are no such blocks, or activations are unknown.
    """

    plain: Estimate
    checkpointed: Estimate | None

    @property
    def chosen(self) -> Estimate:
        """`plain` if it fits, otherwise `checkpointed` if there is one."""
        if self.plain.fits or self.checkpointed is None:
            return self.plain
        return self.checkpointed


def best_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Values for JSON of the cheapest choice that fits; None: nothing fits."""
    fitting = [
        (estimate, is_checkpointed)
        for is_checkpointed in (False, True)
        for estimate in (row.checkpointed if is_checkpointed else row.plain for row in rows)
        if estimate is not None and estimate.fits
    ]
    if not fitting:
        return None
    # Least time first; for equal time without checkpointing, which computes forward twice.
    best, is_checkpointed = min(fitting, key=lambda row: (row[0].cost[0], row[1], row[0].cost))
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
    overlapped_s, sequential_s = estimate.transfer_seconds
    return {
        "device_bytes": estimate.device_bytes,
        "host_bytes_per_node": estimate.host_bytes,
        "disk_bytes_per_node": estimate.disk_bytes,
        "transfer_seconds": [overlapped_s, sequential_s],
    }


def as_dict(row: Row) -> dict[str, Any]:
    """All numbers of a choice for JSON, in bytes and seconds.

    They are without additional activation checkpointing, except for keys that end in
    `with_checkpointing`. Numbers per rank are those of the rank that needs most.
    """
    plain, checkpointed = row.plain, row.checkpointed
    return {
        "zero": plain.choice.zero,
        "offload": plain.choice.offload,
        "fits": plain.fits,
        "fits_with_checkpointing": None if checkpointed is None else checkpointed.fits,
        **_numbers(plain),
        "device_bytes_with_checkpointing": (
            None if checkpointed is None else checkpointed.device_bytes
        ),
        "state_bytes_per_rank": {
            tier.value: {state.value: nbytes for state, nbytes in states.items()}
            for tier, states in plain.tiers.items()
        },
        "min_and_max_bytes_of_ranks": {
            tier.value: list(plain.ranks.min_max_bytes(tier)) for tier in plain.tiers
        },
        "module_buffer_bytes": plain.module_buffer_bytes,
        "average_bytes": sum(plain.counts.averages.values()),
        "nvme_buffer_bytes": plain.counts.nvme_buffer_bytes,
        "staging_bytes": plain.counts.staging_bytes,
        "peak_bytes": {
            "unsharded": plain.counts.peak.unsharded_bytes,
            "gradient buckets": plain.counts.peak.grad_bucket_bytes,
            "activations": plain.counts.peak.activation_bytes,
        },
        "step_bytes": {
            "wire": plain.sent_bytes,
            "to_cpu": plain.counts.to_cpu,
            "from_cpu": plain.counts.from_cpu,
            "nvme_read": plain.counts.read,
            "nvme_written": plain.counts.written,
            "cpu_step": plain.counts.cpu_step,
        },
        "missing_bytes": plain.missing_bytes,
    }


def as_text(
    summary: Mapping[str, Any],
    rows: Sequence[Row],
    machine: Machine,
    best: Any,
    note: str,
    *,
    shows_all: bool = False,
) -> str:
    """Text of the result below `heading`, for 80 columns.

    Args:
        summary: Model, training and ranks.
        rows: Estimates of all choices.
        machine: Hardware of the job.
        best: Result of `best_of`.
        note: What is not counted; may be empty.
        shows_all: Whether to show all choices, and the assumptions of the estimate.
    """
    shown = rows if shows_all else _worth_reading(rows, best)
    num_left_out = len(rows) - len(shown)
    below = [f"{num_left_out} more choices: --all" if num_left_out else ""]
    below += _assumptions(summary, rows, machine) if shows_all else []
    parts = [*([_wrapped(note)] if note else []), "", _table(shown, best)]
    parts += [text for line in filter(None, below) for text in ("", _wrapped(line))]
    return "\n".join([*parts, "", *_verdict(summary, rows, best)])


def heading(summary: Mapping[str, Any], machine: Machine) -> str:
    """Lines about model and hardware, which are known before the estimates."""
    return "\n".join(map(_wrapped, _head(summary, machine)))


def _wrapped(text: str) -> str:
    return fill(text, _TEXT_WIDTH, break_long_words=False, break_on_hyphens=False)


def _head(summary: Mapping[str, Any], machine: Machine) -> Iterator[str]:
    yield (
        f"{summary['model']}: {summary['parameters']:,} parameters, {summary['precision']}, "
        f"{summary['optimizer']}"
    )
    bounds = (
        (machine.device_bytes, "per device"),
        (machine.host_bytes, "of CPU memory and"),
        (machine.disk_bytes, "of disk per node"),
    )
    limits = ", ".join(
        f"{'any amount' if nbytes is None else format_bytes(nbytes)} {where}"
        for nbytes, where in bounds
    ).replace("and,", "and")
    nodes = machine.num_ranks // machine.ranks_per_node
    assumed = ", which is assumed" if summary["link_is_assumed"] else ""
    yield (
        f"{machine.num_ranks} ranks on {nodes} node(s) with {limits}; "
        f"{machine.rates.link / 1e9:g} GB/s between ranks{assumed}"
    )
    if machine.has_device_memory and machine.device_bytes is not None:
        sold, rest = divmod(machine.device_bytes, 10**9)
        if not rest:
            yield (
                f"{sold} GB are {format_bytes(machine.device_bytes)}; a GPU that is sold with "
                f"{sold} GB has almost {sold} GiB: an H100 with 80 GB has 79.6 GiB"
            )
    yield f"DDP needs {format_bytes(summary['data_parallel_bytes'])} of model states per device"


def _worth_reading(rows: Sequence[Row], best: Any) -> list[Row]:
    """Choices without offload, and those with it that fit in less memory than any faster one.

    If nothing fits, the three closest choices.
    """
    if best is None:
        closest = sorted(rows, key=lambda row: sum(row.chosen.missing_bytes.values()))[:3]
        return [row for row in rows if row.plain.choice.offload == "none" or row in closest]
    fitting = [row for row in rows if row.chosen.fits]

    def is_beaten(row: Row) -> bool:
        own = (row.chosen.device_bytes, row.chosen.transfer_seconds[0])
        others = (
            (other.chosen.device_bytes, other.chosen.transfer_seconds[0])
            for other in fitting
            if other is not row
        )
        return any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in others)

    return [
        row
        for row in rows
        if row.plain.choice.offload == "none"
        or row.plain.choice.name == best["choice"]
        or (row.chosen.fits and not is_beaten(row))
    ]


def _table(rows: Sequence[Row], best: Any) -> str:
    """Table of choices, without columns of zeros.

    All columns but `with recompute` are without additional activation checkpointing.
    """
    (unit, size), (time_unit, per_second) = _byte_unit(rows), _time_unit(rows)

    def short(number: float, digits: int = 3) -> str:
        return f"{number:.{digits}g}" if number < 99.5 else f"{number:.0f}"

    def times(estimate: Estimate) -> str:
        overlapped, sequential = (seconds * per_second for seconds in estimate.transfer_seconds)
        if short(overlapped, 2) == short(sequential, 2):
            return short(sequential)
        return f"{short(overlapped, 2)}-{short(sequential, 2)}"

    def fits(row: Row) -> str:
        if row.plain.fits:
            return "yes"
        if row.chosen.fits:
            return "recompute"
        return f"no: {'+'.join(row.chosen.missing_bytes)}".replace(" memory", "")

    def recompute(row: Row) -> str:
        return "" if row.checkpointed is None else _in_unit(row.checkpointed.device_bytes, size)

    names = {"host_bytes": f"CPU\n{unit}", "disk_bytes": f"disk\n{unit}"}
    used = [name for name in names if any(getattr(row.plain, name) for row in rows)]
    has_recompute = any(row.checkpointed is not None for row in rows)
    header = [
        "",
        "zero=",
        "offload=",
        f"states\n{unit}",
        f"peak\n{unit}",
        *([f"with\nrecompute\n{unit}"] if has_recompute else []),
        *(names[name] for name in used),
        f"sent\n{unit}",
        f"transfers\n{time_unit}",
        "fits",
    ]
    lines = [
        [
            "*" if best is not None and best["choice"] == row.plain.choice.name else "",
            row.plain.choice.zero,
            row.plain.choice.offload.replace(_NVME_WITH_GRADIENTS, "nvme+gradients"),
            _in_unit(row.plain.ranks.most_bytes(Tier.DEVICE), size),
            _in_unit(row.plain.device_bytes, size),
            *([recompute(row)] if has_recompute else []),
            *(_in_unit(getattr(row.plain, name), size) for name in used),
            _in_unit(row.plain.sent_bytes, size),
            times(row.plain),
            fits(row),
        ]
        for row in rows
    ]
    return table([header, *lines], left=(0, 1, 2), width=_TEXT_WIDTH)


def _byte_unit(rows: Sequence[Row]) -> tuple[str, int]:
    """Name and bytes of the unit of the table."""
    return byte_unit(max(row.plain.device_bytes for row in rows))


def _time_unit(rows: Sequence[Row]) -> tuple[str, float]:
    """Name of the time unit of the table, and the number of them in a second."""
    if all(row.plain.transfer_seconds[1] < 1 for row in rows):
        return "ms", 1e3
    return "s", 1.0


def _in_unit(nbytes: float, size: int) -> str:
    return f"{nbytes / size:.1f}" if nbytes < 100 * size else f"{nbytes / size:.0f}"


def _assumptions(
    summary: Mapping[str, Any], rows: Sequence[Row], machine: Machine
) -> Iterator[str]:
    rates = machine.rates
    all_rates = (rates.link, rates.cpu_link, rates.nvme, rates.memory)
    link, cpu_link, disk, memory = (rate / 1e9 for rate in all_rates)
    yield (
        "States and peak are per device, at the optimizer step and during a step; the peak with "
        "recompute is that with activation checkpointing of the repeated blocks, the other columns "
        "are without it. CPU memory and disk are per node. Sent bytes go from a rank to other "
        "ranks, in a step."
    )
    yield (
        f"Transfers and optimizer steps on the CPU take from the first time, if all overlap, to "
        f"the second, if none does: at {link:g} GB/s between ranks, {cpu_link:g} GB/s between "
        f"device and CPU, {disk:g} GB/s of disk and {memory:g} GB/s of CPU memory. Set other rates "
        "with --link-gb-per-s."
    )
    yield (
        f"Saving a full checkpoint needs {format_bytes(summary['full_checkpoint_bytes'])} of CPU "
        "memory on rank 0. Saving a sharded checkpoint needs a few buffers on each rank, and with "
        "async_save also a copy of the rank's shards."
    )
    if machine.has_device_memory:
        yield (
            "CUDA, NCCL and fragmentation need 1-2 GiB of a GPU in addition: subtract them from "
            "--device-memory."
        )
    ranges = [row.plain.ranks.min_max_bytes(tier) for row in rows for tier in Tier]
    if any(smallest != largest for smallest, largest in ranges):
        yield "Ranks own full tensors and differ: the numbers are those of the rank with most."


def _verdict(summary: Mapping[str, Any], rows: Sequence[Row], best: Any) -> Iterator[str]:
    if best is not None:
        how = " with activation checkpointing" if best["checkpointing"] else ""
        needs = [f"{format_bytes(best['device_bytes'])} per device"]
        for name, where in (("host", "of CPU memory"), ("disk", "on disk")):
            nbytes = best[f"{name}_bytes_per_node"]
            if nbytes:
                needs.append(f"{format_bytes(nbytes)} {where} per node")
        yield _wrapped(f"* cheapest that fits: {best['choice']}{how}: {', '.join(needs)}")
        yield _trainer(summary, best)
        yield _overrides(summary, best)
        return
    estimates = [row.chosen for row in rows]
    yield "nothing fits; closest choices, with activation checkpointing if possible:"
    for estimate in sorted(estimates, key=lambda e: sum(e.missing_bytes.values()))[:3]:
        missing = ", ".join(
            f"{format_bytes(n)} of {name}" for name, n in estimate.missing_bytes.items()
        )
        yield _wrapped(f"  {estimate.choice.name}: {missing} missing")


def _trainer(summary: Mapping[str, Any], best: Any) -> str:
    """Call of the Trainer for the cheapest choice."""
    nodes = summary["ranks"] // summary["ranks_per_node"]
    arguments = [f"strategy={best['strategy']}", f"devices={summary['ranks_per_node']}"]
    arguments += [f"num_nodes={nodes}"] if nodes > 1 else []
    arguments += ['accelerator="cpu"'] if summary["on_cpu"] else []
    plugin = summary["plugin"]
    arguments.append(f"plugins={plugin}" if plugin else f'precision="{summary["precision"]}"')
    return f"Trainer({', '.join(arguments)})"


def _overrides(summary: Mapping[str, Any], best: Any) -> str:
    """Overrides of `conf` for the cheapest choice."""
    zero, _, offload = best["choice"].partition(", offload=")
    nodes = summary["ranks"] // summary["ranks_per_node"]
    words = [f"zero={zero}"]
    if offload == _NVME_WITH_GRADIENTS:
        words += ["offload=nvme", "+trainer.strategy.offload_optimizer.max_in_cpu_bytes=0"]
    elif offload:
        words.append(f"offload={offload}")
    words += ["recompute=blocks"] if best["checkpointing"] else []
    precision = _PRECISIONS.get(summary["precision"])
    if summary["plugin"] in (None, "Float8Precision()"):  # others are in the configuration
        words.append(
            f"precision={precision}" if precision else f"trainer.precision={summary['precision']}"
        )
    words.append(f"trainer.devices={summary['ranks_per_node']}")
    words += [f"trainer.num_nodes={nodes}"] if nodes > 1 else []
    words += ["trainer.accelerator=cpu"] if summary["on_cpu"] else []
    return " ".join(words)


# -------------------------------------------------------------------- plot

_CHECKPOINTED = "activations, checkpointed"
_COLOURS = {
    "parameters": STATE_COLOURS[State.PARAM],
    "gradients": STATE_COLOURS[State.GRAD],
    "optimizer": STATE_COLOURS[State.OPTIM],
    "unsharded units": "#56B4E9",
    "gradient buckets": "#F0E442",
    "activations": "#CC79A7",
    _CHECKPOINTED: "#E8C4D8",
    "in CPU memory": "#999999",  # if the device is the CPU
}
_WINNER = "#DCEFE3"
_MAX_RATIO = 3.0  # of the longest bar and the limit; beyond it, bars are truncated
_RECOMPUTE = "with\nrecompute"
_COLUMNS = {  # attribute with the bytes, and memory that may be too small
    "peak": ("device_bytes", "device memory"),
    _RECOMPUTE: ("device_bytes", "device memory"),
    "CPU": ("host_bytes", "host memory"),
    "disk": ("disk_bytes", "disk"),
}
# Inches.
_WIDTH, _LEFT, _COLUMN = 12.0, 2.7, 0.7
_TITLE, _ROW, _BELOW = 1.0, 0.32, 1.1


def check_plot(path: Path) -> None:
    """Checks `--plot` before the computation.

    Raises:
        ValueError: matplotlib is not installed, or the path is invalid.
    """
    if not has_matplotlib():
        raise ValueError(f"{MATPLOTLIB_HINT}, or remove --plot.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    endings = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in endings:
        raise ValueError(f"--plot {path} must end in one of {', '.join(endings)}.")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: directory {path.parent} does not exist.")


def draw(rows: Sequence[Row], winner: str | None, machine: Machine, title: str, path: Path) -> None:
    """Writes a plot of stacked bars with a line at the device memory, and columns of numbers.

    Args:
        rows: Choices.
        winner: Name of the cheapest choice that fits; None: nothing fits.
        machine: Hardware of the job.
        title: Title of the plot.
        path: File of the plot; its suffix sets the format.

    Raises:
        OSError: The file cannot be written.
    """
    title = fill(title, 110)
    height = _ROW * len(rows)
    columns = len(_COLUMNS) * _COLUMN + 0.15
    margins = (_LEFT, columns, _TITLE + 0.2 * title.count("\n"), _BELOW)
    bars: dict[Any, list[Row]] = {}
    for row in rows:
        bars.setdefault((row.plain.choice.zero, *_parts(row).items()), []).append(row)
    rows = [row for group in bars.values() for row in group]
    unit, size = byte_unit(max(row.chosen.device_bytes for row in rows))
    with titled_axes(title, path, width=_WIDTH, height=height, margins=margins) as axes:
        _bars(axes, list(bars.values()), machine, size)
        axes.set_xlabel(f"peak {unit} per device during a step", labelpad=2)
        _names(axes, rows, winner)
        for index, name in enumerate(_COLUMNS, start=1):
            x = 1 + index * _COLUMN / (_WIDTH - _LEFT - columns)
            _column(axes, rows, name, x, (unit, size))
        handles, _ = axes.get_legend_handles_labels()
        handles.sort(key=lambda handle: handle.get_label() not in _COLOURS)
        legend(axes, handles, (-0.12, -0.5 / height), ncols=4)


def _bars(axes: Axes, bars: Sequence[Sequence[Row]], machine: Machine, size: int) -> None:
    limit = machine.device_bytes
    totals = [group[0].chosen.device_bytes for group in bars]
    end: float = max(totals)
    if limit is not None and limit < _MAX_RATIO * end:
        end = min(max(end, limit), _MAX_RATIO * limit)
    firsts = list(accumulate((len(group) for group in bars), initial=0))[:-1]
    places = [first + (len(group) - 1) / 2 for first, group in zip(firsts, bars, strict=True)]
    heights = [len(group) - 0.3 for group in bars]
    left = [0.0] * len(bars)
    for part, colour in _COLOURS.items():
        sizes = [_parts(group[0]).get(part, 0) / size for group in bars]
        if any(sizes):
            axes.barh(
                places,
                sizes,
                heights,
                left,
                color=colour,
                edgecolor="white",
                linewidth=0,
                hatch="///" if part == _CHECKPOINTED else "",
                label=part,
                zorder=2,
            )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if limit is not None:
        where = "red: exceeded"
        if limit >= _MAX_RATIO * max(totals):
            where = "far to the right"
        label = f"limit: {format_bytes(limit)}; {where}"
        axes.axvline(limit / size, color=ALARM, linestyle="--", label=label, zorder=3)
    for place, total in zip(places, totals, strict=True):
        if total > end * 1.02:  # truncated
            axes.plot(end * 1.01 / size, place, ">", color="white", markersize=9, zorder=4)
    axes.set_xlim(0, end * 1.02 / size)


def _names(axes: Axes, rows: Sequence[Row], winner: str | None) -> None:
    """Writes the name of each choice to the left of its bar; the winner's is highlighted."""
    names = [row.plain.choice.name for row in rows]
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), names)
    style_axes(axes, labelsize=9.5)
    if winner is not None:
        place = names.index(winner)
        axes.get_yticklabels()[place].set_fontweight("bold")
        edges = (place - 0.5, place + 0.5)
        axes.axhspan(*edges, color=_WINNER, label="cheapest that fits", zorder=1)


def _column(axes: Axes, rows: Sequence[Row], name: str, x: float, unit: tuple[str, int]) -> None:
    """Writes numbers to the right of the bars; those that exceed a limit are coloured."""
    where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "fontsize": 9}
    attribute, lacking = _COLUMNS[name]
    header = f"{name}\n{unit[0]}"
    axes.text(x, -0.6, header, color=INK, weight="bold", va="bottom", **where)
    for place, row in enumerate(rows):
        shown = row.checkpointed if name == _RECOMPUTE else row.plain
        if shown is None:
            continue
        nbytes = getattr(shown, attribute)
        text = _in_unit(nbytes, unit[1]) if nbytes else "-"
        colour = ALARM if lacking in shown.missing_bytes else INK
        axes.text(x, place, text, color=colour, va="center", **where)


def _parts(row: Row) -> dict[str, int]:
    """Bytes on the device by part of a bar."""
    estimate = row.chosen
    held, peak = estimate.tiers[Tier.DEVICE], estimate.counts.peak
    parts = {
        "parameters": held[State.PARAM] + estimate.module_buffer_bytes,
        "gradients": held[State.GRAD],
        "optimizer": held[State.OPTIM],
        "unsharded units": peak.unsharded_bytes,
        "gradient buckets": peak.grad_bucket_bytes,
        "activations" if estimate is row.plain else _CHECKPOINTED: peak.activation_bytes,
    }
    return parts | {"in CPU memory": estimate.device_bytes - sum(parts.values())}
