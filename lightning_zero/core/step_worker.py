"""A thread that steps buckets beside the next forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["StepWorker", "Stepping", "fail", "mark"]

# Its result: an event after which the new values may be read, on a CUDA device.
Stepping = Future["torch.cuda.Event | None"]


class StepWorker:
    """Runs steps in the order in which they are handed over, one at a time.

    On a CUDA device it has a stream of its own, so that neither its copies wait for the forward
    that is queued meanwhile, nor that forward for copies of what it does not need yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def submit(self, run: Callable[[], None], stepping: Sequence[Stepping]) -> None:
        """Runs `run`, which fulfils the futures `stepping`; if it fails, all that are left fail."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._device).record_event()

        def work() -> None:
            try:
                with self._on_stream(ready):
                    run()
            except BaseException as error:
                fail(stepping, error)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero-step")
        self._last = self._executor.submit(work)

    def _on_stream(self, ready: Any) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        torch.cuda.set_device(self._device)
        self._stream.wait_event(ready)  # gradients are there, old values are no longer read
        return torch.cuda.stream(self._stream)

    def drain(self) -> None:
        """Waits until nothing is left to run; failures are told by the futures."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.drain()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def fail(stepping: Sequence[Stepping], error: BaseException) -> None:
    """Fails the futures that are not fulfilled yet."""
    for future in stepping:
        if not future.done():
            future.set_exception(error)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The result of a step whose work is queued on the current stream."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event
