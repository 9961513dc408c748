"""What ranks say to each other in one round of an `Order`, what all hear, what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

__all__ = ["CURE", "Heard", "Judge", "Requests", "Round", "Said", "Talk", "Voice", "called_from"]

_NOTHING = 2**62  # said by a rank that has nothing to compare
_MOST_TEXT = 1024  # bytes, of a failure

CURE = (  # the last line of errors of ranks that differ
    "Enter `with lightning_zero.gathered(module):` on every rank to look at parameters on some, "
    "and `with lightning_zero.uneven_calls(module):` to run forwards without gradients on some."
)


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


class Requests(NamedTuple):
    """The requests of ranks that ask for no unit; see `Order`."""

    begin: int  # a pass
    together: int  # something else that all ranks do
    done: int  # has ended its step, or its backward
    left: int  # has left a loop of steps


class Said(NamedTuple):
    """What one rank says in one round. None: nothing to compare."""

    request: int
    key: int | None  # of the pass, or of what is to be done together
    num_ready: int  # reductions that it is ready for
    flags: int | None  # a mark of what trains
    past: int | None  # likewise of what was done together
    wish: int | None
    has_deviated: bool
    is_in_vain: bool  # it has left gathers of the plan unused
    is_loose: bool
    failed: int  # this rank, if it has; else the number of ranks

    def numbers(self) -> list[int]:
        """To be sent: of each the lowest is heard, and by its negative the highest."""
        lowest = [_NOTHING if number is None else int(number) for number in self]
        highest = [_NOTHING if number is None else -int(number) for number in self]
        return lowest + highest


class Round(NamedTuple):
    """What all ranks have said in one round, number by number."""

    lowest: Said
    highest: Said

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Round:
        """The lowest of what `Said.numbers` has put."""
        half = len(Said._fields)
        return cls(Said._make(numbers[:half]), Said._make([-n for n in numbers[half:]]))

    @property
    def request(self) -> int:
        return self.lowest.request

    @property
    def wish(self) -> int | None:
        return None if self.lowest.wish == _NOTHING else self.lowest.wish

    def is_same(self, field: str) -> bool:
        """Whether all that have said something there have said the same."""
        lowest = getattr(self.lowest, field)
        return lowest in (_NOTHING, getattr(self.highest, field))


class _Deeds(NamedTuple):
    """What a rank has done of its own account when it enters a round; see `Voice`."""

    doing: str
    num_writes: int
    written: str


class Voice:
    """How one rank talks, and finds what is wrong with a round: the same on every rank.

    Args:
        talk: Between the ranks.
        requests: Of `Order`.
        names: Of the parameters, whose `requires_grad` are the flags.
        num_bytes: The longest mask.

    Attributes:
        flags: Of this rank; empty: it compares none.
        doing: The call that this rank makes together with all, and where; empty: none.
        num_writes: Of this rank to its parts of parameters.
        written: The last one, and where.
    """

    def __init__(
        self, talk: Talk, requests: Requests, names: Sequence[str], num_bytes: int
    ) -> None:
        self._talk = talk
        self._requests = requests
        self._names = list(names)
        self.flags = b""
        self.doing = ""
        self.num_writes = 0
        self.written = ""
        self._failure = ""  # while it tells of it
        self._unheard: list[Future[Heard]] = []  # sayings that nobody waits for
        talk.widen(max(num_bytes, talk.size, _MOST_TEXT))

    def forget(self) -> None:
        self._unheard.clear()

    def begin(self, said: Said, mask: bytes = b"", *, is_heard: bool) -> Future[Heard]:
        """Begins a round; if nobody will hear it before an event, what is wrong ends all waits."""
        name = "the next forward or backward"
        judge = partial(self._judge, name, self._deeds(), not is_heard)
        saying = self._talk.begin_saying(said.numbers(), mask, judge)
        if not is_heard:
            self._unheard.append(saying)
        return saying

    def hear(self, saying: Future[Heard], name: str) -> tuple[Round, bytes]:
        """Waits for a round that has begun; `name` tells people for what. Its mask, too."""
        with self._talk.waiting(name):
            heard = saying.result()
        return self._take(heard)

    def say(self, said: Said, name: str, mask: bytes = b"") -> tuple[Round, bytes]:
        """`begin` and `hear`."""
        with self._talk.waiting(name):
            judge = partial(self._judge, name, self._deeds(), False)
            heard = self._talk.say(said.numbers(), mask, judge)
        return self._take(heard)

    def _deeds(self) -> _Deeds:
        return _Deeds(self.doing, self.num_writes, self.written)

    def _take(self, heard: Heard) -> tuple[Round, bytes]:
        unheard, self._unheard = self._unheard, []
        earlier: list[Exception | None] = []
        for saying in unheard:  # one may end meanwhile: asked once
            if saying.done():
                earlier.append(saying.result().error)
            else:
                self._unheard.append(saying)
        for error in (*earlier, heard.error):
            if error is not None:
                raise error
        return Round.of(heard.numbers), heard.mask

    def fail(self, error: Exception, said: Said) -> None:
        """Tells the other ranks why this one fails: `said` has its rank.

        Raises:
            RuntimeError: They cannot be told.
        """
        self._failure = f"{type(error).__name__}: {error}"
        try:
            judge = partial(self._judge, "", self._deeds(), False)
            with self._talk.waiting("the failure of this rank"):
                heard = self._talk.say(said.numbers(), b"", judge)
        finally:
            self._failure = ""
        if heard.error is not None:
            raise heard.error

    # ---------------------------------------------------------------- what is wrong

    def _judge(self, name: str, deeds: _Deeds, alarms: bool, heard: Heard) -> Exception | None:
        """From any thread. `alarms`: nobody may hear it, so what is wrong ends all waits."""
        told = Round.of(heard.numbers)
        error: Exception | None = None
        if told.lowest.failed < self._talk.size:
            error = self._told_failure(told.lowest.failed)
        elif told.request < self._requests.begin:
            error = self._talk.apart(_alone(name)) if alarms else None
        elif not told.highest.is_loose and not told.is_same("flags"):
            error = self._told_flags()
        elif self._are_apart(told):
            error, alarms = self._talk.apart(_alone(name, self._told_deeds(deeds))), True
        if error is not None and alarms:
            self._talk.give_up(error)
        return error

    def _are_apart(self, told: Round) -> bool:
        lowest, highest = told
        is_other = lowest.request < highest.request or not told.is_same("key")
        if lowest.is_loose != highest.is_loose:
            return True
        if lowest.is_loose:
            return lowest.request == self._requests.together and is_other
        return is_other or not told.is_same("past")

    def _told_failure(self, rank: int) -> Exception | None:
        text = self._failure.encode()[:_MOST_TEXT] if rank == self._talk.rank else b""
        heard = self._talk.say([], text)
        if self._failure:
            return None  # it raises its own
        told = heard.mask.rstrip(b"\0").decode(errors="replace")
        return self._talk.failed(f"rank {rank} failed, and all ranks with it: {told}")

    def _told_deeds(self, deeds: _Deeds) -> str:
        """What one rank has done alone, where that is known: the same text on every rank."""
        rank, size = self._talk.rank, self._talk.size
        own = [deeds.num_writes, rank - size * deeds.num_writes, rank if deeds.doing else size]
        fewest, most, caller = self._talk.say(own, b"").numbers
        writes_differ = -(most // size) != fewest
        speaker = most % size if writes_differ else caller
        text = deeds.written if writes_differ else deeds.doing
        heard = self._talk.say([], text.encode()[:_MOST_TEXT] if rank == speaker else b"")
        told = heard.mask.rstrip(b"\0").decode(errors="replace")
        return f"rank {speaker} has {told}, and not every rank has. " if told else ""

    def _told_flags(self) -> Exception:
        """Names the first parameter of which ranks differ."""
        flags, say = self.flags, self._talk.say
        some = say([], flags).mask
        others = say([], bytes(not flag for flag in flags)).mask
        place = next((i for i, pair in enumerate(zip(some, others, strict=True)) if all(pair)), 0)
        own = bytes(self._talk.rank) + bytes([1 + flags[place]] if flags else [0])
        everyone = say([], own).mask[: self._talk.size]
        told = [flag == 2 for flag in everyone if flag]
        return RuntimeError(
            f"requires_grad of parameter {self._names[place]} differs by rank: {told}, in the order"
            " of ranks; freeze and unfreeze the same parameters on all ranks, between the same two "
            "steps."
        )


def _alone(name: str, deed: str = "") -> str:
    return (
        f"this rank has come to {name}, and another rank to something else: {deed}One has fewer or "
        "more batches, runs a forward or backward more, looks at parameters, or makes other calls "
        "(trainer.log_dir, self.all_gather, self.log(..., sync_dist=True), p.grad.norm() of "
        "sharded gradients, p.data = values). Give all ranks equally many batches, as Lightning's "
        "own sampler does, and let all make the same calls in the same order: not `if rank == 0`.\n"
        f"{CURE}"
    )


# Packages whose lines are not a user's.
_PASSED = {"torch", "lightning", "pytorch_lightning", "copy", "contextlib"}
_PASSED |= {__name__.partition(".")[0]}


def called_from() -> str:
    """The line outside of torch, Lightning and this package that has led here, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _PASSED:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
