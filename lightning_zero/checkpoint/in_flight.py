"""At most one thing on its way to the disk while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["InFlight"]


class InFlight:
    """Runs one action at a time in a thread; used from one thread.

    The thread is no daemon: a process that ends waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []  # guarded by the lock
        self._lock = threading.Lock()
        self._is_running = False  # guarded by the lock

    def start(self, action: Callable[[], None]) -> None:
        """Runs `action` in a thread. Call `wait` first."""
        assert self._thread is None, "one at a time"
        self._is_running = True
        self._thread = threading.Thread(target=self._run, args=(action,), name="zero-save")
        self._thread.start()

    def when_done(self, action: Callable[[], None]) -> None:
        """Runs `action` once what is under way has succeeded; never if it fails."""
        with self._lock:
            if self._is_running:
                self._then.append(action)
                return
        if self._error is None:
            action()

    def wait(self) -> None:
        """Waits until nothing is under way.

        Raises:
            BaseException: What the action raised; once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._finish()
        except BaseException as error:  # raised by `wait`
            self._error = error
            with self._lock:
                self._is_running = False
                self._then.clear()

    def _finish(self) -> None:
        while True:
            with self._lock:
                if not self._then:
                    self._is_running = False
                    return
                following = self._then.pop(0)
            following()
