"""Vector clocks of streams and the host, and the uses of memory that they do not order.

[Note: Problems] An operation on a stream comes after all that was queued there before, after what
the host had done when it queued it, and after events that the stream waits for. A use of memory
that does not come after an earlier one, of which either writes, is a RACE. Memory goes back to the
pool of the stream on which it was allocated and is used there again at once: where that stream does
not come after a use on another one, it is a FREE, of page-locked CPU memory a FREE-PINNED. (torch's
own sanitizer of streams sees no reuse.) What runs on the CPU happens when it is called; what a disk
moves is a stream of its own, which the host waits for.

[Note: Overlap] A stream may still be at work while an operation runs on the compute stream that
does not come after the last operation of the other stream. How many operations of compute run
beside each stream is what shows that copies and collectives overlap it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import RLock

__all__ = ["COMPUTE", "HOST", "Clocks", "Region"]

HOST = -1
COMPUTE = 0

Region = tuple[int, int, int]  # storage, first byte, byte after the last
_Time = dict[int, int]  # by stream, the last operation on it that has happened before


@dataclass(frozen=True)
class _Use:
    stream: int
    number: int  # of all operations
    start: int
    stop: int
    is_write: bool
    what: str

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} by {self.what}"


@dataclass
class _Memory:
    stream: int  # in whose pool it is; HOST: of the CPU
    guards: set[int] = field(default_factory=set)  # streams for which the allocator waits
    uses: list[_Use] = field(default_factory=list)


class Clocks:
    """Who comes after whom. See [Note: Problems].

    Args:
        place: Where in the code we are.

    Attributes:
        num_checks: Pairs of uses that have been compared.
        problems: How often each was found.
        syncs: How often the host has waited, by why and where.
        launches: Operations by stream.
        beside: Operations of compute that do not come after the last of each other stream. See
            [Note: Overlap].
        names: Names of streams.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        self.num_checks = 0
        self.problems: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.launches: Counter[int] = Counter()
        self.beside: Counter[int] = Counter()
        self.names = {HOST: "host"}
        self._place = place
        self._number = 0
        self._pending: dict[int, int] = {}  # last operation of a stream that compute is not after
        self._times: defaultdict[int, _Time] = defaultdict(dict)
        self._events: dict[int, _Time] = {}
        self._memory: dict[int, _Memory] = {}
        self._lock = RLock()  # autograd has threads of its own

    # ---------------------------------------------------------------- order

    def record(self, event: int, stream: int) -> None:
        """`event` is what `stream` has been given so far."""
        with self._lock:
            time = dict(self._times[stream])
            _join(time, self._times[HOST])
            self._events[event] = time

    def is_known(self, event: int) -> bool:
        """Whether the host comes after `event`, or after no other: it was never recorded."""
        with self._lock:
            host = self._times[HOST]
            time = self._events.get(event, {})
            return all(host.get(stream, 0) >= number for stream, number in time.items())

    def wait(self, stream: int, event: int) -> None:
        """What comes on `stream` comes after `event`; one that is not recorded is no wait."""
        with self._lock:
            _join(self._times[stream], self._events.get(event, {}))

    def wait_on_host(self, event: int, why: str | None) -> None:
        """The host stands still until `event`; None: that is no synchronization."""
        with self._lock:
            self.wait(HOST, event)
            if why is not None:
                self.syncs[f"{why} [{self._place()}]"] += 1

    def synchronize(self, streams: Iterable[int] | None, why: str) -> None:
        """The host stands still until `streams` have nothing left to do; None: all."""
        with self._lock:
            host = self._times[HOST]
            for stream in list(self._times) if streams is None else streams:
                _join(host, self._times[stream])
            self.syncs[f"{why} [{self._place()}]"] += 1

    # ---------------------------------------------------------------- memory

    def allocate(self, storage: int, stream: int) -> None:
        """New memory, in the pool of `stream`; HOST: of the CPU."""
        with self._lock:
            self._memory[storage] = _Memory(stream)

    def knows(self, storage: int) -> bool:
        """It has been allocated, and not freed since."""
        return storage in self._memory

    def guard(self, storage: int, stream: int) -> None:
        """The allocator waits for `stream` before it uses this memory again."""
        with self._lock:
            self._memory[storage].guards.add(stream)

    def free(self, storage: int) -> None:
        """The memory goes back to its pool."""
        with self._lock:
            memory = self._memory.pop(storage, None)
            if memory is None:
                return
            time = dict(self._times[memory.stream])
            _join(time, self._times[HOST])
            for use in memory.uses:
                is_known = use.stream in (memory.stream, HOST) or use.stream in memory.guards
                if is_known or time.get(use.stream, 0) >= use.number:
                    continue
                kind = "FREE-PINNED" if memory.stream == HOST else "FREE"
                pool = self._name(memory.stream)
                self.problems[
                    f"{kind}: memory of {pool} goes back at [{self._place()}]; not after {use}"
                ] += 1

    def use(
        self, stream: int, reads: Iterable[Region], writes: Iterable[Region], what: str
    ) -> None:
        """An operation on `stream`, or on the host."""
        with self._lock:
            self._number += 1
            time = self._times[stream]
            if stream != HOST:
                _join(time, self._times[HOST])
                self.launches[stream] += 1
            time[stream] = self._number
            if stream == COMPUTE:
                self._count_beside(time)
            elif stream != HOST:
                self._pending[stream] = self._number
            what = f"{what} on {self._name(stream)} [{self._place()}]"
            for is_write, regions in ((False, reads), (True, writes)):
                for storage, start, stop in regions:
                    if start < stop and storage in self._memory:
                        new = _Use(stream, self._number, start, stop, is_write, what)
                        self._add(self._memory[storage], new, time)

    def _count_beside(self, time: _Time) -> None:
        for stream, number in list(self._pending.items()):
            if time.get(stream, 0) >= number:
                del self._pending[stream]
            else:
                self.beside[stream] += 1

    def _add(self, memory: _Memory, new: _Use, time: _Time) -> None:
        kept = []
        for old in memory.uses:
            is_before = old.stream == new.stream or time.get(old.stream, 0) >= old.number
            if old.start < new.stop and new.start < old.stop and (old.is_write or new.is_write):
                self.num_checks += 1
                if not is_before:
                    self.problems[f"RACE: {new}; not after {old}"] += 1
            is_covered = new.start <= old.start and old.stop <= new.stop
            # An operation after the new one is also after the old one.
            replaces = new.is_write or (not old.is_write and old.stream == new.stream)
            if not (is_before and is_covered and replaces):
                kept.append(old)
        memory.uses = [*kept, new]

    def _name(self, stream: int) -> str:
        return self.names.get(stream, f"stream {stream}")


def _join(time: _Time, other: _Time) -> None:
    for stream, number in other.items():
        if time.get(stream, 0) < number:
            time[stream] = number
