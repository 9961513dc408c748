"""One traceback for ranks that fail in the same way, instead of one for each rank."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from functools import partial
from types import TracebackType

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
    sys.excepthook = partial(_print_line, sys.excepthook, error, f"[rank{rank}]", first)
    if "hydra" in sys.modules:  # Hydra prints a traceback itself, without the hook, unless this
        os.environ["HYDRA_FULL_ERROR"] = "1"


def _digest(error: Exception, rank: int) -> str:
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    text = re.sub(rf"\brank {rank}\b", "rank N", str(error))
    return hashlib.sha256(repr((frames, type(error), text)).encode()).hexdigest()


def _print_line(
    before: object,
    error: Exception,
    title: str,
    first: int,
    kind: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
) -> None:
    """An exception hook: prints `error` without its traceback, and others with `before`."""
    if value is error:
        text = "".join(traceback.format_exception_only(value)).strip()
        print(f"{title}: {text} (the traceback is that of rank {first})", file=sys.stderr)
    elif callable(before):
        before(kind, value, trace)
