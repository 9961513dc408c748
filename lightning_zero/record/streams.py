"""CUDA streams and events: this module alone makes them, looks them up and waits for them.

So all concurrency is visible in one module. tests/streams checks the schedule without a device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = [
    "Event",
    "Stream",
    "current",
    "make_event",
    "make_stream",
    "on",
    "synchronize",
    "wait_for_current",
]

Stream = torch.cuda.Stream
Event = torch.cuda.Event


def make_stream(device: torch.device, *, is_high_priority: bool = False) -> Stream | None:
    """Makes a side stream of `device`; returns None if `device` has no streams.

    Work on a stream of high priority starts before queued work of other streams.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=-1 if is_high_priority else 0)


def make_event() -> Event:
    """Makes an event, which marks a point on a stream and its time once it is recorded."""
    return torch.cuda.Event(enable_timing=True)


def current(device: torch.device) -> Stream:
    """Returns the stream on which this thread queues work for `device`."""
    return torch.cuda.current_stream(device)


def on(stream: Stream | None) -> AbstractContextManager[Any]:
    """Context in which work is queued on `stream`; None: on the current stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def wait_for_current(device: torch.device) -> None:
    """Waits until the work that this thread has queued for `device` is done."""
    if device.type == "cuda":
        current(device).synchronize()


def synchronize(device: torch.device | None = None) -> None:
    """Waits until all streams of `device` are idle; None: of the current device."""
    torch.cuda.synchronize(device)
