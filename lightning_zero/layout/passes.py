"""One pass of an `CollectiveOrder`, and the plans that are learned from the logs of passes.

An event is one integer, of n units:

    0 .. n-1       the gather of a unit
    n              backward begins (the turn)
    n+1 ..         the reduction of a bucket
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, islice, takewhile

from lightning_zero.layout.rounds import RoundResult, Tally

__all__ = ["RecordedSchedules", "Pass", "hash_of", "hoist_all_gathers"]

_ALIKE = 2  # equal logs that make a plan
_MOST_ALIKE = 64
_TRUST, _MOST_TRUST = 4, 8  # of a new plan; a pass that deviates costs 4, one in vain 1
_CONTEXTS = (8, 4, 2, 1)  # numbers of passes from which the next one is foretold
_MOST_LOGGED = 100_000  # events
_MOST_KNOWN = 1000  # keys: where each pass has a new one, none would be met again


@dataclass
class Pass:
    """What this rank has done in a pass, and has still to do."""

    key: int | None  # None: nothing is learned from it
    is_training: bool = False
    schedule: tuple[int, ...] | None = None
    is_recorded: bool = True  # the plan comes from logs
    saying: Future[RoundResult] | None = None  # the round of its beginning
    is_begun: bool = True  # that one has been heard, or need not be before an event
    cursor: int = 0
    log: list[int] = field(default_factory=list)
    in_backward: bool = False
    has_logged_backward: bool = False
    eager: list[int] = field(default_factory=list)  # buckets, in the order of reductions
    ready: set[int] = field(default_factory=set)
    reduced: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)  # units
    has_deviated: bool = False
    has_unused_gathers: bool = False

    def record(self, event: int) -> None:
        """Writes an event that is issued into the log."""
        if len(self.log) < _MOST_LOGGED:
            self.log.append(event)

    def upcoming(self) -> Iterator[int]:
        """The rest of the plan."""
        return islice(self.schedule or (), self.cursor, None)

    @property
    def next(self) -> int | None:
        """The first of them."""
        if self.schedule is None or self.cursor >= len(self.schedule):
            return None
        return self.schedule[self.cursor]

    @property
    def num_scheduled(self) -> int:
        return len(self.schedule or ())

    @property
    def num_ready(self) -> int:
        """How many of the first of `eager` are ready."""
        ready = self.ready
        return next((i for i, b in enumerate(self.eager) if b not in ready), len(self.eager))


@dataclass
class _Recording:
    """Of one key."""

    log: tuple[int, ...] = ()
    num_equal: int = 0
    num_needed: int = _ALIKE
    schedule: tuple[int, ...] | None = None
    trust: int = _TRUST


class RecordedSchedules:
    """What is known from earlier passes: the same on every rank.

    Args:
        numels: Elements of each unit.
        prefetch_numel: See `hoist_all_gathers`.

    Attributes:
        last_log: A hash of what the last training pass has issued.
    """

    def __init__(self, numels: Sequence[int], prefetch_numel: int | None) -> None:
        self._numels = numels
        self._prefetch_numel = prefetch_numel
        self.reset()

    def reset(self) -> None:
        self._recordings: dict[int, _Recording] = {}
        self._next_key: dict[tuple[int, ...], int] = {}
        self._context: tuple[int, ...] = ()
        self.last_log = 0

    def schedule_of(self, key: int | None) -> tuple[int, ...] | None:
        known = self._recordings.get(key) if key is not None else None
        return known.schedule if known is not None else None

    def predict_next_key(self) -> int | None:
        """The key that came after as many of the last ones as are known to have come before."""
        told = (self._next_key.get(self._context[-length:]) for length in _CONTEXTS)
        return next((key for key in told if key is not None), None)

    def add_key(self, key: int) -> None:
        """A training pass with this key comes now."""
        if len(self._next_key) > _MOST_KNOWN:
            self._next_key.clear()
        for length in _CONTEXTS:
            self._next_key[self._context[-length:]] = key
        self._context = (*self._context, key)[-_CONTEXTS[0] :]

    def record(self, one: Pass, heard: Tally, *, is_incomplete: bool) -> None:
        """From a pass that has ended, at a boundary."""
        log = tuple(one.log) if one.is_recorded else ()
        if len(self._recordings) > _MOST_KNOWN:
            self._recordings.clear()
        known = (
            self._recordings.setdefault(one.key, _Recording())
            if one.key is not None
            else _Recording()
        )
        mark, is_as_last = hash_of(log if one.schedule is None else known.log), False
        if one.is_training:
            self.last_log, is_as_last = mark, mark == self.last_log
        if one.key is None or not one.is_recorded or len(log) >= _MOST_LOGGED:
            return
        if one.schedule is None:
            known.num_equal = known.num_equal + 1 if log == known.log else 1 + is_as_last
            known.log = log
            if known.num_equal >= known.num_needed:
                known.schedule, known.trust = (
                    hoist_all_gathers(log, self._numels, self._prefetch_numel),
                    _TRUST,
                )
            return
        has_deviated = heard.highest.has_deviated or is_incomplete  # any rank
        change = -4 if has_deviated else -1 if heard.lowest.has_unused_gathers else 1
        known.trust = min(known.trust + change, _MOST_TRUST)
        if known.trust < 0:
            known.schedule, known.log, known.num_equal = None, (), 0
            known.num_needed = min(2 * known.num_needed, _MOST_ALIKE)


def hoist_all_gathers(
    log: Sequence[int], numels: Sequence[int], prefetch_numel: int | None
) -> tuple[int, ...]:
    """The plan of a log: gathers come before the reductions that they need not wait for.

    A unit that forward gathers last and backward first is gathered once, unless forward gathers it
    twice: the second time it may be for a use without gradients, after which it is freed.

    Args:
        log: Events.
        numels: Elements of each unit.
        prefetch_numel: A gather passes the reductions since the gather before it; with a number, also those
            before earlier ones, as long as their units have no more elements. 0: none.
    """
    turn = len(numels)
    schedule: list[int] = []
    units: list[int] = []
    since = [0]  # reductions before each gather, behind the one before it
    last_of_forward: int | None = None
    for event in log:
        place = len(schedule)
        if event > turn:
            since[-1] += 1
        elif event == turn:
            is_last_once = bool(units) and units.count(units[-1]) == 1
            last_of_forward = units[-1] if is_last_once else None
            units, since = [], [0]
        else:
            units.append(event)
            passed = since[-1]
            if prefetch_numel is not None:
                sums = accumulate(numels[unit] for unit in reversed(units))
                together = takewhile(lambda numel: numel <= prefetch_numel, sums)
                passed = sum(num for _, num in zip(together, reversed(since), strict=False))
            since.append(0)
            is_whole, last_of_forward = event == last_of_forward, None
            if is_whole:
                continue
            while passed and schedule[place - 1] > turn:
                place, passed = place - 1, passed - 1
        schedule.insert(place, event)
    return tuple(schedule)


def hash_of(*parts: object) -> int:
    """The same in every process, of less than 62 bits."""
    digest = blake2b(digest_size=7)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "big")
