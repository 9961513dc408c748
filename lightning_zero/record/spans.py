"""Spans of work and of waiting in one window of training, on one rank.

[Note: Hidden and exposed] A collective or a transfer is *in flight* from its issue to its end. The
time for which the computation waits for it is *exposed*; the time for which the computation
continues is *overlapped*. Time in flight in which the computation waits for something else
is neither. On CUDA collectives, transfers and waits for them are measured by events on the streams;
files, and waits for them, by the host's clock: the device may have had work left while the host
waited. On a CPU the end of a gloo collective is only seen when it is waited for, and a collective
that is not yet waited for counts as in flight. So on a CPU overlapped time is an upper bound, rates
are lower bounds, and exposed time is exact.

[Note: Across windows] A span in flight at the end of a window is in that window up to its end, and
in the next window, too, from before its begin. Its bytes count in the window in which it began. An
example is an all-gather after a step, for which the next forward waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Kind", "Recording", "Span"]

_GB = 1e9


class Kind(Enum):
    """Kind of a span; the value is its name in metrics and files."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # the optimizer's
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"  # between shards and the owners of full tensors, in a step
    ALL_REDUCE = "all_reduce"  # over replicas, of unsharded gradients in stage 0, of a norm
    AGREE = "agree"  # rounds of the control plane, in which ranks agree on what comes next
    TO_DEVICE = "to_device"  # from CPU memory
    TO_CPU = "to_cpu"
    READ = "nvme_read"
    WRITE = "nvme_write"

    @property
    def is_compute(self) -> bool:
        """Whether it is computation, which overlaps transfers."""
        return self in (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)


@dataclass(frozen=True)
class Span:
    """Interval of time in which one piece of work, or a wait for it, took place.

    Computation has one span without a name for each entire forward and backward, waits included. If
    units are unsharded before use, spans with their names lie in it. With activation checkpointing,
    forwards run inside backward.
    """

    kind: Kind
    name: str  # name of the bucket, module, file or round
    start_s: float  # seconds since the window began; negative: before it
    stop_s: float
    nbytes: int = 0  # bytes sent by this rank, or copied between tiers; 0 for computation
    is_wait: bool = False  # the computation waited for the work of this kind and name

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class Recording:
    """One window, usually one optimizer step with all of its micro-batches."""

    rank: int
    world_size: int
    step: int  # number of optimizer steps before it
    seconds: float  # length of the window
    spans: tuple[Span, ...] = ()  # by start; they may extend beyond the window on both sides
    hits: int = 0  # units whose all-gather was done or in flight when they were needed
    misses: int = 0  # units whose all-gather began only when they were needed
    read_hits: int = 0  # shards in files whose read was done or in flight when they were needed
    read_misses: int = 0  # shards in files whose read began only when they were needed

    def of(self, kind: Kind, *, is_wait: bool = False) -> Iterator[Span]:
        """Yields the spans of one kind, or the waits for it, clipped to the window."""
        for span in self.spans:
            start, stop = max(span.start_s, 0.0), min(span.stop_s, self.seconds)
            if span.kind is kind and span.is_wait is is_wait and stop > start:
                yield dataclasses.replace(span, start_s=start, stop_s=stop)

    def in_flight_s(self, kind: Kind) -> float:
        """Seconds in which at least one span of `kind` was in flight."""
        return _covered(self.of(kind))

    def exposed_s(self, kind: Kind) -> float:
        """Seconds for which the computation waited for `kind`. See [Note: Hidden and exposed]."""
        return _covered(self.of(kind, is_wait=True))

    def overlapped_s(self, kind: Kind) -> float:
        """Seconds in flight in which the computation waited for no span of any kind."""
        waits = [span for other in Kind for span in self.of(other, is_wait=True)]
        return _covered([*self.of(kind), *waits]) - _covered(waits)

    def nbytes(self, kind: Kind) -> int:
        """Bytes of the spans of `kind` that began in the window."""
        return sum(s.nbytes for s in self.spans if s.kind is kind and 0 <= s.start_s < self.seconds)

    def gb_per_s(self, kind: Kind) -> float:
        """GB (10^9 bytes) per second in flight; 0 if nothing was in flight."""
        seconds = self.in_flight_s(kind)
        return self.nbytes(kind) / _GB / seconds if seconds else 0.0

    @property
    def waited_s(self) -> float:
        """Seconds for which this rank waited for any span."""
        return _covered(span for kind in Kind for span in self.of(kind, is_wait=True))

    @property
    def waited_for_others_s(self) -> float:
        """Seconds for which this rank waited, except for its own steps; least on the slowest."""
        kinds = [kind for kind in Kind if not kind.is_compute]
        return _covered(span for kind in kinds for span in self.of(kind, is_wait=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns the recording as JSON values; `from_dict` reads them."""
        spans = [{**vars(span), "kind": span.kind.value} for span in self.spans]
        return {**vars(self), "spans": spans}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recording:
        """Inverse of `to_dict`.

        Raises:
            ValueError: `values` are not the fields of a recording.
        """
        try:
            spans = tuple(Span(**{**s, "kind": Kind(s["kind"])}) for s in values["spans"])
            return cls(**{**values, "spans": spans})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected the fields of a recording, got {error!r}") from error


def _covered(spans: Iterable[Span]) -> float:
    """Returns the length of the union of intervals, in seconds."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted((span.start_s, span.stop_s) for span in spans):
        total += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return total
