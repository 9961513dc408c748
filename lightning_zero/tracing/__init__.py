"""What recordings and reports show, as files of other programs and as pictures.

    lanes       which spans stand beside each other
    files       where recordings of a run lie, and how they are read again
    chrome      the Trace Event Format, for Perfetto and chrome://tracing
    timeline    a picture of one step
    bars        a picture of what every rank keeps
    style       colours and figures, for all pictures of this package

Pictures need matplotlib, which is imported when one is drawn.
"""

from lightning_zero.tracing.bars import plot_memory
from lightning_zero.tracing.chrome import chrome_trace
from lightning_zero.tracing.files import (
    Recorded,
    find_recordings,
    read_step,
    steps_in,
    write_recording,
)
from lightning_zero.tracing.style import HOW_TO_DRAW, ON_CPU, has_matplotlib
from lightning_zero.tracing.timeline import plot_timeline

__all__ = [
    "HOW_TO_DRAW",
    "ON_CPU",
    "Recorded",
    "chrome_trace",
    "find_recordings",
    "has_matplotlib",
    "plot_memory",
    "plot_timeline",
    "read_step",
    "steps_in",
    "write_recording",
]
