"""A thread that alone changes what it keeps, so that a signal never finds it half changed.

[Note: Signals] A signal, Ctrl-C say, raises an exception anywhere in Python code of the main
thread: between two lines, inside the library's locks, between taking a buffer and writing down that
it is taken. So whoever calls the tier only puts a call into a queue, which is one step that cannot
be cut in two, and waits for an answer. All bookkeeping of files and pipelines is done by actors,
whose threads see no signals.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Actor"]

_Calls = SimpleQueue[Callable[[], object] | None]


class Actor:
    """Runs calls one after another, in the order of `tell`, on a thread of its own.

    The thread ends when nobody holds the actor any more.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._pid = os.getpid()
        threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def tell(self, call: Callable[[], object]) -> None:
        """Have `call` run and do not wait. It must not raise.

        Raises:
            RuntimeError: This is a forked child, which has no such thread.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"files and buffers belong to process {self._pid}; a forked child (a DataLoader "
                "worker, say) must not use them"
            )
        self._calls.put(call)

    def ask(self, call: Callable[[], None]) -> None:
        """Have `call` run and wait until it has.

        Raises:
            BaseException: What `call` raised.
        """
        answer: SimpleQueue[BaseException | None] = SimpleQueue()

        def run() -> None:
            try:
                call()
            except BaseException as error:
                answer.put(error)
            else:
                answer.put(None)

        self.tell(run)
        error = answer.get()
        if error is not None:
            raise error


def _run(calls: _Calls) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call()
        del call  # it may hold the last reference to what holds the actor
