"""Messages between ranks beside the engine's collectives, also from a background thread."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_zero.comm.control import PeerFailedError
from lightning_zero.comm.groups import cut_connections
from lightning_zero.comm.watchdog import summary

__all__ = ["Channel"]

_T = TypeVar("_T")


class Channel:
    """Picklable values between rank 0 and all ranks, over a gloo group of its own.

    Every method that sends is collective: every rank, same order, one thread at a time (`session`).
    A rank that dies, or an exception while sending, closes it for all: nobody waits longer than the
    group's timeout. Made by `Communicator.open_channel`.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int, group: Any | None) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return not self._is_closed

    @contextmanager
    def session(self) -> Iterator[None]:
        """Holds the channel; `close` from another thread takes effect at its end."""
        with self._lock:
            try:
                yield
            finally:
                if self._is_closed:
                    self._destroy()

    def close(self) -> None:
        """No session begins any more. Not collective; the others fail if they still send."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._destroy()
            self._lock.release()

    def cut(self) -> None:
        """Whoever waits here waits no longer. From any thread."""
        group = self._group
        if group is not None:
            cut_connections([group])

    def gather(self, value: _T) -> list[_T] | None:
        """Every rank's value, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        box: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._closing_on_failure():
            dist.gather_object(value, box, group=self._group, group_dst=0)
        return box

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with self._closing_on_failure():
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def attempt(self, action: Callable[[], _T]) -> list[_T] | None:
        """Calls `action` on every rank; if it fails on one, all fail.

        Returns:
            Every rank's result, on rank 0; None elsewhere.

        Raises:
            BaseException: That of the first rank that has one, the same on every rank, caused by a
                `PeerFailedError` that names the rank; but an interruption of this rank always.
        """
        failure: BaseException | None = None
        result: Any = None
        try:
            result = action()
        except BaseException as error:  # the others are told before it goes on its way
            failure = error
        portable, said = _portable(failure, self.rank)
        outcomes = self.gather((result, portable, said))
        failures = [(error, said) for _, error, said in outcomes or [] if error is not None]
        first, said = self.broadcast(failures[0] if failures else (None, ""))
        if failure is not None and not isinstance(failure, Exception):
            self.close()  # this rank goes away
            raise failure
        if first is not None:
            if failure is not None and repr(failure) == repr(first):
                raise failure
            raise first from (failure or PeerFailedError(said))
        return None if outcomes is None else [result for result, *_ in outcomes]

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        if self._group is None:
            raise RuntimeError(
                "the ranks were separated by an exception; nothing can be agreed on."
            )
        try:
            yield
        except BaseException:
            self._is_closed = True
            self._destroy()  # so that the others, who wait for this rank, fail as well
            raise

    def _destroy(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _portable(error: BaseException | None, rank: int) -> tuple[Exception | None, str]:
    """The exception as another rank can raise it, and what it says of it."""
    if error is None:
        return None, ""
    said = f"rank {rank} raised {summary(error)}"
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if isinstance(copied, Exception) and type(copied) is type(error) and str(copied) == str(error):
        return copied, said
    return RuntimeError(f"rank {rank} raised {type(error).__name__}: {error}"), said
