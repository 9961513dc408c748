"""The control plane as `CollectiveOrder` uses it: votes, results, and checks of a round.

In a round every rank sends a `Vote`, and all ranks receive the minimum and the maximum of each of
its numbers. `RoundClient` holds the rounds of one rank and validates their results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

from lightning_zero.health.watchdog import DESYNC_HINT

__all__ = [
    "RoundResult",
    "RoundCheck",
    "Requests",
    "Tally",
    "Vote",
    "ControlPlane",
    "RoundClient",
    "called_from",
]

_NO_VALUE = 2**62  # sent by a rank that has nothing to compare
_MAX_TEXT_BYTES = 1024  # of the text of a failure


class RoundResult(NamedTuple):
    """Result of one round: the same on every rank, except for the error."""

    numbers: list[int]  # minimum over ranks, elementwise
    mask: bytes  # maximum over ranks, elementwise
    error: Exception | None = None  # found by the check of this rank


RoundCheck = Callable[[RoundResult], Exception | None]  # may run further rounds


class ControlPlane(Protocol):
    """Small messages between ranks; implemented by `comm.control.GlooControlPlane`."""

    rank: int
    size: int

    def reserve(self, num_bytes: int) -> None:
        """Reserves `num_bytes` for the mask of every later round."""

    def run_round(
        self, numbers: Sequence[int], mask: bytes, check: RoundCheck | None = None
    ) -> RoundResult:
        """Runs one round."""

    def begin_round(
        self, numbers: Sequence[int], mask: bytes, check: RoundCheck
    ) -> Future[RoundResult]:
        """Begins one round and returns at once."""

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Context of a wait for other ranks; `name` describes the wait."""

    def abort_waits(self, error: Exception) -> None:
        """Makes the other ranks fail, wherever they wait."""

    def peer_failed_error(self, text: str) -> Exception:
        """Error to raise when another rank failed."""

    def desync_error(self, text: str) -> Exception:
        """Error to raise when ranks are desynchronized."""


class Requests(NamedTuple):
    """Requests that ask for no unit; see `CollectiveOrder`."""

    begin: int  # begins a pass
    barrier: int  # enters a call that all ranks make
    done: int  # has ended its step, or its backward
    left: int  # has left a loop of steps


class Vote(NamedTuple):
    """Numbers that one rank sends in one round. None: nothing to compare."""

    request: int
    key: int | None  # of the pass, or of the call that all ranks make
    num_ready: int  # reductions that this rank is ready for
    flags: int | None  # hash of `requires_grad` of all parameters
    history: int | None  # hash of all calls that all ranks have made
    stop_request: int | None
    has_deviated: bool
    has_unused_gathers: bool  # it did not use a unit that the schedule unsharded
    allows_uneven_calls: bool
    failed: int  # this rank, if it has failed; else the number of ranks

    def numbers(self) -> list[int]:
        """The numbers to send: each one for its minimum, and its negative for the maximum."""
        lowest = [_NO_VALUE if number is None else int(number) for number in self]
        highest = [_NO_VALUE if number is None else -int(number) for number in self]
        return lowest + highest


class Tally(NamedTuple):
    """The votes of all ranks in one round, reduced field by field."""

    lowest: Vote
    highest: Vote

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Tally:
        """Splits the minima of `Vote.numbers` over ranks."""
        half = len(Vote._fields)
        return cls(Vote._make(numbers[:half]), Vote._make([-n for n in numbers[half:]]))

    @property
    def request(self) -> int:
        return self.lowest.request

    @property
    def stop_request(self) -> int | None:
        return None if self.lowest.stop_request == _NO_VALUE else self.lowest.stop_request

    def is_same(self, field: str) -> bool:
        """Whether all ranks that sent a value for `field` sent the same one."""
        lowest = getattr(self.lowest, field)
        return lowest in (_NO_VALUE, getattr(self.highest, field))


class _LocalActions(NamedTuple):
    """Actions of this rank alone before it entered a round; see `RoundClient`."""

    current_call: str
    num_writes: int
    last_write: str


