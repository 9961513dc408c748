"""What ranks say to each other in one round of an `CollectiveOrder`, what all hear, what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

__all__ = [
    "DESYNC_HINT",
    "RoundResult",
    "RoundCheck",
    "Requests",
    "Tally",
    "Vote",
    "ControlPlane",
    "RoundClient",
    "called_from",
]

_NOTHING = 2**62  # said by a rank that has nothing to compare
_MOST_TEXT = 1024  # bytes, of a failure

DESYNC_HINT = (  # the last line of errors of ranks that differ
    "Enter `with lightning_zero.gathered(module):` on every rank to look at parameters on some, "
    "and `with lightning_zero.uneven_calls(module):` to run forwards without gradients on some."
)


class RoundResult(NamedTuple):
    """What all ranks hear of one round, the same on every rank but for the error."""

    numbers: list[int]  # the lowest of each
    mask: bytes  # the highest of each
    error: Exception | None = None  # by the judge of this rank


RoundCheck = Callable[[RoundResult], Exception | None]  # may hold further rounds


class ControlPlane(Protocol):
    """How ranks speak: `comm.control.GlooControlPlane`."""

    rank: int
    size: int

    def reserve(self, num_bytes: int) -> None:
        """Makes room in every saying."""

    def run_round(
        self, numbers: Sequence[int], mask: bytes, judge: RoundCheck | None = None
    ) -> RoundResult:
        """One round."""

    def begin_round(
        self, numbers: Sequence[int], mask: bytes, judge: RoundCheck
    ) -> Future[RoundResult]:
        """One round, while this rank goes on."""

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Around waiting for other ranks."""

    def abort_waits(self, error: Exception) -> None:
        """Lets the other ranks fail, wherever they wait."""

    def peer_failed_error(self, text: str) -> Exception:
        """For another rank's failure."""

    def desync_error(self, text: str) -> Exception:
        """For ranks that have come to different points."""


class Requests(NamedTuple):
    """The requests of ranks that ask for no unit; see `CollectiveOrder`."""

    begin: int  # a pass
    barrier: int  # something else that all ranks do
    done: int  # has ended its step, or its backward
    left: int  # has left a loop of steps


class Vote(NamedTuple):
    """What one rank says in one round. None: nothing to compare."""

    request: int
    key: int | None  # of the pass, or of what is to be done together
    num_ready: int  # reductions that it is ready for
    flags: int | None  # a mark of what trains
    history: int | None  # likewise of what was done together
    stop_request: int | None
    has_deviated: bool
    has_unused_gathers: bool  # it has left gathers of the plan unused
    allows_uneven_calls: bool
    failed: int  # this rank, if it has; else the number of ranks

    def numbers(self) -> list[int]:
        """To be sent: of each the lowest is heard, and by its negative the highest."""
        lowest = [_NOTHING if number is None else int(number) for number in self]
        highest = [_NOTHING if number is None else -int(number) for number in self]
        return lowest + highest


class Tally(NamedTuple):
    """What all ranks have said in one round, number by number."""

    lowest: Vote
    highest: Vote

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Tally:
        """The lowest of what `Vote.numbers` has put."""
        half = len(Vote._fields)
        return cls(Vote._make(numbers[:half]), Vote._make([-n for n in numbers[half:]]))

    @property
    def request(self) -> int:
        return self.lowest.request

    @property
    def stop_request(self) -> int | None:
        return None if self.lowest.stop_request == _NOTHING else self.lowest.stop_request

    def is_same(self, field: str) -> bool:
        """Whether all that have said something there have said the same."""
        lowest = getattr(self.lowest, field)
        return lowest in (_NOTHING, getattr(self.highest, field))


class _LocalActions(NamedTuple):
    """What a rank has done of its own account when it enters a round; see `RoundClient`."""

    current_call: str
    num_writes: int
    last_write: str


