"""Colours and figures of all pictures: one colour for one thing, on white."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_zero.layout.stage import State
from lightning_zero.record.spans import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "ALARM",
    "DPI",
    "HOW_TO_DRAW",
    "INK",
    "KIND_COLOURS",
    "ON_CPU",
    "STATE_COLOURS",
    "TIER_HATCHES",
    "blank_figure",
    "has_matplotlib",
    "ink_on",
    "unit_of",
]

HOW_TO_DRAW = 'pictures need matplotlib: pip install "lightning-zero[plot]"'
# What nobody has waited for yet counts as in flight there.
ON_CPU = "on CPU, hidden time is at most and a rate at least what is given"
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
_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


def has_matplotlib() -> bool:
    """Whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


def unit_of(nbytes: float) -> tuple[str, int]:
    """The unit in which the largest of some sizes is best read, and its bytes."""
    return next((unit for unit in _UNITS if nbytes >= unit[1]), ("bytes", 1))


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


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on a colour such as "#0072B2"."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "white"
