"""Checks of names that come from a checkpoint, and so from outside.

A file name in a checkpoint must name a file in the checkpoint's folder, and a printed name must not
control the terminal.
"""

from __future__ import annotations

from pathlib import PurePosixPath

__all__ = ["check_inside", "escaped", "printable"]

_MAX_PRINTED = 2000  # characters of a line with a name


def check_inside(name: str) -> str:
    """Returns `name` if it names a file in the checkpoint's folder or in a folder below it.

    Raises:
        ValueError: It names another path, or none.
    """
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts or "\\" in name or "://" in name
    if leads_out or not path.parts or "\0" in name:
        raise ValueError(f"the name {printable(repr(name))} leads out of the checkpoint's folder")
    return name


def printable(text: str) -> str:
    """Escapes every character of `text` that could control a terminal.

    These are all characters that cannot be printed, such as control characters, direction marks and
    lone surrogates. Long text is truncated.
    """
    short = text if len(text) <= _MAX_PRINTED else f"{text[:_MAX_PRINTED]}..."
    return escaped(short)


def escaped(text: str) -> str:
    """As `printable`, without truncation."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
