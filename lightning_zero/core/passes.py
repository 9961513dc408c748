"""One pass of a `CollectiveOrder`, and the schedules recorded from the logs of passes.

An event is one integer. With n units it means:

    0 .. n-1       the all-gather of a unit
    n              backward begins
    n+1 ..         the reduction of a bucket
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, islice, takewhile

from lightning_zero.comm.rounds import RoundResult, Tally

__all__ = ["RecordedSchedules", "Pass", "hash_of", "hoist_all_gathers"]

_MIN_EQUAL = 2  # equal logs that make a schedule
_MAX_EQUAL = 64
# Trust in a new schedule. A pass that deviates from it costs 4, unused all-gathers cost 1.
_TRUST, _MAX_TRUST = 4, 8
_CONTEXTS = (8, 4, 2, 1)  # numbers of passes from which the next one is predicted
_MAX_LOGGED = 100_000  # events
_MAX_KEYS = 1000  # where every pass has a new key, no recording would be used again


@dataclass
class Pass:
    """Progress of this rank through one pass."""

    key: int | None  # None: the pass is not recorded
    is_training: bool = False
    schedule: tuple[int, ...] | None = None  # events to issue, in order
    is_recorded: bool = True  # the schedule comes from logs
    pending: Future[RoundResult] | None = None  # the round that begins the pass
    is_begun: bool = True  # that round has ended, or need not end before the first event
    cursor: int = 0  # index of the next event of the schedule
    log: list[int] = field(default_factory=list)  # events issued
    in_backward: bool = False
    has_logged_backward: bool = False
    reduction_order: list[int] = field(default_factory=list)  # buckets, without a schedule
    ready: set[int] = field(default_factory=set)  # buckets with all their gradients
    reduced: list[int] = field(default_factory=list)  # buckets
    used: set[int] = field(default_factory=set)  # units
    has_deviated: bool = False
    has_unused_gathers: bool = False

    def record(self, event: int) -> None:
        """Appends an event that is issued to the log."""
        if len(self.log) < _MAX_LOGGED:
            self.log.append(event)

    def upcoming(self) -> Iterator[int]:
        """Events of the schedule that have not been issued."""
        return islice(self.schedule or (), self.cursor, None)

    @property
    def next(self) -> int | None:
        """The first event of `upcoming`."""
        if self.schedule is None or self.cursor >= len(self.schedule):
            return None
        return self.schedule[self.cursor]

    @property
    def num_scheduled(self) -> int:
        return len(self.schedule or ())

    @property
    def num_ready(self) -> int:
        """Number of buckets at the start of `reduction_order` that are all ready."""
        order = self.reduction_order
        return next((i for i, b in enumerate(order) if b not in self.ready), len(order))


@dataclass
class _Recording:
    """Recorded schedule of one pass key."""

    log: tuple[int, ...] = ()  # of the last pass
    num_equal: int = 0  # passes in a row with this log
    num_needed: int = _MIN_EQUAL
    schedule: tuple[int, ...] | None = None
    trust: int = _TRUST


class RecordedSchedules:
    """Schedules recorded from earlier passes, by pass key: the same on every rank.

    Args:
        numels: Elements of each unit.
        prefetch_numel: See `hoist_all_gathers`.

    Attributes:
        last_log: Hash of the events of the last training pass.
    """

    def __init__(self, numels: Sequence[int], prefetch_numel: int | None) -> None:
        self._numels = numels
        self._prefetch_numel = prefetch_numel
        self.reset()

    def reset(self) -> None:
        self._recordings: dict[int, _Recording] = {}
        self._next_key: dict[tuple[int, ...], int] = {}  # by the keys of the passes before
        self._context: tuple[int, ...] = ()
        self.last_log = 0

    def schedule_of(self, key: int | None) -> tuple[int, ...] | None:
        recording = self._recordings.get(key) if key is not None else None
        return recording.schedule if recording is not None else None

    def predict_next_key(self) -> int | None:
        """The key that followed the longest known sequence of the latest keys."""
        keys = (self._next_key.get(self._context[-length:]) for length in _CONTEXTS)
        return next((key for key in keys if key is not None), None)

    def add_key(self, key: int) -> None:
        """Adds the key of a training pass that begins now."""
        if len(self._next_key) > _MAX_KEYS:
            self._next_key.clear()
        for length in _CONTEXTS:
            self._next_key[self._context[-length:]] = key
        self._context = (*self._context, key)[-_CONTEXTS[0] :]

    def record(self, one: Pass, tally: Tally, *, is_incomplete: bool) -> None:
        """Records a pass that has ended; called at a boundary."""
        log = tuple(one.log) if one.is_recorded else ()
        if len(self._recordings) > _MAX_KEYS:
            self._recordings.clear()
        recording = _Recording()
        if one.key is not None:
            recording = self._recordings.setdefault(one.key, recording)
        digest, is_as_last = hash_of(log if one.schedule is None else recording.log), False
        if one.is_training:
            self.last_log, is_as_last = digest, digest == self.last_log
        if one.key is None or not one.is_recorded or len(log) >= _MAX_LOGGED:
            return
        if one.schedule is None:
            if log == recording.log:
                recording.num_equal += 1
            else:
                recording.num_equal = 2 if is_as_last else 1
            recording.log = log
            if recording.num_equal >= recording.num_needed:
                recording.schedule = hoist_all_gathers(log, self._numels, self._prefetch_numel)
                recording.trust = _TRUST
            return
        if tally.highest.has_deviated or is_incomplete:  # on any rank
            change = -4
        elif tally.lowest.has_unused_gathers:  # on all ranks
            change = -1
        else:
            change = 1
        recording.trust = min(recording.trust + change, _MAX_TRUST)
        if recording.trust < 0:
            recording.schedule, recording.log, recording.num_equal = None, (), 0
            recording.num_needed = min(2 * recording.num_needed, _MAX_EQUAL)


def hoist_all_gathers(
    log: Sequence[int], numels: Sequence[int], prefetch_numel: int | None
) -> tuple[int, ...]:
    """Makes a schedule of a log: all-gathers move ahead of reductions they need not wait for.

    A unit that is gathered last in forward and first in backward is gathered once, unless forward
    gathers it twice: its second use may be one without gradients, after which it is freed.

    Args:
        log: Events of a pass.
        numels: Elements of each unit.
        prefetch_numel: None: an all-gather passes the reductions since the previous all-gather. A
            number: it also passes those before earlier all-gathers, if their units
            together have at most this many elements. 0: it passes none.
    """
    backward_event = len(numels)
    schedule: list[int] = []
    units: list[int] = []
    since = [0]  # by all-gather: reductions between it and the previous one
    last_of_forward: int | None = None
    for event in log:
        index = len(schedule)
        if event > backward_event:
            since[-1] += 1
        elif event == backward_event:
            is_last_once = bool(units) and units.count(units[-1]) == 1
            last_of_forward = units[-1] if is_last_once else None
            units, since = [], [0]
        else:
            units.append(event)
            passed = since[-1]
            if prefetch_numel is not None:
                sums = accumulate(numels[unit] for unit in reversed(units))
                within = takewhile(lambda numel: numel <= prefetch_numel, sums)
                passed = sum(num for _, num in zip(within, reversed(since), strict=False))
            since.append(0)
            is_unsharded, last_of_forward = event == last_of_forward, None
            if is_unsharded:
                continue
            while passed and schedule[index - 1] > backward_event:
                index, passed = index - 1, passed - 1
        schedule.insert(index, event)
    return tuple(schedule)


def hash_of(*parts: object) -> int:
    """Hash of less than 62 bits, the same in every process."""
    digest = blake2b(digest_size=7)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "big")
