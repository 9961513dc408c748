"""Frames of the user's code, for errors that name the line."""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["called_from", "calling_collective", "is_user_frame"]

_OWN_PACKAGE = __name__.partition(".")[0]
_COLLECTIVES = "torch.distributed.distributed_c10d"
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
    "runpy",
    "torchmetrics",
    "typing_extensions",
    _OWN_PACKAGE,
}


def is_user_frame(frame: FrameType) -> bool:
    """Whether `frame` runs the user's code: not this package's, torch's or Lightning's."""
    return _package_of(frame) not in _SKIPPED_PACKAGES


def _package_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def called_from() -> str:
    """The innermost line of the user's code on the stack, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_frame(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def calling_collective() -> str:
    """Name of the function of `torch.distributed` that has called this package; "": none has."""
    if torch.compiler.is_compiling():
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) == _OWN_PACKAGE:
        frame = frame.f_back
    name = ""
    while frame is not None and frame.f_globals.get("__name__") == _COLLECTIVES:
        name, frame = frame.f_code.co_name, frame.f_back
    return name
