"""CUDA streams and events: made, asked for and waited for here alone.

So that whoever wants to know what runs beside what need look at, or replace, one module: a test
that proves the schedule without a device does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Event", "Stream", "current", "make_event", "make_stream", "on", "synchronize"]

Stream = torch.cuda.Stream
Event = torch.cuda.Event


def make_stream(device: torch.device, *, is_high_priority: bool = False) -> Stream | None:
    """A stream beside the one that computes; None: `device` has no streams.

    With a high priority, what is queued here starts before what is queued on others.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=-1 if is_high_priority else 0)


def make_event() -> Event:
    """A point on a stream, and its time, once it is recorded there."""
    return torch.cuda.Event(enable_timing=True)


def current(device: torch.device) -> Stream:
    """The stream on which this thread queues work for `device`."""
    return torch.cuda.current_stream(device)


def on(stream: Stream | None) -> AbstractContextManager[Any]:
    """Work is queued on `stream` inside; None: where it would be."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def synchronize(device: torch.device | None = None) -> None:
    """Waits until all streams of a device have nothing left to do; None: of the current one."""
    torch.cuda.synchronize(device)
