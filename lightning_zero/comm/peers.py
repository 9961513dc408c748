"""The other ranks' processes on this node, as the kernel sees them, and the store of all ranks.

Only the thread of a watchdog uses these.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = [
    "Heartbeats",
    "HostedStore",
    "Peer",
    "Peers",
    "StoreLog",
    "describe_exit",
    "log_unreadable",
    "connect_to_store",
]

_LOOK_FOR_S = 120.0  # from the start: all ranks begin about then
_MEET_S = 3.0  # for rank 0, which begins about now
_RANK_0_IS_HERE = "lightning_zero/rank_0_is_here"
_MAX_PIDS = 2**31
_LATE_S = 0.05  # of an answer of the store
_MAX_BEAT_S = 5.0  # between two heartbeats
_BEATS = 4  # in the time after which a silent rank is lost

_log = logging.getLogger(__name__)
_Request = tuple["Future[Any]", str, tuple[Any, ...]]


def describe_exit(code: int) -> str:
    """An exit code in words; that of a signal is negative, as in `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


@dataclass(eq=False)
class Peer:
    """A process of another rank."""

    rank: int
    pid: int
    descriptor: int | None = None  # where the kernel has one, and until it has ended
    exited_at: float | None = None  # when it was found to have ended, time.monotonic()
    how: str | None = None  # such as "was killed by SIGKILL"; None: nobody has told


class Peers:
    """Finds the processes, and waits for one of them to end. Of one thread, but for `wake`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: list[Peer] = []
        self._pid_log = StoreLog(f"lightning_zero/node/{_node()}")
        self._rank = -1
        self._until = 0.0

    def announce(self, rank: int, store: Any) -> None:
        """Tells the other ranks of this node, also in runs to come, which process this is.

        The store may go with rank 0, which must be known by then: the others wait for it.
        """
        self._rank = rank
        self._until = time.monotonic() + _LOOK_FOR_S
        with suppress(RuntimeError):
            self._take_up(self._pid_log.append(store, f"{rank} {os.getpid()}"))
            if rank == 0:
                store.set(_RANK_0_IS_HERE, "")
            else:
                with suppress(RuntimeError):  # it is late
                    store.wait([_RANK_0_IS_HERE], timedelta(seconds=_MEET_S))
            self.find(store)

    def find(self, store: Any) -> None:
        """Takes up those that have announced themselves since the last time."""
        if time.monotonic() <= self._until:
            self._take_up(self._pid_log.read(store))

    def _take_up(self, lines: Iterator[str]) -> None:
        for line in lines:
            try:
                rank, pid = map(int, line.split())
                if not 0 < pid < _MAX_PIDS:
                    raise ValueError
            except ValueError:
                log_unreadable(line)
                continue
            if rank == self._rank:
                continue
            self._peers.append(peer := Peer(rank, pid))
            with suppress(OSError, AttributeError):  # not Linux, or forbidden: see `wait`
                peer.descriptor = os.pidfd_open(pid)
                self._selector.register(peer.descriptor, selectors.EVENT_READ, peer)

    def wait(self, seconds: float) -> None:
        """Until one has ended or `wake` is called, at most so long."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, Peer):
                key.data.how = _status_of_zombie(key.data.pid)
                self._mark_exited(key.data)
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
        for peer in self._peers:
            if peer.descriptor is None and peer.exited_at is None and not _exists(peer.pid):
                self._mark_exited(peer)

    def _mark_exited(self, peer: Peer) -> None:
        peer.exited_at = time.monotonic()
        if peer.descriptor is not None:
            self._selector.unregister(peer.descriptor)
            os.close(peer.descriptor)
            peer.descriptor = None

    def wake(self) -> None:
        """Ends a `wait`. From any thread."""
        with suppress(OSError):
            self._waker.send(b"!")

    def exited(self) -> list[Peer]:
        """Those that have ended and were not dropped."""
        return [peer for peer in self._peers if peer.exited_at is not None]

    def has_rank_0_exited(self) -> bool:
        """Looks anew."""
        self.wait(0)
        return any(peer.rank == 0 for peer in self.exited())

    def drop(self, peer: Peer) -> None:
        """Forgets one that has ended."""
        self._peers.remove(peer)

    def close(self) -> None:
        for peer in self._peers:
            if peer.descriptor is not None:
                os.close(peer.descriptor)
        self._peers.clear()
        self._selector.close()
        self._waker.close()
        self._woken.close()


def _node() -> str:
    """The same for processes that can see each other by their numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _status_of_zombie(pid: int) -> str | None:
    """How a process has ended that its parent has not waited for yet."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if fields[0] == "Z":
            return describe_exit(os.waitstatus_to_exitcode(int(fields[-1])))
    return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class StoreLog:
    """Lines in a store, to which every rank appends, in an order that is the same for all.

    They are numbered: the first number that nobody has set is the next.
    """

    def __init__(self, key: str) -> None:
        self._key = key  # of the lines, without their number
        self.num_read = 0

    def append(self, store: Any, line: str) -> Iterator[str]:
        """Appends, if it is not there yet, and reads up to there: to be iterated to its end."""
        read = ""
        while read != line:
            read = _text(store.compare_set(f"{self._key}/{self.num_read}", "", line))
            self.num_read += 1
            yield read

    def read(self, store: Any) -> Iterator[str]:
        """Those that have come since the last time."""
        while store.check([key := f"{self._key}/{self.num_read}"]):
            self.num_read += 1
            yield _text(store.get(key))


def _text(line: bytes) -> str:
    return line.decode(errors="backslashreplace")


def log_unreadable(line: str) -> None:
    """Logs a line of the store that no rank of this program has written; it is skipped."""
    _log.warning("a line in the ranks' store is not readable and is skipped: %.200r", line)


class Heartbeats:
    """Finds a rank that is silent, such as a stopped process or a node without a network.

    Each rank writes a number that grows, and reads that of the next rank: two requests for each
    beat, whatever the number of ranks. Of several lost ranks in a row the first one is found.

    Args:
        name: Prefix of the keys in the store.
        rank: This rank.
        size: Number of ranks.
        lost_s: Seconds of silence after which a rank is lost.
    """

    def __init__(self, name: str, rank: int, size: int, lost_s: float) -> None:
        self.next_rank = (rank + 1) % size
        self._own, self._others = f"{name}/beat/{rank}", f"{name}/beat/{self.next_rank}"
        self._lost_s = lost_s
        self._every_s = min(_MAX_BEAT_S, lost_s / _BEATS)
        self._beat_at = 0.0  # time.monotonic() of the last own beat
        self._num_beats = 0
        self._heard = b""  # the last beat of the next rank
        self._heard_at = 0.0

    def poll(self, store: Any) -> str | None:
        """Beats where it is time; a clause with its subject where the next rank is lost."""
        now = time.monotonic()
        since = now - self._beat_at
        if since < self._every_s:
            return None
        self._beat_at = now
        self._num_beats += 1
        store.set(self._own, str(self._num_beats))
        beat = store.get(self._others) if store.check([self._others]) else b""
        # A job that was suspended as a whole goes on: this rank was silent itself.
        if not beat or beat != self._heard or since > self._lost_s / 2:
            self._heard, self._heard_at = beat, now
        elif now - self._heard_at > self._lost_s:
            return (
                f"rank {self.next_rank} has been silent for {self._lost_s:g} s (heartbeat_timeout_s): its "
                "process is stopped, or its node cannot be reached"
            )
        return None


class HostedStore:
    """The ranks' store as a client sees it that must not wait for ever; of one thread.

    One of the ranks has it in its process. A request to it has no time limit: where that process
    dies while forks of it, such as workers of a data loader, hold its connections open, or where
    its node cannot be reached, no answer comes and no end either. So another thread, which may stay
    behind, waits for the answer.

    Args:
        store: A client of its own.
        is_gone: Whether the answer will never come; called with the seconds for which this request
            has waited, again and again.
    """

    def __init__(self, store: Any, is_gone: Callable[[float], bool]) -> None:
        self._store = store
        self._is_gone = is_gone
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="lightning-zero-store").start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The requests of a store: `check`, `get`, `set`, `add`, `compare_set`, `wait`."""
        return partial(self._ask, name)

    def close(self) -> None:
        """No request comes any more."""
        self._requests.put(None)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Raises RuntimeError, as the store does, where its process is gone."""
        answer: Future[Any] = Future()
        asked_at = time.monotonic()
        self._requests.put((answer, name, arguments))
        while not wait([answer], timeout=_LATE_S).done:
            if self._is_gone(time.monotonic() - asked_at):
                raise RuntimeError("the process that has the ranks' store is gone.")
        return answer.result()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            answer, name, arguments = request
            try:
                answer.set_result(getattr(self._store, name)(*arguments))
            except BaseException as error:
                answer.set_exception(error)
        self._store = None


def connect_to_store(
    rank: int,
    has_rank_0_exited: Callable[[], bool],
    is_lost: Callable[[str, float], bool] = lambda place, seconds: False,
) -> Any:
    """The store of WORLD, by a connection of its own: a request waits for the one before it.

    Args:
        rank: This rank.
        has_rank_0_exited: Whether the process of rank 0 has ended.
        is_lost: Whether to wait no longer for an answer; called with the place of the store, such
            as "10.0.0.1:29500, in the process of rank 0", and the seconds it has not answered for.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    server = store
    while isinstance(server, dist.distributed_c10d.PrefixStore):
        server = server.underlying_store
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not hasattr(server, "port") or not (rank or is_torchruns):
        return store  # in files, or in this process
    host = "torchrun" if is_torchruns else "the process of rank 0"
    place = f"{server.host}:{server.port}, in {host}"

    def is_gone(seconds: float) -> bool:
        return (not is_torchruns and has_rank_0_exited()) or is_lost(place, seconds)

    return HostedStore(store, is_gone)
