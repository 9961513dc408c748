"""One pass of a `CollectiveOrder`, and the schedules recorded from the logs of passes.

An event is one integer. With n units it means:

    0 .. n-1       the all-gather of a unit
    n              backward begins
    n+1 ..         the reduction of a bucket
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, takewhile

from lightning_zero.comm.control import RoundResult
from lightning_zero.comm.rounds import Tally

__all__ = ["Pass", "RecordedSchedules", "hash_of", "hoist_all_gathers"]

_MAX_MISMATCHES = 2  # passes in a row that do not match a schedule, which is then dropped
_MAX_LOGGED = 100_000  # events
_MAX_KEYS = 1000  # where every pass has a new key, no schedule would be used again


@dataclass
class Pass:
    """Progress of this rank through one pass."""

    kind: int = 0  # hash of the kind and of the parameters that train
    key: int | None = None  # None: the pass is not recorded
    is_training: bool = False
    schedule: tuple[int, ...] | None = None  # events to issue, in order
    cursor: int = 0  # index of the next event of the schedule
    pending: Future[RoundResult] | None = None  # the round that begins the pass
    is_begun: bool = True  # that round has ended, or need not end before the first event
    log: list[int] = field(default_factory=list)  # events issued
    in_backward: bool = False
    reduction_order: list[int] = field(default_factory=list)  # buckets, without a schedule
    ready: set[int] = field(default_factory=set)  # buckets with all their gradients
    reduced: list[int] = field(default_factory=list)  # buckets
    used: set[int] = field(default_factory=set)  # units
    is_same_on_all_ranks: bool = True  # all ranks have requested the same units
    has_deviated: bool = False
    has_unused_gathers: bool = False

    def upcoming(self) -> tuple[int, ...]:
        """Events of the schedule that have not been issued."""
        return self.schedule[self.cursor :] if self.schedule else ()

    @property
    def num_ready(self) -> int:
        """Number of buckets at the start of `reduction_order` that are all ready."""
        order = self.reduction_order
        return next((i for i, b in enumerate(order) if b not in self.ready), len(order))


@dataclass
class _Recording:
    """Recorded schedule of one pass key."""

    digest: int | None = None  # hash of the log of the last pass without a schedule
    schedule: tuple[int, ...] | None = None
    num_mismatches: int = 0  # in a row


class RecordedSchedules:
    """Schedules recorded from earlier passes, by pass key: the same on every rank.

    Args:
        numels: Elements of each unit.
        prefetch_numel: See `hoist_all_gathers`.
    """

    def __init__(self, numels: Sequence[int], prefetch_numel: int | None) -> None:
        self._numels = numels
        self._has_units = any(numels)
        self._prefetch_numel = prefetch_numel
        self.reset()

    def reset(self) -> None:
        """Drops everything. Local, on all ranks."""
        self._recordings: dict[int, _Recording] = {}
        self._last = 0  # hash of the last training pass; 0: there was none
        # Key of the last training passes, and how many in a row had it.
        self._run: tuple[int | None, int] = (None, 0)
        self._changes: dict[tuple[int | None, int], int] = {}  # the other key that followed a run

    def training_key(self, kind: int) -> int:
        """Key of a training pass of this kind that begins now."""
        return hash_of(kind, self._last)

    def expected_key(self) -> int | None:
        """Key that the next training pass is expected to have; None: unknown.

        A pass repeats the key of the pass before, unless another key followed last time after as
        many equal passes: so do micro-batches of a step, and the passes of a GAN.
        """
        return self._changes.get(self._run, self._run[0])

    def schedule_of(self, key: int | None) -> tuple[int, ...] | None:
        """The recorded schedule of `key`; None: there is none."""
        recording = self._recordings.get(key) if key is not None else None
        return recording.schedule if recording is not None else None

    def record(self, one: Pass, tally: Tally, *, is_incomplete: bool) -> None:
        """Records a pass that has ended; called at a boundary."""
        if one.key is None:
            return
        if max(len(self._recordings), len(self._changes)) > _MAX_KEYS:
            self._recordings.clear()
            self._changes.clear()
        if one.is_training:
            self._extend_run(one.key)
        last = one.kind
        if self._has_units:
            if one.schedule is None and is_incomplete:
                return  # its log lacks the reductions that follow
            last = self._record_log(one, tally, is_incomplete=is_incomplete)
        if one.is_training:
            self._last = last

    def _extend_run(self, key: int) -> None:
        last, length = self._run
        if key == last:
            self._changes.pop(self._run, None)
            self._run = key, length + 1
        else:
            if last is not None:
                self._changes[self._run] = key
            self._run = key, 1

    def _record_log(self, one: Pass, tally: Tally, *, is_incomplete: bool) -> int:
        """Adopts or judges the schedule of a pass; returns the hash of its log.

        A log is adopted if it is the first of its key, and the same on all ranks, or if it repeats.
        """
        assert one.key is not None
        recording = self._recordings.setdefault(one.key, _Recording())
        digest = hash_of(one.log)
        if one.schedule is None:
            is_first = recording.digest is None and one.is_same_on_all_ranks
            if (is_first or recording.digest == digest) and len(one.log) < _MAX_LOGGED:
                log = tuple(one.log)
                recording.schedule = hoist_all_gathers(log, self._numels, self._prefetch_numel)
                recording.num_mismatches = 0
            recording.digest = digest
            if one.is_training and not self._last:  # an equal pass is likely to follow
                self._recordings[hash_of(one.kind, digest)] = recording
            return digest
        has_deviated = tally.highest.has_deviated or is_incomplete  # on any rank
        has_unused_gathers = tally.lowest.has_unused_gathers  # on all ranks
        is_mismatch = has_deviated or has_unused_gathers
        recording.num_mismatches = recording.num_mismatches + 1 if is_mismatch else 0
        if recording.num_mismatches == _MAX_MISMATCHES:
            recording.schedule = None
        # A pass that has matched on some rank counts as the recorded one.
        if tally.lowest.has_deviated or recording.digest is None:
            return digest
        return recording.digest


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
