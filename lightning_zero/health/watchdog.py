"""Watchdog: a thread per rank that detects failures of other ranks and ends the waits for them.

[Note: Shared log] The ranks share a log in the store of their rendezvous, a `StoreLog`, so that all
ranks read the same entries in the same order:

    abort    a rank has raised an exception
    dead     the process of a rank has ended while other ranks need it
    report   a rank has waited long, and requests the status of every rank

A watchdog depends neither on its main thread, which may hang in a collective, nor on the
connections of the rank that failed: these may stay open in processes that the failed rank forked,
such as DataLoader workers. It learns of an exception from the log, and of the end of a process on
its own node from the kernel. A silent rank, whose process is stopped or whose node cannot be
reached, counts as lost only if the user has set a limit; then heartbeats in the store show it.
After a failure the watchdog closes the connections of its own rank, so that every wait on them
fails, and the error names the cause.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.health.peers import (
    Heartbeats,
    HostedStore,
    Peers,
    StoreLog,
    connect_to_store,
    describe_exit,
    log_unreadable,
)
from lightning_zero.health.reports import LogEntry, Reports, Wait, Waits, is_collective_call
from lightning_zero.health.world import disconnect_groups, disconnect_store, world_size
from lightning_zero.layout.config import WaitLimits

__all__ = [
    "DESYNC_HINT",
    "PeerAbortedError",
    "DesynchronizedError",
    "RankFailure",
    "Watchdog",
    "end_at_exit",
    "next_watchdog_name",
    "summary",
]

_POLL_S = 0.25
_MAX_POLL_S = 1.0  # a failure must be known within 10 s, whatever the number of ranks
_FULL_RATE_RANKS = 64  # more ranks poll less often: one process answers the requests of all
_STORE_TIMEOUT_S = 3.0  # the client's own timeout does not end every request
_CONFIRM_S = 1.0  # from the end of a process until it is reported, if its exit code is unknown
_STORE_CONFIRM_S = 3.0  # from the end of the store until it is reported
_END_CONFIRM_S = 3.0  # of a wait for a rank whose script is over: its messages may still arrive
_SAME_ERROR_S = 1.0  # from an exception of one rank until it is reported; others may raise it, too
_SETTLE_S = 2.0  # from a failure until groups other than the engine's are disconnected, too
_STORE_SETTLE_S = 3.0  # from a failure until the store is disconnected, too
_LAST_RESORT_S = 5.0  # from a failure until a process that nothing has woken exits
_REACHED_END = "reached the end of its script"
_ALL_CAME, _LOST = "together", "lost"  # outcomes of a regroup

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


DESYNC_HINT = (  # the last line of errors about desynchronized ranks
    "To read parameters on some ranks only, enter `with lightning_zero.gathered(module):` on every "
    "rank; to run forwards without gradients on some ranks only, enter "
    "`with lightning_zero.uneven_calls(module):` on every rank."
)


def poll_interval_s(size: int) -> float:
    """Returns the seconds between two looks of each rank into the store of `size` ranks."""
    return min(_POLL_S * max(1.0, size / _FULL_RATE_RANKS), _MAX_POLL_S)


class DesynchronizedError(RuntimeError):
    """The ranks are desynchronized: they issued different operations, or one of them failed."""


class PeerAbortedError(DesynchronizedError):
    """Another rank raised an exception or has died; the text names the rank and the cause."""


@dataclass(frozen=True)
class RankFailure:
    """Reason why the ranks cannot continue together."""

    rank: int | None  # rank that caused the failure; None: no single rank
    text: str  # clause with its subject, such as "rank 1 was killed by SIGKILL"


class Watchdog:
    """Watches the other ranks on behalf of the thread that makes it.

    Every rank makes one, with the same name, and ends it by `stop` or with the process. Without
    other ranks there is nothing to watch.

    Args:
        name: Prefix of its keys in the store.
        rank: Rank of this process.
        size: Number of ranks.
        limits: Limits of how long a rank may keep others waiting; None: the defaults.
        can_regroup: Whether the ranks, until `finish`, either call `regroup` after a failure or
            exit, so that all other waits end, too. Otherwise collectives on other groups that begin
            after a failure are not interrupted while all ranks live.
        describe_exit: Describes how a process that this one has started has ended, such as "ended
            with exit code 3"; returns None if it does not know.
    """

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        limits: WaitLimits | None = None,
        can_regroup: bool = False,
        describe_exit: Callable[[int], str | None] = lambda pid: None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._name = f"lightning_zero/{name}"
        self._waits = Waits(threading.get_ident())
        self._limits = limits = limits or WaitLimits()
        # The engine's; a weak reference: an engine that is never closed is still freed.
        self._status_source: weakref.WeakMethod[Callable[[], str]] | None = None
        self._reports = Reports(self._name, rank, size, limits.report_s, self._waits, self._moment)
        self._can_regroup = can_regroup
        self._describe_exit = describe_exit
        # Weak references: an engine that is never closed is still freed.
        self._failure_callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._lock = threading.Lock()  # guards `_failure_callbacks`, and their calls
        # State of the ranks.
        self._epoch = 0  # number of successful regroups
        self._aborts: dict[int, RankFailure] = {}  # first abort of each epoch
        self._death: RankFailure | None = None
        self._own_error: DesynchronizedError | None = None
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
        self._is_silence_reported = False  # the store's, in the current request
        self._heartbeats: Heartbeats | None = None  # None: silence alone ends nothing
        self._shared_log = StoreLog(f"{self._name}/log")
        self._exit_log = StoreLog("lightning_zero/exits")  # shared by all runs
        self._exits: dict[int, str] = {}  # how ranks have ended, by rank
        self._peers: Peers  # set if there is a thread
        self._thread: _Thread | None = None
        if size > 1 and dist.is_initialized() and dist.get_backend() != "fake":
            self._world = dist.group.WORLD
            self._peers = Peers()
            self._store = connect_to_store(rank, self._peers.has_rank_0_exited, self._is_store_lost)
            if limits.lost_s is not None:
                self._heartbeats = Heartbeats(self._name, rank, size, limits.lost_s)
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
        for thread in threading.enumerate():
            if isinstance(thread, _Thread) and not thread.watchdog._is_needed:
                thread.watchdog.stop()

    # ---------------------------------------------------------------- for the main thread

    @property
    def failure(self) -> RankFailure | None:
        """The failure that makes collectives impossible now; None: there is none."""
        return self._death or self._aborts.get(self._epoch)

    @property
    def is_unrecoverable(self) -> bool:
        """Whether the ranks can never regroup."""
        return self._death is not None or self._is_disconnected

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

    def waiting(
        self,
        name: str,
        *,
        is_engine_group: bool = True,
        is_data_transfer: bool = False,
        is_one_way: bool = False,
    ) -> AbstractContextManager[None]:
        """Context in which this thread waits for other ranks. See `Wait`.

        Raises:
            PeerAbortedError: Another rank, or this one, has failed.
            DesynchronizedError: Another rank does not join.
        """
        if self._death is not None or self._aborts:
            self.raise_if_failed()
        wait = Wait(name, time.monotonic(), is_engine_group, is_data_transfer, is_one_way)
        return self._waits.announced(wait, partial(self._raise_cause, name))

    def _raise_cause(self, name: str, error: RuntimeError) -> None:
        """Raises the cause of a failed wait for `name`, if it is not `error` itself."""
        if isinstance(error, (PeerAbortedError, torch.OutOfMemoryError, torch.AcceleratorError)):
            return
        may_be_transport = _may_be_transport_error(error)
        if may_be_transport:  # it may arrive before the report of its cause
            self.wait_for_failure()
        self.raise_if_failed(error)
        if may_be_transport:
            raise self._desync_error(name, error) from error
        # else an error of this rank alone, such as one of pickling

    def _desync_error(self, name: str, error: RuntimeError) -> DesynchronizedError:
        return DesynchronizedError(
            f"rank {self._rank} waited for {name} without success ({summary(error)}): the call "
            "itself is wrong, or the other ranks did not reach the same point. Every rank must run "
            "forward and backward together, with equally many batches. In stage 3 this includes a "
            "forward that generates a sample or an image: it must not run under `if rank == 0`.\n"
            f"{DESYNC_HINT}"
        )

    @property
    def is_waiting(self) -> bool:
        """Whether this thread is inside `waiting`."""
        return self._waits.is_announced

    def raise_if_failed(self, cause: BaseException | None = None) -> None:
        """Raises the PeerAbortedError of the current failure, if there is one."""
        failure = self.failure
        if failure is not None:
            raise self._own_error or PeerAbortedError(self._explain(failure)) from cause

    def _explain(self, failure: RankFailure) -> str:
        if failure.rank == self._rank:
            return f"rank {self._rank} has already failed: {failure.text}"
        return f"rank {self._rank} stops because {failure.text}"

    def explain(self, error: BaseException) -> None:
        """Prints the cause if `error` does not name it, such as a closed connection."""
        if _is_transport_error(error):
            self.wait_for_failure()
        failure = self.failure
        if failure is not None and failure.rank != self._rank and failure.text not in str(error):
            _print_now(self._explain(failure))

    def wait_for_failure(self, seconds: float = _CONFIRM_S) -> None:
        """Waits for a failure report that may be on its way, after a connection was closed."""
        polls_s = 4 * poll_interval_s(self._size)
        until = time.monotonic() + seconds + polls_s
        with self._waits.after_failed_wait():
            while self.failure is None and self._is_running():
                if (lost_at := self._store_lost_at) is not None:
                    until = max(until, lost_at + _STORE_CONFIRM_S + polls_s)
                if time.monotonic() > until:
                    return
                self._run_in_thread(lambda: None)
                time.sleep(0.02)

    def abort_desynchronized(self, error: DesynchronizedError) -> None:
        """Like `abort`, for an error that every rank detects and raises in its current wait."""
        self._own_error = error
        self.abort(error)

    def abort(self, error: BaseException | None) -> None:
        """Ends the other ranks' waits for this rank with an error. Does not wait for them."""
        if error is not None and _is_transport_error(error):
            self.wait_for_failure()  # another rank is the cause
        if self.failure is not None:
            return
        text = "stopped" if error is None else f"raised {summary(error)}"
        self._run_in_thread(
            partial(self._append, {"kind": "abort", "text": f"rank {self._rank} {text}"})
        )

    def wait_for_same_error(self, error: BaseException | None) -> None:
        """Before `abort`: gives the other ranks a moment to raise the same error on their own.

        All ranks may raise the same error; a slower rank must not be stopped before it does.
        """
        is_own = isinstance(error, Exception) and not isinstance(error, DesynchronizedError)
        if error is None or not is_own or _is_transport_error(error):
            return
        key, until = f"{self._name}/raised/{self._epoch}", time.monotonic() + _SAME_ERROR_S
        with self._waits.after_failed_wait():
            num_raised = self._run_in_thread(partial(self._count, key, 1))
            while self.failure is None and num_raised is not None and num_raised < self._size:
                if time.monotonic() > until:
                    return
                time.sleep(0.02)
                num_raised = self._run_in_thread(partial(self._count, key, 0))

    def first_with(self, name: str) -> int | None:
        """Returns the rank that was the first to call this with `name`; None: it is not known."""
        return self._run_in_thread(partial(self._claim, f"{self._name}/{name}/{self._epoch}"))

    def regroup(self, deadline: timedelta) -> bool:
        """After `abort`: waits until every rank has called this, without process groups.

        Returns:
            Whether all ranks called in time; the same on every rank that calls.
        """
        if not self._is_running() or self.is_unrecoverable:
            # So that no other rank waits for this one.
            self._run_in_thread(partial(self._decide_regroup, self._epoch, 0.0))
            return False
        epoch, until = self._epoch, time.monotonic() + deadline.total_seconds()
        wait = Wait("the other ranks to regroup", time.monotonic())
        with self._waits.announced(wait):
            outcome = self._run_in_thread(partial(self._arrive, epoch))
            while outcome is None and self._is_running():
                time.sleep(0.02)
                outcome = self._run_in_thread(partial(self._decide_regroup, epoch, until))
        if outcome != _ALL_CAME or self.is_unrecoverable:
            return False
        self._failed_at = self._own_error = None
        self._epoch += 1
        self._run_in_thread(self._on_failure)  # a faster rank may have failed again already
        return True

    def finish(self) -> None:
        """Ends this rank's part: it no longer needs the others, nor they this rank."""
        self._run_in_thread(self._mark_left)
        self._is_needed = False

    def end_with_process(self) -> None:
        """Reports that this rank's script is over to the ranks that wait for it, and stops."""
        error = getattr(sys, "last_value", None)  # the exception that ended the script
        end = _REACHED_END if error is None else f"raised {summary(error)}"
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
        if not self._waits and (not dist.is_initialized() or dist.group.WORLD is not self._world):
            self._is_stopped = True
            return
        polls = (
            self._poll_store,
            self._poll_heartbeats,
            self._poll_peers,
            self._poll_main,
        )
        for poll in polls:
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

    def _poll_heartbeats(self) -> None:
        if self._heartbeats is None or self._store is None or not self._is_needed:
            return
        text, rank = self._heartbeats.poll(self._store), self._heartbeats.next_rank
        if text is not None and self.failure is None and not self._has_left(rank):
            self._record_death(rank, text)
            self._append({"kind": "dead", "rank": rank, "text": text})

    def _is_store_lost(self, place: str, seconds: float) -> bool:
        """Returns whether a request to the store has waited too long; reports a long wait once.

        Without the store the other ranks cannot get this rank's status, so it logs that itself.
        """
        limits = self._limits
        if limits.report_s is None or seconds <= limits.report_s:
            self._is_silence_reported = False
        elif not self._is_silence_reported:
            self._is_silence_reported = True
            head = (
                f"the ranks' store ({place}) has not answered rank {self._rank} for {seconds:.0f} "
                "s: its process is stopped, or its node cannot be reached. What this rank is doing:"
            )
            _log.warning("%s", "\n  ".join([head, *self._reports.status().lines()]))
        if limits.lost_s is None or seconds <= limits.lost_s or not self._is_needed:
            return False
        if self.failure is None:
            self._record_death(
                None,
                f"the ranks' store ({place}) has not answered for {limits.lost_s:g} s "
                "(heartbeat_timeout_s): its process is stopped, or its node cannot be reached",
            )
        return True

    def _drop_store(self) -> None:
        store, self._store = self._store, None
        if isinstance(store, HostedStore):
            store.close()

    def _lose_store(self) -> None:
        if self._store_lost_at is None:
            self._drop_store()
            self._store_lost_at = time.monotonic()
        if not self._is_needed and not self._waits:
            self._is_stopped = True

    # ---------------------------------------------------------------- shared log

    def _append(self, entry: LogEntry) -> None:
        """Appends an entry to the shared log, and reads the log up to it."""
        mine = json.dumps({**entry, "epoch": self._epoch, "by": self._rank})
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
            if kind == "abort":
                failure = RankFailure(by if entry.get("is_own", True) else None, entry["text"])
                if self._aborts.setdefault(entry["epoch"], failure) is failure:
                    self._on_failure()
            elif kind == "dead":
                self._record_death(entry["rank"], entry["text"])
        except (ValueError, KeyError, TypeError):
            log_unreadable(text)
            return None
        if kind == "report":
            for answer in self._reports.answer(self._store, number, entry):
                self._append(answer)
        return dict(entry)

    def _record_death(self, rank: int | None, text: str) -> None:
        if self._death is None:
            before = self._aborts.get(self._epoch)
            if before is not None and before.rank == rank:
                text = before.text
            self._death = RankFailure(rank, text)
            self._on_failure()

    def _on_failure(self) -> None:
        """Ends all waits in the engine after a failure of the current epoch."""
        if self.failure is None:
            return  # it belongs to a later epoch
        self._failed_at = time.monotonic()
        with self._lock:
            for known in self._failure_callbacks:
                if (callback := known()) is not None:
                    callback()

    # ---------------------------------------------------------------- regroup and exits

    def _count(self, key: str, num: int) -> int | None:
        """Adds `num` to the counter `key` and returns the sum; None: the store is lost."""
        return None if self._store is None else int(self._store.add(key, num))

    def _claim(self, key: str) -> int | None:
        return (
            None if self._store is None else int(self._store.compare_set(key, "", str(self._rank)))
        )

    def _arrive(self, epoch: int) -> str | None:
        if self._store is None:
            return _LOST
        self._store.add(f"{self._name}/come/{epoch}", 1)
        return None

    def _decide_regroup(self, epoch: int, until: float) -> str | None:
        """Returns the outcome of the regroup, if any; the first rank to see one decides for all."""
        if self._store is None:
            return _LOST
        decision = None
        if self.is_unrecoverable or time.monotonic() > until:
            decision = _LOST
        elif int(self._store.get(f"{self._name}/come/{epoch}")) >= self._size:
            decision = _ALL_CAME
        key = f"{self._name}/regroup/{epoch}"
        if decision is not None:
            return str(self._store.compare_set(key, "", decision).decode())
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def _mark_left(self, end: str | None = None) -> None:
        """Marks this rank as finished: no rank waits for it. `end`: how its script has ended."""
        self._decide_regroup(self._epoch, 0.0)
        if self._store is None:
            return
        if end is not None:
            self._record_exits(self._exit_log.append(self._store, f"{self._rank} {end}"))
        if end is not None or self.failure is None:
            self._store.set(f"{self._name}/left/{self._rank}", "")

    def _record_exits(self, lines: Iterable[str]) -> None:
        for line in lines:
            rank, _, end = line.partition(" ")
            if rank.isdecimal():
                self._exits.setdefault(int(rank), end)
            else:
                log_unreadable(line)

    def _has_left(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"{self._name}/left/{rank}"])

    def _poll_peers(self) -> None:
        """Reports processes of this node that have ended while other ranks need them."""
        now, wait, exited = time.monotonic(), self._waits.main_thread_wait(), self._peers.exited()
        if not self._is_needed and not self._waits and wait is None:
            return
        if self._store is not None and (exited or wait is not None):
            self._record_exits(self._exit_log.read(self._store))
        for peer in exited:
            how = peer.status or self._describe_exit(peer.pid)
            if how is None and now - peer.found_at < _CONFIRM_S:
                continue
            has_left = self._has_left(peer.rank)
            self._peers.drop(peer)
            end = self._exits.get(peer.rank)
            if end is None or (end == _REACHED_END and how not in (None, describe_exit(0))):
                end = self._exits[peer.rank] = how or "has died"
            if not has_left:
                text = f"rank {peer.rank} {end}"
                self._record_death(peer.rank, text)
                self._append({"kind": "dead", "rank": peer.rank, "text": text})
        if wait is None or self.failure is not None:
            return
        if self._store_lost_at is not None:
            if now - self._store_lost_at > _STORE_CONFIRM_S:
                self._record_death(
                    0, "rank 0, or the launcher that held the ranks' store, has died"
                )
        elif wait.has_failed or (not wait.is_one_way and now - wait.since > _END_CONFIRM_S):
            for rank, end in self._exits.items():
                if wait.needs(rank):
                    self._record_death(rank, f"rank {rank} {end}")

    # ---------------------------------------------------------------- the main thread's waits

    def _poll_main(self) -> None:
        wait = self._waits.main_thread_wait()
        failed_at, failure = self._failed_at, self.failure  # read once: a regroup resets them
        if failed_at is not None and failure is not None:
            if wait is not None and not wait.is_engine_group and wait.needs(failure.rank):
                self._wake_main(wait, failure, failed_at)
            return
        if self._store is not None:
            for entry in self._reports.poll(self._store, wait):
                self._append(entry)

    def _wake_main(self, wait: Wait, failure: RankFailure, failed_at: float) -> None:
        """Ends a wait outside the engine's groups, which a failure does not end by default."""
        must_regroup = self._can_regroup and self._is_needed
        is_dead = failure is self._death
        if not (must_regroup or is_dead or wait.since < failed_at):
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
            _print_now(f"{self._explain(failure)}; it still waits in {wait.name}, and exits now.")
            os._exit(1)


