"""One pass of a `CollectiveOrder`, and the schedules recorded from the logs of passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, takewhile
from operator import gt

from lightning_zero.comm.control import RoundResult
from lightning_zero.comm.rounds import Tally

__all__ = ["Events", "Pass", "RecordedSchedules", "hash_of", "hoist_all_gathers"]

_MAX_MISMATCHES = 2  # passes in a row that do not match a schedule, which is then dropped
_MAX_LOGGED = 100_000  # events
_MAX_KEYS = 1000  # where every pass has a new key, no schedule would be used again


class Events:
    """Numbers of the events of a pass, and of the flags of the units that it uses.

    With n units, an event is one integer:

        0 .. n-1       the all-gather of a unit
        n              backward begins
        n+1 ..         the reduction of a bucket

    and the uses of a pass are 2n flags: of the units in forward, then in backward.

    Attributes:
        backward: The event with which backward begins. Those below it are all-gathers, and their
            numbers are those of the units; those above it are reductions.
        num_uses: Number of the flags of a pass.
    """

    def __init__(self, num_units: int) -> None:
        self.backward = num_units
        self.num_uses = 2 * num_units

    def reduction(self, bucket: int) -> int:
        """The reduction of `bucket`."""
        return self.backward + 1 + bucket

    def bucket(self, reduction: int) -> int:
        """The bucket of a reduction."""
        return reduction - self.backward - 1

    def uses(self, schedule: Sequence[int]) -> bytes:
        """Flags of the units that `schedule` unshards."""
        flags, offset = bytearray(self.num_uses), 0
        for event in schedule:
            if event < self.backward:
                flags[offset + event] = 1
            elif event == self.backward:
                offset = self.backward
        return bytes(flags)


@dataclass
class Pass:
    """Progress of this rank through one pass."""

    events: Events
    key: int | None = None  # hash of its kind and of the parameters that train; None: not recorded
    is_training: bool = False
    is_uneven: bool = False  # other ranks may make fewer passes
    schedule: tuple[int, ...] | None = None  # events to issue, in order
    is_begun: bool = True  # its first round has ended, or need not end before the first event
    pending: Future[RoundResult] | None = None  # that round
    in_backward: bool = False
    reduction_order: list[int] = field(default_factory=list)  # buckets, without a schedule
    ready: set[int] = field(default_factory=set)  # buckets with all their gradients
    cursor: int = field(default=0, init=False)  # index of the next event of the schedule
    log: list[int] = field(default_factory=list, init=False)  # events issued
    num_reduced: int = field(default=0, init=False)  # of `reduction_order`, without a schedule
    used: bytearray = field(init=False)  # flags of the units that this rank used: see `Events`
    has_deviated: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.used = bytearray(self.events.num_uses)

    @property
    def next_event(self) -> int | None:
        """The next event of the schedule; None: there is none."""
        schedule = self.schedule
        if schedule is None or self.cursor >= len(schedule):
            return None
        return schedule[self.cursor]

    def stop_after(self, event: int) -> int:
        """Index behind `event` in the rest of the schedule; `cursor` if it is not in it."""
        try:
            return self.schedule.index(event, self.cursor) + 1 if self.schedule else self.cursor
        except ValueError:
            return self.cursor

    @property
    def next_unit(self) -> int | None:
        """The unit whose all-gather is the next event of the schedule; None: not an all-gather."""
        schedule, index = self.schedule, self.cursor
        if schedule is None or index >= len(schedule):
            return None
        return schedule[index] if schedule[index] < self.events.backward else None

    def upcoming_units(self) -> Iterator[int]:
        """Units that the schedule has still to unshard."""
        schedule, backward = self.schedule or (), self.events.backward
        indices = range(self.cursor, len(schedule))
        return (schedule[index] for index in indices if schedule[index] < backward)

    def is_last_of_forward(self, unit: int) -> bool:
        """Whether forward unsharded `unit` last, and backward is next in the schedule."""
        backward = self.events.backward
        if self.in_backward or self.next_event != backward:
            return False
        return unit == next((event for event in reversed(self.log) if event < backward), None)

    @property
    def ready_stop(self) -> int:
        """Index in the schedule behind the reductions that are next and ready."""
        schedule, index, first = self.schedule or (), self.cursor, self.events.backward + 1
        while index < len(schedule) and schedule[index] - first in self.ready:
            index += 1
        return index

    @property
    def num_ready(self) -> int:
        """Number of buckets at the start of `reduction_order` that are all ready."""
        order = self.reduction_order
        return next((i for i, b in enumerate(order) if b not in self.ready), len(order))

    def begin(self, key: int | None, schedule: tuple[int, ...] | None) -> None:
        """All ranks have begun the pass, with this key."""
        self.key, self.is_begun = key, True
        self.log.clear()  # of a pass that failed on this rank first, and on others later
        if self.schedule is None:
            self.schedule = schedule

    def begin_backward(self, reduction_order: Sequence[int], *, has_units: bool) -> None:
        """This rank begins its backward. Without units the reductions are the schedule."""
        self.in_backward = True
        if not self.reduction_order:
            self.reduction_order = list(reduction_order)
        if not has_units and self.schedule is None:
            self.schedule = tuple(map(self.events.reduction, reduction_order))

    def mark_used(self, unit: int) -> None:
        """This rank uses `unit`."""
        self.used[unit + self.events.backward * self.in_backward] = 1

    def take_next(self) -> int | None:
        """Moves past the next event of the schedule, which is issued now, and returns it."""
        schedule, index = self.schedule, self.cursor
        if schedule is None or index >= len(schedule):
            return None
        self.cursor = index + 1
        self.log.append(schedule[index])
        return schedule[index]

    def log_backward(self) -> None:
        """Logs that all ranks have begun backward, in a pass without a schedule."""
        if self.events.backward not in self.log:
            self.log.append(self.events.backward)

    def take_reduction(self, num_ready: int) -> int | None:
        """Logs the next of the first `num_ready` reductions, in a pass without a schedule.

        Returns the event; None: all of them have been issued.
        """
        if self.num_reduced >= min(num_ready, len(self.reduction_order)):
            return None
        event = self.events.reduction(self.reduction_order[self.num_reduced])
        self.num_reduced += 1
        self.log.append(event)
        return event

    def rest(self, key: int | None, schedule: tuple[int, ...] | None) -> Pass:
        """The rest of a training pass after a barrier, as a pass of its own."""
        issued = set(self.log)
        return Pass(
            self.events,
            key,
            is_training=True,
            is_uneven=self.is_uneven,
            schedule=schedule,
            in_backward=self.in_backward,
            reduction_order=[
                b for b in self.reduction_order if self.events.reduction(b) not in issued
            ],
            ready=self.ready,
        )

    def deviate(self) -> None:
        """This rank needs a unit that is not in the rest of the schedule."""
        self.has_deviated = True


@dataclass(frozen=True)
class _Recording:
    """What is recorded of one pass key."""

    schedule: tuple[int, ...] | None = None  # None: there is none, or it has been dropped
    num_mismatches: int = 0  # passes in a row that did not match the schedule


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
        self._recordings: dict[int, _Recording] = {}
        self._last: int | None = None  # key of the last training pass

    def is_repeated(self, key: int) -> bool:
        """Whether the last training pass had this key, and all ranks know its events."""
        return key == self._last and (not self._has_units or self.schedule_of(key) is not None)

    def schedule_of(self, key: int | None) -> tuple[int, ...] | None:
        """The recorded schedule of `key`; None: there is none."""
        recording = self._recordings.get(key) if key is not None else None
        return recording.schedule if recording is not None else None

    def record(self, ended: Pass, tally: Tally, *, is_incomplete: bool) -> None:
        """Records the log of a pass without a schedule, or judges its schedule; at a boundary.

        Args:
            ended: The pass that has ended on all ranks.
            tally: Votes of the boundary.
            is_incomplete: The log lacks reductions.
        """
        if ended.key is None:
            return
        if ended.is_training and not ended.is_uneven:
            self._last = ended.key
        if len(self._recordings) > _MAX_KEYS:
            self._recordings.clear()
        self._recordings.setdefault(ended.key, _Recording())
        if not self._has_units:
            return
        self._recordings[ended.key] = self._judged(ended, tally, is_incomplete=is_incomplete)

    def _judged(self, ended: Pass, tally: Tally, *, is_incomplete: bool) -> _Recording:
        """What is recorded of the key of `ended` from now on."""
        assert ended.key is not None
        known = self._recordings[ended.key]
        if ended.schedule is None:
            if is_incomplete or len(ended.log) >= _MAX_LOGGED:
                return known
            return _Recording(hoist_all_gathers(ended.log, self._numels, self._prefetch_numel))
        if known.schedule is None:
            return known
        used = tally.mask[: ended.events.num_uses]  # by any rank
        is_unused = any(map(gt, ended.events.uses(known.schedule), used))
        if not (is_unused or tally.highest.has_deviated or is_incomplete):
            return _Recording(known.schedule)
        num_mismatches = known.num_mismatches + 1
        is_dropped = num_mismatches == _MAX_MISMATCHES
        return _Recording() if is_dropped else _Recording(known.schedule, num_mismatches)


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
    backward_event = Events(len(numels)).backward
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
