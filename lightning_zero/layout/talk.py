"""What ranks say to each other in one round of an `Order`, and what all hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

__all__ = ["NOTHING", "Heard", "Judge", "Round", "Talk", "both_ways"]

NOTHING = 2**62  # said by a rank that has nothing to compare


class Heard(NamedTuple):
    """What all ranks hear of one round, the same on every rank but for the error."""

    numbers: list[int]  # the lowest of each
    mask: bytes  # the highest of each
    error: Exception | None = None  # by the judge of this rank


Judge = Callable[[Heard], Exception | None]  # may hold further rounds


class Talk(Protocol):
    """How ranks speak: `comm.control.Control`."""

    rank: int
    size: int

    def widen(self, num_bytes: int) -> None:
        """Makes room in every saying."""

    def say(self, numbers: Sequence[int], mask: bytes, judge: Judge | None = None) -> Heard:
        """One round."""

    def begin_saying(self, numbers: Sequence[int], mask: bytes, judge: Judge) -> Future[Heard]:
        """One round, while this rank goes on."""

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Around waiting for other ranks."""

    def give_up(self, error: Exception) -> None:
        """Lets the other ranks fail, wherever they wait."""

    def failed(self, text: str) -> Exception:
        """For another rank's failure."""

    def apart(self, text: str) -> Exception:
        """For ranks that have come to different points."""


class Round(NamedTuple):
    """What all ranks have said in one round."""

    lowest: int  # request
    highest: int
    num_ready: int  # reductions that all are ready for
    key: int  # of those that sent one, the lowest
    is_same_key: bool
    is_same_flags: bool
    is_same_past: bool
    wish: int | None  # the lowest
    has_deviated: bool  # any
    is_in_vain: bool  # all have left gathers of the plan unused
    is_loose: bool  # any
    is_alike_loose: bool  # all are, or none
    failed: int  # the lowest rank that has, or their number

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Round:
        """As `Order._numbers` has put it."""
        low, high, ready, key, *marks, wish, deviated, in_vain, loose, all_loose, failed = numbers
        most_key, flags, most_flags, past, most_past = marks
        return cls(
            lowest=low,
            highest=-high,
            num_ready=ready,
            key=key,
            is_same_key=key == NOTHING or key == -most_key,
            is_same_flags=flags == NOTHING or flags == -most_flags,
            is_same_past=past == NOTHING or past == -most_past,
            wish=None if wish == NOTHING else wish,
            has_deviated=deviated < 0,
            is_in_vain=in_vain > 0,
            is_loose=loose < 0,
            is_alike_loose=loose == -all_loose,
            failed=failed,
        )


def both_ways(mark: int | None) -> tuple[int, int]:
    """The lowest of the second, turned, is the highest mark of all."""
    return (NOTHING, NOTHING) if mark is None or mark == NOTHING else (mark, -mark)
