"""How the processes of other ranks have ended."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_zero.health.link import Entry

__all__ = ["END_OF_SCRIPT", "EndOfRank", "Exits", "describe_exit"]

END_OF_SCRIPT = "reached the end of its script"
_CONFIRM_S = 1.0  # from the end of a connection until it is reported, if no exit code is known


def describe_exit(code: int) -> str:
    """Describes an exit code in words; the code of a signal is negative, as in `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


@dataclass(frozen=True)
class EndOfRank:
    """What is known of the end of a rank's process.

    Attributes:
        text: Clause without a subject, such as "raised ValueError: no data".
        is_death: Whether it was killed, or ended with an exit code other than 0.
        since: `time.monotonic()` when this rank learned of it.
    """

    text: str
    is_death: bool
    since: float


class Exits:
    """Ends of the other ranks, from their own last words, their exit codes and their connections.

    The exit code is known to the process that has started a rank. On rank 0, which has a
    connection to every rank, a connection that ends is a death, unless the rank has sent before
    how it ends. The watchdogs' lock guards it.

    Args:
        rank: Rank of this process.
        node: Its node.
    """

    def __init__(self, rank: int, node: str) -> None:
        self._rank = rank
        self._node = node
        self._pids: dict[int, tuple[int, str]] = {}  # by rank: process id and node
        self._handles: dict[int, int] = {}  # by rank on this node: a pidfd, if the system has them
        self._closed_at: dict[int, float] = {}  # ranks whose end is not explained yet
        self.by_rank: dict[int, EndOfRank] = {}
        self.over: set[int] = set()  # ranks whose process has ended, as far as this rank can know
        self._describe: Callable[[int], str | None] = lambda pid: None

    def describe_by(self, describe: Callable[[int], str | None]) -> None:
        """Sets the function that describes the end of a process which this one has started.

        It returns None if it does not know.
        """
        self._describe = describe

    def take(self, entry: Entry) -> None:
        """Takes an entry of the log: `here`, `end`, `dead`; or `closed`, which is not in it."""
        kind = entry["kind"]
        rank = int(entry["rank"] if "rank" in entry else entry["by"])
        if kind == "here":
            self._pids[rank] = entry["pid"], entry["node"]
            with suppress(OSError, AttributeError):
                if rank != self._rank and entry["node"] == self._node:
                    self._handles[rank] = os.pidfd_open(entry["pid"])
        elif kind == "closed":
            self._closed_at[rank] = time.monotonic()
        else:
            self._end(rank, entry["text"], is_death=kind == "dead")

    def _end(self, rank: int, text: str, *, is_death: bool) -> None:
        known = self.by_rank.get(rank)
        if known is None:
            known = EndOfRank(text, is_death, time.monotonic())
        elif known.text == END_OF_SCRIPT:  # else its own words are more than its exit code
            known = replace(known, text=text)
        self.by_rank[rank] = replace(known, is_death=known.is_death or is_death)

    def close(self) -> None:
        """Closes the handles of processes."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    @property
    def is_pending(self) -> bool:
        """Whether a connection has ended, and the cause is not known yet."""
        return bool(self._closed_at)

    def find(self) -> Iterator[Entry]:
        """Looks for the causes of ends; yields entries for the log."""
        now = time.monotonic()
        # A fork of a rank that Python does not know of may keep its connection open.
        poller = select.poll()
        for handle in self._handles.values():
            poller.register(handle)
        ended = {handle for handle, _ in poller.poll(0)}
        for rank in [rank for rank, handle in self._handles.items() if handle in ended]:
            os.close(self._handles.pop(rank))
            self._closed_at.setdefault(rank, now)
        for rank, (pid, node) in list(self._pids.items()):
            if rank == self._rank or node != self._node:
                continue
            how = self._describe(pid)
            if how is None and rank in self._closed_at:
                how = _status_of_zombie(pid)
            if how is not None:
                del self._pids[rank]
                yield from self._report(rank, how)
        for rank, closed_at in list(self._closed_at.items()):
            if now - closed_at > _CONFIRM_S:
                yield from self._report(rank, None)

    def _report(self, rank: int, how: str | None) -> Iterator[Entry]:
        """Yields the entry of an end, unless it adds nothing. `how`: None: it is not known."""
        self._closed_at.pop(rank, None)
        self.over.add(rank)
        if how is None and 0 not in (rank, self._rank):
            return  # rank 0 knows what that rank has sent last
        known = self.by_rank.get(rank)
        if how == describe_exit(0) or (how is None and known is not None):
            if known is None:
                yield {"kind": "end", "rank": rank, "text": how}
        elif known is None or not known.is_death:
            yield {"kind": "dead", "rank": rank, "text": how or "has died"}


def _status_of_zombie(pid: int) -> str | None:
    """Describes how a process has ended, if its parent has not waited for it yet."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if fields[0] == "Z":
            return describe_exit(os.waitstatus_to_exitcode(int(fields[-1])))
    return None
