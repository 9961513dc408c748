"""Processes of the other ranks on this node, watched through the kernel, and the ranks' store.

Used by the thread of a watchdog only.
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

from lightning_zero.health.world import server_of

__all__ = [
    "REACHED_END",
    "HostedStore",
    "Peer",
    "PeerExit",
    "Peers",
    "ScriptEnds",
    "StoreLog",
    "describe_exit",
    "log_unreadable",
    "poll_interval_s",
    "connect_to_store",
]

REACHED_END = "reached the end of its script"
_POLL_S = 0.25
_MAX_POLL_S = 1.0  # a failure must be known within 10 s, whatever the number of ranks
_FULL_RATE_RANKS = 64  # more ranks poll less often: one process answers the requests of all
_FIND_PEERS_S = 120.0  # from the start: all ranks announce themselves in this time
_RANK_0_TIMEOUT_S = 3.0  # wait for rank 0 to announce itself
_RANK_0_IS_HERE = "lightning_zero/rank_0_is_here"
_MAX_PIDS = 2**31
_CHECK_S = 0.05  # between checks whether the store has been lost

_log = logging.getLogger(__name__)
_Request = tuple["Future[Any]", str, tuple[Any, ...]]


def poll_interval_s(size: int) -> float:
    """Returns the seconds between two looks of each rank into the store of `size` ranks."""
    return min(_POLL_S * max(1.0, size / _FULL_RATE_RANKS), _MAX_POLL_S)


def describe_exit(code: int) -> str:
    """Describes an exit code in words; the code of a signal is negative, as in `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


@dataclass(frozen=True)
class Peer:
    """Process of another rank."""

    rank: int
    pid: int
    descriptor: int | None  # pidfd; None: the kernel has none


@dataclass(frozen=True)
class PeerExit:
    """End of the process of another rank."""

    rank: int
    pid: int
    found_at: float  # time.monotonic()
    status: str | None  # such as "was killed by SIGKILL"; None: not known


class Peers:
    """Finds the processes, and waits for one to end. For one thread only, except `wake`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._running: list[Peer] = []
        self._exits: list[PeerExit] = []
        self._pid_log = StoreLog(f"lightning_zero/node/{_node()}")
        self._rank = -1
        self._until = 0.0

    def announce(self, rank: int, store: Any) -> None:
        """Announces this process to the other ranks of this node, including those of later runs.

        The store may end with rank 0, which must be known before: the other ranks wait for its
        announcement.
        """
        self._rank = rank
        self._until = time.monotonic() + _FIND_PEERS_S
        with suppress(RuntimeError):
            self._add(self._pid_log.append(store, f"{rank} {os.getpid()}"))
            if rank == 0:
                store.set(_RANK_0_IS_HERE, "")
            else:
                with suppress(RuntimeError):  # rank 0 is late
                    store.wait([_RANK_0_IS_HERE], timedelta(seconds=_RANK_0_TIMEOUT_S))
            self.find(store)

    def find(self, store: Any) -> None:
        """Adds the processes that have announced themselves since the last call."""
        if time.monotonic() <= self._until:
            self._add(self._pid_log.read(store))

    def _add(self, lines: Iterator[str]) -> None:
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
            descriptor = None
            with suppress(OSError, AttributeError):  # not Linux, or forbidden: see `wait`
                descriptor = os.pidfd_open(pid)
            peer = Peer(rank, pid, descriptor)
            self._running.append(peer)
            if descriptor is not None:
                self._selector.register(descriptor, selectors.EVENT_READ, peer)

    def wait(self, seconds: float) -> None:
        """Waits until a process has ended or `wake` is called, at most `seconds`."""
        ended = [key.data for key, _ in self._selector.select(seconds) if key.data is not None]
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        ended += [p for p in self._running if p.descriptor is None and not _exists(p.pid)]
        for peer in ended:
            status = _status_of_zombie(peer.pid)
            self._exits.append(PeerExit(peer.rank, peer.pid, time.monotonic(), status))
            self._running.remove(peer)
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        if peer.descriptor is not None:
            self._selector.unregister(peer.descriptor)
            os.close(peer.descriptor)

    def wake(self) -> None:
        """Ends a `wait`. From any thread."""
        with suppress(OSError):
            self._waker.send(b"!")

    def exited(self) -> list[PeerExit]:
        """Returns the processes that have ended and were not dropped."""
        return list(self._exits)

    def has_rank_0_exited(self) -> bool:
        """Checks whether the process of rank 0 has ended."""
        self.wait(0)
        return any(peer.rank == 0 for peer in self.exited())

    def drop(self, peer: PeerExit) -> None:
        """Removes a process that has ended."""
        self._exits.remove(peer)

    def close(self) -> None:
        for peer in self._running:
            self._close(peer)
        self._running.clear()
        self._selector.close()
        self._waker.close()
        self._woken.close()


def _node() -> str:
    """Returns an id that is equal for processes that share process ids: boot and pid namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _status_of_zombie(pid: int) -> str | None:
    """Describes how a process has ended, if its parent has not waited for it yet."""
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
    """Log of text lines in a store: every rank appends, and all read the same order.

    Lines are numbered; the next line takes the first number that is not set.
    """

    def __init__(self, key: str) -> None:
        self._key = key  # prefix of the lines' keys
        self.num_read = 0

    def append(self, store: Any, line: str) -> Iterator[str]:
        """Appends `line` unless it is in the log, and yields all unread lines up to it.

        The caller must exhaust the iterator.
        """
        read = ""
        while read != line:
            read = _decode(store.compare_set(f"{self._key}/{self.num_read}", "", line))
            self.num_read += 1
            yield read

    def read(self, store: Any) -> Iterator[str]:
        """Yields the lines that were appended since the last read."""
        while store.check([key := f"{self._key}/{self.num_read}"]):
            self.num_read += 1
            yield _decode(store.get(key))


def _decode(line: bytes) -> str:
    return line.decode(errors="backslashreplace")


def log_unreadable(line: str) -> None:
    """Logs that a line of the store is skipped, because no rank of this program has written it."""
    _log.warning("a line in the ranks' store is not readable and is skipped: %.200r", line)


class ScriptEnds:
    """How the scripts of the ranks have ended: in a log of all runs of these processes.

    Attributes:
        by_rank: Clauses without a subject, such as "raised ValueError: no data".
        found_at: `time.monotonic()` when this rank learned of the end, by rank.
    """

    def __init__(self) -> None:
        self.by_rank: dict[int, str] = {}
        self.found_at: dict[int, float] = {}
        self._log = StoreLog("lightning_zero/exits")

    def append(self, store: Any, rank: int, end: str) -> None:
        """Appends the end of `rank` to the log, and reads the log up to it."""
        self._take(self._log.append(store, f"{rank} {end}"))

    def read(self, store: Any) -> None:
        """Reads what is new in the log."""
        self._take(self._log.read(store))

    def with_exit(self, rank: int, how: str | None) -> str:
        """The end of `rank`, whose process has ended as `how` describes; None: it is not known."""
        end = self.by_rank.get(rank)
        if end is None or (end == REACHED_END and how not in (None, describe_exit(0))):
            end = self.by_rank[rank] = how or "has died"
        self.found_at.setdefault(rank, time.monotonic())
        return end

    def _take(self, lines: Iterator[str]) -> None:
        for line in lines:
            rank, _, end = line.partition(" ")
            if rank.isdecimal():
                self.by_rank.setdefault(int(rank), end)
                self.found_at.setdefault(int(rank), time.monotonic())
            else:
                log_unreadable(line)


class HostedStore:
    """Client of a store in another process that never hangs; for one thread only.

    A request to the store has no time limit: if its process dies while forks of it, such as workers
    of a data loader, hold its connections open, or if its node cannot be reached, neither an answer
    nor an error arrives. So another thread, which may be abandoned, waits for the answer.

    Args:
        store: A client that only this object uses.
        is_lost: Returns whether the answer will never arrive; called repeatedly with the seconds
            for which the request has waited.
    """

    def __init__(self, store: Any, is_lost: Callable[[float], bool]) -> None:
        self._store = store
        self._is_lost = is_lost
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="lightning-zero-store").start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a request of a store: `check`, `get`, `set`, `add`, `compare_set` or `wait`."""
        return partial(self._request, name)

    def close(self) -> None:
        """Ends the thread; no request may follow."""
        self._requests.put(None)

    def _request(self, name: str, *arguments: Any) -> Any:
        """Runs a request; raises RuntimeError, as the store does, if its process is lost."""
        answer: Future[Any] = Future()
        requested_at = time.monotonic()
        self._requests.put((answer, name, arguments))
        while not wait([answer], timeout=_CHECK_S).done:
            if self._is_lost(time.monotonic() - requested_at):
                raise RuntimeError("the process that hosts the ranks' store has ended.")
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
    on_silence: Callable[[str, float], None] = lambda place, seconds: None,
) -> Any:
    """Connects to the store of WORLD once more: requests on one connection wait for each other.

    Args:
        rank: Rank of this process.
        has_rank_0_exited: Returns whether the process of rank 0 has ended.
        on_silence: Called while an answer is awaited, with the store's location, such as
            "10.0.0.1:29500, in the process of rank 0", and the seconds without an answer.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    server = server_of(store)
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not hasattr(server, "port") or not (rank or is_torchruns):
        return store  # it is in files, or in this process
    host = "torchrun" if is_torchruns else "the process of rank 0"
    place = f"{server.host}:{server.port}, in {host}"

    def is_request_lost(seconds: float) -> bool:
        on_silence(place, seconds)
        return not is_torchruns and has_rank_0_exited()

    return HostedStore(store, is_request_lost)
