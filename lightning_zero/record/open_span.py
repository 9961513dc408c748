"""A span of time that is under way.

[Note: Marks] A moment is `time.perf_counter()` on the host, or an event on a CUDA stream, in which
the work queued before it is over. What a device does is marked on the stream that does it; a wait
on the stream that stands still, which tells also when the host has come too late with more work.
Reads and writes of files, and steps on the CPU, are marked on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_zero.record.spans import Kind

__all__ = ["OFF", "Flight", "Mark", "now_on_device", "seconds_between"]

Mark = float | torch.cuda.Event  # see [Note: Marks]


class Flight:
    """A span under way; as a context it ends with the block.

    Args:
        kind: What is done, or waited for.
        name: Of the bucket, module or file.
        nbytes: That it moves.
        is_wait: The computation stands still for it.
        now: Marks a moment.
        then: Called at the end; None: nobody wants to know.

    Attributes:
        start: When it began.
        stop: When it ended; None: it is under way.
    """

    start: Mark
    stop: Mark | None

    def __init__(
        self,
        kind: Kind,
        name: str,
        nbytes: int,
        is_wait: bool,
        now: Callable[[], Mark],
        then: Callable[[Flight], object] | None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.nbytes = nbytes
        self.is_wait = is_wait
        self.start = now()
        self.stop = None
        self._now = now
        self._then = then

    def end(self, stop: Mark | None = None) -> None:
        """It is over, now or since `stop`. Ending twice is harmless."""
        if self._then is not None and self.stop is None:
            self.stop = self._now() if stop is None else stop
            self._then(self)

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


OFF = Flight(Kind.AGREE, "", 0, False, time.perf_counter, None)  # what begins while nobody records


def now_on_device(device: torch.device) -> Mark:
    """Marks this moment on the current stream of `device`, which may not be the current device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(one: torch.cuda.Event, other: torch.cuda.Event) -> float:
    """Negative if `other` came first, for which CUDA promises no negative answer."""
    after = float(one.elapsed_time(other))
    return (after if after > 0 else -float(other.elapsed_time(one))) / 1e3
