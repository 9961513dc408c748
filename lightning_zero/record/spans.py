"""What happened in one window of training, on one rank: spans of work, and waits for it.

[Note: Hidden and exposed] A collective or a transfer is *in flight* from its issue to its end.
Where the computation stands still for it, that time is *exposed*; where it goes on, *hidden*. What
is in flight while the computation stands still for something else is neither. On CUDA collectives,
transfers and waits for them are read from events on the streams; files, and waits for them, from
the host's clock: the device may have had work left while the host waited. On a CPU gloo does not
tell when data has arrived, but only whoever waits for it: what nobody waited for yet counts as in
flight, so that hidden time is an upper bound there, rates are lower bounds, and exposed time is
exact.

[Note: Across windows] What is under way when a window ends is in it up to its end, and in the next
window too, from before its begin. Its bytes count where it began. The gathers after a step, for
which the next forward waits, are so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Kind", "Recording", "Span"]

_GIB = 1024**3


class Kind(Enum):
    """What a span is; the value is its name in metrics and files."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # of the optimizer
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"  # over replicas, of whole gradients in stage 0, of a norm
    AGREE = "agree"  # ranks tell each other what comes next
    TO_DEVICE = "to_device"  # from CPU memory
    TO_CPU = "to_cpu"
    READ = "nvme_read"
    WRITE = "nvme_write"

    @property
    def is_compute(self) -> bool:
        """Work of the device or processor itself, which transfers hide behind."""
        return self in (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Computation has one span without a name for each whole forward and backward, waits included.
    Where units are gathered before use, spans with their names lie in it. Activation checkpointing
    runs forwards inside backward.
    """

    kind: Kind
    name: str  # of the bucket; of the module that computes; of the file; or what ranks agree on
    start_s: float  # since the window began; negative: before it
    stop_s: float
    nbytes: int = 0  # sent by this rank over the wire, or moved between tiers; 0 for computation
    is_wait: bool = False  # the computation stood still for the work of this kind and name

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class Recording:
    """One window, usually one optimizer step with all of its micro-batches."""

    rank: int
    world_size: int
    step: int  # optimizer steps before it
    seconds: float  # length of the window
    spans: tuple[Span, ...] = ()  # by start; they may reach beyond the window on both sides
    hits: int = 0  # units that had been gathered ahead, or were on their way, when needed
    misses: int = 0  # units whose gather began only when they were needed
    read_hits: int = 0  # shards in files that were being read, or had been, when needed
    read_misses: int = 0  # shards in files whose read began only when they were needed

    def of(self, kind: Kind, *, is_wait: bool = False) -> Iterator[Span]:
        """Spans of one kind, or the waits for it, cut to the window."""
        for span in self.spans:
            start, stop = max(span.start_s, 0.0), min(span.stop_s, self.seconds)
            if span.kind is kind and span.is_wait is is_wait and stop > start:
                yield dataclasses.replace(span, start_s=start, stop_s=stop)

    def in_flight_s(self, kind: Kind) -> float:
        """Seconds in which at least one span of `kind` was under way."""
        return _covered(self.of(kind))

    def exposed_s(self, kind: Kind) -> float:
        """Seconds for which the computation waited for `kind`. See [Note: Hidden and exposed]."""
        return _covered(self.of(kind, is_wait=True))

    def hidden_s(self, kind: Kind) -> float:
        """Seconds in flight in which the computation waited for nothing, of whatever kind."""
        waits = [span for other in Kind for span in self.of(other, is_wait=True)]
        return _covered([*self.of(kind), *waits]) - _covered(waits)

    def nbytes(self, kind: Kind) -> int:
        """Bytes of the spans of `kind` that began in the window."""
        return sum(s.nbytes for s in self.spans if s.kind is kind and 0 <= s.start_s < self.seconds)

    def gib_per_s(self, kind: Kind) -> float:
        """Bytes over seconds in flight; 0 where there was none."""
        seconds = self.in_flight_s(kind)
        return self.nbytes(kind) / _GIB / seconds if seconds else 0.0

    @property
    def waited_s(self) -> float:
        """Seconds for which this rank waited for anything."""
        return _covered(span for kind in Kind for span in self.of(kind, is_wait=True))

    @property
    def waited_for_others_s(self) -> float:
        """Likewise, but for a step of its own; the slowest rank waits least."""
        kinds = [kind for kind in Kind if not kind.is_compute]
        return _covered(span for kind in kinds for span in self.of(kind, is_wait=True))

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file; `from_dict` reads it."""
        spans = [{**vars(span), "kind": span.kind.value} for span in self.spans]
        return {**vars(self), "spans": spans}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recording:
        """The inverse of `to_dict`; a ValueError where `values` are not of a recording."""
        try:
            spans = tuple(Span(**{**s, "kind": Kind(s["kind"])}) for s in values["spans"])
            return cls(**{**values, "spans": spans})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected the fields of a recording, got {error!r}") from error


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of intervals, in seconds."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted((span.start_s, span.stop_s) for span in spans):
        total += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return total
