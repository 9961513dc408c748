"""The control plane: what ranks tell each other besides data, between CPUs, over gloo.

Single integers, small masks and objects, so that all ranks, whatever their group, agree on what
comes next without making a device wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.watchdog import (
    PeerAbortedError,
    RanksApartError,
    Watchdog,
    cut_connections,
)
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind

__all__ = ["Control", "PeerFailedError", "Round", "topic_of"]

_FAILED = -1
_NO_MARK = 2**62


class PeerFailedError(RanksApartError):
    """Another rank failed where all go on together; the text tells how."""


class Round(NamedTuple):
    """What `Control.agree` found."""

    lowest: int  # request of all ranks
    fewest: int  # reductions that any rank has issued
    highest: int  # request of all ranks
    is_alike: bool = True  # those that sent a mark sent the same one
    is_same_topic: bool = True  # those that sent a topic sent the same one
    wish: int | None = None  # the lowest of those that sent one


def topic_of(name: str) -> int:
    """A number for what ranks meet for, so that they find out whether it is the same."""
    return crc32(name.encode())


class Control:
    """Every method is collective where it does not say that it is local: every rank, same order.

    Args:
        recorder: Of what goes on in this process.
        rank: In the world.
        size: Of the world.
        backend: Of the group: "gloo", or "fake", which stands for all ranks in one process.
        timeout: Of collectives; None: the backend's.
        watchdog: Tells of the failures of others.

    Attributes:
        watchdog: That one.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        rank: int,
        size: int,
        backend: str,
        timeout: timedelta | None,
        watchdog: Watchdog,
    ) -> None:
        self.rank = rank
        self.size = size
        self.watchdog = watchdog
        self._recorder = recorder
        self._backend = backend
        self._timeout = timeout
        self._group: Any = None
        self.open()

    def open(self) -> None:
        """Makes the group, where there is a world."""
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(timeout=self._timeout, backend=self._backend)

    @property
    def is_open(self) -> bool:
        """Whether there is a group. Local."""
        return self._group is not None

    @contextmanager
    def waiting(self, name: str, *, is_one_way: bool = False) -> Iterator[None]:
        """Around waiting for other ranks, not for data. Local.

        Args:
            name: See `Watchdog.waiting`.
            is_one_way: See there.

        Raises:
            PeerAbortedError: One of them, or this one, has failed.
            RuntimeError: One does not come.
        """
        waiting = self.watchdog.waiting(name, is_one_way=is_one_way)
        with waiting, self._recorder.span(Kind.AGREE, name, is_wait=True):
            yield

    # ---------------------------------------------------------------- values

    def min_ints(self, values: Sequence[int]) -> list[int]:
        """Elementwise minimum over ranks."""
        if self.size == 1:
            return list(values)
        lowest = torch.tensor(values, dtype=torch.int64)
        with self.waiting("minimum"):
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in lowest.tolist()]

    def union(self, mask: Sequence[bool]) -> list[bool]:
        """Elementwise `or` over ranks."""
        if self.size == 1:
            return list(mask)
        bits = torch.tensor(mask, dtype=torch.uint8)
        with self.waiting("mask"):
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(bit) for bit in bits.tolist()]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's picklable object, on every rank."""
        if self._group is None or self.size == 1:
            return value
        box = [value]
        with self.waiting("broadcast", is_one_way=True):
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, on every rank."""
        if self._group is None or self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self.waiting("objects"):
            dist.all_gather_object(box, value, group=self._group)
        return box

    def collect_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, by rank, on rank 0; nothing elsewhere."""
        if self._group is None or self.size == 1:
            return [value]
        box: list[Any] | None = None if self.rank else [None] * self.size
        with self.waiting("objects", is_one_way=True):
            dist.gather_object(value, box, group=self._group, group_dst=0)
        return box or []

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank, on every rank: equally many on each."""
        if self._group is None or self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [own.clone() for _ in range(self.size)]
        with self.waiting("numbers"):
            dist.all_gather(everyone, own, group=self._group)
        return [numbers.tolist() for numbers in everyone]

    # ---------------------------------------------------------------- rounds

    def agree(
        self,
        request: int,
        num_issued: int = 0,
        mark: int | None = None,
        *,
        topic: int | None = None,
        wish: int | None = None,
        name: str = "the next round",
    ) -> Round:
        """One round.

        Args:
            request: What this rank asks for; not negative.
            num_issued: How many reductions it has issued in this backward.
            mark: Of what it trains; all ranks that send one should send the same.
            topic: What the request is about, likewise.
            wish: Of which the lowest is told. These three are of less than 62 bits.
            name: What this rank waits for, to be read by people.

        Raises:
            PeerAbortedError: Another rank has failed.
            PeerFailedError: Another rank called `fail`.
        """
        return self.begin_agreement(request, num_issued, mark, topic=topic, wish=wish, name=name)()

    def begin_agreement(
        self,
        request: int,
        num_issued: int = 0,
        mark: int | None = None,
        *,
        topic: int | None = None,
        wish: int | None = None,
        name: str = "the next round",
    ) -> Callable[[], Round]:
        """As `agree`, but what it returns waits for the other ranks, and raises."""
        if self.size == 1:
            return lambda: Round(request, num_issued, request, wish=wish)
        numbers = [request, -request, num_issued, *_both_ways(mark), *_both_ways(topic)]
        agreed = torch.tensor([*numbers, _NO_MARK if wish is None else wish], dtype=torch.int64)
        with self.watchdog.waiting(name):
            work = dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        return lambda: self._end_agreement(request, work, agreed, name)

    def _end_agreement(self, request: int, work: Any, agreed: Tensor, name: str) -> Round:
        with self.waiting(name):
            work.wait()
        lowest, highest, fewest, *marks, wish = agreed.tolist()
        if lowest == _FAILED and request != _FAILED:
            self._raise_failure(None)
        return Round(
            lowest,
            fewest,
            -highest,
            is_alike=_is_one(*marks[:2]),
            is_same_topic=_is_one(*marks[2:]),
            wish=None if wish == _NO_MARK else wish,
        )

    # ---------------------------------------------------------------- failure

    def fail(self, error: Exception) -> None:
        """Tells the other ranks, at their next `agree`, why this one fails; they raise it too.

        The caller raises `error` afterwards. All ranks can go on together where that is caught on
        all of them. Where ranks fail at once, each raises its own.

        Raises:
            RuntimeError: They cannot be told.
        """
        if self.size == 1 or isinstance(error, (PeerAbortedError, PeerFailedError)):
            return
        with suppress(PeerAbortedError, PeerFailedError):
            self.agree(_FAILED)
            self._raise_failure(error)

    def _raise_failure(self, error: Exception | None) -> None:
        text = None if error is None else f"{type(error).__name__}: {error}"
        for rank, failure in enumerate(self.gather_objects(text)):
            if failure is not None:
                raise PeerFailedError(f"rank {rank} failed, and all ranks with it: {failure}")

    # ---------------------------------------------------------------- abort and the end

    def cut(self) -> None:
        """Whoever waits here waits no longer. Local, from any thread."""
        group = self._group
        if group is not None:
            cut_connections(group)

    def close(self) -> None:
        """Destroys the group. Local: ranks may come here at different times."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _both_ways(mark: int | None) -> tuple[int, int]:
    """The least of the first is the least mark of all, and that of the second, turned, the most."""
    return (_NO_MARK, _NO_MARK) if mark is None else (mark, -mark)


def _is_one(least: int, most: int) -> bool:
    return least == _NO_MARK or least == -most
