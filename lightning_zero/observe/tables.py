"""Tables and paragraphs of text, laid out by rich for the width of the terminal.

The text has no colour codes, so that logs and files are the same as the terminal's output. The
module is separate from `report` because commands without Lightning print tables, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["WIDTH", "paragraph", "table"]

WIDTH = 120  # columns, if standard output is not a terminal and $COLUMNS is not set


def table(
    lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,), width: int | None = None
) -> str:
    """Lays out columns separated by two spaces.

    A table that is too wide has one space between columns, and cells are wrapped between words.

    Args:
        lines: Cells of the header, which may have several lines, and of each row.
        left: Indices of the columns with text, which are left-aligned; the other columns have
            numbers, which are right-aligned and never wrapped.
        width: Columns of the text; None: those of the terminal.
    """
    limit = width or _columns()
    columns = list(zip(*lines, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    is_wide = sum(widths) + 2 * (len(widths) - 1) <= limit
    drawn = Table(box=None, pad_edge=False, padding=(0, 2 if is_wide else 1, 0, 0))
    for index, (header, *cells) in enumerate(columns):
        is_left = index in left
        unbroken = [*header.split(), *(" ".join(cells).split() if is_left else cells)]
        drawn.add_column(
            Text(header),
            justify="left" if is_left else "right",
            min_width=max(map(len, unbroken), default=0),
        )
    for line in lines[1:]:
        drawn.add_row(*map(Text, line))
    return _plain(drawn, limit)


def paragraph(text: str) -> str:
    """Wraps `text` between words."""
    return _plain(Text(text), _columns())


def _columns() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns


def _plain(renderable: RenderableType, width: int) -> str:
    written = StringIO()
    console = Console(file=written, width=width, color_system=None, force_jupyter=False)
    console.print(renderable, crop=False)  # too wide is better than truncated
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
