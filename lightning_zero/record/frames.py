"""Frames of the user's code, for errors that name the line."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["called_from", "is_user_frame"]

# Packages whose frames are not the user's.
_SKIPPED_PACKAGES = {
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "hydra",
    "copy",
    "contextlib",
    "functools",
    "typing_extensions",
    __name__.partition(".")[0],
}


def is_user_frame(frame: FrameType) -> bool:
    """Whether `frame` runs the user's code: not this package's, torch's or Lightning's."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in _SKIPPED_PACKAGES


def called_from() -> str:
    """The innermost line of the user's code on the stack, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_frame(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
