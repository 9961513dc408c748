"""The control plane: what ranks tell each other besides data, between CPUs, over gloo.

Rounds of a few integers, small masks and objects, so that all ranks, whatever their group, agree on
what comes next without making a device wait; and, on a group of its own, what a thread beside the
training has to agree on.

[Note: Rounds] In round k every rank says its k-th saying: a few integers, of which all hear the
lowest of any rank, and bytes, of which all hear the highest. A rank may begin a round and go on; a
thread carries it through, for its later messages depend on earlier ones. Rounds never overtake each
other: the k-th saying of one rank meets the k-th of every other, whatever those were for, so that
ranks which have come to different points find it out.

Messages go along a dissemination network: in hop i rank r sends what it has heard to r + 2^i and
hears from r - 2^i (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988).
After ceil(log2 N) hops, for any N, it has heard from all, some of them twice, which neither a
minimum nor a maximum minds. Receives are posted before the first hop.
"""

from __future__ import annotations

import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.comm.watchdog import DesynchronizedError, Watchdog, end_at_exit, summary
from lightning_zero.comm.world import disconnect_groups, has_world
from lightning_zero.layout.rounds import RoundCheck, RoundResult
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind

__all__ = ["Channel", "GlooControlPlane", "PeerFailedError", "Rounds"]

_T = TypeVar("_T")
_Task = tuple[Sequence[int], bytes, RoundCheck | None, "Future[RoundResult]"]
_FIRST_TAG = 1 << 20  # of nobody else on the group
_EXIT_S = 2.0  # for the thread to end with the process


class PeerFailedError(DesynchronizedError):
    """Another rank failed where all go on together; the text tells how."""


