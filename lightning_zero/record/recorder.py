"""Records what an engine does: spans and waits, as one `Recording` per window.

[Note: Marks] A mark is a moment: `time.perf_counter()` on the host, or an event on a CUDA stream,
which is reached once the work queued before it is done. Work of a device is marked on the stream
that does it; a wait on the stream that waits, so that a host that queues work too late shows up as
well. Reads and writes of files, and steps on the CPU, are marked on the host.

[Note: Waits of other threads] The training does not stop while another thread waits, such as the
worker that steps. So such waits are not recorded; the thread that needs the result records its
own wait for it.
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
    """A span in progress; as a context it ends with the block."""

    kind: Kind
    name: str
    nbytes: int
    is_wait: bool
    start: Mark
    now: Callable[[], Mark]  # clock that marked the start
    on_end: Callable[[OpenSpan], object] | None  # called at the end; None: not recorded
    stop: Mark | None = None  # None: in progress

    def end(self, stop: Mark | None = None) -> None:
        """Ends the span now, or at `stop`. Ending twice is harmless."""
        if self.on_end is not None and self.stop is None:
            self.stop = self.now() if stop is None else stop
            self.on_end(self)

    def set_marks(self, start: Mark, stop: Mark) -> None:
        """Ends the span with marks that the device has recorded."""
        self.start = start
        self.end(stop)

    def __enter__(self) -> OpenSpan:
        return self

    def __exit__(self, *_: object) -> None:
        if self.on_end is not None:
            self.end()


# Stands for all spans while nothing is recorded.
_OFF = OpenSpan(Kind.AGREE, "", 0, False, 0.0, time.perf_counter, None)


def _now_on_device(device: torch.device) -> Mark:
    """Returns a mark on the current stream of `device`, which may not be the current device."""
    event = streams.make_event()
    event.record(streams.current(device))
    return event


def _seconds_between(start: streams.Event, other: streams.Event) -> float:
    """Returns the seconds from `start` to `other`, which are negative if `other` came first.

    CUDA does not guarantee negative times, so those are measured in the other direction.
    """
    milliseconds = float(start.elapsed_time(other))
    if milliseconds <= 0:
        milliseconds = -float(other.elapsed_time(start))
    return milliseconds / 1e3


_OWN_THREADS = "zero-"  # prefix of the names of the engine's background threads


class Pending(Protocol):
    """A collective in flight. It keeps its tensors alive until `wait`."""

    marks: tuple[Mark, Mark] | None  # begin and end; None: `wait` finds the end

    def wait(self) -> None:
        """Makes the result safe to use on the current stream. Waiting twice is harmless."""


class Recorder:
    """Records spans in windows, from `begin` to `end`; from `start` to `stop` also between them.

    While it is off each call only checks `is_on`. Any thread may record; `start`, `begin`, `end`
    and `stop` are for the thread that trains. No method is collective.

    Args:
        device: Device on which the module computes; None: the CPU.
        rank: Rank of this process in the world.
        world_size: Number of ranks.
    """

    def __init__(
        self, device: torch.device | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.is_on = False  # whether spans are recorded
        self._now: Callable[[], Mark] = time.perf_counter
        if device is not None and device.type == "cuda":
            self._now = partial(_now_on_device, device)
        self._rank = rank
        self._world_size = world_size
        self._open: set[OpenSpan] = set()
        self._finished: deque[OpenSpan] = deque()
        self._phase = _OFF
        self._layers: dict[tuple[Kind, str], OpenSpan] = {}
        # Begin of the window, by both clocks; None between windows.
        self._zero: streams.Event | None = None
        self._zero_s: float | None = None
        self._stops_at_end = False  # recording began with the window, not with `start`
        self._step = 0
        self._counts = [0, 0, 0, 0]  # hits, misses, read hits, read misses

    # ---------------------------------------------------------------- windows

    def start(self) -> None:
        """Begins to record, so that a window includes spans in progress at its begin."""
        self.stop()
        self.is_on = True

    def begin(self, step: int) -> None:
        """Begins a window; `step`: number of optimizer steps before it. Waits for the device."""
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
        self._keep_after(0.0)

    def end(self) -> Recording:
        """Ends the window, and stops recording unless `start` was called. Waits for the device.

        Spans in progress are in it up to now, and in the next window if recording continues.

        Raises:
            RuntimeError: No window has begun.
        """
        if self._zero_s is None:
            raise RuntimeError("no window has begun; call begin(step) before end().")
        now = self._now()
        if not isinstance(now, float):
            now.synchronize()
        seconds = self._seconds(now)
        spans = []
        for span in (*self._keep_after(seconds), *list(self._open)):
            start, stop = self._seconds(span.start), self._seconds(span.stop)
            if start < seconds and stop > 0:
                stop = seconds if stop == float("inf") else stop
                spans.append(Span(span.kind, span.name, start, stop, span.nbytes, span.is_wait))
        spans.sort(key=lambda span: span.start_s)
        self._zero = self._zero_s = None
        if self._stops_at_end:
            self.stop()
        rank, world_size = self._rank, self._world_size
        return Recording(rank, world_size, self._step, seconds, tuple(spans), *self._counts)

    def _keep_after(self, seconds: float) -> list[OpenSpan]:
        """Returns all finished spans, and drops those that ended before `seconds`."""
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        self._finished.extend(span for span in finished if self._seconds(span.stop) > seconds)
        return finished

    def stop(self) -> None:
        """Stops recording and drops all spans."""
        self.is_on = self._stops_at_end = False
        self.discard_open_spans()
        self._finished.clear()
        self._zero = self._zero_s = None

    def discard_open_spans(self) -> None:
        """Drops the spans in progress: after an exception some will never end."""
        self._open.clear()
        self._layers.clear()
        self._phase = _OFF

    def _seconds(self, mark: Mark | None) -> float:
        """Returns the seconds since the window began; infinite for a mark not yet reached."""
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
        """Begins a span, which `end` or a `with` block ends. See `Span`.

        Args:
            kind: Kind of the work.
            name: Name of the bucket, module, file or round.
            nbytes: Bytes sent by this rank, or copied between tiers.
            is_wait: Whether the span is a wait for the work.
            on_host: Whether the host's clock measures it, because the device takes no part.
        """
        if not self.is_on:
            return _OFF
        if is_wait and threading.current_thread().name.startswith(_OWN_THREADS):
            return _OFF  # see [Note: Waits of other threads]
        now = time.perf_counter if on_host else self._now
        span = OpenSpan(kind, name, nbytes, is_wait, now(), now, self._keep)
        self._open.add(span)
        return span

    def copy_span(
        self, name: str, nbytes: int, source: torch.device, target: torch.device
    ) -> OpenSpan:
        """Begins the span of a copy on the current stream; none if both devices are the same."""
        if not self.is_on or source.type == target.type:
            return _OFF
        return self.span(Kind.TO_CPU if target.type == "cpu" else Kind.TO_DEVICE, name, nbytes)

    def watch(
        self, kind: Kind, name: str, nbytes: int, issue: Callable[..., Pending], *args: Any
    ) -> Pending:
        """Issues a collective inside a profiler range.

        `wait` of the result begins the span of the wait, and ends the collective's span.
        """
        with record_function(f"zero::{kind.value} {name}"):
            if not self.is_on:
                return issue(*args)
            span = self.span(kind, name, nbytes)
            return _Watched(issue(*args), span, self)

    def mark(self) -> Mark | None:
        """Returns a mark of this moment, on the current stream if there is one; None while off."""
        return self._now() if self.is_on else None

    def _keep(self, span: OpenSpan) -> None:
        self._open.discard(span)
        if self.is_on:
            self._finished.append(span)

    # ---------------------------------------------------------------- computation

    def begin_phase(self, kind: Kind | None) -> None:
        """Begins the phase `kind` of the computation; None: computation outside the engine."""
        if not self.is_on:
            return
        for span in (*self._layers.values(), self._phase):
            span.end()
        self._layers.clear()
        self._phase = _OFF if kind is None else self.span(kind)

    def begin_layer(self, kind: Kind, name: str) -> None:
        """Begins the computation of layer `name`. In backward this ends the previous layer."""
        if not self.is_on:
            return
        for key in [key for key in self._layers if kind is Kind.BACKWARD is key[0]]:
            self.end_layer(*key)
        self.end_layer(kind, name)
        self._layers[kind, name] = self.span(kind, name)

    def end_layer(self, kind: Kind, name: str) -> None:
        """Ends the computation of layer `name`."""
        if self.is_on:
            self._layers.pop((kind, name), _OFF).end()

    # ---------------------------------------------------------------- prefetch

    def count_prefetch(self, *, is_hit: bool) -> None:
        """Counts a needed unit; `is_hit`: its all-gather is done or in flight already."""
        if self.is_on:
            self._counts[0 if is_hit else 1] += 1

    def count_read(self, *, is_hit: bool) -> None:
        """Counts a needed shard in a file; `is_hit`: its read is done or in flight already."""
        if self.is_on:
            self._counts[2 if is_hit else 3] += 1


class _Watched:
    """A pending collective that records the wait for it."""

    def __init__(self, pending: Pending, span: OpenSpan, recorder: Recorder) -> None:
        self.marks = pending.marks
        self._pending = pending
        self._span = span
        self._recorder = recorder
        self._is_waited = False
        if self.marks is not None:
            span.set_marks(*self.marks)

    def wait(self) -> None:
        if self._is_waited:
            self._pending.wait()
            return
        with self._recorder.span(self._span.kind, self._span.name, is_wait=True) as waited:
            self._pending.wait()
        self._is_waited = True
        self._span.end(waited.stop)
