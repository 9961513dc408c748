"""Control plane of an engine: small messages between the CPUs of all ranks, over gloo.

Rounds exchange a few integers, small masks and objects, so that all ranks, whatever their group,
agree on what comes next without making a device wait. `Channel` has a group of its own, for a
background thread.

[Note: Rounds] In round k every rank sends its k-th vote: a few integers, of which all receive the
minimum over ranks, and bytes, of which all receive the maximum. A rank may begin a round and
continue; a thread completes it, because its later messages depend on earlier ones. Rounds never
overtake each other: the k-th vote of one rank meets the k-th vote of every other rank, whatever
they are for, so that desynchronized ranks detect it.

Messages are sent along a dissemination network: in hop i rank r sends what it has received so far
to r + 2^i and receives from r - 2^i (Hensgen, Finkel and Manber, "Two algorithms for barrier
synchronization", 1988). After ceil(log2 N) hops, for any N, it has the votes of all ranks, some of
them twice, which changes neither a minimum nor a maximum. Receives are posted before the first hop.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.comm.world import new_group
from lightning_zero.health.watchdog import Watchdog
from lightning_zero.health.world import disconnect_groups, end_at_exit, has_world
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind

__all__ = ["Channel", "GlooControlPlane", "RoundResult", "Rounds"]

_T = TypeVar("_T")


class RoundResult(NamedTuple):
    """Result of one round: the same on every rank, except for the error."""

    numbers: list[int]  # minimum over ranks, elementwise
    mask: bytes  # maximum over ranks, elementwise
    error: Exception | None = None  # found by the check of this rank


RoundCheck = Callable[[RoundResult], Exception | None]  # may run further rounds
_Task = tuple[Sequence[int], bytes, RoundCheck | None, "Future[RoundResult]"]
_FIRST_TAG = 1 << 20  # nothing else on the group uses tags from here on
_EXIT_S = 2.0  # time for the thread to end with the process


class GlooControlPlane:
    """Control plane over gloo.

    Every method is collective (every rank, same order) unless it is marked "Local".

    Attributes:
        watchdog: Reports failures of other ranks.
    """

    def __init__(
        self,
        recorder: Recorder,
        watchdog: Watchdog,
        *,
        rank: int,
        size: int,
        timeout: timedelta | None,
    ) -> None:
        self.watchdog = watchdog
        self.rank = rank
        self.size = size
        self._recorder = recorder
        self._timeout = timeout
        self._group: Any = None
        self._channels: list[Channel] = []
        self.is_simulated = False
        self._width = 0
        self.open()

    def open(self) -> None:
        """Makes the process group, if there is a default one."""
        if has_world():
            # The fake backend simulates N ranks in one process; gloo would wait for the others.
            self.is_simulated = dist.get_backend() == "fake"
            backend = "fake" if self.is_simulated else "gloo"
            self._group = new_group(self.watchdog, self._timeout, backend)
        group = None if self._is_alone else self._group
        self._rounds = Rounds(group, rank=self.rank, size=self.size)
        self._rounds.reserve(self._width)

    @property
    def is_open(self) -> bool:
        """Whether there is a process group. Local."""
        return self._group is not None

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank sends anything: none exists, or the group has ended. Local."""
        return self.size == 1 or self._group is None or self.is_simulated

    @contextmanager
    def waiting(
        self, name: str, *, is_one_way: bool = False, kind: Kind = Kind.AGREE
    ) -> Iterator[None]:
        """As `Watchdog.waiting`; also records the wait, as one for `kind`. Local."""
        if self.size == 1:
            yield
            return
        waiting = self.watchdog.waiting(name, is_one_way=is_one_way)
        with waiting, self._recorder.span(kind, name, is_wait=True):
            yield

    # ---------------------------------------------------------------- values

    def min_ints(self, values: Sequence[int], name: str = "minimum") -> list[int]:
        """Returns the elementwise minimum over ranks."""
        if self.size == 1:
            return list(values)
        lowest = torch.tensor(values, dtype=torch.int64)
        with self.waiting(name):
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in lowest.tolist()]

    def union(self, mask: Sequence[bool]) -> list[bool]:
        """Returns the elementwise `or` over ranks."""
        return [bit < 0 for bit in self.min_ints([-int(bit) for bit in mask], "mask")]

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's picklable object, on every rank."""
        if self._is_alone:
            return value
        box = [value]
        with self.waiting("broadcast", is_one_way=True):
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's picklable object, by rank, on every rank."""
        if self._is_alone:
            return [value] * self.size
        box: list[Any] = [None] * self.size
        with self.waiting("objects"):
            dist.all_gather_object(box, value, group=self._group)
        return box

    def collect_objects(self, value: Any) -> list[Any]:
        """Returns every rank's picklable object, by rank, on rank 0; [] on the other ranks."""
        if self._is_alone:
            return [] if self.rank else [value] * self.size
        box: list[Any] | None = None if self.rank else [None] * self.size
        with self.waiting("objects", is_one_way=True):
            dist.gather_object(value, box, group=self._group, group_dst=0)
        return box or []

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every rank's numbers, by rank, on every rank; all ranks pass equally many."""
        if self._is_alone:
            return [list(values)] * self.size
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [own.clone() for _ in range(self.size)]
        with self.waiting("numbers"):
            dist.all_gather(everyone, own, group=self._group)
        return [numbers.tolist() for numbers in everyone]

    # ---------------------------------------------------------------- rounds

    @property
    def num_rounds(self) -> int:
        """Number of rounds that this rank has begun since the group was made. Local."""
        return self._rounds.num_begun

    def reserve(self, num_bytes: int) -> None:
        """Reserves `num_bytes` in every later vote; the same on every rank. Local."""
        self._width = max(self._width, num_bytes)
        self._rounds.reserve(num_bytes)

    def run_round(
        self, numbers: Sequence[int], mask: bytes, check: RoundCheck | None = None
    ) -> RoundResult:
        """Runs one round: see `Rounds.run_round`. The caller has entered `waiting`."""
        return self._rounds.run_round(numbers, mask, check)

    def begin_round(
        self, numbers: Sequence[int], mask: bytes, check: RoundCheck
    ) -> Future[RoundResult]:
        """As `run_round`, but does not wait; the caller waits for the result in `waiting`."""
        return self._rounds.begin(numbers, mask, check)

    # ---------------------------------------------------------------- channels

    def open_channel(self) -> Channel:
        """Returns a new channel, for messages of a background thread.

        `close` closes it, and so does a death.
        """
        group = None if self._is_alone else new_group(self.watchdog, self._timeout, "gloo")
        channel = Channel(self.rank, self.size, group)
        self._channels = [other for other in self._channels if other.is_open]
        self._channels.append(channel)
        return channel

    # ---------------------------------------------------------------- failure

    def abort_waits(self, error: Exception) -> None:
        """Ends all waits of all ranks with an error. Local, from any thread."""
        self.watchdog.abort_waits(error)

    # ---------------------------------------------------------------- abort and close

    def disconnect(self) -> None:
        """Unblocks all waiters of this rank. Local, from any thread."""
        groups = [self._group]
        if self.watchdog.is_unrecoverable:  # else a session in progress may finish
            groups += [channel.group for channel in self._channels]
        disconnect_groups(group for group in groups if group is not None)

    def close(self) -> None:
        """Destroys the process groups. Local: ranks may close at different times."""
        for channel in self._channels:
            channel.close()
        group, self._group = self._group, None
        self._rounds.close()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


