"""Who has failed, and what everybody is doing: a thread in each rank, on a store of its own.

[Note: Shared log] The ranks share a log in the store that they have met by, a `StoreLog`, so that all ranks
read the same entries in the same order:

    abort    a rank has raised an exception
    dead     the process of a rank has ended while others need it
    report   a rank waits, and asks what every rank is doing

A watchdog needs neither its main thread, which may wait for ever in a collective, nor the
connections of the rank that failed: processes that this one has forked, such as DataLoader workers,
hold them open. It hears of an exception from the log, and of the end of a process of its own node
from the kernel. A rank that is silent, because its process is stopped or its node cannot be
reached, is lost only where the user has set a limit; then heartbeats in the store show it. Then it
cuts the connections of its own rank, so that whoever waits on them fails
and says why.
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
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.comm.peers import (
    Heartbeats,
    HostedStore,
    Peers,
    StoreLog,
    connect_to_store,
    describe_exit,
    log_unreadable,
)
from lightning_zero.comm.reports import LogEntry, Reports, Wait, Waits
from lightning_zero.comm.world import WaitLimits, disconnect_groups, world_size
from lightning_zero.layout.rounds import DESYNC_HINT

__all__ = [
    "PeerAbortedError",
    "DesynchronizedError",
    "RankFailure",
    "Watchdog",
    "end_at_exit",
    "next_watchdog_name",
    "summary",
]

_POLL_S = 0.25
_POLL_AT_FIRST_S = 0.05  # while the processes of this node find each other
_AT_FIRST_S = 2.0
_STORE_TIMEOUT_S = 3.0  # the client's own does not end every request
_CONFIRM_S = 1.0  # from the end of a process until others are told, where nobody knows how
_STORE_CONFIRM_S = 3.0  # from the end of the store
_END_CONFIRM_S = 3.0  # of a wait for a rank whose script is over: what it has sent may still come
_ALIKE_S = 1.0  # from an exception of one rank until the others are told, which may raise it too
_SETTLE_S = 2.0  # from a verdict until collectives that are not the engine's are cut, too
_LAST_RESORT_S = 4.0  # from a verdict until a process that cannot be woken is ended
_AT_END = "has come to the end of its script"
_TOGETHER, _LOST = "together", "lost"  # how a regroup ends

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class DesynchronizedError(RuntimeError):
    """The ranks are not together, whatever this one computes."""


class PeerAbortedError(DesynchronizedError):
    """Another rank raised an exception or has died, which is what to read."""


@dataclass(frozen=True)
class RankFailure:
    """Why the ranks cannot go on together."""

    rank: int | None  # who is the cause; None: nobody alone
    text: str  # a clause with its subject, such as "rank 1 was killed by SIGKILL"


class Watchdog:
    """Watches the other ranks for the thread that makes it.

    Every rank makes one, with the same name, and ends it with `stop`, or with the process. Without
    other ranks there is nothing to watch.

    Args:
        name: Of its keys in the store.
        rank: Of this process.
        size: Number of ranks.
        limits: How long a rank may keep others waiting; None: the defaults of `WaitLimits`.
        can_regroup: Until `leave`, the ranks come together after a failure in `regroup` or not at all, so
            that nobody may wait elsewhere. Otherwise collectives on other groups that begin after
            a failure are left alone, as long as all ranks live.
        describe_exit: Tells how a process has ended that this one has started, such as "ended with exit
            code 3"; None where it does not know.
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
        self._reports = Reports(self._name, rank, size, limits.report_s, self._waits)
        self._can_regroup = can_regroup
        self._describe_exit = describe_exit
        # Weak: an engine that nobody closes goes all the same.
        self._failure_callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._lock = threading.Lock()  # of `_failure_callbacks`, and while they are called
        # Where the ranks stand.
        self._epoch = 0  # number of the rallies that have brought all together
        self._aborts: dict[int, RankFailure] = {}  # the first one of each epoch
        self._death: RankFailure | None = None
        self._own_error: DesynchronizedError | None = None
        self._judged_at: float | None = None
        self._is_disconnected = False  # nothing collective is possible on any group of this process
        self._is_needed = True  # the others must not go
        # Of the thread.
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_over = False
        self._has_logged_failure = False
        self._store: Any = None  # None: there is none any more
        self._world: Any = None  # the default group, with which the watch ends
        self._store_gone_at: float | None = None
        self._is_silence_reported = False  # of the store, in the request under way
        self._heartbeats: Heartbeats | None = None  # where a silent rank is lost after a time
        self._news = StoreLog(f"{self._name}/news")
        self._exit_log = StoreLog("lightning_zero/ends")  # of all runs
        self._ends: dict[int, str] = {}  # how ranks have ended that nobody missed
        self._peers: Peers  # where there is a thread
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
        """A copy, in another process say, watches nobody."""
        return partial(Watchdog, "", rank=self._rank, size=1), ()

    @staticmethod
    def stop_finished() -> None:
        """Ends the watches of runs that are over, of whatever Trainer: the next one has its own."""
        for thread in threading.enumerate():
            if isinstance(thread, _Thread) and not thread.watchdog._is_needed:
                thread.watchdog.stop()

    # ---------------------------------------------------------------- for the main thread

    @property
    def failure(self) -> RankFailure | None:
        """Why nothing collective is possible at this moment, if so."""
        return self._death or self._aborts.get(self._epoch)

    @property
    def is_unrecoverable(self) -> bool:
        """Whether the ranks can never come together again."""
        return self._death is not None or self._is_disconnected

    def add_failure_callback(self, callback: Callable[[], None]) -> None:
        """From now on `callback`, a method, is called at a verdict, from another thread.

        It ends every wait, and is held no longer than its object lives.
        """
        with self._lock:
            self._failure_callbacks.append(weakref.WeakMethod(callback))

    def remove_failure_callback(self, callback: Callable[[], None]) -> None:
        """Not any more. Waits for a call that is under way."""
        with self._lock:
            self._failure_callbacks = [
                known for known in self._failure_callbacks if known() not in (None, callback)
            ]

    def set_status_source(self, describe: Callable[[], str]) -> None:
        """From now on `describe`, a method, tells what the engine does, from another thread."""
        self._reports.describe = weakref.WeakMethod(describe)

    @contextmanager
    def waiting(
        self,
        name: str,
        *,
        is_engine_group: bool = True,
        is_data_transfer: bool = False,
        is_one_way: bool = False,
    ) -> Iterator[None]:
        """Around waiting for other ranks: see `Wait`.

        Raises:
            PeerAbortedError: One of them, or this one, has failed.
            DesynchronizedError: One does not come.
        """
        if self._death is not None or self._aborts:
            self.raise_if_failed()
        wait = Wait(name, time.monotonic(), is_engine_group, is_data_transfer, is_one_way)
        with self._waits.announced(wait):
            try:
                yield
            except (PeerAbortedError, torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except RuntimeError as error:
                if _is_of_connection(error):  # which is seen before the news of its cause
                    self.wait_for_failure()
                    self.raise_if_failed(error)
                    raise self._waited_in_vain(name) from error
                self.raise_if_failed(error)
                raise  # what was to be sent could not be pickled, say

    def _waited_in_vain(self, name: str) -> DesynchronizedError:
        return DesynchronizedError(
            f"rank {self._rank} waited in vain for {name}: the other ranks did not come to the "
            "same point. Every rank must run forward and backward together, with equally many "
            "batches (in stage 3 also a forward for a sample or an image, which `if rank == 0` "
            f"would run on one rank alone).\n{DESYNC_HINT}"
        )

    @property
    def is_waiting(self) -> bool:
        """Whether this thread is inside of `waiting`."""
        return self._waits.is_announced

    def raise_if_failed(self, cause: BaseException | None = None) -> None:
        """Raises the PeerAbortedError of a verdict, if there is one."""
        failure = self.failure
        if failure is not None:
            raise self._own_error or PeerAbortedError(self._explain(failure)) from cause

    def _explain(self, failure: RankFailure) -> str:
        if failure.rank == self._rank:
            return f"rank {self._rank} has ended with an exception before: {failure.text}"
        return f"rank {self._rank} stops because {failure.text}"

    def explain(self, error: BaseException) -> None:
        """Says why this rank fails, where `error` does not: a connection was cut."""
        if _is_of_connection(error):
            self.wait_for_failure()
        failure = self.failure
        if failure is not None and failure.rank != self._rank and failure.text not in str(error):
            _say(self._explain(failure))

    def wait_for_failure(self, seconds: float = _CONFIRM_S + 4 * _POLL_S) -> None:
        """Waits for news that may be on its way: a connection was closed."""
        until = time.monotonic() + seconds
        with self._waits.after_failed_wait():
            while self.failure is None and self._is_on_watch():
                if (exited_at := self._store_gone_at) is not None:
                    until = max(until, exited_at + _STORE_CONFIRM_S + 4 * _POLL_S)
                if time.monotonic() > until:
                    return
                self._order(lambda: None)
                time.sleep(0.02)

    def abort_desynchronized(self, error: DesynchronizedError) -> None:
        """As `abort`, of what all ranks find out alike: this one raises it where it waits."""
        self._own_error = error
        self.abort(error)

    def abort(self, error: BaseException | None) -> None:
        """Makes the other ranks fail where they wait for this one. Does not wait for them."""
        if error is not None and _is_of_connection(error):
            self.wait_for_failure()  # another rank is the cause
        if self.failure is not None:
            return
        text = "stopped" if error is None else f"raised {summary(error)}"
        self._order(partial(self._append, {"kind": "abort", "text": f"rank {self._rank} {text}"}))

    def wait_for_same_error(self, error: BaseException | None) -> None:
        """Before `abort`: gives the other ranks a moment to raise by themselves what this one has.

        All ranks may raise alike, and one that comes later must not be stopped before it does.
        """
        is_own = isinstance(error, Exception) and not isinstance(error, DesynchronizedError)
        if error is None or not is_own or _is_of_connection(error):
            return
        key, until = f"{self._name}/raised/{self._epoch}", time.monotonic() + _ALIKE_S
        with self._waits.after_failed_wait():
            num_raised = self._order(partial(self._count, key, 1))
            while self.failure is None and num_raised is not None and num_raised < self._size:
                if time.monotonic() > until:
                    return
                time.sleep(0.02)
                num_raised = self._order(partial(self._count, key, 0))

    def regroup(self, deadline: timedelta) -> bool:
        """After `abort`: waits until every rank has come here, also without any connection.

        Returns whether all came in time: the same on every rank that comes.
        """
        if not self._is_on_watch() or self.is_unrecoverable:
            self._order(partial(self._decide, self._epoch, 0.0))  # nobody shall wait there
            return False
        epoch, until = self._epoch, time.monotonic() + deadline.total_seconds()
        wait = Wait("the other ranks to come together again", time.monotonic())
        with self._waits.announced(wait):
            outcome = self._order(partial(self._come, epoch))
            while outcome is None and self._is_on_watch():
                time.sleep(0.02)
                outcome = self._order(partial(self._decide, epoch, until))
        if outcome != _TOGETHER or self.is_unrecoverable:
            return False
        self._judged_at = self._own_error = None
        self._epoch += 1
        self._order(self._judge)  # a faster rank may have failed again already
        return True

    def leave(self) -> None:
        """This rank needs the others no more, nor they it, unless one waits all the same."""
        self._order(self._depart)
        self._is_needed = False

    def end_with_process(self) -> None:
        """The script of this rank is over; those that wait for it learn of it."""
        error = getattr(sys, "last_value", None)  # has ended it
        end = _AT_END if error is None else f"raised {summary(error)}"
        self._order(partial(self._depart, end))
        self.stop()

    def stop(self) -> None:
        """Ends the watch. Stopping twice is harmless."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._is_over = True
            self._peers.wake()
            thread.join(_STORE_TIMEOUT_S)

    def _is_on_watch(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _order(self, action: Callable[[], _T]) -> _T | None:
        """Lets the thread do it, for the store is its own; None where it cannot, in time."""
        if threading.current_thread() is self._thread:
            return action()
        if not self._is_on_watch():
            return None
        answer: list[_T] = []
        is_done = threading.Event()

        def do() -> None:
            try:
                answer.append(action())
            finally:
                is_done.set()

        self._orders.put(do)
        self._peers.wake()
        is_done.wait(_STORE_TIMEOUT_S)
        return answer[0] if answer else None

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        """Watches, until `stop`; in a thread of its own."""
        try:
            found_by = time.monotonic() + _AT_FIRST_S
            while not self._is_over:
                self._poll()
                self._peers.wait(_POLL_S if time.monotonic() > found_by else _POLL_AT_FIRST_S)
        except Exception:  # it must not take the process with it
            if not sys.is_finalizing():
                _log.exception("rank %d: the watchdog has failed.", self._rank)
        finally:
            self._drop_store()
            self._peers.close()
            self._world = None  # its connections are no more than needed

    def _poll(self) -> None:
        if not self._waits and (not dist.is_initialized() or dist.group.WORLD is not self._world):
            self._is_over = True
            return
        looks = (
            self._poll_store,
            self._poll_heartbeats,
            self._poll_peers,
            self._poll_main,
        )
        for look in looks:
            try:
                look()
            except RuntimeError:  # the process that has the store is gone
                self._lose_store()
            except Exception:  # the watch goes on: nothing else would end a wait
                if not sys.is_finalizing() and not self._has_logged_failure:
                    self._has_logged_failure = True
                    _log.exception("rank %d: a look of the watchdog has failed.", self._rank)

    def _poll_store(self) -> None:
        while not self._orders.empty():
            self._orders.get()()
        if self._store is not None:
            for text in self._news.read(self._store):
                self._take(text)
            self._peers.find(self._store)

    def _poll_heartbeats(self) -> None:
        if self._heartbeats is None or self._store is None or not self._is_needed:
            return
        text, rank = self._heartbeats.poll(self._store), self._heartbeats.next_rank
        if text is not None and self.failure is None and not self._has_left(rank):
            self._bury(rank, text)
            self._append({"kind": "dead", "rank": rank, "text": text})

    def _is_store_lost(self, place: str, seconds: float) -> bool:
        """Whether a request to the store has waited too long; reports a long wait once.

        Without the store no other rank learns what this one is doing, so it reports that itself.
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
            self._bury(
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
        if self._store_gone_at is None:
            self._drop_store()
            self._store_gone_at = time.monotonic()
        if not self._is_needed and not self._waits:
            self._is_over = True

    # ---------------------------------------------------------------- news

    def _append(self, entry: LogEntry) -> None:
        """Appends to the log, and reads it up to there."""
        mine = json.dumps({**entry, "epoch": self._epoch, "by": self._rank})
        if self._store is None:
            return
        for found in self._news.append(self._store, mine):
            news = self._take(found)
            if news is not None and entry["kind"] == news["kind"] == "report":
                return  # also if another rank has asked the same

    def _take(self, text: str) -> LogEntry | None:
        """Does what an entry of the log, just read, calls for; None: it is not readable."""
        number = self._news.num_read - 1
        try:
            news = json.loads(text)
            kind, by = news["kind"], news["by"]
            if kind == "abort":
                failure = RankFailure(by if news.get("is_own", True) else None, news["text"])
                if self._aborts.setdefault(news["epoch"], failure) is failure:
                    self._judge()
            elif kind == "dead":
                self._bury(news["rank"], news["text"])
        except (ValueError, KeyError, TypeError):
            log_unreadable(text)
            return None
        if kind == "report":
            for entry in self._reports.answer(self._store, number, news):
                self._append(entry)
        return dict(news)

    def _bury(self, rank: int | None, text: str) -> None:
        if self._death is None:
            before = self._aborts.get(self._epoch)
            if before is not None and before.rank == rank:
                text = before.text
            self._death = RankFailure(rank, text)
            self._judge()

    def _judge(self) -> None:
        """There is a verdict: whoever waits in the engine is woken."""
        if self.failure is None:
            return  # of an epoch to come
        self._judged_at = time.monotonic()
        with self._lock:
            for known in self._failure_callbacks:
                if (callback := known()) is not None:
                    callback()

    # ---------------------------------------------------------------- rallies and ends

    def _count(self, key: str, num: int) -> int | None:
        """Ranks that have come to `key`, with `num` that do so now."""
        return None if self._store is None else int(self._store.add(key, num))

    def _come(self, epoch: int) -> str | None:
        if self._store is None:
            return _LOST
        self._store.add(f"{self._name}/come/{epoch}", 1)
        return None

    def _decide(self, epoch: int, until: float) -> str | None:
        """How the regroup has ended; the first rank to see that decides for all."""
        if self._store is None:
            return _LOST
        wish = None
        if self.is_unrecoverable or time.monotonic() > until:
            wish = _LOST
        elif int(self._store.get(f"{self._name}/come/{epoch}")) >= self._size:
            wish = _TOGETHER
        key = f"{self._name}/regroup/{epoch}"
        if wish is not None:
            return str(self._store.compare_set(key, "", wish).decode())
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def _depart(self, end: str | None = None) -> None:
        """Nobody shall wait for this rank in a regroup, nor miss it; `end`: how its script ends."""
        self._decide(self._epoch, 0.0)
        if self._store is None:
            return
        if end is not None:
            self._note_ends(self._exit_log.append(self._store, f"{self._rank} {end}"))
        if end is not None or self.failure is None:
            self._store.set(f"{self._name}/left/{self._rank}", "")

    def _note_ends(self, lines: Iterable[str]) -> None:
        for line in lines:
            rank, _, end = line.partition(" ")
            if rank.isdecimal():
                self._ends.setdefault(int(rank), end)
            else:
                log_unreadable(line)

    def _has_left(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"{self._name}/left/{rank}"])

    def _poll_peers(self) -> None:
        """Tells all of a process of this node that has ended before its time."""
        now, wait, gone = time.monotonic(), self._waits.main_thread_wait(), self._peers.exited()
        if not self._is_needed and not self._waits and wait is None:
            return
        if self._store is not None and (gone or wait is not None):
            self._note_ends(self._exit_log.read(self._store))
        for peer in gone:
            how = peer.how or self._describe_exit(peer.pid)
            assert peer.exited_at is not None
            if how is None and now - peer.exited_at < _CONFIRM_S:
                continue
            has_left = self._has_left(peer.rank)
            self._peers.drop(peer)
            end = self._ends.get(peer.rank)
            if end is None or (end == _AT_END and how not in (None, describe_exit(0))):
                end = self._ends[peer.rank] = how or "has died"
            if not has_left:
                text = f"rank {peer.rank} {end}"
                self._bury(peer.rank, text)
                self._append({"kind": "dead", "rank": peer.rank, "text": text})
        if wait is None or self.failure is not None:
            return
        if self._store_gone_at is not None:
            if now - self._store_gone_at > _STORE_CONFIRM_S:
                self._bury(0, "rank 0, or the launcher that held the ranks' store, has died")
        elif wait.has_failed or (not wait.is_one_way and now - wait.since > _END_CONFIRM_S):
            for rank, end in self._ends.items():
                if wait.needs(rank):
                    self._bury(rank, f"rank {rank} {end}")

    # ---------------------------------------------------------------- the main thread's waits

    def _poll_main(self) -> None:
        wait = self._waits.main_thread_wait()
        judged_at, failure = self._judged_at, self.failure  # a regroup ends them meanwhile
        if judged_at is not None and failure is not None:
            if wait is not None and not wait.is_engine_group and wait.needs(failure.rank):
                self._wake_main(wait, failure, judged_at)
            return
        if self._store is not None:
            for entry in self._reports.poll(self._store, wait):
                self._append(entry)

    def _wake_main(self, wait: Wait, failure: RankFailure, judged_at: float) -> None:
        """The engine's own groups are cut; a wait elsewhere will never end either."""
        is_together_or_not = self._can_regroup and self._is_needed
        is_dead = failure is self._death
        if not (is_together_or_not or is_dead or wait.since < judged_at):
            return
        waited_s = time.monotonic() - max(judged_at, wait.since)
        if waited_s > _SETTLE_S and not self._is_disconnected:
            self._is_disconnected = True
            disconnect_groups(list(dist.distributed_c10d._world.pg_map))
        if waited_s > _LAST_RESORT_S:
            # In the store, say, while a group is made: nothing wakes it before its timeout.
            _say(f"{self._explain(failure)}; it waits in {wait.name}, and is ended.")
            os._exit(1)


class _Thread(threading.Thread):
    """Is itself the record of the watches of this process: see `stop_finished`."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(target=watchdog.run, daemon=True, name="lightning-zero-watchdog")
        self.watchdog = watchdog


def next_watchdog_name(rank: int) -> str:
    """Of a watchdog that every rank makes at the same point, before they could agree on one."""
    if world_size() == 1 or dist.get_backend() == "fake":
        return ""  # there is nothing to watch
    store = dist.distributed_c10d._get_default_store()
    return f"run-{store.add(f'lightning_zero/runs/{rank}', 1)}"


def _is_of_connection(error: BaseException) -> bool:
    """Whether it tells only that another rank is not there, or does not come."""
    words = ("gloo", "NCCL", "onnection", "pair closure", "imed out", "imeout")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def summary(error: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0][:500]}' if lines else ''}"


def _say(text: str) -> None:
    """At once: this process may end next."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)


def end_at_exit(owner: Any) -> None:
    """Calls `owner.end_with_process` when this process ends, if it has not gone before.

    A thread that is in torch while the interpreter ends would crash it.
    """
    reference = weakref.ref(owner)

    def end() -> None:
        if (alive := reference()) is not None:
            alive.end_with_process()

    atexit.register(end)
    weakref.finalize(owner, atexit.unregister, end).atexit = False  # else it may come first
