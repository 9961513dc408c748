"""The control plane: what ranks tell each other besides data, between CPUs, over gloo.

Rounds of a few integers (rounds.py), small masks and objects, so that all ranks, whatever their
group, agree on what comes next without making a device wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.groups import cut_connections
from lightning_zero.comm.rounds import Rounds
from lightning_zero.comm.watchdog import (
    RanksApartError,
    Watchdog,
)
from lightning_zero.layout.talk import Heard, Judge
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind

__all__ = ["Control", "PeerFailedError"]


class PeerFailedError(RanksApartError):
    """Another rank failed where all go on together; the text tells how."""


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
        self._width = 0
        self._rounds = self._make_rounds()
        self.open()

    def open(self) -> None:
        """Makes the group, where there is a world."""
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(timeout=self._timeout, backend=self._backend)
        self._rounds.close()
        self._rounds = self._make_rounds()

    def _make_rounds(self) -> Rounds:
        is_alone = self.size == 1 or self._backend == "fake"
        group = None if is_alone else self._group
        rounds = Rounds(group, rank=self.rank, size=self.size)
        rounds.widen(self._width)
        return rounds

    @property
    def is_open(self) -> bool:
        """Whether there is a group. Local."""
        return self._group is not None

    @contextmanager
    def waiting(
        self, name: str, *, is_one_way: bool = False, kind: Kind = Kind.AGREE
    ) -> Iterator[None]:
        """Around waiting for other ranks, or for a few bytes of theirs. Local.

        Args:
            name: See `Watchdog.waiting`.
            is_one_way: See there.
            kind: As what it is recorded.

        Raises:
            PeerAbortedError: One of them, or this one, has failed.
            RuntimeError: One does not come.
        """
        if self.size == 1:
            yield
            return
        waiting = self.watchdog.waiting(name, is_one_way=is_one_way)
        with waiting, self._recorder.span(kind, name, is_wait=True):
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

    @property
    def num_rounds(self) -> int:
        """That this rank has begun since the group was made. Local."""
        return self._rounds.num_begun

    def widen(self, num_bytes: int) -> None:
        """Makes room for `num_bytes` in every saying, the same on every rank. Local."""
        self._width = max(self._width, num_bytes)
        self._rounds.widen(num_bytes)

    def say(self, numbers: Sequence[int], mask: bytes, judge: Judge | None = None) -> Heard:
        """One round: see `Rounds.say`. Whoever calls it is `waiting`."""
        return self._rounds.say(numbers, mask, judge)

    def begin_saying(self, numbers: Sequence[int], mask: bytes, judge: Judge) -> Future[Heard]:
        """As `say`, but this rank goes on meanwhile; the result is waited for in `waiting`."""
        return self._rounds.begin(numbers, mask, judge)

    def agree(self, value: int, name: str = "the next round") -> int:
        """The lowest value of any rank.

        Args:
            value: Of this rank; of less than 63 bits.
            name: What it waits for, to be read by people.
        """
        with self.waiting(name):
            return self.say([value], b"").numbers[0]

    # ---------------------------------------------------------------- failure

    def give_up(self, error: Exception) -> None:
        """Lets the other ranks fail, wherever they wait. Local, from any thread."""
        if isinstance(error, RanksApartError):
            self.watchdog.part(error)
        else:
            self.watchdog.abort(error)

    def failed(self, text: str) -> Exception:
        """What to raise where another rank has failed, and all go on together. Local."""
        return PeerFailedError(text)

    def apart(self, text: str) -> Exception:
        """What to raise where ranks have come to different points. Local."""
        return RanksApartError(text)

    # ---------------------------------------------------------------- abort and the end

    def cut(self) -> None:
        """Whoever waits here waits no longer. Local, from any thread."""
        group = self._group
        if group is not None:
            cut_connections([group])

    def close(self) -> None:
        """Destroys the group. Local: ranks may come here at different times."""
        group, self._group = self._group, None
        self._rounds.close()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