class Rounds:
    """Rounds between the ranks of one process group. See [Note: Rounds]."""

    def __init__(self, group: Any, *, rank: int, size: int) -> None:
        self._group = group  # a gloo group; None: this is the only rank
        self._rank = rank
        self._size = size
        self._distances = [1 << hop for hop in range((size - 1).bit_length())] if group else []
        self._width = 0  # bytes of every vote
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[RoundResult] | None = None  # the last round begun; rounds end in order
        self.num_begun = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserves `num_bytes` in every later vote; the same on every rank. Local."""
        self._width = max(self._width, num_bytes)

    def run_round(
        self, numbers: Sequence[int], mask: bytes = b"", check: RoundCheck | None = None
    ) -> RoundResult:
        """Runs one round and returns its result. Inside a `check` it runs at once.

        Args:
            numbers: Integers of less than 63 bits, equally many on every rank.
            mask: Bytes, at most as many as `reserve` has reserved.
            check: Called on every rank with the result; returns the error in it, if any. It runs in
                the rounds' thread, if there is one, so that it also runs if no caller waits.
        """
        if threading.current_thread() is not self._thread:
            if self._last is not None and not self._last.done():
                return self.begin(numbers, mask, check).result()
            self.num_begun += 1
        return self._carry(numbers, mask, check)

    def begin(
        self, numbers: Sequence[int], mask: bytes = b"", check: RoundCheck | None = None
    ) -> Future[RoundResult]:
        """As `run_round`, but does not wait for the result."""
        future: Future[RoundResult] = Future()
        self.num_begun += 1
        if not self._distances:
            _fulfil(self, numbers, mask, check, future)
            return future
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._tasks), daemon=True, name="zero-rounds"
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
            end_at_exit(self)
        self._last = future
        self._tasks.put((numbers, mask, check, future))
        return future

    def end_with_process(self) -> None:
        """Ends the thread, even if it waits for a rank that does not answer. Local."""
        thread, last = self._thread, self._last
        self.close()
        if thread is not None and thread.is_alive():
            if last is not None and not last.done():
                disconnect_groups([self._group])
            thread.join(_EXIT_S)

    def close(self) -> None:
        """Ends the thread once the rounds in flight are over. Local; does not wait."""
        self._tasks.put(None)
        self._thread = None

    def _carry(self, numbers: Sequence[int], mask: bytes, check: RoundCheck | None) -> RoundResult:
        if self._distances:
            assert len(mask) <= self._width, "see `reserve`"
            with torch.inference_mode(mode=False), torch.device("cpu"):
                numbers, mask = self._exchange(numbers, mask)
        result = RoundResult(list(numbers), mask)
        if check is None:
            return result
        return result._replace(error=check(result))

    def _exchange(self, numbers: Sequence[int], mask: bytes) -> tuple[list[int], bytes]:
        split = 8 * len(numbers)
        payload = torch.zeros(split + self._width, dtype=torch.uint8)
        lowest, highest = payload[:split].view(torch.int64), payload[split:]
        lowest.copy_(torch.tensor(numbers, dtype=torch.int64))
        if mask:
            highest[: len(mask)] = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        others = [torch.empty_like(payload) for _ in self._distances]
        receives = [
            self._group.recv([other], (self._rank - distance) % self._size, _FIRST_TAG + hop)
            for hop, (distance, other) in enumerate(zip(self._distances, others, strict=True))
        ]
        sends = []
        for hop, distance in enumerate(self._distances):
            sent = payload.clone()
            target = (self._rank + distance) % self._size
            sends.append((self._group.send([sent], target, _FIRST_TAG + hop), sent))
            receives[hop].wait()
            torch.minimum(lowest, others[hop][:split].view(torch.int64), out=lowest)
            torch.maximum(highest, others[hop][split:], out=highest)
        for send, _ in sends:
            send.wait()
        return lowest.tolist(), bytes(highest.numpy())


def _run(rounds: weakref.ref[Rounds], tasks: queue.SimpleQueue[_Task | None]) -> None:
    """Body of the thread, which keeps no `Rounds` alive while it waits for work."""
    while (task := tasks.get()) is not None:
        owner = rounds()
        if owner is None:
            return
        _fulfil(owner, *task)
        del owner, task


def _fulfil(
    rounds: Rounds,
    numbers: Sequence[int],
    mask: bytes,
    check: RoundCheck | None,
    future: Future[RoundResult],
) -> None:
    try:
        result = rounds._carry(numbers, mask, check)
    except BaseException as error:  # raised where the result is waited for
        future.set_exception(error)
    else:
        future.set_result(result)


class Channel:
    """Exchange of picklable values between rank 0 and all ranks, also from a background thread.

    It has a gloo group of its own. Every method that sends is collective: every rank, same order,
    one thread at a time (`session`). If a rank dies, or an exception is raised while sending, the
    channel closes on all ranks: no rank waits longer than the group's timeout. Work that may fail
    goes through `run_on_all_ranks`. Made by `GlooControlPlane.open_channel`.

    Attributes:
        group: The group; None: the channel is closed, or there are no other ranks.
    """

    def __init__(self, rank: int, size: int, group: Any | None) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether a session may begin."""
        return not self._is_closed

    @contextmanager
    def session(self) -> Iterator[None]:
        """Holds the channel; a `close` from another thread takes effect when the session ends."""
        with self._lock:
            try:
                yield
            finally:
                if self._is_closed:
                    self._destroy()

    def close(self) -> None:
        """Allows no further session. Not collective; other ranks that still send fail."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._destroy()
            self._lock.release()

    def gather(self, value: _T) -> list[_T] | None:
        """Returns every rank's value, by rank, on rank 0; None on the other ranks."""
        if self.size == 1:
            return [value]
        box: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._closing_on_failure():
            dist.gather_object(value, box, group=self.group, group_dst=0)
        return box

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with self._closing_on_failure():
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def all_gather(self, value: _T) -> list[_T]:
        """Returns every rank's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self._closing_on_failure():
            dist.all_gather_object(box, value, group=self.group)
        return box

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        if self.group is None:
            raise RuntimeError(
                "the channel between ranks was closed by an earlier exception on some rank; the "
                "ranks cannot exchange anything through it any more."
            )
        try:
            yield
        except BaseException:
            self._is_closed = True
            self._destroy()  # so that the ranks that wait for this one fail, too
            raise

    def _destroy(self) -> None:
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
