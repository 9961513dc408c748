"""One read or write on its way, in blocks that several threads move."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Transfer"]


class Transfer:
    """A read or write of the bytes [start, stop) of one file.

    It is made by `NvmeFile.read` and `NvmeFile.write`. Until it is done its memory belongs to it:
    what a read fills must not be used, what a write takes must not be changed.
    """

    is_write: bool
    start: int  # bytes, in the file
    stop: int
    # A write to the same bytes was asked for after this read: what was read is out of date.
    is_stale: bool
    is_cancelled: bool

    def __init__(self, *, is_write: bool, start: int, stop: int, view: memoryview) -> None:
        self.is_write = is_write
        self.start = start
        self.stop = stop
        self.is_stale = False
        self.is_cancelled = False
        self._view: memoryview | None = view  # None when done: the memory is free
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether the memory is free again, be it after success, failure or `cancel`."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What went wrong so far."""
        return self._error

    def wait(self) -> None:
        """Return when all bytes are moved; any thread may call it, any number of times.

        Raises:
            OSError: The transfer failed; says the path, the offset and the bytes.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Move no block that is not under way yet; `wait` still says when the memory is free."""
        self.is_cancelled = True

    def overlaps(self, other: Transfer) -> bool:
        """Whether both touch a common byte."""
        return self.start < other.stop and other.start < self.stop

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when done, on the thread that ends it, or now if it is done."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and move no further block."""
        with self._lock:
            if self._error is None:
                self._error = error
        self.is_cancelled = True

    def block(self, start: int, stop: int) -> memoryview:
        """The memory of the bytes [start, stop) counted from this transfer's own start."""
        assert self._view is not None
        return self._view[start:stop]

    def finish(self) -> None:
        """The last block is moved or given up: the memory is free."""
        with self._lock:
            self._view = None
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
