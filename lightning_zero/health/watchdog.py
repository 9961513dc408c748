"""Watchdog: a thread per rank that detects failures of other ranks and ends the waits for them.

[Note: Shared log] The ranks share a log in the store of their rendezvous, a `StoreLog`, so that all
ranks read the same entries in the same order:

    abort    a rank has raised an exception
    dead     the process of a rank has ended while other ranks need it
    ready    a rank that has raised an exception is ready for the next run
    gone     a rank will not take part in the next run
    report   a rank has waited long, and requests the status of every rank

A watchdog depends neither on its main thread, which may hang in a collective, nor on the
connections of the rank that failed: these may stay open in processes that the failed rank forked,
such as DataLoader workers. It learns of an exception from the log, and of the end of a process on
its own node from the kernel. Silence alone ends nothing: a process that is stopped, or a node that
cannot be reached, may come back, and a collective that waits for it ends at its timeout. After a
failure the watchdog closes the connections of its own rank, so that every wait on them fails, and
the error names the cause. After an exception of another rank it does so a second later, and not at
all if its own rank has raised one by then: all ranks may raise the same error. See [Note: Runs].
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.health.failures import (
    DeadlockError,
    DesynchronizedError,
    PeerFailedError,
    RankFailure,
    desync_error,
    is_transport_error,
    may_be_transport_error,
    print_now,
    summary,
)
from lightning_zero.health.peers import (
    REACHED_END,
    HostedStore,
    Peers,
    ScriptEnds,
    StoreLog,
    connect_to_store,
    describe_exit,
    log_unreadable,
    poll_interval_s,
)
from lightning_zero.health.reports import LogEntry, Reports
from lightning_zero.health.runs import Runs
from lightning_zero.health.tracebacks import print_user_frames
from lightning_zero.health.waits import Wait, Waits
from lightning_zero.health.world import disconnect_groups, disconnect_store, end_at_exit

__all__ = ["Watchdog"]

_STORE_TIMEOUT_S = 3.0  # the client's own timeout does not end every request
_CONFIRM_S = 1.0  # from the end of a process until it is reported, if its exit code is unknown
_STORE_CONFIRM_S = 3.0  # from the end of the store until it is reported
_END_CONFIRM_S = 3.0  # of a wait for a rank that has ended well: its messages may still arrive
_SAME_ERROR_S = 1.0  # in which a rank that waits may raise the same exception as another one
_BUSY_S = 5.0  # the same for a rank that computes: it may wait for a device
_SETTLE_S = 2.0  # from a failure until groups other than the engine's are disconnected, too
_STORE_SETTLE_S = 3.0  # from a failure until the store is disconnected, too
_LAST_RESORT_S = 5.0  # from a failure until a process that nothing has woken exits

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Watchdog:
    """Watches the other ranks on behalf of the thread that makes it.

    Every rank makes one, with the same name, and ends it by `stop` or with the process. Without
    other ranks there is nothing to watch.

    Args:
        name: Prefix of its keys in the store.
        rank: Rank of this process.
        size: Number of ranks.
        ends_all_waits: Whether every other wait ends, too, until `finish`. If not, collectives on
            other groups that begin after a failure are not interrupted while all ranks live.
        describe_exit: Describes how a process that this one has started has ended, such as "ended
            with exit code 3"; returns None if it does not know.

    Attributes:
        runs: Failures, and whether another run follows.
        waits: Waits of this process, and its count of collectives; `waiting` is a method of it.
    """

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        ends_all_waits: bool = False,
        describe_exit: Callable[[int], str | None] = lambda pid: None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._name = f"lightning_zero/{name}"
        self.waits = Waits(
            threading.get_ident(),
            self._name,
            self._find_other_waits,
            raise_failure=self.raise_if_failed,
            raise_cause=self._raise_cause,
        )
        self.waiting = self.waits.waiting
        # The engine's; a weak reference: an engine that is never closed is still freed.
        self._status_source: weakref.WeakMethod[Callable[[], str]] | None = None
        self._reports = Reports(self._name, rank, size, self.waits, self._moment)
        self._ends_all_waits = ends_all_waits
        self._describe_exit = describe_exit
        # Weak references: an engine that is never closed is still freed.
        self._failure_callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._lock = threading.Lock()  # guards `_failure_callbacks`, and their calls
        # State of the ranks.
        self.runs = Runs(rank, size)
        self._raised_at: float | None = None  # when an exception of another rank was read
        self._own_error: DesynchronizedError | None = None
        self._ends_own_waits = False  # an exception of this rank ends its own waits, too
        self._failed_at: float | None = None
        self._is_disconnected = False  # no collective is possible on any group of this process
        self._is_store_disconnected = False
        self._is_needed = True  # until `finish`: this rank needs the others
        # State of the thread.
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopped = False
        self._has_logged_failure = False
        self._store: Any = None  # None: lost, or never opened
        self._world: Any = None  # the default group; the watchdog ends with it
        self._store_lost_at: float | None = None  # time.monotonic()
        self._shared_log = StoreLog(f"{self._name}/log")
        self._ends = ScriptEnds()
        self._peers: Peers  # set if there is a thread
        self._thread: _Thread | None = None
        if size > 1 and dist.is_initialized() and dist.get_backend() != "fake":
            self._start()

    def _start(self) -> None:
        """Opens the store and starts the thread."""
        rank = self._rank
        self._world = dist.group.WORLD
        self._peers = Peers()
        self._store = connect_to_store(
            rank, self._peers.has_rank_0_exited, self._reports.log_silence
        )
        self._peers.announce(rank, self._store)
        self._thread = _Thread(self)
        self._thread.start()
        end_at_exit(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, such as one in another process, watch no rank."""
        return partial(Watchdog, "", rank=self._rank, size=1), ()

    @staticmethod
    def stop_finished() -> None:
        """Stops the watchdogs of runs that are over, of any Trainer; the next run makes its own."""
        for watchdog in _running():
            if not watchdog._is_needed:
                watchdog.stop()

    def _find_other_waits(self) -> list[Waits]:
        return [watchdog.waits for watchdog in _running() if watchdog is not self]

    # ---------------------------------------------------------------- for the main thread

    @property
    def failure(self) -> RankFailure | None:
        """The failure that makes collectives impossible now; None: there is none."""
        return self.runs.failure

    @property
    def is_unrecoverable(self) -> bool:
        """Whether no further run is possible."""
        return self.runs.death is not None or self._is_disconnected

    def add_failure_callback(self, callback: Callable[[], None]) -> None:
        """Registers `callback`, a bound method, to be called at a failure, from another thread.

        It must end every wait. Its object is referenced weakly.
        """
        with self._lock:
            self._failure_callbacks.append(weakref.WeakMethod(callback))

    def remove_failure_callback(self, callback: Callable[[], None]) -> None:
        """Removes `callback`. Waits for a call in progress."""
        with self._lock:
            self._failure_callbacks = [
                known for known in self._failure_callbacks if known() not in (None, callback)
            ]

    def set_status_source(self, describe: Callable[[], str]) -> None:
        """Sets `describe`, a bound method called from another thread: what the engine is doing."""
        self._status_source = weakref.WeakMethod(describe)

    def _moment(self) -> str:
        describe = self._status_source() if self._status_source is not None else None
        return describe() if describe is not None else ""

    def _raise_cause(self, name: str, error: RuntimeError) -> None:
        """Raises the cause of a failed wait for `name`, if it is not `error` itself."""
        if isinstance(error, (PeerFailedError, torch.OutOfMemoryError, torch.AcceleratorError)):
            return
        may_be_transport = may_be_transport_error(error)
        if may_be_transport:  # it may arrive before the report of its cause
            self.wait_for_failure()
        self.raise_if_failed()
        if may_be_transport:
            raise desync_error(self._rank, name, error) from error
        # else an error of this rank alone, such as one of pickling

    def raise_if_failed(self) -> None:
        """Raises the PeerFailedError of the current failure, if there is one.

        Its traceback leaves out the error of the transport, which is a consequence of the failure.
        """
        failure = self.failure
        if failure is not None:
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

    def wait_for_failure(self, seconds: float = _CONFIRM_S) -> None:
        """Waits for a failure report that may be on its way, after a connection was closed."""
        polls_s = 4 * poll_interval_s(self._size)
        until = time.monotonic() + seconds + polls_s
        with self.waits.after_failed_wait():
            while self.failure is None and self._is_running():
                self._run_in_thread(self._fail_with_other)
                if (lost_at := self._store_lost_at) is not None:
                    until = max(until, lost_at + _STORE_CONFIRM_S + polls_s)
                if time.monotonic() > until:
                    return
                time.sleep(0.02)

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
        if self.failure is not None:
            return
        text = "stopped" if error is None else f"raised {summary(error)}"
        self._run_in_thread(
            partial(self._append, {"kind": "abort", "text": f"rank {self._rank} {text}"})
        )

    def first_with(self, name: str) -> int | None:
        """Returns the rank that was the first to call this with `name`; None: it is not known."""
        mine = str(self._rank)
        key = f"{self._name}/{name}/{self.runs.number}"
        found = self._run_in_thread(lambda: self._store and self._store.compare_set(key, "", mine))
        return int(found) if found else None

    def begin_run(self, deadline: timedelta) -> bool:
        """After `abort`: waits until every rank has called this, without process groups.

        Returns:
            Whether all ranks called in time; the same on every rank that calls.
        """
        until = time.monotonic() + deadline.total_seconds()
        is_lost = not self._is_running() or self.is_unrecoverable
        self._run_in_thread(partial(self._append, {"kind": "gone" if is_lost else "ready"}))
        with self.waits.announced(Wait("the other ranks after an exception", time.monotonic())):
            while self.runs.follows() is None and self._is_running():
                is_over = self.is_unrecoverable or time.monotonic() > until
                if is_over or self._store is None:
                    self._run_in_thread(partial(self._append, {"kind": "gone"}))
                    break
                self._run_in_thread(lambda: None)  # reads the log
                time.sleep(0.02)
        if not self.runs.follows() or self.is_unrecoverable:
            return False
        self._failed_at = self._raised_at = self._own_error = None
        self._ends_own_waits = False
        self.waits.restart_count()
        self.runs.begin()
        self._run_in_thread(self._look_at_next_run)
        return True

    def _look_at_next_run(self) -> None:
        """Acts on what a faster rank has already appended for the run that has begun."""
        if self.runs.other_failure is not None:
            self._raised_at = time.monotonic()
        self._on_failure()

    def finish(self) -> None:
        """Ends this rank's part: it no longer needs the others, nor they this rank."""
        self._run_in_thread(self._mark_left)
        self._is_needed = False

    def end_with_process(self) -> None:
        """Reports that this rank's script is over to the ranks that wait for it, and stops."""
        error = getattr(sys, "last_value", None)  # the exception that ended the script
        end = REACHED_END if error is None else f"raised {summary(error)}"
        self._run_in_thread(partial(self._mark_left, end))
        self.stop()

    def stop(self) -> None:
        """Stops the watchdog. Stopping twice is harmless."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._is_stopped = True
            self._peers.wake()
            thread.join(_STORE_TIMEOUT_S)

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run_in_thread(self, action: Callable[[], _T]) -> _T | None:
        """Calls `action` in the thread that owns the store; returns None if it cannot in time."""
        if threading.current_thread() is self._thread:
            return action()
        if not self._is_running():
            return None
        answer: list[_T] = []
        is_done = threading.Event()

        def do() -> None:
            try:
                answer.append(action())
            finally:
                is_done.set()

        self._actions.put(do)
        self._peers.wake()
        is_done.wait(_STORE_TIMEOUT_S)
        return answer[0] if answer else None

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        """Watches until `stop`; the body of the thread."""
        try:
            while not self._is_stopped:
                self._poll()
                self._peers.wait(poll_interval_s(self._size))
        except Exception:  # it must not end the process
            if not sys.is_finalizing():
                _log.exception("rank %d: the watchdog has failed.", self._rank)
        finally:
            self._drop_store()
            self._peers.close()
            self._world = None  # so that its connections are freed

    def _poll(self) -> None:
        if not self.waits and (not dist.is_initialized() or dist.group.WORLD is not self._world):
            self._is_stopped = True
            return
        for poll in (self._poll_store, self._poll_peers, self._poll_main):
            try:
                poll()
            except RuntimeError:  # the process that hosts the store has ended
                self._lose_store()
            except Exception:  # keep watching: nothing else would end a wait
                if not sys.is_finalizing() and not self._has_logged_failure:
                    self._has_logged_failure = True
                    _log.exception("rank %d: a check of the watchdog has failed.", self._rank)

    def _poll_store(self) -> None:
        while not self._actions.empty():
            self._actions.get()()
        if self._store is not None:
            for text in self._shared_log.read(self._store):
                self._take(text)
            self._peers.find(self._store)

    def _drop_store(self) -> None:
        store, self._store = self._store, None
        if isinstance(store, HostedStore):
            store.close()

    def _lose_store(self) -> None:
        if self._store_lost_at is None:
            self._drop_store()
            self._store_lost_at = time.monotonic()
        if not self._is_needed and not self.waits:
            self._is_stopped = True

    # ---------------------------------------------------------------- shared log

    def _append(self, entry: LogEntry) -> None:
        """Appends an entry to the shared log, and reads the log up to it."""
        mine = json.dumps({**entry, "epoch": self.runs.number, "by": self._rank})
        if self._store is None:
            return
        for found in self._shared_log.append(self._store, mine):
            other = self._take(found)
            if other is not None and entry["kind"] == other["kind"] == "report":
                return  # another rank's request serves as well

    def _take(self, text: str) -> LogEntry | None:
        """Acts on an entry just read from the log and returns it; None: it is not readable."""
        number = self._shared_log.num_read - 1
        try:
            entry = json.loads(text)
            kind, by = entry["kind"], entry["by"]
            if kind == "dead":
                self._record_death(entry["rank"], entry["text"])
            elif kind != "report":
                before = self.failure
                self.runs.take(entry)
                if kind == "abort" and self.runs.number == entry["epoch"]:
                    self._on_abort(entry, by, is_new=self.failure is not before)
        except (ValueError, KeyError, TypeError):
            log_unreadable(text)
            return None
        if kind == "report":
            for answer in self._reports.answer(self._store, number, entry):
                self._append(answer)
        return dict(entry)

    def _on_abort(self, entry: LogEntry, by: int, *, is_new: bool) -> None:
        """Acts on the abort of rank `by` in this run; `is_new`: it is the failure from now on."""
        if not entry.get("is_own", True):  # a deadlock, which no single rank has caused
            if is_new:
                self._on_failure()
                self._end_other_waits(entry)
        elif by == self._rank:
            self.waits.note_failure()
            if self._ends_own_waits:
                self._on_failure()
        elif self._raised_at is None:
            self._raised_at = time.monotonic()

    def _fail_with_other(self) -> None:
        """Ends the waits of this rank because another one has raised an exception."""
        if self.runs.fail_with_other():
            self._on_failure()
            self._append({"kind": "gone"})

    def _end_other_waits(self, entry: LogEntry) -> None:
        """After a deadlock: ranks may wait in other engines, with watchdogs of their own."""
        for other in _running():
            if other is not self and other.waits.has_main_thread:
                other._actions.put(partial(other._append, entry))
                other._peers.wake()

    def _record_death(self, rank: int, text: str) -> None:
        if self.runs.record_death(rank, text):
            self._on_failure()

    def _on_failure(self) -> None:
        """Ends all waits in the engine after a failure of the current epoch."""
        self.waits.note_failure()
        if self.failure is None:
            return  # it belongs to a later epoch
        self._failed_at = time.monotonic()
        with self._lock:
            for known in self._failure_callbacks:
                if (callback := known()) is not None:
                    callback()

    # ---------------------------------------------------------------- ends of other ranks

    def _mark_left(self, end: str | None = None) -> None:
        """Marks this rank as finished: no rank waits for it. `end`: how its script has ended."""
        self._append({"kind": "gone"})
        if self._store is None:
            return
        if end is not None:
            self._ends.append(self._store, self._rank, end)
        if end is not None or self.failure is None:
            self._store.set(f"{self._name}/left/{self._rank}", "")

    def _has_left(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"{self._name}/left/{rank}"])

    def _poll_peers(self) -> None:
        """Reports processes of this node that have ended while other ranks need them."""
        now, wait, exited = time.monotonic(), self.waits.main_thread_wait(), self._peers.exited()
        if not self._is_needed and not self.waits and wait is None:
            return
        if self._store is not None and (exited or wait is not None):
            self._ends.read(self._store)
        for peer in exited:
            how = peer.status or self._describe_exit(peer.pid)
            if how is None and now - peer.found_at < _CONFIRM_S:
                continue
            has_left = self._has_left(peer.rank)
            self._peers.drop(peer)
            text = f"rank {peer.rank} {self._ends.with_exit(peer.rank, how)}"
            # One that ended with 0 may have taken part in all collectives: see below.
            if not has_left and how != describe_exit(0):
                self._record_death(peer.rank, text)
                self._append({"kind": "dead", "rank": peer.rank, "text": text})
        if wait is None or self.failure is not None:
            return
        for rank, end in self._ends.by_rank.items():
            waited_s = now - max(wait.since, self._ends.found_at[rank])
            is_too_long = waited_s > _END_CONFIRM_S and not wait.is_one_way
            if wait.needs(rank) and (wait.has_failed or is_too_long):
                self._record_death(rank, f"rank {rank} {end}")
                if end == describe_exit(0):  # ranks on other nodes do not know
                    self._append({"kind": "dead", "rank": rank, "text": f"rank {rank} {end}"})
        if self._store_lost_at is not None and now - self._store_lost_at > _STORE_CONFIRM_S:
            self._record_death(0, "rank 0, or the launcher that held the ranks' store, has died")

    # ---------------------------------------------------------------- the main thread's waits

    def _poll_main(self) -> None:
        wait = self.waits.main_thread_wait()
        if self._raised_at is not None:
            waited_s = time.monotonic() - max(self._raised_at, 0.0 if wait is None else wait.since)
            if waited_s > (_BUSY_S if wait is None else _SAME_ERROR_S):
                self._fail_with_other()
        failed_at, failure = self._failed_at, self.failure  # read once: the next run clears them
        if failed_at is not None and failure is not None:
            if wait is not None and not wait.is_engine_group and wait.needs(failure.rank):
                self._wake_main(wait, failure, failed_at)
            return
        if self._store is not None:
            for entry in self._reports.poll(self._store, wait):
                self._append(entry)

    def _wake_main(self, wait: Wait, failure: RankFailure, failed_at: float) -> None:
        """Ends a wait outside the engine's groups, which a failure does not end by default."""
        ends_all = self._ends_all_waits and self._is_needed
        is_dead = failure is self.runs.death
        if not (ends_all or is_dead or wait.since < failed_at):
            return
        waited_s = time.monotonic() - max(failed_at, wait.since)
        if waited_s > _SETTLE_S and not self._is_disconnected:
            self._is_disconnected = True
            disconnect_groups(list(dist.distributed_c10d._world.pg_map))
        if waited_s > _STORE_SETTLE_S and not self._is_store_disconnected:
            self._is_store_disconnected = True
            disconnect_store()  # the wait is in the store, for example while a group is made
        if waited_s > _LAST_RESORT_S:
            # For example in a store of files: nothing ends that before its timeout.
            print_now(
                f"{failure.explain_to(self._rank)}; it still waits in {wait.name}, and exits now."
            )
            os._exit(1)


class _Thread(threading.Thread):
    """Thread of a watchdog; `_running` finds the watchdogs of this process by it."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(target=watchdog.run, daemon=True, name="lightning-zero-watchdog")
        self.watchdog = watchdog


def _running() -> list[Watchdog]:
    """The watchdogs of this process, of any engine or Trainer."""
    return [one.watchdog for one in threading.enumerate() if isinstance(one, _Thread)]