class RoundClient:
    """How one rank talks, and finds what is wrong with a round: the same on every rank.

    Args:
        control_plane: Between the ranks.
        requests: Of `CollectiveOrder`.
        names: Of the parameters, whose `requires_grad` are the flags.
        num_bytes: The longest mask.

    Attributes:
        flags: Of this rank; empty: it compares none.
        current_call: The call that this rank makes together with all, and where; empty: none.
        num_writes: Of this rank to its parts of parameters.
        last_write: The last one, and where.
    """

    def __init__(
        self, control_plane: ControlPlane, requests: Requests, names: Sequence[str], num_bytes: int
    ) -> None:
        self._control_plane = control_plane
        self._requests = requests
        self._names = list(names)
        self.flags = b""
        self.current_call = ""
        self.num_writes = 0
        self.last_write = ""
        self._failure = ""  # while it tells of it
        self._unawaited: list[Future[RoundResult]] = []  # sayings that nobody waits for
        control_plane.reserve(max(num_bytes, control_plane.size, _MOST_TEXT))

    def reset(self) -> None:
        self._unawaited.clear()

    def begin(self, said: Vote, mask: bytes = b"", *, is_awaited: bool) -> Future[RoundResult]:
        """Begins a round; if nobody will hear it before an event, what is wrong ends all waits."""
        name = "the next forward or backward"
        judge = partial(self._judge, name, self._deeds(), not is_awaited)
        saying = self._control_plane.begin_round(said.numbers(), mask, judge)
        if not is_awaited:
            self._unawaited.append(saying)
        return saying

    def wait(self, saying: Future[RoundResult], name: str) -> tuple[Tally, bytes]:
        """Waits for a round that has begun; `name` tells people for what. Its mask, too."""
        with self._control_plane.waiting(name):
            heard = saying.result()
        return self._take(heard)

    def run_round(self, said: Vote, name: str, mask: bytes = b"") -> tuple[Tally, bytes]:
        """`begin` and `wait`."""
        with self._control_plane.waiting(name):
            judge = partial(self._judge, name, self._deeds(), False)
            heard = self._control_plane.run_round(said.numbers(), mask, judge)
        return self._take(heard)

    def _deeds(self) -> _LocalActions:
        return _LocalActions(self.current_call, self.num_writes, self.last_write)

    def _take(self, heard: RoundResult) -> tuple[Tally, bytes]:
        unheard, self._unawaited = self._unawaited, []
        earlier: list[Exception | None] = []
        for saying in unheard:  # one may end meanwhile: asked once
            if saying.done():
                earlier.append(saying.result().error)
            else:
                self._unawaited.append(saying)
        for error in (*earlier, heard.error):
            if error is not None:
                raise error
        return Tally.of(heard.numbers), heard.mask

    def report_failure(self, error: Exception, said: Vote) -> None:
        """Tells the other ranks why this one fails: `said` has its rank.

        Raises:
            RuntimeError: They cannot be told.
        """
        self._failure = f"{type(error).__name__}: {error}"
        try:
            judge = partial(self._judge, "", self._deeds(), False)
            with self._control_plane.waiting("the failure of this rank"):
                heard = self._control_plane.run_round(said.numbers(), b"", judge)
        finally:
            self._failure = ""
        if heard.error is not None:
            raise heard.error

    # ---------------------------------------------------------------- what is wrong

    def _judge(
        self, name: str, deeds: _LocalActions, alarms: bool, heard: RoundResult
    ) -> Exception | None:
        """From any thread. `alarms`: nobody may hear it, so what is wrong ends all waits."""
        told = Tally.of(heard.numbers)
        error: Exception | None = None
        if told.lowest.failed < self._control_plane.size:
            error = self._told_failure(told.lowest.failed)
        elif told.request < self._requests.begin:
            error = self._control_plane.desync_error(_alone(name)) if alarms else None
        elif not told.highest.allows_uneven_calls and not told.is_same("flags"):
            error = self._told_flags()
        elif self._are_apart(told):
            error, alarms = (
                self._control_plane.desync_error(_alone(name, self._told_deeds(deeds))),
                True,
            )
        if error is not None and alarms:
            self._control_plane.abort_waits(error)
        return error

    def _are_apart(self, told: Tally) -> bool:
        lowest, highest = told
        is_other = lowest.request < highest.request or not told.is_same("key")
        if lowest.allows_uneven_calls != highest.allows_uneven_calls:
            return True
        if lowest.allows_uneven_calls:
            return lowest.request == self._requests.barrier and is_other
        return is_other or not told.is_same("history")

    def _told_failure(self, rank: int) -> Exception | None:
        text = self._failure.encode()[:_MOST_TEXT] if rank == self._control_plane.rank else b""
        heard = self._control_plane.run_round([], text)
        if self._failure:
            return None  # it raises its own
        told = heard.mask.rstrip(b"\0").decode(errors="replace")
        return self._control_plane.peer_failed_error(
            f"rank {rank} failed, and all ranks with it: {told}"
        )

    def _told_deeds(self, deeds: _LocalActions) -> str:
        """What one rank has done alone, where that is known: the same text on every rank."""
        rank, size = self._control_plane.rank, self._control_plane.size
        own = [
            deeds.num_writes,
            rank - size * deeds.num_writes,
            rank if deeds.current_call else size,
        ]
        fewest, most, caller = self._control_plane.run_round(own, b"").numbers
        writes_differ = -(most // size) != fewest
        speaker = most % size if writes_differ else caller
        text = deeds.last_write if writes_differ else deeds.current_call
        heard = self._control_plane.run_round(
            [], text.encode()[:_MOST_TEXT] if rank == speaker else b""
        )
        told = heard.mask.rstrip(b"\0").decode(errors="replace")
        return f"rank {speaker} has {told}, and not every rank has. " if told else ""

    def _told_flags(self) -> Exception:
        """Names the first parameter of which ranks differ."""
        flags, run_round = self.flags, self._control_plane.run_round
        some = run_round([], flags).mask
        others = run_round([], bytes(not flag for flag in flags)).mask
        place = next((i for i, pair in enumerate(zip(some, others, strict=True)) if all(pair)), 0)
        own = bytes(self._control_plane.rank) + bytes([1 + flags[place]] if flags else [0])
        everyone = run_round([], own).mask[: self._control_plane.size]
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
        f"{DESYNC_HINT}"
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
