"""One read or write on its way, in blocks that several threads move."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind

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
    is_done: bool  # the memory is free again, be it after success, failure or `cancel`
    error: BaseException | None  # what went wrong so far

    def __init__(
        self, name: str, recorder: Recorder, *, is_write: bool, start: int, view: memoryview
    ) -> None:
        self.is_write = is_write
        self.start = start
        self.stop = start + len(view)
        self._what = (Kind.WRITE if is_write else Kind.READ, name)
        self._recorder = recorder
        self._span = recorder.span(*self._what, len(view), on_host=True)
        self.is_stale = self.is_cancelled = self.is_done = False
        self.error = None
        self._view: memoryview | None = view  # None when done
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        # A lock, not an Event: it stays whole if a signal ends the wait ([Note: Signals]).
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def wait(self) -> None:
        """Return when all bytes are moved; any thread may call it, any number of times.

        Raises:
            OSError: The transfer failed; says the path, the offset and the bytes.
        """
        with self._recorder.span(*self._what, is_wait=True, on_host=True):
            self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Return when the memory is free, whatever came of it."""
        with self._under_way:
            pass

    def cancel(self) -> None:
        """Move no block that is not under way yet; `settle` says when the memory is free."""
        self.is_cancelled = True

    def overlaps(self, other: Transfer) -> bool:
        """Whether both touch a common byte."""
        return self.start < other.stop and other.start < self.stop

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when done, on the thread that ends it, or now if it is done."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and move no further block."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.is_cancelled = True

    def block(self, start: int, stop: int) -> memoryview:
        """The memory of the bytes [start, stop) counted from this transfer's own start."""
        assert self._view is not None
        return self._view[start:stop]

    def finish(self) -> None:
        """The last block is moved or given up: the memory is free."""
        with self._lock:
            self._view = None
            self._span.end()
            self.is_done = True
            self._under_way.release()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