class RoundClient:
    """Client side of control-plane rounds; validates their results, with the same error everywhere.

    Args:
        control_plane: Carries the rounds.
        requests: Requests of `CollectiveOrder`.
        names: Names of the parameters whose `requires_grad` are the flags.
        num_bytes: Bytes of the longest mask.

    Attributes:
        flags: `requires_grad` of the parameters on this rank; empty: they are not compared.
        current_call: The call that all ranks make now, and its line; empty: none.
        num_writes: Number of writes of this rank to its shards of parameters.
        last_write: The last of these writes, and its line.
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
        self._failure = ""  # text of the error of this rank while it is sent
        self._unawaited: list[Future[RoundResult]] = []  # rounds that no caller waits for
        control_plane.reserve(max(num_bytes, control_plane.size, _MAX_TEXT_BYTES))

    def reset(self) -> None:
        self._unawaited.clear()

    def begin(self, vote: Vote, mask: bytes = b"", *, is_awaited: bool) -> Future[RoundResult]:
        """Begins a round. If it is not awaited, a failed check aborts the waits of all ranks."""
        name = "the next forward or backward"
        check = partial(self._check, name, self._local_actions(), not is_awaited)
        pending = self._control_plane.begin_round(vote.numbers(), mask, check)
        if not is_awaited:
            self._unawaited.append(pending)
        return pending

    def wait(self, pending: Future[RoundResult], name: str) -> tuple[Tally, bytes]:
        """Waits for a round that has begun; returns its tally and its mask.

        Args:
            pending: The round.
            name: Name of the wait, for reports.
        """
        with self._control_plane.waiting(name):
            result = pending.result()
        return self._accept(result)

    def run_round(self, vote: Vote, name: str, mask: bytes = b"") -> tuple[Tally, bytes]:
        """Runs one round: `begin`, then `wait`."""
        with self._control_plane.waiting(name):
            check = partial(self._check, name, self._local_actions(), False)
            result = self._control_plane.run_round(vote.numbers(), mask, check)
        return self._accept(result)

    def _local_actions(self) -> _LocalActions:
        return _LocalActions(self.current_call, self.num_writes, self.last_write)

    def _accept(self, result: RoundResult) -> tuple[Tally, bytes]:
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
        return Tally.of(result.numbers), result.mask

    def report_failure(self, error: Exception, vote: Vote) -> None:
        """Sends `error` to the other ranks; `vote` has this rank as `failed`.

        Raises:
            RuntimeError: The other ranks cannot be reached.
        """
        self._failure = f"{type(error).__name__}: {error}"
        try:
            check = partial(self._check, "", self._local_actions(), False)
            with self._control_plane.waiting("the failure of this rank"):
                result = self._control_plane.run_round(vote.numbers(), b"", check)
        finally:
            self._failure = ""
        if result.error is not None:
            raise result.error

    # ---------------------------------------------------------------- checks

    def _check(
        self, name: str, actions: _LocalActions, aborts: bool, result: RoundResult
    ) -> Exception | None:
        """Finds the error of a round. Called from any thread.

        `aborts`: no caller may wait for the round, so an error must end all waits.
        """
        tally = Tally.of(result.numbers)
        error: Exception | None = None
        if tally.lowest.failed < self._control_plane.size:
            error = self._failure_of(tally.lowest.failed)
        elif tally.request < self._requests.begin:
            if aborts:
                error = self._control_plane.desync_error(_desync_text(name))
        elif not tally.highest.allows_uneven_calls and not tally.is_same("flags"):
            error = self._flags_error()
        elif self._are_desynchronized(tally):
            text = _desync_text(name, self._describe_actions(actions))
            error, aborts = self._control_plane.desync_error(text), True
        if error is not None and aborts:
            self._control_plane.abort_waits(error)
        return error

    def _are_desynchronized(self, tally: Tally) -> bool:
        lowest, highest = tally
        differs = lowest.request < highest.request or not tally.is_same("key")
        if lowest.allows_uneven_calls != highest.allows_uneven_calls:
            return True
        if lowest.allows_uneven_calls:
            return lowest.request == self._requests.barrier and differs
        return differs or not tally.is_same("history")

    def _failure_of(self, rank: int) -> Exception | None:
        """The error of `rank`, which sends its text in one more round."""
        text = b""
        if rank == self._control_plane.rank:
            text = self._failure.encode()[:_MAX_TEXT_BYTES]
        result = self._control_plane.run_round([], text)
        if self._failure:
            return None  # this rank raises its own error
        received = result.mask.rstrip(b"\0").decode(errors="replace")
        return self._control_plane.peer_failed_error(
            f"rank {rank} failed, and all ranks with it: {received}"
        )

    def _describe_actions(self, actions: _LocalActions) -> str:
        """Describes what one rank did alone, if that is known; the same text on every rank."""
        rank, size = self._control_plane.rank, self._control_plane.size
        own = [
            actions.num_writes,
            rank - size * actions.num_writes,  # its minimum: the rank with the most writes
            rank if actions.current_call else size,
        ]
        fewest, most, caller = self._control_plane.run_round(own, b"").numbers
        writes_differ = -(most // size) != fewest
        sender = most % size if writes_differ else caller
        text = actions.last_write if writes_differ else actions.current_call
        mask = text.encode()[:_MAX_TEXT_BYTES] if rank == sender else b""
        result = self._control_plane.run_round([], mask)
        received = result.mask.rstrip(b"\0").decode(errors="replace")
        return f"rank {sender} {received}; not every rank did. " if received else ""

    def _flags_error(self) -> Exception:
        """Names the first parameter whose `requires_grad` differs by rank."""
        flags, run_round = self.flags, self._control_plane.run_round
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


def _desync_text(name: str, action: str = "") -> str:
    return (
        f"this rank reached {name}, and another rank reached a different call. {action}"
        "One rank has fewer or more batches, runs an additional forward or backward, reads "
        "parameters, or makes other calls "
        "(trainer.log_dir, self.all_gather, self.log(..., sync_dist=True), p.grad.norm() of "
        "sharded gradients, p.data = values). Give all ranks the same number of batches, as "
        "Lightning's own sampler does, and make the same calls in the same order on all ranks, "
        f"not under `if rank == 0`.\n{DESYNC_HINT}"
    )


# Packages whose lines are not the user's.
_SKIPPED_PACKAGES = {"torch", "lightning", "pytorch_lightning", "copy", "contextlib"}
_SKIPPED_PACKAGES |= {__name__.partition(".")[0]}


def called_from() -> str:
    """The innermost line of the user's code on the stack, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _SKIPPED_PACKAGES:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
