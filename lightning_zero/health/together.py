"""Work of all ranks that fails on every rank if it fails on one.

[Note: Failing together] A rank that raises leaves the others waiting for it. There are two ways to
make them raise, too, with the rank and its error:

    `run_on_all_ranks`, `failing_together`  for work after which all ranks meet: they exchange how
                                            it went, and go on or raise together
    `Watchdog.abort`                        anywhere else: the watchdogs end the waits of the other
                                            ranks

The lowest rank that failed decides what all ranks raise; an interruption, such as Ctrl-C, only if
no rank has failed otherwise. A rank whose own error has its type and
errno raises its own; any other rank raises one that is made from the description it has received:
an OSError with the same errno, or else a RuntimeError.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from lightning_zero.health.failures import PeerFailedError, summary

__all__ = ["Gather", "failing_together", "run_on_all_ranks"]

_T = TypeVar("_T")
# Returns every rank's picklable object, by rank, on every rank: a method of a strategy, of an
# engine's control plane or of a `Channel`.
Gather = Callable[[Any], Sequence[Any]]


def run_on_all_ranks(
    action: Callable[[], _T], *, gather: Gather, what: str | None = None
) -> list[_T]:
    """Calls `action` on every rank; if it fails on one rank, all ranks raise. Collective.

    Args:
        action: Local work; its result is picklable.
        gather: Exchanges the results.
        what: The work, such as "open one.ckpt" in "rank 1 could not open one.ckpt". None: the other
            ranks raise a copy of the error itself, and only its cause names the rank.

    Returns:
        The results by rank.

    Raises:
        Exception: On a rank that has failed; see [Note: Failing together]. An interruption of this
            rank is always raised.
        OSError: Another rank has failed with an OSError of this errno.
        RuntimeError: Another rank has failed with another error.
    """
    result: Any = None
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as raised:  # raised below, once all ranks know it
        error = raised
    return _exchange(result, error, gather, what)


@contextmanager
def failing_together(what: str, *, gather: Gather) -> Iterator[None]:
    """As `run_on_all_ranks`, for work whose results stay local: the context's body. Collective.

    An interruption is raised at once: it may end a body in which other ranks still wait.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    _exchange(None, error, gather, what)


def _exchange(
    result: _T, error: BaseException | None, gather: Gather, what: str | None
) -> list[_T]:
    own = None if error is None else _Failure.of(error, is_copied=what is None)
    try:
        outcomes = gather((result, own))
    except BaseException as failed:  # a rank has ended, or this one was interrupted
        if error is not None:
            raise error from failed
        raise
    failures = [
        (rank, failure) for rank, (_, failure) in enumerate(outcomes) if failure is not None
    ]
    if failures:
        rank, failure = min(failures, key=lambda found: found[1].is_interruption)
        if error is not None and (not isinstance(error, Exception) or failure.is_like(error)):
            raise error
        raise failure.as_error(rank, what) from error or failure.cause(rank, what)
    if error is not None:  # `gather` exchanges the results of rank 0 alone
        raise error
    return [value for value, _ in outcomes]


class _Failure(NamedTuple):
    """Description of an exception for the other ranks."""

    type_name: str
    text: str
    summary: str  # type and first line
    errno: int | None  # of an OSError
    pickled: bytes  # empty: it cannot be copied, or need not be
    is_interruption: bool

    @classmethod
    def of(cls, error: BaseException, *, is_copied: bool) -> _Failure:
        return cls(
            type(error).__name__,
            str(error),
            summary(error),
            error.errno if isinstance(error, OSError) else None,
            _pickled(error) if is_copied else b"",
            not isinstance(error, Exception),
        )

    def is_like(self, error: Exception) -> bool:
        other = _Failure.of(error, is_copied=False)
        return (self.type_name, self.errno) == (other.type_name, other.errno)

    def as_error(self, rank: int, what: str | None) -> Exception:
        """The error that another rank raises."""
        if self.pickled:
            try:
                copied: Exception = pickle.loads(self.pickled)
                return copied
            except Exception:  # its class cannot be imported on this rank
                pass
        found = "raised" if what is None else f"could not {what}:"
        text = f"rank {rank} {found} {self.type_name}: {self.text}"
        return RuntimeError(text) if self.errno is None else OSError(self.errno, text)

    def cause(self, rank: int, what: str | None) -> PeerFailedError | None:
        """Names the rank, if `as_error` does not."""
        return PeerFailedError(f"rank {rank} raised {self.summary}") if what is None else None


def _pickled(error: BaseException) -> bytes:
    """The pickled exception, if unpickling makes an equal one."""
    try:
        pickled = pickle.dumps(error)
        copied = pickle.loads(pickled)
    except Exception:
        return b""
    is_equal = type(copied) is type(error) and str(copied) == str(error)
    return pickled if is_equal and isinstance(copied, Exception) else b""
