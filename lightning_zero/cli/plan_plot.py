"""The picture of a plan: what every choice takes on a device, beside what there is."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_zero.cli.plan_report import Row
from lightning_zero.offload import Tier
from lightning_zero.planner import Estimate, Machine
from lightning_zero.stage import State

__all__ = ["check_plot", "draw"]

_GIB = 1024**3
_COLOURS = {  # of Okabe and Ito, which most people can tell apart
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "gathered units": "#56B4E9",
    "gradient buckets": "#F0E442",
    "activations": "#CC79A7",
}


def check_plot(path: Path) -> None:
    """Refuses before anything is computed.

    Raises:
        ValueError: matplotlib is not installed, or cannot write a picture there.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            '--plot needs matplotlib: pip install "lightning-zero[plot]", or leave --plot out.'
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    endings = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in endings:
        raise ValueError(f"--plot {path} must end in one of {', '.join(endings)}.")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}.")


def draw(rows: Sequence[Row], machine: Machine, title: str, path: Path) -> None:
    """Writes stacked bars, one for each choice, and a line at the device's memory.

    Raises:
        OSError: It cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1.4 + 0.42 * len(rows)), layout="constrained")
    names = [row.plain.choice.name for row in rows]
    left = [0.0] * len(rows)
    for part, colour in _COLOURS.items():
        sizes = [_parts(row.plain)[part] / _GIB for row in rows]
        axes.barh(names, sizes, left=left, color=colour, label=part, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    limit = None if machine.device_bytes is None else machine.device_bytes / _GIB
    for place, row in enumerate(rows):
        if row.checkpointed is not None:
            total = row.checkpointed.device_bytes / _GIB
            axes.plot([total, total], [place - 0.42, place + 0.42], color="black", linewidth=1.5)
    if any(row.checkpointed is not None for row in rows):
        axes.plot([], [], color="black", linewidth=1.5, label="with checkpointing")
    if limit is not None:
        axes.axvline(limit, color="#D55E00", linestyle="--", label=f"there are {limit:.4g} GiB")
    for place, (row, end) in enumerate(zip(rows, left, strict=True)):
        axes.annotate(
            _beside(row.plain),
            (end, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.set_xlabel("GiB on the device of one rank, at most in a step")
    axes.set_title(title)
    axes.legend(loc="lower right", fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)


def _parts(estimate: Estimate) -> dict[str, int]:
    held = estimate.resting.tiers[Tier.DEVICE]
    return {
        "parameters": held[State.PARAM] + estimate.resting.module_buffer_bytes,
        "gradients": held[State.GRAD],
        "optimizer": held[State.OPTIM],
        "gathered units": estimate.peak.gathered_bytes,
        "gradient buckets": estimate.peak.bucket_bytes,
        "activations": estimate.peak.activation_bytes,
    }


def _beside(estimate: Estimate) -> str:
    """What is elsewhere, in words."""
    parts = []
    if host := estimate.host_bytes:
        parts.append(f"{host / _GIB:.0f} GiB host")
    if disk := estimate.disk_bytes:
        parts.append(f"{disk / _GIB:.0f} GiB disk")
    return ", ".join(parts)
