"""Watches what an engine does: spans and waits, as one `Recording` for each window.

[Note: Marks] A moment is `time.perf_counter()` on the host, or an event on a CUDA stream, in which
the work queued before it is over. What a device does is marked on the stream that does it; a wait
on the stream that stands still, which tells also when the host has come too late with more work.
Reads and writes of files, and steps on the CPU, are marked on the host.

[Note: Waits of other threads] Nobody stands still while a thread beside the training waits, such as
the one that steps: whoever needs its result records that wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from lightning_zero.record import streams
from lightning_zero.record.spans import Kind, Recording, Span

__all__ = ["Mark", "OpenSpan", "Pending", "Recorder"]

Mark = float | streams.Event  # see [Note: Marks]


@dataclass(eq=False)
class OpenSpan:
    """A span under way; as a context it ends with the block."""

    kind: Kind
    name: str
    nbytes: int
    is_wait: bool
    start: Mark
    now: Callable[[], Mark]  # of the clock that marked the start
    then: Callable[[OpenSpan], object] | None  # called at the end; None: nobody wants to know
    stop: Mark | None = None  # None: it is under way

    def end(self, stop: Mark | None = None) -> None:
        """It is over, now or since `stop`. Ending twice is harmless."""
        if self.then is not None and self.stop is None:
            self.stop = self.now() if stop is None else stop
            self.then(self)

    def __enter__(self) -> OpenSpan:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# What begins while nobody records.
_OFF = OpenSpan(Kind.AGREE, "", 0, False, 0.0, time.perf_counter, None)


def _now_on_device(device: torch.device) -> Mark:
    """On the current stream of `device`, which may not be the current device."""
    event = streams.make_event()
    event.record(streams.current(device))
    return event


def _seconds_between(one: streams.Event, other: streams.Event) -> float:
    """Negative if `other` came first, for which CUDA promises no negative answer."""
    after = float(one.elapsed_time(other))
    return (after if after > 0 else -float(other.elapsed_time(one))) / 1e3


_OWN_THREADS = "zero-"  # names of threads beside the training begin so


class Pending(Protocol):
    """A collective under way. It keeps its tensors alive until `wait`."""

    marks: tuple[Mark, Mark] | None  # begin and end; None: whoever waits learns of the end

    def wait(self) -> None:
        """Makes the result safe to use on the current stream. Waiting twice is harmless."""


class Recorder:
    """Keeps spans in windows, from `begin` to `end`; from `start` to `stop` also between them.

    While it is off each call is a look at `is_on`. Any thread may record; `start`, `begin`, `end`
    and `stop` are for the thread that trains. None of them is collective.

    Args:
        device: Where the module computes; None: on the CPU.
        rank: Of this process in the world.
        world_size: Number of ranks.
    """

    def __init__(
        self, device: torch.device | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.is_on = False  # spans are kept
        self._now: Callable[[], Mark] = time.perf_counter
        if device is not None and device.type == "cuda":
            self._now = partial(_now_on_device, device)
        self._rank = rank
        self._world_size = world_size
        self._under_way: set[OpenSpan] = set()
        self._over: deque[OpenSpan] = deque()
        self._phase = _OFF
        self._layers: dict[tuple[Kind, str], OpenSpan] = {}
        # When the window began, by both clocks; None between windows.
        self._zero: streams.Event | None = None
        self._zero_s: float | None = None
        self._stops_at_end = False  # nobody has called `start`
        self._step = 0
        self._counts = [0, 0, 0, 0]  # hits, misses, read hits, read misses

    # ---------------------------------------------------------------- windows

    def start(self) -> None:
        """Keeps spans from now on, so that a window sees what was under way before it."""
        self.stop()
        self.is_on = True

    def begin(self, step: int) -> None:
        """A window begins after so many steps; none need have been kept. Waits for the device."""
        if not self.is_on:
            self.start()
            self._stops_at_end = True
        self._step = step
        self._counts = [0, 0, 0, 0]
        zero = self._now()
        if not isinstance(zero, float):
            zero.synchronize()
            self._zero, zero = zero, time.perf_counter()
        self._zero_s = zero
        self._keep_those_after(0.0)

    def end(self) -> Recording:
        """The window ends, and what nobody has started stops. Waits for the device.

        What is still under way is in it so far, and after `start` in the next one too.
        """
        if self._zero_s is None:
            raise RuntimeError("no window has begun; call begin(step) before end().")
        now = self._now()
        if not isinstance(now, float):
            now.synchronize()
        seconds = self._seconds(now)
        spans = []
        for span in (*self._keep_those_after(seconds), *list(self._under_way)):
            start, stop = self._seconds(span.start), self._seconds(span.stop)
            if start < seconds and stop > 0:
                stop = seconds if stop == float("inf") else stop
                what = (span.kind, span.name, start, stop, span.nbytes, span.is_wait)
                spans.append(Span(*what))
        spans.sort(key=lambda span: span.start_s)
        self._zero = self._zero_s = None
        if self._stops_at_end:
            self.stop()
        who = (self._rank, self._world_size)
        return Recording(*who, self._step, seconds, tuple(spans), *self._counts)

    def _keep_those_after(self, seconds: float) -> list[OpenSpan]:
        """All that are over; those that were before `seconds` are dropped."""
        over = [self._over.popleft() for _ in range(len(self._over))]
        self._over.extend(span for span in over if self._seconds(span.stop) > seconds)
        return over

    def stop(self) -> None:
        """Keeps nothing any more and drops what was kept."""
        self.is_on = self._stops_at_end = False
        self.discard_open_spans()
        self._over.clear()
        self._zero = self._zero_s = None

    def discard_open_spans(self) -> None:
        """Drops what is under way: after an exception some of it will never end."""
        self._under_way.clear()
        self._layers.clear()
        self._phase = _OFF

    def _seconds(self, mark: Mark | None) -> float:
        """Since the window began; infinite for what has not happened yet."""
        if mark is None:
            return float("inf")
        if isinstance(mark, float):
            assert self._zero_s is not None
            return mark - self._zero_s
        assert self._zero is not None
        return _seconds_between(self._zero, mark) if mark.query() else float("inf")

    # ---------------------------------------------------------------- spans

    def span(
        self,
        kind: Kind,
        name: str = "",
        nbytes: int = 0,
        *,
        is_wait: bool = False,
        on_host: bool = False,
    ) -> OpenSpan:
        """Begins a span, which `end` or a `with` block ends: see `Span`.

        Where it is `on_host` the device has no part in it.
        """
        if not self.is_on:
            return _OFF
        if is_wait and threading.current_thread().name.startswith(_OWN_THREADS):
            return _OFF  # see [Note: Waits of other threads]
        now = time.perf_counter if on_host else self._now
        span = OpenSpan(kind, name, nbytes, is_wait, now(), now, self._keep)
        self._under_way.add(span)
        return span

    def copy_span(
        self, name: str, nbytes: int, source: torch.device, target: torch.device
    ) -> OpenSpan:
        """Begins the span of a copy on the current stream; none where both are one memory."""
        if not self.is_on or source.type == target.type:
            return _OFF
        return self.span(Kind.TO_CPU if target.type == "cpu" else Kind.TO_DEVICE, name, nbytes)

    def watch(
        self, kind: Kind, name: str, nbytes: int, issue: Callable[..., Pending], *args: Any
    ) -> Pending:
        """Issues a collective, which the profiler shows, too.

        Its span ends, and the wait for it begins, with `wait`.
        """
        with record_function(f"zero::{kind.value} {name}"):
            span = self.span(kind, name, nbytes)
            pending = issue(*args)
        return pending if span is _OFF else _Watched(pending, span, self)

    def mark(self) -> Mark | None:
        """This moment, on the current stream where there is one; None while off."""
        return self._now() if self.is_on else None

    def _keep(self, span: OpenSpan) -> None:
        self._under_way.discard(span)
        if self.is_on:
            self._over.append(span)

    # ---------------------------------------------------------------- computation

    def begin_phase(self, kind: Kind | None) -> None:
        """The computation goes over to `kind`; None: to what is not the engine's."""
        if not self.is_on:
            return
        for span in (*self._layers.values(), self._phase):
            span.end()
        self._layers.clear()
        self._phase = _OFF if kind is None else self.span(kind)

    def begin_layer(self, kind: Kind, name: str) -> None:
        """The layer `name` computes. In backward the layer before it has ended with that."""
        if not self.is_on:
            return
        for key in [key for key in self._layers if kind is Kind.BACKWARD is key[0]]:
            self.end_layer(*key)
        self.end_layer(kind, name)
        self._layers[kind, name] = self.span(kind, name)

    def end_layer(self, kind: Kind, name: str) -> None:
        """The layer `name` has computed."""
        if self.is_on:
            self._layers.pop((kind, name), _OFF).end()

    # ---------------------------------------------------------------- prefetch

    def count_prefetch(self, *, is_hit: bool) -> None:
        """A unit is needed: it has been gathered ahead, or its gather begins only now."""
        if self.is_on:
            self._counts[0 if is_hit else 1] += 1

    def count_read(self, *, is_hit: bool) -> None:
        """A shard in a file is needed: its read has begun ahead, or begins only now."""
        if self.is_on:
            self._counts[2 if is_hit else 3] += 1


class _Watched:
    """A pending collective that records when it is waited for."""

    def __init__(self, pending: Pending, span: OpenSpan, recorder: Recorder) -> None:
        self.marks = pending.marks
        self._pending = pending
        self._span = span
        self._recorder = recorder
        self._is_waited = False
        if self.marks is not None:
            span.start, stop = self.marks
            span.end(stop)

    def wait(self) -> None:
        if self._is_waited:
            self._pending.wait()
            return
        with self._recorder.span(self._span.kind, self._span.name, is_wait=True) as waited:
            self._pending.wait()
        self._is_waited = True
        self._span.end(waited.stop)
