"""Rounds as `CollectiveOrder` uses them: requests, votes, results, and the checks of a round.

In a round every rank sends a `Vote`, and all ranks receive the minimum and the maximum of each of
its numbers. `RoundClient` runs the rounds of one rank and validates their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from lightning_zero.comm.control import GlooControlPlane, RoundResult
from lightning_zero.health.failures import DESYNC_HINT, DesynchronizedError
from lightning_zero.record.frames import called_from

__all__ = ["Request", "RequestKind", "RoundClient", "Tally", "Vote"]

_NO_VALUE = 2**62  # sent by a rank that has nothing to compare
_MAX_TEXT_BYTES = 1024  # of a text that a round sends
_SPAN = 1 << 40  # packed requests of one kind


class RequestKind(IntEnum):
    """Why a rank enters a round. The lowest request of all ranks comes first."""

    FORWARD = 0  # it needs a unit in forward
    BACKWARD = 1  # it needs a unit in backward
    BEGIN = 2  # it begins a pass
    BARRIER = 3  # it enters a call that all ranks make
    DONE = 4  # it has ended its step, or its backward
    LEFT = 5  # it has left a loop of steps


class Request(NamedTuple):
    """Request of one rank. Units are served in layout order, in backward in reverse order."""

    kind: RequestKind
    number: int = 0  # of the unit

    def pack(self) -> int:
        """The request as one number, in the order in which requests are served."""
        offset = -self.number if self.kind is RequestKind.BACKWARD else self.number
        return self.kind * _SPAN + offset

    @classmethod
    def unpack(cls, packed: int) -> Request:
        """The inverse of `pack`."""
        kind = (packed + _SPAN // 2) // _SPAN
        return cls(RequestKind(kind), abs(packed - kind * _SPAN))


class Vote(NamedTuple):
    """Numbers that one rank sends in one round. None: nothing to compare."""

    request: int  # packed
    key: int | None  # of the pass, or of the call that all ranks make
    num_ready: int  # reductions that this rank is ready for
    flags: int | None  # hash of `requires_grad` of all parameters
    history: int | None  # hash of all calls that all ranks have made
    stop_request: int | None
    has_deviated: bool
    allows_uneven_calls: bool

    def numbers(self) -> list[int]:
        """The numbers to send: each one for its minimum, and its negative for the maximum."""
        lowest = [_NO_VALUE if number is None else int(number) for number in self]
        highest = [_NO_VALUE if number is None else -int(number) for number in self]
        return lowest + highest


class Tally(NamedTuple):
    """The votes of all ranks in one round, reduced field by field."""

    lowest: Vote
    highest: Vote
    mask: bytes  # maximum over ranks, byte by byte

    @classmethod
    def of(cls, result: RoundResult) -> Tally:
        """Splits the minima of `Vote.numbers` over ranks."""
        half, numbers = len(Vote._fields), result.numbers
        lowest, highest = numbers[:half], [-number for number in numbers[half:]]
        return cls(Vote._make(lowest), Vote._make(highest), result.mask)

    @property
    def request(self) -> Request:
        """The lowest request."""
        return Request.unpack(self.lowest.request)

    @property
    def stop_request(self) -> int | None:
        """The lowest stop request."""
        return None if self.lowest.stop_request == _NO_VALUE else self.lowest.stop_request

    def is_same(self, field: str) -> bool:
        """Whether all ranks that sent a value for `field` sent the same one."""
        lowest = getattr(self.lowest, field)
        return lowest in (_NO_VALUE, getattr(self.highest, field))


class _LocalState(NamedTuple):
    """State of one rank when it enters a round; the text of an error is made from it."""

    flags: bytes = b""  # `requires_grad` of the parameters; empty: they are not compared
    current_call: str = ""  # the call that all ranks make now, and its line; empty: none
    num_writes: int = 0  # writes of this rank to its shards of parameters
    last_write: str = ""  # the last of these writes, and its line


class RoundClient:
    """Runs the rounds of one rank and validates their results, with the same error everywhere.

    Args:
        control_plane: Carries the rounds.
        names: Names of the parameters whose `requires_grad` are the flags.
        num_bytes: Bytes of the longest mask.
    """

    def __init__(
        self, control_plane: GlooControlPlane, names: Sequence[str], num_bytes: int
    ) -> None:
        self._control_plane = control_plane
        self._names = list(names)
        self._state = _LocalState()
        self._unawaited: list[Future[RoundResult]] = []  # rounds that no caller waits for
        control_plane.reserve(max(num_bytes, control_plane.size, _MAX_TEXT_BYTES))

    # ---------------------------------------------------------------- state of this rank

    @property
    def flags(self) -> bytes:
        """`requires_grad` of the parameters in this pass; empty: ranks do not compare them."""
        return self._state.flags

    def set_flags(self, flags: bytes) -> None:
        """Sets `flags`. Local."""
        self._state = self._state._replace(flags=flags)

    def set_call(self, name: str) -> None:
        """Sets the call that all ranks make now; "": none. Local."""
        text = f"reached {name}, {called_from()}" if name else ""
        self._state = self._state._replace(current_call=text)

    def note_write(self, name: str) -> None:
        """Notes that this rank writes to its shard of parameter `name`. Local."""
        self._state = self._state._replace(
            num_writes=self._state.num_writes + 1,
            last_write=f"wrote to parameter {name}, {called_from()}",
        )

    # ---------------------------------------------------------------- rounds

    def begin(
        self, vote: Vote, name: str, mask: bytes = b"", *, is_awaited: bool
    ) -> Future[RoundResult]:
        """Begins a round for `name`. If it is not awaited, a failed check ends all ranks' waits."""
        check = partial(self._check, name, self._state, not is_awaited)
        pending = self._control_plane.begin_round(vote.numbers(), mask, check)
        if not is_awaited:
            self._unawaited.append(pending)
        return pending

    def wait(self, pending: Future[RoundResult], name: str) -> Tally:
        """Waits, as `name`, for a round that has begun."""
        with self._control_plane.waiting(name):
            result = pending.result()
        return self._accept(result)

    def run_round(self, vote: Vote, name: str, mask: bytes = b"") -> Tally:
        """Runs one round: `begin`, then `wait`."""
        with self._control_plane.waiting(name):
            check = partial(self._check, name, self._state, False)
            result = self._control_plane.run_round(vote.numbers(), mask, check)
        return self._accept(result)

    def _accept(self, result: RoundResult) -> Tally:
        """Raises the error of this round, or of an earlier one that was not awaited."""
        unawaited, self._unawaited = self._unawaited, []
        earlier: list[Exception | None] = []
        for pending in unawaited:  # one may end meanwhile: `done` is called once
            if pending.done():
                earlier.append(pending.result().error)
            else:
                self._unawaited.append(pending)
        for error in (*earlier, result.error):
            if error is not None:
                raise error
        return Tally.of(result)

    # ---------------------------------------------------------------- checks

    def _check(
        self, name: str, state: _LocalState, aborts: bool, result: RoundResult
    ) -> Exception | None:
        """Finds the error of a round. Called from any thread.

        `aborts`: no caller may wait for the round, so an error must end all waits.
        """
        tally = Tally.of(result)
        request = tally.request
        error: Exception | None = None
        if request.kind < RequestKind.BEGIN:
            if aborts:
                error = DesynchronizedError(_desync_text(name))
        elif not tally.highest.allows_uneven_calls and not tally.is_same("flags"):
            error = self._flags_error(state.flags)
        elif _are_desynchronized(tally):
            try:
                happened = self._describe(name, state)
            except RuntimeError:  # another rank has its error already, and has ended the rounds
                happened = ""
            error = DesynchronizedError(_desync_text(name, happened))
            aborts = True
        if error is not None and aborts:
            self._control_plane.abort_waits(error)
        return error

    def _receive_text(self, text: bytes) -> str:
        """Text of the only rank that sends one."""
        return self._control_plane.run_round([], text).mask.rstrip(b"\0").decode(errors="replace")

    def _describe(self, name: str, state: _LocalState) -> str:
        """What one rank did alone, if that is known, and that this one reached `name`."""
        rank, size = self._control_plane.rank, self._control_plane.size
        own = [
            state.num_writes,
            rank - size * state.num_writes,  # its minimum: the rank with the most writes
            rank if state.current_call else size,
        ]
        fewest, most, caller = self._control_plane.run_round(own, b"").numbers
        writes_differ = -(most // size) != fewest
        sender = most % size if writes_differ else caller
        text = state.last_write if writes_differ else state.current_call
        received = self._receive_text(text.encode()[:_MAX_TEXT_BYTES] if rank == sender else b"")
        if not received:
            return ""
        reached = "" if rank == sender else f": this rank reached {name}"
        return f"rank {sender} {received}; not every rank did{reached}."

    def _flags_error(self, flags: bytes) -> Exception:
        """Names the first parameter whose `requires_grad` differs by rank."""
        run_round = self._control_plane.run_round
        some = run_round([], flags).mask
        others = run_round([], bytes(not flag for flag in flags)).mask
        index = next((i for i, pair in enumerate(zip(some, others, strict=True)) if all(pair)), 0)
        own = bytes(self._control_plane.rank) + bytes([1 + flags[index]] if flags else [0])
        by_rank = run_round([], own).mask[: self._control_plane.size]
        values = [flag == 2 for flag in by_rank if flag]
        return RuntimeError(
            f"requires_grad of parameter {self._names[index]} differs by rank: {values}, in the "
            "order of ranks; freeze and unfreeze the same parameters on all ranks, between the "
            "same two steps."
        )


def _are_desynchronized(tally: Tally) -> bool:
    lowest, highest, _ = tally
    differs = lowest.request < highest.request or not tally.is_same("key")
    if lowest.allows_uneven_calls != highest.allows_uneven_calls:
        return True
    if lowest.allows_uneven_calls:
        return tally.request.kind is RequestKind.BARRIER and differs
    return differs or not tally.is_same("history")


def _desync_text(name: str, happened: str = "") -> str:
    """Text of the error of this rank, which reached `name`: what happened, the cure, the rest."""
    if not happened:
        happened = f"this rank reached {name}, and another rank reached a different call."
    return (
        f"{happened}\n{DESYNC_HINT}\n"
        "Otherwise one rank has fewer or more batches, runs an additional forward or backward, has "
        "caught an exception, steps other parameters, or makes other calls (trainer.log_dir, "
        "self.all_gather, self.log(..., sync_dist=True), p.grad.norm() of sharded gradients, "
        "p.grad = None, p.data = values). Give all ranks the same number of batches, as "
        "Lightning's own sampler does, and make the same calls in the same order on all ranks, not "
        "under `if rank == 0`."
    )
