"""The other ranks' processes on this node, as the kernel sees them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["Peer", "Peers", "Roll", "how_ended"]

_LOOK_FOR_S = 120.0  # from the start: all ranks begin about then
_MEET_S = 3.0  # for rank 0, which begins about now
_RANK_0_IS_HERE = "lightning_zero/rank_0_is_here"


class Roll:
    """Lines in a store, to which every rank appends, in an order that is the same for all.

    Args:
        key: Of the first of them, without its number.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._num_read = 0

    def append(self, store: Any, line: str) -> None:
        """Once: a line that is there already is left alone."""
        number = self._num_read
        while store.compare_set(f"{self._key}/{number}", "", line).decode() != line:
            number += 1

    def read(self, store: Any) -> Iterator[str]:
        """Those that have come since the last time."""
        while store.check([key := f"{self._key}/{self._num_read}"]):
            self._num_read += 1
            yield store.get(key).decode()


@dataclass(eq=False)
class Peer:
    """A process of another rank.

    Attributes:
        rank: In the world.
        pid: On this node.
        gone_at: When it was found to have ended, `time.monotonic()`.
        how: Such as "was killed by SIGKILL"; None: nobody has told.
    """

    rank: int
    pid: int
    gone_at: float | None = None
    how: str | None = None


def how_ended(code: int) -> str:
    """An exit code in words; that of a signal is negative, as in `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


class Peers:
    """Finds the processes, and waits for one of them to end.

    Of one thread, but for `wake`, and for `announce`, which comes first.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: dict[Peer, int | None] = {}  # and a file descriptor, where the kernel has one
        self._roll = Roll(f"lightning_zero/node/{_node()}")
        self._rank = -1
        self._until = 0.0

    def announce(self, rank: int, store: Any) -> None:
        """Tells the other ranks of this node, also in runs to come, which process this is.

        The store may go with rank 0, which must be known by then: the others wait for it.
        """
        self._rank = rank
        self._until = time.monotonic() + _LOOK_FOR_S
        with suppress(RuntimeError):
            self._roll.append(store, f"{rank} {os.getpid()}")
            if rank == 0:
                store.set(_RANK_0_IS_HERE, "")
            else:
                with suppress(RuntimeError):  # it is late
                    store.wait([_RANK_0_IS_HERE], timedelta(seconds=_MEET_S))
            self.find(store)

    def find(self, store: Any) -> None:
        """Takes up those that have announced themselves since the last time."""
        if time.monotonic() > self._until:
            return
        for line in self._roll.read(store):
            rank, pid = map(int, line.split())
            if rank != self._rank:
                self._take_up(Peer(rank, pid))

    def _take_up(self, peer: Peer) -> None:
        descriptor = None
        with suppress(OSError, AttributeError):  # not Linux, or forbidden: see `wait`
            descriptor = os.pidfd_open(peer.pid)
            self._selector.register(descriptor, selectors.EVENT_READ, peer)
        self._peers[peer] = descriptor

    def wait(self, seconds: float) -> None:
        """Until one has ended or `wake` is called, at most so long."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, Peer):
                key.data.how = _status_of_zombie(key.data.pid)
                self._note_end(key.data)
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
        for peer, descriptor in self._peers.items():
            if descriptor is None and peer.gone_at is None and not _exists(peer.pid):
                self._note_end(peer)

    def _note_end(self, peer: Peer) -> None:
        peer.gone_at = time.monotonic()
        descriptor = self._peers[peer]
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            self._peers[peer] = None

    def wake(self) -> None:
        """Ends a `wait`. From any thread."""
        with suppress(OSError):
            self._waker.send(b"!")

    def gone(self) -> list[Peer]:
        """Those that have ended and were not dropped."""
        return [peer for peer in self._peers if peer.gone_at is not None]

    def is_rank_0_gone(self) -> bool:
        """Looks anew."""
        self.wait(0)
        return any(peer.rank == 0 for peer in self.gone())

    def drop(self, peer: Peer) -> None:
        """Forgets one that has ended."""
        del self._peers[peer]

    def close(self) -> None:
        """Lets go of all."""
        for descriptor in self._peers.values():
            if descriptor is not None:
                os.close(descriptor)
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
            return how_ended(os.waitstatus_to_exitcode(int(fields[-1])))
    return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
