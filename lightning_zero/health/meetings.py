"""Meetings: all ranks come to the same point of their programs, without a process group.

A rank that has come sends `meet` to rank 0, which sends `met` to all ranks once every rank has.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_zero.health.link import Entry

__all__ = ["Meetings"]


class Meetings:
    """This rank's side of meetings. One thread takes the entries, and sends those that it yields.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_begun = 0
        self._come: dict[str, set[int]] = {}  # by meeting, ranks that have come; on rank 0
        self._over: set[str] = set()  # meetings to which all ranks have come

    def next(self) -> str:
        """Begins the next meeting, and returns its name, which is the same on every rank."""
        self._num_begun += 1
        return str(self._num_begun)

    def take(self, entry: Entry) -> Iterator[Entry]:
        """Takes an entry of the log: `meet` or `met`."""
        meeting = entry["meeting"]
        if entry["kind"] == "met":
            self._over.add(meeting)
            return
        come = self._come.setdefault(meeting, set())
        come.add(entry["by"])
        if len(come) == self._size:
            del self._come[meeting]
            yield {"kind": "met", "meeting": meeting}

    def is_over(self, meeting: str) -> bool:
        """Whether all ranks have come to a meeting."""
        return meeting in self._over
