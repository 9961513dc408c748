"""A thread that steps buckets while the next forward runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.health.failures import DesynchronizedError
from lightning_zero.record import streams
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind

__all__ = ["OverlappedStep", "StepLoop", "StepWorker"]


class StepLoop:
    """Steps of several buckets, one after the other; other threads can wait for each of them.

    `kept`: tensors that the steps read. On a CUDA device they belong to another stream's memory
    pool, and must not be freed before that stream has waited for the steps.
    """

    def __init__(self, device: torch.device, kept: object = None) -> None:
        self._device = device
        self._kept = kept if device.type == "cuda" else None
        self._num_buckets = 0
        self._events: list[streams.Event | None] = []  # one for each bucket that is stepped
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self) -> Callable[[], BaseException | None]:
        """Adds a bucket; returns a function that waits for its step and returns its exception."""
        self._num_buckets += 1
        return partial(self._wait, self._num_buckets - 1)

    @property
    def num_stepped(self) -> int:
        """Number of buckets whose step is done, or queued on a stream."""
        return len(self._events)

    def advance(self) -> None:
        """Marks the next bucket as stepped, once the current stream has done its queued work."""
        is_cuda = self._device.type == "cuda"
        event = streams.current(self._device).record_event() if is_cuda else None
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Marks all buckets that are not stepped yet as failed."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _wait(self, number: int) -> BaseException | None:
        with self._changed:
            self._changed.wait_for(lambda: self.num_stepped > number or self._error is not None)
        if self.num_stepped <= number:
            return self._error
        event = self._events[number]
        if event is not None:
            streams.current(self._device).wait_event(event)
        return None


class StepWorker:
    """Runs submitted loops in order, one at a time.

    On a CUDA device it has a stream of its own: its copies do not wait for the forward that is
    queued in the meantime, and the forward does not wait for copies that it does not need yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = streams.make_stream(device)
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def submit(self, loop: StepLoop, run: Callable[[], None]) -> None:
        """Runs `run`, which advances `loop`, on the thread; if it raises, the loop fails."""
        ready: Any = None
        if self._stream is not None:
            ready = streams.current(self._device).record_event()

        def work() -> None:
            try:
                if self._stream is not None:
                    torch.cuda.set_device(self._device)
                    self._stream.wait_event(ready)  # gradients are ready, old values no longer read
                with streams.on(self._stream):
                    run()
            except BaseException as error:
                loop.fail(error)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero-step")
        self._last = self._executor.submit(work)

    def drain(self) -> None:
        """Waits for all loops, also on the current stream. Loops report their own failures."""
        if self._last is not None:
            self._last.result()
            self._last = None
        if self._executor is not None and self._stream is not None:
            streams.current(self._device).wait_stream(self._stream)

    def close(self, outliving: Iterable[Tensor] = ()) -> None:
        """Waits for all loops and ends the thread.

        Steps may have allocated the `outliving` tensors in the pool of the worker's stream. They
        are used on the current stream from now on, so their memory must not be reused by another
        owner of the worker's stream before the current stream is done with it.
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


class OverlappedStep:
    """The step of one bucket by a worker, which every use of the bucket waits for.

    Attributes:
        is_running: Whether a worker steps the bucket, or has stepped it and nothing has waited.
    """

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.is_running = False
        self._name = name
        self._recorder = recorder
        self._wait: Callable[[], BaseException | None] | None = None

    def begin(self, wait: Callable[[], BaseException | None]) -> None:
        """Begins a step: `wait` waits until the worker has ended it, see `StepLoop.add`."""
        self._wait = wait
        self.is_running = True

    def finish(self) -> None:
        """Waits until a worker has ended the step; if that failed, the next `wait` raises."""
        if self._wait is not None and self._wait() is None:
            self._wait, self.is_running = None, False

    def wait(self) -> None:
        """Waits until a worker has stepped the bucket; raises if that step failed."""
        if self._wait is None:
            return
        with self._recorder.span(Kind.STEP, self._name, is_wait=True):
            error = self._wait()  # after an interrupt, the next call waits for the step
            self._wait, self.is_running = None, False
        if isinstance(error, DesynchronizedError):
            raise error
        if error is not None:
            raise RuntimeError(f"the optimizer step of {self._name} failed: {error}") from error
