"""Watchdog: learns of failures of other ranks and ends the waits for them.

[Note: Shared log] A thread in each process (thread.py) reads one log of all ranks (link.py):

    abort       a rank has raised an exception
    ready       a rank that has raised an exception is ready for the next run
    gone        a rank will not take part in the next run
    left        a rank no longer needs the others, nor they it
    first       which rank is the first to print a traceback
    here        process id of a rank
    end, dead   the process of a rank has ended
    long, report, status, deadlock      long waits (reports.py)
    meet, met   all ranks come to one point (meetings.py)

A watchdog depends neither on its main thread, which may hang in a collective, nor on the
process groups. After a failure it closes the connections of its own rank, so that every wait on
them fails, and the error names the cause. After an exception of another rank it does so a second
later, and not at all if its own rank has raised one by then: all ranks may raise the same error.
See [Note: Runs].
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.health.callbacks import FailureCallbacks
from lightning_zero.health.failures import (
    DeadlockError,
    DesynchronizedError,
    PeerFailedError,
    RankFailure,
    desync_error,
    is_transport_error,
    may_be_transport_error,
    print_now,
    silence_error,
    summary,
)
from lightning_zero.health.link import Entry
from lightning_zero.health.runs import Runs
from lightning_zero.health.thread import ANSWER_S, WatchThread
from lightning_zero.health.tracebacks import print_user_frames
from lightning_zero.health.waits import Wait, announced_waits
from lightning_zero.health.world import DEFAULT_TIMEOUT, disconnect_groups

__all__ = ["Watchdog"]

_CAUSE_S = 5.0  # from a closed connection until its cause is known
_END_CONFIRM_S = 3.0  # of a wait for a rank that has ended well: its messages may still arrive
_SAME_ERROR_S = 1.0  # in which a rank that waits may raise the same exception as another one
_BUSY_S = 5.0  # the same for a rank that computes: it may wait for a device
_LOOK_S = 0.1  # between two looks whether a rank has failed
_SETTLE_S = 2.0  # from a failure until groups other than the engine's are disconnected, too

_T = TypeVar("_T")


class Watchdog:
    """Watches the other ranks, for an engine or a Trainer.

    Every rank makes one at the same point, and ends it by `stop` or with the process. Without
    other ranks there is nothing to watch.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        describe_exit: Describes how a process that this one has started has ended, such as "ended
            with exit code 3"; returns None if it does not know. None: this one has started none.

    Attributes:
        runs: Failures, and whether another run follows.
        failure_callbacks: Called at a failure that ends the waits of this rank.
        name: Equal on every rank, and different from those of other watchdogs of this process.
        num_issued: Collectives of the data plane that this rank has issued in this run.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        describe_exit: Callable[[int], str | None] | None = None,
    ) -> None:
        self._rank = rank
        self.runs = Runs(rank, size)
        self.name = ""
        self.num_issued = 0
        # A weak reference: an engine that is never closed is still freed.
        self._status_source: weakref.WeakMethod[Callable[[], str]] | None = None
        self._has_failed = False  # some rank, at some time: waits look at the failure first
        self._raised_at: float | None = None  # when an exception of another rank was read
        self._failed_at: float | None = None  # when waits of this rank were ended
        self._is_raised = False  # the failure, to the user's code
        self._own_error: DesynchronizedError | None = None
        self._ends_own_waits = False  # an exception of this rank ends its own waits, too
        self._is_disconnected = False  # no collective is possible on any group of this process
        self._is_needed = True  # until `finish`: this rank needs the others
        self._left: set[int] = set()  # ranks that need no other any more
        self._firsts: dict[tuple[int, str], int] = {}  # see `first_with`
        self._thread: WatchThread | None = None
        self._lock: AbstractContextManager[Any] = nullcontext()  # the thread's
        if size > 1 and dist.is_initialized() and dist.get_backend() != "fake":
            self._thread = WatchThread.of_process(rank, size)
            self._lock = self._thread.changed
        self.failure_callbacks = FailureCallbacks(self._lock)
        if self._thread is not None:
            self.name = self._thread.add(self, describe_exit)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, such as one in another process, watch no rank."""
        return partial(Watchdog, rank=self._rank, size=1), ()

    # ---------------------------------------------------------------- for the engine

    @property
    def failure(self) -> RankFailure | None:
        """The failure that makes collectives impossible now; None: there is none."""
        return self.runs.failure

    @property
    def is_unrecoverable(self) -> bool:
        """Whether no further run is possible."""
        return self.runs.death is not None or self._is_disconnected

    def set_status_source(self, describe: Callable[[], str]) -> None:
        """Sets `describe`, a bound method called from another thread: what the engine is doing."""
        self._status_source = weakref.WeakMethod(describe)

    def moment(self) -> str:
        """What the engine is doing; "" without one."""
        describe = self._status_source() if self._status_source is not None else None
        return describe() if describe is not None else ""

    def count_issued(self) -> int:
        """Counts a collective of the data plane, and returns its number, from 1."""
        self.num_issued += 1
        return self.num_issued

    def waiting(
        self,
        name: str,
        *,
        is_engine_group: bool = True,
        is_data_transfer: bool = False,
        is_one_way: bool = False,
        number: int = 0,
    ) -> AbstractContextManager[None]:
        """Context in which this thread waits for other ranks. See `Wait`.

        Raises:
            PeerFailedError: Another rank, or this one, has failed.
            DesynchronizedError: Another rank does not join.
        """
        if self._has_failed:
            self.raise_if_failed()
        kinds = is_engine_group, is_data_transfer, is_one_way
        wait = Wait(name, time.monotonic(), self.name, *kinds, number=number)
        return _announced(wait, partial(self._raise_cause, wait))

    def _raise_cause(self, wait: Wait, error: RuntimeError) -> None:
        """Raises the cause of a failed wait, if it is not `error` itself."""
        if isinstance(error, (PeerFailedError, torch.OutOfMemoryError, torch.AcceleratorError)):
            return
        may_be_transport = may_be_transport_error(error)
        if may_be_transport:  # it may arrive before the report of its cause
            self.wait_for_failure(wait)
        self.raise_if_failed()
        if may_be_transport:
            is_silent = self.first_with(f"{wait.name} at {time.monotonic()}") is None
            make = silence_error if is_silent and self._thread is not None else desync_error
            raise make(self._rank, wait.name, error) from error
        # else an error of this rank alone, such as one of pickling

    def raise_if_failed(self) -> None:
        """Raises the PeerFailedError of the current failure, if there is one.

        Its traceback leaves out the error of the transport, which is a consequence of the failure.
        """
        failure = self.failure
        if failure is not None:
            self._is_raised = self._is_raised or self._thread is None or self._thread.is_main
            kind = DeadlockError if failure.rank is None else PeerFailedError
            raise self._own_error or kind(failure.explain_to(self._rank)) from None

    def explain(self, error: BaseException) -> None:
        """Prints the cause if `error` does not name it, such as a closed connection."""
        if is_transport_error(error):
            self.wait_for_failure()
        failure = self.failure
        if failure is None or failure.rank == self._rank or error is self._own_error:
            return
        if failure.text not in str(error):
            print_now(failure.explain_to(self._rank))

    def wait_for_failure(self, wait: Wait | None = None) -> None:
        """Waits for the cause of a connection that was closed. `wait`: what has failed by it."""
        thread = self._thread
        if thread is None:
            return
        wait = wait or Wait("a failure report of the other ranks", time.monotonic(), self.name)
        with _announced(replace(wait, has_failed=True)):
            thread.wait_for(lambda: self.failure or self._fail_with_other(), _CAUSE_S)

    def abort_waits(self, error: Exception) -> None:
        """As `abort`, for an error that another thread than the main one has found.

        Ends the waits of the main thread, too. Every rank finds a DesynchronizedError, and raises
        it where it waits.
        """
        if isinstance(error, DesynchronizedError):
            self._own_error = error
            print_user_frames(error, self._rank)
        self._ends_own_waits = True
        self.abort(error)

    def abort(self, error: BaseException | None) -> None:
        """Ends the other ranks' waits for this rank with an error. Does not wait for them."""
        if error is not None and is_transport_error(error):
            self.wait_for_failure()  # another rank is the cause
        if self.failure is None:
            text = "stopped" if error is None else f"raised {summary(error)}"
            # An error about other ranks that this one has not found itself is a consequence.
            is_cause = type(error) is not DesynchronizedError or error is self._own_error
            text = f"rank {self._rank} {text}"
            self._send("abort", lambda: self.failure, text=text, is_cause=is_cause)

    def first_with(self, key: str) -> int | None:
        """Returns the rank that was the first to call this with `key`; None: it is not known."""
        place = self.runs.number, key
        self._send("first", lambda: place in self._firsts, key=key)
        return self._firsts.get(place)

    def begin_run(self, deadline: timedelta) -> bool:
        """After `abort`: waits until every rank has called this, without process groups.

        Returns:
            Whether all ranks called in time; the same on every rank that calls.
        """
        thread = self._thread
        if thread is None or self.is_unrecoverable:
            self._send("gone")
            return False
        self._send("ready")
        with _announced(Wait("the other ranks after an exception", time.monotonic(), self.name)):
            thread.wait_for(
                lambda: self.runs.follows() is not None or self.is_unrecoverable,
                deadline.total_seconds(),
            )
        if self.runs.follows() is None:
            self._send("gone", lambda: self.runs.follows() is not None)
        if not self.runs.follows() or self.is_unrecoverable:
            return False
        with self._lock:
            self._failed_at = self._raised_at = self._own_error = None
            self._ends_own_waits = self._is_raised = False
            self.num_issued = 0
            self.runs.begin()
            # A faster rank may have failed in the new run already.
            if self.runs.other_failure is not None:
                self._raised_at = time.monotonic()
            if self.failure is not None:
                self._end_waits()
        return True

    def finish(self) -> None:
        """Ends this rank's part: it no longer needs the others, nor they this rank."""
        self._send("gone")
        if self.failure is None:  # else the end of its process is a failure as well
            self._send("left")
        self.stop()

    def stop(self) -> None:
        """Stops the watchdog. Stopping twice is harmless. Takes no lock."""
        self._is_needed = False
        if self._thread is not None:
            self._thread.remove(self.name)

    def _send(self, kind: str, is_done: Callable[[], object] = lambda: True, **entry: Any) -> None:
        """Appends an entry to the log, and waits until `is_done`, which reading it brings about."""
        if self._thread is not None:
            number = {"name": self.name, "epoch": self.runs.number}
            self._thread.send({"kind": kind, **number, **entry})
            self._thread.wait_for(is_done, ANSWER_S)

    def run(self, name: str, action: Callable[[], _T], timeout: timedelta | None) -> _T:
        """Calls `action`, which makes a process group, and ends if a rank fails. Collective.

        All ranks meet first. Then torch waits for them where nothing can wake it before its
        timeout: so a thread does, which is abandoned if a rank dies at this moment.

        Args:
            name: What it waits for, such as "a process group".
            action: Called in the other thread, with this thread's device.
            timeout: For all ranks to meet; None: torch's default.

        Raises:
            PeerFailedError: A rank has failed; `action` may still run.
            DesynchronizedError: Some rank has not come.
        """
        if self._thread is None:
            return action()
        thread = self._thread
        device = torch.accelerator.current_device_index() if torch.cuda.is_initialized() else None
        outcome: futures.Future[_T] = futures.Future()

        def call() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)
                outcome.set_result(action())
            except BaseException as error:
                outcome.set_exception(error)

        with self.waiting(name):
            meeting = thread.meet()
            until = time.monotonic() + (timeout or DEFAULT_TIMEOUT).total_seconds()
            while not thread.wait_for(lambda: thread.has_met(meeting), _LOOK_S):
                self.raise_if_failed()
                if time.monotonic() > until:
                    raise desync_error(self._rank, name, TimeoutError("some rank has not come"))
            threading.Thread(target=call, daemon=True, name="lightning-zero-group").start()
            while not futures.wait([outcome], _LOOK_S).done:
                self.raise_if_failed()
            return outcome.result()

    # ---------------------------------------------------------------- in the watchdogs' thread

    def take(self, entry: Entry) -> None:
        """Takes an entry of the log."""
        kind, by = entry["kind"], entry["by"]
        if kind == "first":
            self._firsts.setdefault((entry["epoch"], entry["key"]), by)
        elif kind == "left":
            self._left.add(by)
        elif kind == "deadlock":
            if self.runs.fail(RankFailure(None, entry["text"])):
                self._end_waits()
        else:
            self.runs.take(entry)
            if kind == "abort" and entry["epoch"] == self.runs.number:
                self._on_abort(by)

    def _on_abort(self, by: int) -> None:
        """Acts on the exception of rank `by` in this run."""
        self._has_failed = True
        if by != self._rank:
            self._raised_at = self._raised_at or time.monotonic()
        elif self._ends_own_waits:
            self._end_waits()

    def look(self) -> None:
        """Looks whether another rank has failed, and what of this rank must end by now."""
        thread, now = self._thread, time.monotonic()
        if thread is None or not self._is_needed:
            return
        wait = thread.present_wait()
        is_own = wait is not None and wait.watchdog == self.name
        for rank, end in thread.exits.by_rank.items():
            if rank == self._rank:
                continue
            is_missed = (
                wait is not None
                and is_own
                and _cannot_end(
                    wait, now - end.since, now - wait.since, is_over=rank in thread.exits.over
                )
            )
            is_failure = is_missed or (end.is_death and rank not in self._left)
            if is_failure and self.runs.record_death(rank, f"rank {rank} {end.text}"):
                self._end_waits()
        if self._raised_at is not None:
            waited_s = now - max(self._raised_at, 0.0 if wait is None else wait.since)
            if waited_s > (_BUSY_S if wait is None else _SAME_ERROR_S):
                self._fail_with_other()
        self._end_other_waits(wait)

    def _fail_with_other(self) -> bool:
        """Ends the waits of this rank if another one has raised an exception; whether one has."""
        if not self.runs.fail_with_other():
            return False
        self._end_waits()
        self._send("gone")
        return True

    def _end_waits(self) -> None:
        """Ends all waits in the engine after a failure."""
        self._has_failed = True
        self._failed_at = time.monotonic()
        self.failure_callbacks.call()

    def _end_other_waits(self, wait: Wait | None) -> None:
        """Ends waits outside the engine's groups, such as in a collective of the user's."""
        if self._failed_at is None or self._is_disconnected:
            return
        is_waiting = wait is not None and not wait.is_engine_group
        is_others = self.failure is not None and self.failure.rank != self._rank
        is_lost = self.runs.death is not None or (is_others and not self._is_raised)
        if (is_lost or is_waiting) and time.monotonic() - self._failed_at > _SETTLE_S:
            self._is_disconnected = True
            groups = list(dist.distributed_c10d._world.pg_map)
            self.failure_callbacks.run([partial(disconnect_groups, groups)])


def _cannot_end(wait: Wait, ended_s: float, waited_s: float, *, is_over: bool) -> bool:
    """Whether a wait will not end because a rank has ended, though not by a fault.

    Args:
        wait: The wait.
        ended_s: Seconds since the last words of that rank.
        waited_s: Seconds of the wait.
        is_over: Whether its process has ended: else its exit code may still come.
    """
    if wait.has_failed:
        return is_over or ended_s > _END_CONFIRM_S
    return min(ended_s, waited_s) > _END_CONFIRM_S and not wait.is_one_way


@contextmanager
def _announced(
    wait: Wait, on_error: Callable[[RuntimeError], object] = lambda error: None
) -> Iterator[None]:
    """Context of a wait of this thread; `on_error` may raise another error than it is given."""
    thread = threading.get_ident()
    outer = announced_waits.get(thread)
    announced_waits[thread] = wait
    try:
        yield
    except RuntimeError as error:
        on_error(error)
        raise
    finally:
        if outer is None:
            announced_waits.pop(thread, None)
        else:
            announced_waits[thread] = outer
