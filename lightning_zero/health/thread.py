"""The watchdogs' thread, one in a process: it reads the log of the ranks and ends what must end.

Silence alone ends nothing: a process that is stopped may come back, and a collective that waits for
it ends at its timeout. A node that cannot be reached for ten minutes counts as dead.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from lightning_zero.health.exits import END_OF_SCRIPT, Exits
from lightning_zero.health.failures import summary
from lightning_zero.health.link import Entry, Link, node_of_process
from lightning_zero.health.meetings import Meetings
from lightning_zero.health.reports import Reports
from lightning_zero.health.waits import RankStatus, Wait, present_wait
from lightning_zero.health.world import end_at_exit

__all__ = ["ANSWER_S", "WatchThread"]

ANSWER_S = 3.0  # for this rank to read what it has sent itself
_POLL_S = 0.25
_EXIT_POLL_S = 0.02  # an exit code can be read for a moment only

_log = logging.getLogger(__name__)


class _Watchdog(Protocol):
    """What the thread calls of a `Watchdog`."""

    num_issued: int

    def take(self, entry: Entry) -> None: ...

    def look(self) -> None: ...

    def moment(self) -> str: ...

    def finish(self) -> None: ...


class WatchThread(threading.Thread):
    """Watches the other ranks of the default process group, until that ends.

    Args:
        rank: Rank of this process.
        size: Number of ranks.

    Attributes:
        changed: Guards the state of all watchdogs; notified when it may have changed.
        exits: How processes of other ranks have ended.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(daemon=True, name="lightning-zero-watchdog")
        self.rank = rank
        self.changed = threading.Condition(threading.RLock())
        self._main = threading.get_ident()  # the thread that runs the user's code
        self._watchdogs: dict[str, _Watchdog] = {}
        self._num_named = 0  # watchdogs
        self._early: list[Entry] = []  # for watchdogs that this rank has not made yet
        self._reports = Reports(rank, size, self._status)
        self._meetings = Meetings(size)
        self._shall_end = False
        self._ends_with_process = False  # which then closes the connections
        self._has_ended = False
        self._logged: set[type] = set()  # errors of its own
        self._removed: deque[str] = deque()  # names of watchdogs
        self._world: Any = weakref.ref(dist.group.WORLD)  # with it its store ends
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"lightning_zero/links/{rank}", 1)
        self.exits = Exits(rank, node_of_process())
        self._link = Link(rank, store, f"lightning_zero/link/{number}")
        end_at_exit(self)

    @staticmethod
    def of_process(rank: int, size: int) -> WatchThread:
        """The thread of this process; a new one for a new process group. Collective."""
        for thread in threading.enumerate():
            if isinstance(thread, WatchThread):
                if thread._watches_world() and thread.is_watching:
                    return thread
                thread.stop()
        thread = WatchThread(rank, size)
        thread.start()
        return thread

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        """Watches until `stop`, or until the process group has ended."""
        text = "has left the process group"
        try:
            while not self._shall_end and self._watches_world():
                entries = self._link.read(_EXIT_POLL_S if self.exits.is_pending else _POLL_S)
                with self.changed:
                    self._look(entries)
                    self.changed.notify_all()
        except Exception:  # it must not end the process
            text = "has no watchdog any more"
            if not sys.is_finalizing():
                _log.exception("rank %d: the watchdog has failed.", self.rank)
        finally:
            if not self._ends_with_process:
                self.send({"kind": "end", "rank": self.rank, "text": text})
                self._link.close()
            with self.changed:
                self.exits.close()
                self._has_ended = True
                self.changed.notify_all()

    def _look(self, entries: Iterable[Entry]) -> None:
        """Acts on what has happened since the last look."""
        while self._removed:
            self._watchdogs.pop(self._removed.popleft(), None)
        actions: list[Callable[[], object]] = [lambda: self._send(self.exits.find())]
        actions += [watchdog.look for watchdog in self._watchdogs.values()]
        actions += [lambda: self._send(self._reports.poll(self.present_wait()))]
        actions[:0] = [partial(self._take, entry) for entry in entries]
        for action in actions:
            try:
                action()
            except Exception as error:  # keep watching: nothing else would end a wait
                if not sys.is_finalizing() and type(error) not in self._logged:
                    self._logged.add(type(error))
                    _log.exception("rank %d: a check of the watchdog has failed.", self.rank)

    def _take(self, entry: Entry) -> None:
        kind = entry["kind"]
        if kind in ("here", "closed", "end", "dead"):
            self.exits.take(entry)
        elif kind in ("long", "report", "status"):
            self._send(self._reports.take(entry, self.present_wait()))
        elif kind == "deadlock":
            for watchdog in self._watchdogs.values():
                watchdog.take(entry)
        elif kind in ("meet", "met"):
            self._send(self._meetings.take(entry))
        elif (named := self._watchdogs.get(entry["name"])) is not None:
            named.take(entry)
        elif int(entry["name"]) > self._num_named:
            self._early.append(entry)

    def _watches_world(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._world()

    def _status(self) -> RankStatus:
        wait = self.present_wait()
        watchdogs = list(self._watchdogs.values())
        own = self._watchdogs.get(wait.watchdog) if wait is not None else None
        moments = [own.moment()] if own else [watchdog.moment() for watchdog in watchdogs]
        moment = next(filter(None, moments), "")
        counts = {name: watchdog.num_issued for name, watchdog in self._watchdogs.items()}
        return RankStatus.of(self._main, wait, moment, counts)

    # ---------------------------------------------------------------- from any thread

    @property
    def is_watching(self) -> bool:
        """Whether the thread runs, and not in another process: this one may be a fork."""
        return self.is_alive() and not self._has_ended

    @property
    def is_main(self) -> bool:
        """Whether the thread that runs the user's code calls this."""
        return threading.get_ident() == self._main

    def present_wait(self) -> Wait | None:
        """What this process waits for."""
        return present_wait(self._main)

    def send(self, entry: Entry) -> None:
        """Appends an entry to the log of all ranks."""
        self._link.send(entry)

    def _send(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.send(entry)

    def wait_for(self, is_so: Callable[[], object], seconds: float) -> bool:
        """Waits until `is_so`, at most `seconds`; not at all in this thread, or if it has ended."""
        if threading.current_thread() is self or not self.is_watching:
            return bool(is_so())
        with self.changed:
            self.changed.wait_for(lambda: is_so() or not self.is_watching, seconds)
            return bool(is_so())

    def meet(self) -> str:
        """Comes to the next meeting of all ranks, and returns its name. See `has_met`."""
        meeting = self._meetings.next()
        self.send({"kind": "meet", "meeting": meeting})
        return meeting

    def has_met(self, meeting: str) -> bool:
        """Whether all ranks have come to a meeting; True without a thread, which cannot know."""
        return self._meetings.is_over(meeting) or not self.is_watching

    def add(self, watchdog: _Watchdog, describe_exit: Callable[[int], str | None] | None) -> str:
        """Adds a watchdog; returns its name, which is the same on every rank."""
        with self.changed:
            self._main = threading.get_ident()
            self._num_named += 1
            self._watchdogs[name := str(self._num_named)] = watchdog
            if describe_exit is not None:
                self.exits.describe_by(describe_exit)
            early, self._early = self._early, []
            for entry in early:
                self._take(entry)
            return name

    def remove(self, name: str) -> None:
        """Removes a watchdog. Takes no lock: garbage collection may call it at any point."""
        self._removed.append(name)

    def end_with_process(self) -> None:
        """Reports that this rank's script is over to the ranks that wait for it, and stops."""
        self._ends_with_process = True
        if self.is_watching:
            error = getattr(sys, "last_value", None)  # the exception that ended the script
            if error is None:
                for watchdog in list(self._watchdogs.values()):
                    watchdog.finish()
                self.send({"kind": "end", "rank": self.rank, "text": END_OF_SCRIPT})
            else:
                text = f"raised {summary(error)}"
                self.send({"kind": "dead", "rank": self.rank, "text": text})
        self.stop()

    def stop(self) -> None:
        """Ends the thread. Stopping twice is harmless."""
        self._shall_end = True
        self._link.wake()
        if threading.current_thread() is not self and self.is_alive():
            self.join(ANSWER_S)
