"""Who has failed, and what everybody is doing: a thread in each rank, on a store of its own.

[Note: News] The ranks share a log in the store that they have met by. Its entries are numbered; one
is appended by setting the first number that nobody has set, so that all ranks read the same entries
in the same order:

    abort    a rank has raised an exception
    dead     the process of a rank has ended while others need it
    report   a rank waits, and asks what every rank is doing

A watchdog needs neither its main thread, which may wait for ever in a collective, nor the
connections of the rank that failed: processes that this one has forked, such as DataLoader workers,
hold them open. It hears of an exception from the log, and of the end of a process of its own node
from the kernel. Then it cuts the connections of its own rank, so that whoever waits on them fails
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.comm.doing import (
    Doing,
    collective_of,
    frame_of,
    is_in_collective,
    is_one_way,
    ranks_of_collective,
    report,
    user_frames,
)
from lightning_zero.comm.peers import Peers, Roll, how_ended
from lightning_zero.comm.rank_store import HostedStore

__all__ = [
    "PeerAbortedError",
    "RanksApartError",
    "Verdict",
    "Watchdog",
    "cut_connections",
    "next_name",
    "summary",
]

_POLL_S = 0.25
_POLL_AT_FIRST_S = 0.05  # while the processes of this node find each other
_AT_FIRST_S = 2.0
_STORE_TIMEOUT_S = 3.0  # the client's own does not end every request
_CONFIRM_S = 1.0  # from the end of a process until others are told, where nobody knows how
_STORE_CONFIRM_S = 3.0  # from the end of the store
_END_CONFIRM_S = 3.0  # of a wait for a rank whose script is over: what it has sent may still come
_SETTLE_S = 2.0  # from a verdict until collectives that are not the engine's are cut, too
_LAST_RESORT_S = 4.0  # from a verdict until a process that cannot be woken is ended
_ANSWER_S = 3.0  # for all ranks to say what they are doing
_AGAIN_S = 10.0  # between two looks at ranks that seem to wait for each other
_AT_END = "has come to the end of its script"
_TOGETHER, _LOST = "together", "lost"  # how a rally ends

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RanksApartError(RuntimeError):
    """The ranks are not together, whatever this one computes."""


class PeerAbortedError(RanksApartError):
    """Another rank raised an exception or has died, which is what to read."""


@dataclass(frozen=True)
class Verdict:
    """Why the ranks cannot go on together.

    Attributes:
        rank: Who is the cause; None: nobody alone.
        text: What happened, a clause with its subject, such as "rank 1 was killed by SIGKILL".
        is_dead: That rank's process has ended.
    """

    rank: int | None
    text: str
    is_dead: bool = False


@dataclass(frozen=True)
class _Wait:
    name: str
    since: float  # time.monotonic()
    is_engines: bool = True
    is_for_data: bool = False  # which may take its time
    is_one_way: bool = False  # others may have done their part, and be gone
    has_failed: bool = False  # nothing comes any more
    ranks: tuple[int, ...] | None = None  # that take part; None: all

    def needs(self, rank: int | None) -> bool:
        """Whether it cannot end without `rank`, or where ranks wait for each other."""
        return rank is None or self.ranks is None or rank in self.ranks


class Watchdog:
    """Watches the other ranks for the thread that makes it.

    Every rank makes one, with the same name, and ends it with `stop`, or with the process. Without
    other ranks there is nothing to watch.

    Args:
        name: Of the log in the store.
        rank: Of this process.
        size: Number of ranks.
        report_after_s: Seconds of waiting for other ranks after which all tell what they are doing;
            None: never.
        rallies: Until `leave`, the ranks come together after a failure in `rally` or not at all, so
            that nobody may wait elsewhere. Otherwise collectives on other groups that begin after
            a failure are left alone, as long as all ranks live.
        how_ended: Tells how a process has ended that this one has started, such as "ended with exit
            code 3"; None where it does not know.

    """

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        report_after_s: float | None = 30.0,
        rallies: bool = False,
        how_ended: Callable[[int], str | None] = lambda pid: None,
    ) -> None:
        self._describe: weakref.WeakMethod[Callable[[], str]] | None = None
        self._rank = rank
        self._size = size
        self._name = f"lightning_zero/{name}"
        self._report_after_s = report_after_s
        self._rallies = rallies
        self._how_ended = how_ended
        self._main = threading.get_ident()
        self._waits: dict[int, _Wait] = {}  # by thread
        # Weak: an engine that nobody closes goes all the same.
        self._cuts: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._lock = threading.Lock()  # of `_cuts`, and while they are called
        # Where the ranks stand.
        self._epoch = 0  # number of the rallies that have brought all together
        self._aborts: dict[int, Verdict] = {}  # the first one of each epoch
        self._death: Verdict | None = None
        self._judged_at: float | None = None
        self._is_cut = False  # nothing collective is possible on any group of this process
        self._is_needed = True  # the others must not go
        # Of the thread.
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_over = False
        self._store: Any = None  # None: there is none any more
        self._world: Any = None  # the default group, with which the watch ends
        self._store_gone_at: float | None = None
        self._num_read = 0
        self._roll_of_ends = Roll("lightning_zero/ends")  # of all runs
        self._ends: dict[int, str] = {}  # how ranks have ended that nobody missed
        self._outside: tuple[Any, _Wait] | None = None  # a wait that the engine has not announced
        self._reported: _Wait | None = None
        self._texts: list[str] = []  # keys of reports that others will write
        self._second_look: tuple[float, list[float]] | None = None
        self._peers: Peers  # where there is a thread
        self._thread: _Thread | None = None
        if size > 1 and dist.is_initialized() and dist.get_backend() != "fake":
            self._world = dist.group.WORLD
            self._peers = Peers()
            self._store = _clone(dist.distributed_c10d._get_default_store())
            if rank > 0 and _is_with_rank_0(self._store):
                self._store = HostedStore(self._store, self._peers.is_rank_0_gone)
            self._thread = _Thread(self)
            self._thread.start()
            _stop_at_exit(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in another process say, watches nobody."""
        return partial(Watchdog, "", rank=self._rank, size=1), ()

    @staticmethod
    def stop_those_that_left() -> None:
        """Ends the watches of runs that are over, of whatever Trainer: the next one has its own."""
        for thread in threading.enumerate():
            if isinstance(thread, _Thread) and not thread.watchdog._is_needed:
                thread.watchdog.stop()

    # ---------------------------------------------------------------- for the main thread

    @property
    def verdict(self) -> Verdict | None:
        """Why nothing collective is possible at this moment, if so."""
        return self._death or self._aborts.get(self._epoch)

    @property
    def is_lost(self) -> bool:
        """Whether the ranks can never come together again."""
        return self._death is not None or self._is_cut

    def on_failure(self, cut: Callable[[], None]) -> None:
        """From now on `cut` is called at a verdict, from another thread: nobody may wait longer.

        Args:
            cut: A method, which keeps its object alive no longer than others do.
        """
        with self._lock:
            self._cuts.append(weakref.WeakMethod(cut))

    def forget(self, cut: Callable[[], None]) -> None:
        """Not any more. Waits for a call that is under way."""
        with self._lock:
            self._cuts = [known for known in self._cuts if known() not in (None, cut)]

    def describe_by(self, describe: Callable[[], str]) -> None:
        """From now on `describe`, a method, tells what the engine does, from another thread."""
        self._describe = weakref.WeakMethod(describe)

    @contextmanager
    def waiting(
        self,
        name: str,
        *,
        is_engines: bool = True,
        is_for_data: bool = False,
        is_one_way: bool = False,
    ) -> Iterator[None]:
        """Around waiting for other ranks.

        Args:
            name: What for, as in "rank 0 waits for the gather of layers.3".
            is_engines: On a group that is cut by what was given to `on_failure`.
            is_for_data: Much may be under way, so that a long wait is no sign of a fault.
            is_one_way: Likewise; and others may be done with it, and gone.

        Raises:
            PeerAbortedError: One of them, or this one, has failed.
            RanksApartError: One does not come.
        """
        if self._death is not None or self._aborts:
            self.raise_if_failed()
        thread = threading.get_ident()
        outer = self._waits.get(thread)
        self._waits[thread] = _Wait(
            name, time.monotonic(), is_engines, is_for_data or is_one_way, is_one_way
        )
        try:
            yield
        except (PeerAbortedError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            is_in_vain = _is_of_connection(error)
            if is_in_vain:  # which is seen before the news of its cause
                self._waits[thread] = replace(self._waits[thread], has_failed=True)
                self.await_verdict()
            self.raise_if_failed(error)
            if not is_in_vain:
                raise  # what was to be sent could not be pickled, say
            raise RanksApartError(
                f"rank {self._rank} waited in vain for {name}: the other ranks did not come to the "
                "same point. Every rank must run forward and backward together, with equally many "
                "batches (in stage 3 also a forward for a sample or an image, which `if rank == 0` "
                "would run on one rank alone; inside `with lightning_zero.lockstep(module)` on "
                "every rank, ranks may run different numbers of them)."
            ) from error
        finally:
            if outer is None:
                self._waits.pop(thread, None)
            else:
                self._waits[thread] = outer

    def raise_if_failed(self, cause: BaseException | None = None) -> None:
        """Raises PeerAbortedError where there is a verdict."""
        verdict = self.verdict
        if verdict is not None:
            raise PeerAbortedError(self._explain(verdict)) from cause

    def _explain(self, verdict: Verdict) -> str:
        if verdict.rank == self._rank:
            return f"rank {self._rank} has ended with an exception before: {verdict.text}"
        return f"rank {self._rank} stops because {verdict.text}"

    def explain(self, error: BaseException) -> None:
        """Says why this rank fails, where `error` does not: a connection was cut."""
        if _is_of_connection(error):
            self.await_verdict()
        verdict = self.verdict
        if verdict is not None and verdict.rank != self._rank and verdict.text not in str(error):
            _say(self._explain(verdict))

    def await_verdict(self, seconds: float = _CONFIRM_S + 4 * _POLL_S) -> None:
        """Waits for news that may be on its way: a connection was closed."""
        until = time.monotonic() + seconds
        while self.verdict is None and self._is_on_watch() and time.monotonic() < until:
            self._order(lambda: None)
            time.sleep(0.02)

    def abort(self, error: BaseException | None) -> None:
        """Makes the other ranks fail where they wait for this one. Does not wait for them."""
        if error is not None and _is_of_connection(error):
            self.await_verdict()  # another rank is the cause
        if self.verdict is not None:
            return
        text = "stopped" if error is None else f"raised {summary(error)}"
        entry = {"kind": "abort", "epoch": self._epoch, "text": f"rank {self._rank} {text}"}
        self._order(partial(self._append, entry))

    def rally(self, deadline: timedelta) -> bool:
        """After `abort`: waits until every rank has come here, also without any connection.

        Returns:
            Whether all came in time: the same on every rank that comes.
        """
        if not self._is_on_watch() or self.is_lost:
            self._order(partial(self._decide, self._epoch, 0.0))  # nobody shall wait there
            return False
        epoch, until = self._epoch, time.monotonic() + deadline.total_seconds()
        thread = threading.get_ident()
        self._waits[thread] = _Wait("the other ranks to come together again", time.monotonic())
        try:
            outcome = self._order(partial(self._come, epoch))
            while outcome is None and self._is_on_watch():
                time.sleep(0.02)
                outcome = self._order(partial(self._decide, epoch, until))
        finally:
            self._waits.pop(thread, None)
        if outcome != _TOGETHER or self.is_lost:
            return False
        self._judged_at = None
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
            self._peers.announce(self._rank, self._store)
            found_by = time.monotonic() + _AT_FIRST_S
            while not self._is_over:
                self._look()
                self._peers.wait(_POLL_S if time.monotonic() > found_by else _POLL_AT_FIRST_S)
        except Exception:  # it must not take the process with it
            if not sys.is_finalizing():
                _log.exception("rank %d: the watchdog has failed.", self._rank)
        finally:
            self._drop_store()
            self._peers.close()
            self._world = None  # its connections are no more than needed

    def _look(self) -> None:
        if not self._waits and (not dist.is_initialized() or dist.group.WORLD is not self._world):
            self._is_over = True
            return
        for look in (self._look_at_store, self._look_at_peers, self._look_at_main):
            try:
                look()
            except RuntimeError:  # the process that has the store is gone
                self._lose_store()

    def _look_at_store(self) -> None:
        while not self._orders.empty():
            self._orders.get()()
        if self._store is not None:
            self._read_news()
            self._peers.find(self._store)

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

    def _append(self, entry: dict[str, Any]) -> None:
        """Appends to the log, and reads it up to there."""
        mine = json.dumps({**entry, "by": self._rank}).encode()
        while self._store is not None:
            key = f"{self._name}/news/{self._num_read}"
            found = self._store.compare_set(key, "", mine.decode())
            self._take_next(found)
            if found == mine:
                return
            if entry["kind"] == "report" and json.loads(found)["kind"] == "report":
                return  # another rank has asked the same

    def _read_news(self) -> None:
        while self._store.check([key := f"{self._name}/news/{self._num_read}"]):
            self._take_next(self._store.get(key))

    def _take_next(self, text: bytes) -> None:
        number, self._num_read = self._num_read, self._num_read + 1
        news = json.loads(text)
        kind, by = news["kind"], news["by"]
        if kind == "abort":
            verdict = Verdict(by if news.get("is_own", True) else None, news["text"])
            if self._aborts.setdefault(news["epoch"], verdict) is verdict:
                self._judge()
        elif kind == "dead":
            self._bury(news["rank"], news["text"])
        elif kind == "report":
            self._answer(number, news)

    def _bury(self, rank: int | None, text: str) -> None:
        if self._death is None:
            before = self._aborts.get(self._epoch)
            is_known = before is not None and before.rank == rank
            self._death = (
                replace(before, is_dead=True)
                if is_known and before is not None
                else Verdict(rank, text, is_dead=True)
            )
            self._judge()

    def _judge(self) -> None:
        """There is a verdict: whoever waits in the engine is woken."""
        if self.verdict is None:
            return  # of an epoch to come
        self._judged_at = time.monotonic()
        with self._lock:
            for known in self._cuts:
                if (cut := known()) is not None:
                    cut()

    # ---------------------------------------------------------------- rallies and ends

    def _come(self, epoch: int) -> str | None:
        if self._store is None:
            return _LOST
        self._store.add(f"{self._name}/come/{epoch}", 1)
        return None

    def _decide(self, epoch: int, until: float) -> str | None:
        """How the rally has ended; the first rank to see that decides for all."""
        if self._store is None:
            return _LOST
        wish = None
        if self.is_lost or time.monotonic() > until:
            wish = _LOST
        elif int(self._store.get(f"{self._name}/come/{epoch}")) >= self._size:
            wish = _TOGETHER
        key = f"{self._name}/rally/{epoch}"
        if wish is not None:
            return str(self._store.compare_set(key, "", wish).decode())
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def _depart(self, end: str | None = None) -> None:
        """Nobody shall wait for this rank in a rally, nor miss it; `end`: how its script ends."""
        self._decide(self._epoch, 0.0)
        if self._store is None:
            return
        if end is not None:
            self._roll_of_ends.append(self._store, f"{self._rank} {end}")
        if end is not None or self.verdict is None:
            self._store.set(f"{self._name}/left/{self._rank}", "")

    def _read_ends(self) -> None:
        for line in self._roll_of_ends.read(self._store) if self._store is not None else ():
            rank, _, end = line.partition(" ")
            self._ends.setdefault(int(rank), end)

    def _has_left(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"{self._name}/left/{rank}"])

    def _look_at_peers(self) -> None:
        """Tells all of a process of this node that has ended before its time."""
        now, wait, gone = time.monotonic(), self._wait_of_main(), self._peers.gone()
        if not self._is_needed and not self._waits and wait is None:
            return
        if gone or wait is not None:
            self._read_ends()
        for peer in gone:
            how = peer.how or self._how_ended(peer.pid)
            assert peer.gone_at is not None
            if how is None and now - peer.gone_at < _CONFIRM_S:
                continue
            has_left = self._has_left(peer.rank)
            self._peers.drop(peer)
            end = self._ends.get(peer.rank)
            if end is None or (end == _AT_END and how not in (None, how_ended(0))):
                end = self._ends[peer.rank] = how or "has died"
            if not has_left:
                text = f"rank {peer.rank} {end}"
                self._bury(peer.rank, text)
                self._append({"kind": "dead", "rank": peer.rank, "text": text})
        if wait is None or self.verdict is not None:
            return
        if self._store_gone_at is not None:
            if now - self._store_gone_at > _STORE_CONFIRM_S:
                self._bury(0, "rank 0, or the launcher that held the ranks' store, has died")
        elif wait.has_failed or (not wait.is_one_way and now - wait.since > _END_CONFIRM_S):
            for rank, end in self._ends.items():
                if wait.needs(rank):
                    self._bury(rank, f"rank {rank} {end}")

    # ---------------------------------------------------------------- the main thread's waits

    def _wait_of_main(self) -> _Wait | None:
        """For other ranks, in the engine or in torch.distributed."""
        frame = frame_of(self._main)
        if (wait := self._waits.get(self._main)) is not None:
            return wait
        if not is_in_collective(frame):
            self._outside = None
            # On CUDA autograd has a thread of its own, in which its hooks wait.
            return min(list(self._waits.values()), key=lambda each: each.since, default=None)
        assert frame is not None
        mark = (id(frame), frame.f_lasti)
        if self._outside is None or self._outside[0] != mark:
            name = collective_of(frame)
            ranks = ranks_of_collective(frame)
            wait = _Wait(
                name,
                time.monotonic(),
                is_engines=False,
                is_for_data=ranks is not None or is_one_way(name),
                is_one_way=is_one_way(name),
                ranks=ranks,
            )
            self._outside = (mark, wait)
        return self._outside[1]

    def _look_at_main(self) -> None:
        now, wait = time.monotonic(), self._wait_of_main()
        judged_at, verdict = self._judged_at, self.verdict  # a rally ends them meanwhile
        if judged_at is not None and verdict is not None:
            if wait is not None and not wait.is_engines and wait.needs(verdict.rank):
                self._wake_main(wait, verdict, judged_at)
            return
        if self._report_after_s is None or self._store is None:
            return
        is_long = wait is not None and now - wait.since > self._report_after_s
        if is_long and wait is not self._reported:
            self._reported = wait
            self._append({"kind": "report"})
        if self._second_look is not None and now > self._second_look[0]:
            self._append({"kind": "report", "is_again": True})
        self._read_texts()

    def _wake_main(self, wait: _Wait, verdict: Verdict, judged_at: float) -> None:
        """The engine's own groups are cut; a wait elsewhere will never end either."""
        is_together_or_not = self._rallies and self._is_needed
        if not (is_together_or_not or verdict.is_dead or wait.since < judged_at):
            return
        waited_s = time.monotonic() - max(judged_at, wait.since)
        if waited_s > _SETTLE_S and not self._is_cut:
            self._is_cut = True
            for group in list(dist.distributed_c10d._world.pg_map):
                with suppress(RuntimeError, ValueError):
                    cut_connections(group)
        if waited_s > _LAST_RESORT_S:
            # In the store, say, while a group is made: nothing wakes it before its timeout.
            _say(f"{self._explain(verdict)}; it waits in {wait.name}, and is ended.")
            os._exit(1)

    # ---------------------------------------------------------------- reports

    def _doing(self) -> Doing:
        frame, wait = frame_of(self._main), self._wait_of_main()
        describe = self._describe() if self._describe is not None else None
        moment = describe() if describe is not None else ""
        frames = user_frames(frame)
        if wait is None:
            return Doing(moment, "", 0.0, False, frames)
        waited = time.monotonic() - wait.since
        return Doing(moment, wait.name, waited, wait.is_for_data, frames, wait.since)

    def _answer(self, number: int, news: dict[str, Any]) -> None:
        """Tells what this rank is doing; the one that asked reads all, and writes the report."""
        self._reported = self._wait_of_main()
        key = f"{self._name}/doing/{number}"
        self._store.set(f"{key}/{self._rank}", json.dumps(self._doing().as_dict()))
        if news["by"] == self._rank:
            self._write_report(key, news)
        elif not news.get("is_again"):
            self._texts.append(f"{key}/text")

    def _write_report(self, key: str, news: dict[str, Any]) -> None:
        answers = self._collect(key)
        if news.get("is_again"):
            self._look_again(answers)
            return
        who = f"rank {news['by']} has waited {self._report_after_s:g} s for other ranks"
        text = report(f"{who}; what every rank is doing:", answers)
        self._store.set(f"{key}/text", text)
        self._log_report(text, is_alone=answers[0] is None)
        if _may_be_circle(answers):
            again = time.monotonic() + min(_AGAIN_S, self._report_after_s or _AGAIN_S)
            self._second_look = (again, [a.since for a in answers if a is not None])

    def _collect(self, key: str) -> list[Doing | None]:
        answers: list[Doing | None] = [None] * self._size
        until = time.monotonic() + _ANSWER_S
        while None in answers and time.monotonic() < until:
            for rank, answer in enumerate(answers):
                if answer is None and self._store.check([f"{key}/{rank}"]):
                    text = self._store.get(f"{key}/{rank}")
                    answers[rank] = Doing.of_dict(json.loads(text))
            time.sleep(0.02)
        return answers

    def _look_again(self, answers: list[Doing | None]) -> None:
        """Ends a wait of all ranks for each other, which has not moved since the last look."""
        assert self._second_look is not None
        _, before = self._second_look
        self._second_look = None
        now = [answer.since for answer in answers if answer is not None]
        if not _may_be_circle(answers) or now != before:
            return
        text = report("all ranks wait for each other, in different places:", answers)
        end = (
            "\nCall collectives of your own at the same point on every rank; in stage 3, outside "
            "of code that only some ranks run."
        )
        entry = {"kind": "abort", "epoch": self._epoch, "text": text + end, "is_own": False}
        self._append(entry)

    def _read_texts(self) -> None:
        for key in [key for key in self._texts if self._store.check([key])]:
            self._texts.remove(key)
            self._log_report(self._store.get(key).decode())

    def _log_report(self, text: str, *, is_alone: bool = False) -> None:
        """For people to see on rank 0, or where that one does not answer; else for the log."""
        _log.log(logging.WARNING if self._rank == 0 or is_alone else logging.INFO, "%s", text)


