"""Short tracebacks: of an error about other ranks the user's frames alone, printed by one rank.

Only what Python prints at the end of the script changes: the error can be caught as before.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightning_zero.health.failures import DesynchronizedError
from lightning_zero.record.frames import is_user_frame

__all__ = ["print_once", "print_user_frames"]

_MAX_FRAMES = 4


def print_once(error: BaseException, rank: int, first_with: Callable[[str], int | None]) -> None:
    """Makes this rank print `error` as one line if another rank prints the same traceback. Local.

    Same are the frames, the type and the text, in which the rank itself may have another number.
    The first rank that fails so prints its traceback, of an error about other ranks the text and
    then the frames of the user's code.

    Args:
        error: The error.
        rank: This rank.
        first_with: Returns the first rank that has called it with the same text; see `Watchdog`.
    """
    if not isinstance(error, Exception):
        return
    first = first_with(f"traceback/{_digest(error, rank)}")
    if first is not None and first != rank:
        line = f"{_text(error).splitlines()[0]} (the traceback is that of rank {first})"
        _print_instead(error, rank, lambda: line)
    elif isinstance(error, DesynchronizedError):
        print_user_frames(error, rank)


def print_user_frames(error: Exception, rank: int) -> None:
    """Makes this rank print the text of `error`, and then only the frames of the user's code."""
    _print_instead(error, rank, lambda: f"{_text(error)}\n{_user_frames(error)}")


def _print_instead(error: Exception, rank: int, text: Callable[[], str]) -> None:
    """Makes Python print `text` of `error`."""
    # Until `ProcessSnapshot.restore` of package `launch`, if another job of this process follows.
    sys.excepthook = _Printer(sys.excepthook, error, rank, text)
    if "hydra" in sys.modules:  # Hydra prints a traceback itself, without the hook, unless this
        os.environ["HYDRA_FULL_ERROR"] = "1"


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _user_frames(error: Exception) -> str:
    """The lines of the user's code in the traceback of `error`; empty if it has none."""
    frames = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if is_user_frame(f)]
    if not frames:
        return ""
    lines = traceback.StackSummary.extract(iter(frames[-_MAX_FRAMES:])).format()
    return "Lines of your code, most recent call last:\n" + "".join(lines)


def _digest(error: Exception, rank: int) -> str:
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    text = re.sub(rf"\brank {rank}\b", "rank N", str(error))
    return hashlib.sha256(repr((frames, type(error), text)).encode()).hexdigest()


class _Printer:
    """An exception hook: prints `text` for `error`, and other exceptions with `before`."""

    def __init__(
        self, before: Callable[..., Any], error: Exception, rank: int, text: Callable[[], str]
    ) -> None:
        self._before = before
        self._error = error
        self._rank = rank
        self._text = text

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if value is self._error:
            lines = self._text().splitlines()
            text = "".join(f"[rank{self._rank}]: {line}\n" for line in lines)
            print(text, end="", file=sys.stderr, flush=True)
        else:
            self._before(kind, value, trace)
