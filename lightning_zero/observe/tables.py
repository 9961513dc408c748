"""Tables and paragraphs as text, laid out by rich for the width of the terminal.

Without codes for colours, so that a log or a file has what the terminal shows. Apart from `report`,
since commands that know nothing of Lightning print tables too.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["WIDTH", "paragraph", "table"]

WIDTH = 120  # columns, where standard output is no terminal and $COLUMNS does not say otherwise


def table(lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Columns two spaces apart; one, where that is too wide, and words go to the next line then.

    Args:
        lines: Cells of the header and of each row.
        left: Places of the columns of words; the others are of numbers, which are not broken.
    """
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_wide = sum(widths) + 2 * (len(widths) - 1) <= _columns()
    drawn = Table(box=None, pad_edge=False, padding=(0, 2 if is_wide else 1, 0, 0))
    for place, (header, *cells) in enumerate(columns):
        is_left = place in left
        unbroken = [*header.split(), *(" ".join(cells).split() if is_left else cells)]
        drawn.add_column(
            Text(header),
            justify="left" if is_left else "right",
            min_width=max(map(len, unbroken), default=0),
        )
    for line in lines[1:]:
        drawn.add_row(*map(Text, line))
    return _plain(drawn)


def paragraph(text: str) -> str:
    """`text` in lines that are broken between words."""
    return _plain(Text(text))


def _columns() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns


def _plain(renderable: RenderableType) -> str:
    written = StringIO()
    console = Console(file=written, width=_columns(), color_system=None, force_jupyter=False)
    console.print(renderable, crop=False)  # too wide is better than cut
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
