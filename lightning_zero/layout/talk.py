"""What ranks say to each other in one round of an `Order`, and what all hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

__all__ = ["NOTHING", "Heard", "Judge", "Round", "Said", "Talk"]

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


class Said(NamedTuple):
    """What one rank says in one round; of each number all hear the lowest. See `Round`."""

    request: int
    key: int | None  # of the pass, or of what is to be done together; None: nothing to compare
    num_ready: int  # reductions that it is ready for
    flags: int | None  # a mark of what trains; None: nothing to compare
    past: int | None  # likewise of what was done together
    wish: int | None
    has_deviated: bool
    is_in_vain: bool
    is_loose: bool
    failed: int  # this rank, if it has; else the number of ranks

    def numbers(self) -> list[int]:
        """To be sent."""
        return [
            *_both_ways(self.request),
            self.num_ready,
            *_both_ways(self.key),
            *_both_ways(self.flags),
            *_both_ways(self.past),
            NOTHING if self.wish is None else self.wish,
            -int(self.has_deviated),
            int(self.is_in_vain),
            *_both_ways(int(self.is_loose)),
            self.failed,
        ]


def _both_ways(number: int | None) -> tuple[int, int]:
    """So that the lowest and the highest are heard."""
    return (NOTHING, NOTHING) if number is None else (number, -number)


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
        """The lowest of what `Said.numbers` has put."""
        low, high, ready, key, most_key, flags, most_flags, past, most_past, *rest = numbers
        wish, deviated, in_vain, all_loose, any_loose, failed = rest
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
            is_loose=any_loose < 0,
            is_alike_loose=all_loose == -any_loose,
            failed=failed,
        )
