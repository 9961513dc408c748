"""Names that a checkpoint gives to files and values: they come from outside.

A name of a file that stands in a checkpoint means a file in its folder, wherever the checkpoint
comes from; and a name that is printed must not steer the terminal.
"""

from __future__ import annotations

from pathlib import PurePosixPath

__all__ = ["check_inside", "escaped", "printable"]

_MAX_PRINTED = 2000  # characters of a line that holds a name


def check_inside(name: str) -> str:
    """`name`, if it is that of a file in the folder of the checkpoint or in a folder below it.

    Raises:
        ValueError: It leads elsewhere, or nowhere.
    """
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts or "\\" in name or "://" in name
    if leads_out or not path.parts or "\0" in name:
        raise ValueError(f"the name {printable(repr(name))} leads out of the checkpoint's folder")
    return name


def printable(text: str) -> str:
    """`text` with an escape instead of every character that a terminal would obey.

    Those are all that have no shape, such as control characters, marks of direction and lone
    surrogates. Long text is cut.
    """
    shown = text if len(text) <= _MAX_PRINTED else f"{text[:_MAX_PRINTED]}..."
    return escaped(shown)


def escaped(text: str) -> str:
    """The same of text of any length."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