class _Thread(threading.Thread):
    """Thread of a watchdog; `stop_finished` finds the watchdogs of this process by it."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(target=watchdog.run, daemon=True, name="lightning-zero-watchdog")
        self.watchdog = watchdog


def next_watchdog_name(rank: int) -> str:
    """Returns a name for the watchdogs that all ranks make at the same point; sends nothing."""
    if world_size() == 1 or dist.get_backend() == "fake":
        return ""  # there is nothing to watch
    store = dist.distributed_c10d._get_default_store()
    return f"run-{store.add(f'lightning_zero/runs/{rank}', 1)}"


def _may_be_transport_error(error: BaseException) -> bool:
    """Whether torch may have raised the error because another rank is gone or does not answer.

    gloo's errors have no type of their own.
    """
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _is_transport_error(error: BaseException) -> bool:
    """As `_may_be_transport_error`, for an error that was raised anywhere in the program."""
    if isinstance(error, dist.DistError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return type(error) is RuntimeError and any(map(is_collective_call, frames))


def summary(error: BaseException) -> str:
    """Returns the type and the first line of an exception."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0][:500]}"


def _print_now(text: str) -> None:
    """Prints at once, because this process may end next."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)


def end_at_exit(owner: Any) -> None:
    """Calls `owner.end_with_process` when this process ends, unless `owner` has been freed.

    A thread that runs torch code while the interpreter ends would crash it.
    """
    reference = weakref.ref(owner)

    def end() -> None:
        if (alive := reference()) is not None:
            alive.end_with_process()

    atexit.register(end)
    # At exit, the finalizer must not run before `end`.
    weakref.finalize(owner, atexit.unregister, end).atexit = False