class _Thread(threading.Thread):
    """Is itself the record of the watches of this process: see `stop_those_that_left`."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(target=watchdog.run, daemon=True, name="lightning-zero-watchdog")
        self.watchdog = watchdog


def _may_be_circle(answers: list[Doing | None]) -> bool:
    """Whether every rank waits, not all for the same, and none for data under way."""
    waits = {None if a is None or a.is_for_data or not a.wait else a.wait for a in answers}
    return None not in waits and len(waits) > 1


def _clone(store: Any) -> Any:
    """The same with a connection of its own: a request on one waits for the one before it."""
    return store.clone()


def _is_with_rank_0(store: Any) -> bool:
    """Whether it goes with the process of rank 0; else it is in files, or torchrun has it."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return hasattr(store, "port") and not is_torchruns


def next_name(rank: int) -> str:
    """Of a watchdog that every rank makes at the same point, before they could agree on one."""
    if not dist.is_initialized():
        return ""
    store = dist.distributed_c10d._get_default_store()
    return f"run-{store.add(f'lightning_zero/runs/{rank}', 1)}"


def cut_connections(group: Any) -> None:
    """Ends what is under way on a group, on this rank: gloo's connections close, NCCL aborts.

    Destroying a group of gloo does not while anything, a transfer or a traceback, refers to it. A
    receive that times out does; but where the peer has gone it fails, and closes nothing else.
    """
    backends = _backends_of(group)
    if "nccl" in backends:
        dist.distributed_c10d._abort_process_group(group)
    if "gloo" not in backends:
        return
    nothing = torch.empty(1)
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([nothing], peer, 2**30).wait(timedelta(milliseconds=1))


def _backends_of(group: Any) -> set[str]:
    """Of a group that may have one for each kind of device, whose name tells none of them then."""
    dist.get_backend(group)  # raises where it is destroyed
    return {group._get_backend(device).name().lower() for device in group._device_types}


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


def _stop_at_exit(watchdog: Watchdog) -> None:
    """A thread that calls into torch while the interpreter ends would crash it."""
    reference = weakref.ref(watchdog)

    def stop() -> None:
        if (alive := reference()) is not None:
            alive.end_with_process()

    atexit.register(stop)
    weakref.finalize(watchdog, atexit.unregister, stop).atexit = False  # else it may come first
