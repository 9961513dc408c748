"""Callbacks that a failure calls to end the waits of this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["FailureCallbacks"]


class FailureCallbacks:
    """Callbacks of one watchdog. Each must end every wait that it knows of.

    They run in a thread: an abort of NCCL takes seconds, in which entries of the log arrive.

    Args:
        lock: The caller of `call` holds it.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        # Weak references: an engine that is never closed is still freed.
        self._callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._thread: threading.Thread | None = None  # the last one, which waits for the others

    def add(self, callback: Callable[[], None]) -> None:
        """Adds a bound method, whose object is referenced weakly."""
        self._callbacks = [*self._callbacks, weakref.WeakMethod(callback)]

    def remove(self, callback: Callable[[], None]) -> None:
        """Removes `callback`. Waits for a call in progress."""
        with self._lock:
            self._callbacks = [
                known for known in self._callbacks if known() not in (None, callback)
            ]
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def call(self) -> None:
        """Calls all of them, and does not wait."""
        callbacks = [known() for known in self._callbacks]
        self.run([callback for callback in callbacks if callback is not None])

    def run(self, actions: Sequence[Callable[[], None]]) -> None:
        """Runs `actions` after the calls in progress, and does not wait."""
        self._thread = threading.Thread(
            target=_run, args=(actions, self._thread), daemon=True, name="lightning-zero-end"
        )
        self._thread.start()


def _run(actions: Sequence[Callable[[], None]], before: threading.Thread | None) -> None:
    if before is not None:
        before.join()
    for action in actions:
        action()
