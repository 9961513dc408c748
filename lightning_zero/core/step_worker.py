"""A thread that steps buckets beside the next forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.record import streams

__all__ = ["StepLoop", "StepWorker"]


class StepLoop:
    """Steps of buckets, one after the other, of which others wait for number k.

    `kept` is what the steps read. On a CUDA device it is of the pool of another stream than theirs,
    and must not be freed before that one has waited for them.
    """

    def __init__(self, device: torch.device, kept: object = None) -> None:
        self._device = device
        self._kept = kept if device.type == "cuda" else None
        self._num_buckets = 0
        self._events: list[streams.Event | None] = []  # of the buckets that are stepped
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self) -> Callable[[], BaseException | None]:
        """One more bucket; waits until it is stepped, and returns why it was not."""
        self._num_buckets += 1
        return partial(self._wait, self._num_buckets - 1)

    @property
    def num_stepped(self) -> int:
        """The first ones, of which at least all work is queued on a stream."""
        return len(self._events)

    def advance(self) -> None:
        """The next bucket is stepped, when the current stream has done what is queued there."""
        is_cuda = self._device.type == "cuda"
        event = streams.current(self._device).record_event() if is_cuda else None
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Those that are not stepped will not be."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _wait(self, number: int) -> BaseException | None:
        with self._changed:
            self._changed.wait_for(lambda: self.num_stepped > number or self._error is not None)
        if self.num_stepped <= number:
            return self._error
        if (event := self._events[number]) is not None:
            streams.current(self._device).wait_event(event)
        return None


class StepWorker:
    """Runs loops in the order in which they are handed over, one at a time.

    On a CUDA device it has a stream of its own, so that neither its copies wait for the forward
    that is queued meanwhile, nor that forward for copies of what it does not need yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = streams.make_stream(device)
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def submit(self, loop: StepLoop, run: Callable[[], None]) -> None:
        """Runs `run`, which advances `loop`; if it raises, the loop fails."""
        ready: Any = None
        if self._stream is not None:
            ready = streams.current(self._device).record_event()

        def work() -> None:
            try:
                if self._stream is not None:
                    torch.cuda.set_device(self._device)
                    self._stream.wait_event(ready)  # gradients are there, old values no longer read
                with streams.on(self._stream):
                    run()
            except BaseException as error:
                loop.fail(error)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero-step")
        self._last = self._executor.submit(work)

    def drain(self) -> None:
        """Nothing is left to run, and the current stream comes after it. Loops tell of failures."""
        if self._last is not None:
            self._last.result()
            self._last = None
        if self._executor is not None and self._stream is not None:
            streams.current(self._device).wait_stream(self._stream)

    def close(self, outliving: Iterable[Tensor] = ()) -> None:
        """Waits, and ends the thread.

        Steps may have made the `outliving` tensors, in the pool of the stream. From now on they are
        used on the current one, and their memory is not for whoever gets the stream next before
        that is over.
        """
        self.drain()
        if self._executor is None:
            return
        self._executor.shutdown()
        self._executor = None
        if self._stream is not None:
            current = streams.current(self._device)
            self._stream.wait_stream(current)
            for tensor in outliving:
                if tensor.is_cuda:
                    tensor.record_stream(current)