class GlooControlPlane:
    """Every method is collective where it does not say that it is local: every rank, same order."""

    watchdog: Watchdog  # tells of the failures of others; set before anything is told

    def __init__(
        self, recorder: Recorder, *, rank: int, size: int, timeout: timedelta | None
    ) -> None:
        self.rank = rank
        self.size = size
        self._recorder = recorder
        self._timeout = timeout
        self._group: Any = None
        self._width = 0
        self.open()

    def open(self) -> None:
        """Makes the group, where there is a world."""
        is_alone = self.size == 1
        if has_world():
            # The fake backend stands for N ranks in one process; gloo would wait for the others.
            backend = "fake" if dist.get_backend() == "fake" else "gloo"
            self._group = dist.new_group(timeout=self._timeout, backend=backend)
            is_alone |= backend == "fake"
        group = None if is_alone else self._group
        self._rounds = Rounds(group, rank=self.rank, size=self.size)
        self._rounds.reserve(self._width)

    @property
    def is_open(self) -> bool:
        """Local."""
        return self._group is not None

    @contextmanager
    def waiting(
        self, name: str, *, is_one_way: bool = False, kind: Kind = Kind.AGREE
    ) -> Iterator[None]:
        """As `Watchdog.waiting`, and recorded as one of `kind`. Local."""
        if self.size == 1:
            yield
            return
        waiting = self.watchdog.waiting(name, is_one_way=is_one_way)
        with waiting, self._recorder.span(kind, name, is_wait=True):
            yield

    # ---------------------------------------------------------------- values

    def min_ints(self, values: Sequence[int], name: str = "minimum") -> list[int]:
        """Elementwise minimum over ranks."""
        if self.size == 1:
            return list(values)
        lowest = torch.tensor(values, dtype=torch.int64)
        with self.waiting(name):
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in lowest.tolist()]

    def union(self, mask: Sequence[bool]) -> list[bool]:
        """Elementwise `or` over ranks."""
        return [bit < 0 for bit in self.min_ints([-int(bit) for bit in mask], "mask")]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's picklable object, on every rank."""
        if self._group is None or self.size == 1:
            return value
        box = [value]
        with self.waiting("broadcast", is_one_way=True):
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, on every rank."""
        if self._group is None or self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self.waiting("objects"):
            dist.all_gather_object(box, value, group=self._group)
        return box

    def collect_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, by rank, on rank 0; nothing elsewhere."""
        if self._group is None or self.size == 1:
            return [value]
        box: list[Any] | None = None if self.rank else [None] * self.size
        with self.waiting("objects", is_one_way=True):
            dist.gather_object(value, box, group=self._group, group_dst=0)
        return box or []

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank, on every rank: equally many on each."""
        if self._group is None or self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [own.clone() for _ in range(self.size)]
        with self.waiting("numbers"):
            dist.all_gather(everyone, own, group=self._group)
        return [numbers.tolist() for numbers in everyone]

    # ---------------------------------------------------------------- rounds

    @property
    def num_rounds(self) -> int:
        """That this rank has begun since the group was made. Local."""
        return self._rounds.num_begun

    def reserve(self, num_bytes: int) -> None:
        """Makes room for `num_bytes` in every saying, the same on every rank. Local."""
        self._width = max(self._width, num_bytes)
        self._rounds.reserve(num_bytes)

    def run_round(
        self, numbers: Sequence[int], mask: bytes, judge: RoundCheck | None = None
    ) -> RoundResult:
        """One round: see `Rounds.run_round`. Whoever calls it is `waiting`."""
        return self._rounds.run_round(numbers, mask, judge)

    def begin_round(
        self, numbers: Sequence[int], mask: bytes, judge: RoundCheck
    ) -> Future[RoundResult]:
        """As `run_round`, but this rank goes on meanwhile; the result is waited for in `waiting`."""
        return self._rounds.begin(numbers, mask, judge)

    def agree(self, value: int, name: str = "the next round") -> int:
        """The lowest value, of less than 63 bits, of any rank."""
        with self.waiting(name):
            return self.run_round([value], b"").numbers[0]

    # ---------------------------------------------------------------- failure

    def abort_waits(self, error: Exception) -> None:
        """Lets the other ranks fail, wherever they wait. Local, from any thread."""
        if isinstance(error, DesynchronizedError):
            self.watchdog.abort_desynchronized(error)
        else:
            self.watchdog.abort(error)

    def peer_failed_error(self, text: str) -> Exception:
        """What to raise where another rank has failed, and all go on together. Local."""
        return PeerFailedError(text)

    def desync_error(self, text: str) -> Exception:
        """What to raise where ranks have come to different points. Local."""
        return DesynchronizedError(text)

    # ---------------------------------------------------------------- abort and the end

    def disconnect(self) -> None:
        """Whoever waits here waits no longer. Local, from any thread."""
        group = self._group
        if group is not None:
            disconnect_groups([group])

    def close(self) -> None:
        """Destroys the group. Local: ranks may come here at different times."""
        group, self._group = self._group, None
        self._rounds.close()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


class Rounds:
    """The rounds of one group of ranks: see [Note: Rounds]."""

    def __init__(self, group: Any, *, rank: int, size: int) -> None:
        self._group = group  # on gloo; None: this rank is alone
        self._rank = rank
        self._size = size
        self._distances = [1 << hop for hop in range((size - 1).bit_length())] if group else []
        self._width = 0  # bytes of every saying
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[RoundResult] | None = None  # begun last; rounds end in their order
        self.num_begun = 0

    def reserve(self, num_bytes: int) -> None:
        """From now on all sayings have room for `num_bytes`, the same on every rank. Local."""
        self._width = max(self._width, num_bytes)

    def run_round(
        self, numbers: Sequence[int], mask: bytes = b"", judge: RoundCheck | None = None
    ) -> RoundResult:
        """One round, which ends before this returns; inside a `judge` at once.

        Args:
            numbers: Of less than 63 bits, equally many on every rank.
            mask: Bytes, at most as many as `reserve` has made room for.
            judge: Is asked, on every rank, what is wrong with what was heard; in the thread where
                there is one, so that it is asked also where nobody waits.
        """
        if threading.current_thread() is not self._thread:
            if self._last is not None and not self._last.done():
                return self.begin(numbers, mask, judge).result()
            self.num_begun += 1
        return self._carry(numbers, mask, judge)

    def begin(
        self, numbers: Sequence[int], mask: bytes = b"", judge: RoundCheck | None = None
    ) -> Future[RoundResult]:
        """As `run_round`, but this rank goes on meanwhile."""
        future: Future[RoundResult] = Future()
        self.num_begun += 1
        if not self._distances:
            _fulfil(self, numbers, mask, judge, future)
            return future
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._tasks), daemon=True, name="zero-rounds"
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
            end_at_exit(self)
        self._last = future
        self._tasks.put((numbers, mask, judge, future))
        return future

    def end_with_process(self) -> None:
        """Ends the thread, also where it waits for a rank that does not come. Local."""
        thread, last = self._thread, self._last
        self.close()
        if thread is not None and thread.is_alive():
            if last is not None and not last.done():
                disconnect_groups([self._group])
            thread.join(_EXIT_S)

    def close(self) -> None:
        """Ends the thread, when it has ended the rounds under way. Local; does not wait."""
        self._tasks.put(None)
        self._thread = None

    def _carry(self, numbers: Sequence[int], mask: bytes, judge: RoundCheck | None) -> RoundResult:
        if self._distances:
            assert len(mask) <= self._width, "see `reserve`"
            with torch.inference_mode(mode=False), torch.device("cpu"):
                numbers, mask = self._exchange(numbers, mask)
        heard = RoundResult(list(numbers), mask)
        return heard if judge is None else heard._replace(error=judge(heard))

    def _exchange(self, numbers: Sequence[int], mask: bytes) -> tuple[list[int], bytes]:
        split = 8 * len(numbers)
        said = torch.zeros(split + self._width, dtype=torch.uint8)
        lowest, highest = said[:split].view(torch.int64), said[split:]
        lowest.copy_(torch.tensor(numbers, dtype=torch.int64))
        if mask:
            highest[: len(mask)] = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        others = [torch.empty_like(said) for _ in self._distances]
        receives = [
            self._group.recv([other], (self._rank - distance) % self._size, _FIRST_TAG + hop)
            for hop, (distance, other) in enumerate(zip(self._distances, others, strict=True))
        ]
        sends = []
        for hop, distance in enumerate(self._distances):
            travelling = said.clone()
            target = (self._rank + distance) % self._size
            sends.append((self._group.send([travelling], target, _FIRST_TAG + hop), travelling))
            receives[hop].wait()
            torch.minimum(lowest, others[hop][:split].view(torch.int64), out=lowest)
            torch.maximum(highest, others[hop][split:], out=highest)
        for send, _ in sends:
            send.wait()
        return lowest.tolist(), bytes(highest.numpy())


def _run(rounds: weakref.ref[Rounds], tasks: queue.SimpleQueue[_Task | None]) -> None:
    """The thread: it keeps no `Rounds` alive while it waits for work."""
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
    judge: RoundCheck | None,
    future: Future[RoundResult],
) -> None:
    try:
        result = rounds._carry(numbers, mask, judge)
    except BaseException as error:  # whoever waits raises it
        future.set_exception(error)
    else:
        future.set_result(result)


class Channel:
    """Picklable values between rank 0 and all ranks, also from a background thread.

    It has a gloo group of its own. Every method that sends is collective: every rank, same order,
    one thread at a time (`session`). A rank that dies, or an exception while sending, closes it for
    all: nobody waits longer than the group's timeout. Made by `Communicator.open_channel`.
    """

    def __init__(self, rank: int, size: int, group: Any | None) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether a session may begin."""
        return not self._is_closed

    @contextmanager
    def session(self) -> Iterator[None]:
        """Holds the channel; `close` from another thread takes effect at its end."""
        with self._lock:
            try:
                yield
            finally:
                if self._is_closed:
                    self._destroy()

    def close(self) -> None:
        """No session begins any more. Not collective; the others fail if they still send."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._destroy()
            self._lock.release()

    def disconnect(self) -> None:
        """Whoever waits here waits no longer. From any thread."""
        group = self._group
        if group is not None:
            disconnect_groups([group])

    def gather(self, value: _T) -> list[_T] | None:
        """Every rank's value, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        box: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._closing_on_failure():
            dist.gather_object(value, box, group=self._group, group_dst=0)
        return box

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with self._closing_on_failure():
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def attempt(self, action: Callable[[], _T]) -> list[_T] | None:
        """Calls `action` on every rank: their results, on rank 0. If it fails on one, all fail.

        Raises:
            BaseException: That of the first rank that has one, the same on every rank, caused by a
                `PeerFailedError` that names the rank; but an interruption of this rank always.
        """
        failure: BaseException | None = None
        result: Any = None
        try:
            result = action()
        except BaseException as error:  # the others are told before it goes on its way
            failure = error
        portable, said = _portable(failure, self.rank)
        outcomes = self.gather((result, portable, said))
        failures = [(error, said) for _, error, said in outcomes or [] if error is not None]
        first, said = self.broadcast(failures[0] if failures else (None, ""))
        if failure is not None and not isinstance(failure, Exception):
            self.close()  # this rank goes away
            raise failure
        if first is not None:
            if failure is not None and repr(failure) == repr(first):
                raise failure
            raise first from (failure or PeerFailedError(said))
        return None if outcomes is None else [result for result, *_ in outcomes]

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        if self._group is None:
            raise RuntimeError(
                "the ranks were separated by an exception; nothing can be agreed on."
            )
        try:
            yield
        except BaseException:
            self._is_closed = True
            self._destroy()  # so that the others, who wait for this rank, fail as well
            raise

    def _destroy(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _portable(error: BaseException | None, rank: int) -> tuple[Exception | None, str]:
    """The exception as another rank can raise it, and what it says of it."""
    if error is None:
        return None, ""
    said = f"rank {rank} raised {summary(error)}"
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if isinstance(copied, Exception) and type(copied) is type(error) and str(copied) == str(error):
        return copied, said
    return RuntimeError(f"rank {rank} raised {type(error).__name__}: {error}"), said
