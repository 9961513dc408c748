"""One traceback for ranks that fail in the same way, instead of one for each rank."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightning_zero.health.watchdog import Watchdog

__all__ = ["shorten_traceback"]


def shorten_traceback(error: BaseException, watchdog: Watchdog, rank: int) -> None:
    """Makes this rank print `error` as one line if another rank prints the same traceback. Local.

    Same are the frames, the type and the text, in which the rank itself may have another number.
    The first rank that fails so prints its traceback. Only what Python prints at the end of the
    script changes: `error` can be caught as before.
    """
    if not isinstance(error, Exception):
        return
    first = watchdog.first_with(f"traceback/{_digest(error, rank)}")
    if first is None or first == rank:
        return
    # Until `ProcessSnapshot.restore` of package `launch`, if another job of this process follows.
    sys.excepthook = _OneLine(sys.excepthook, error, f"[rank{rank}]", first)
    if "hydra" in sys.modules:  # Hydra prints a traceback itself, without the hook, unless this
        os.environ["HYDRA_FULL_ERROR"] = "1"


def _digest(error: Exception, rank: int) -> str:
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    text = re.sub(rf"\brank {rank}\b", "rank N", str(error))
    return hashlib.sha256(repr((frames, type(error), text)).encode()).hexdigest()


class _OneLine:
    """An exception hook: prints `error` without its traceback, and others with `before`."""

    def __init__(
        self, before: Callable[..., Any], error: Exception, title: str, first: int
    ) -> None:
        self._before = before
        self._error = error
        self._title = title
        self._first = first

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if value is self._error:
            text = "".join(traceback.format_exception_only(value)).strip()
            where = f"the traceback is that of rank {self._first}"
            print(f"{self._title}: {text} ({where})", file=sys.stderr)
        else:
            self._before(kind, value, trace)
