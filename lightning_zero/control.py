"""The control plane: what ranks tell each other besides data, between CPUs, over gloo.

Single integers, small masks and objects, so that all ranks, whatever their group, agree on what
comes next without making a device wait. Here a rank also learns that another one has failed: at
once, for an aborting rank closes its connections, and by whom, for it leaves its number in the
store that the ranks have met by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.recorder import Recorder
from lightning_zero.recording import Kind

__all__ = ["Control", "PeerAbortedError", "PeerFailedError", "Round", "hang_up"]

_FAILED = -1
_NO_MARK = 2**62
_STORE_TIMEOUT_S = 3.0  # the client's own does not end every request


class PeerAbortedError(RuntimeError):
    """Another rank stopped with an exception of its own, which is the one to read."""


class PeerFailedError(RuntimeError):
    """Another rank failed where all go on together; the text tells how."""


class Round(NamedTuple):
    """What `Control.agree` found."""

    lowest: int  # request of all ranks
    fewest: int  # reductions that any rank has issued
    highest: int  # request of all ranks
    is_alike: bool = True  # those that sent a mark sent the same one
    is_same_batch: bool = True  # those that sent a batch sent the same one
    wish: int | None = None  # the lowest of those that sent one


class Control:
    """Every method is collective where it does not say that it is local: every rank, same order.

    Args:
        recorder: Of what goes on in this process.
        rank: In the world.
        size: Of the world.
        backend: Of the group: "gloo", or "fake", which stands for all ranks in one process.
        timeout: Of collectives; None: the backend's.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        rank: int,
        size: int,
        backend: str,
        timeout: timedelta | None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._recorder = recorder
        self._backend = backend
        self._timeout = timeout
        self._group: Any = None
        self._name = ""  # in the store, which may outlive many groups
        self.open()

    def open(self) -> None:
        """Makes the group, where there is a world."""
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(timeout=self._timeout, backend=self._backend)
            name = uuid4().hex
            self._name = name if self._backend == "fake" else self.broadcast_object(name)

    @property
    def is_open(self) -> bool:
        """Whether there is a group. Local."""
        return self._group is not None

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Around waiting for other ranks, not for data. Local.

        Raises:
            PeerAbortedError: One of them, or this one, called `abort`.
            RuntimeError: One does not come.
        """
        try:
            with self._recorder.span(Kind.AGREE, name, is_wait=True):
                yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            rank = self._aborted_by()
            if rank == self.rank:
                raise PeerAbortedError(f"rank {rank} has ended with an exception before.") from None
            if rank is not None:
                raise PeerAbortedError(
                    f"rank {self.rank} stops because rank {rank} raised an exception; its "
                    "traceback, in that rank's output, tells the cause."
                ) from error
            raise RuntimeError(
                f"rank {self.rank} waited in vain for the other ranks to come to the same point. "
                "Every rank must run forward and backward together, with equally many batches (in "
                "stage 3 also a forward for a sample or an image, which `if rank == 0` would run "
                "on one rank alone; inside `with lightning_zero.lockstep(module)` on every rank, "
                "ranks may run different numbers of them); or another rank has died."
            ) from error

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
        with self.waiting("broadcast"):
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
        with self.waiting("objects"):
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
        batch: int | None = None,
        wish: int | None = None,
    ) -> Round:
        """One round.

        Args:
            request: What this rank asks for; not negative.
            num_issued: How many reductions it has issued in this backward.
            mark: Of what it trains; all ranks that send one should send the same.
            batch: Number of a batch, likewise.
            wish: Of which the lowest is told. These three are of less than 62 bits.

        Raises:
            PeerAbortedError: Another rank called `abort`.
            PeerFailedError: Another rank called `fail`.
        """
        return self.begin_agreement(request, num_issued, mark, batch=batch, wish=wish)()

    def begin_agreement(
        self,
        request: int,
        num_issued: int = 0,
        mark: int | None = None,
        *,
        batch: int | None = None,
        wish: int | None = None,
    ) -> Callable[[], Round]:
        """As `agree`, but what it returns waits for the other ranks, and raises."""
        if self.size == 1:
            return lambda: Round(request, num_issued, request, wish=wish)
        numbers = [request, -request, num_issued, *_both_ways(mark), *_both_ways(batch)]
        agreed = torch.tensor([*numbers, _NO_MARK if wish is None else wish], dtype=torch.int64)
        work = dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        return lambda: self._end_agreement(request, work, agreed)

    def _end_agreement(self, request: int, work: Any, agreed: Tensor) -> Round:
        with self.waiting("round"):
            work.wait()
        lowest, highest, fewest, *marks, wish = agreed.tolist()
        if lowest == _FAILED and request != _FAILED:
            self._raise_failure(None)
        return Round(
            lowest,
            fewest,
            -highest,
            is_alike=_is_one(*marks[:2]),
            is_same_batch=_is_one(*marks[2:]),
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

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around work that each rank does alone and that may fail on some: then all of them fail.

        Raises:
            RuntimeError: Another rank failed; says which and how.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(failed):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed where all must succeed: {message}")

    # ---------------------------------------------------------------- abort and the end

    def abort(self) -> None:
        """Makes the other ranks fail where they wait for this one. Local: does not wait for them.

        Whatever they do next on this plane, or do already, finds the connection closed. A message
        would pair with what this rank was about to take part in, which may be of another size.
        """
        own = str(self.rank)
        _ask_store(lambda store: store.compare_set(self._key("abort"), "", own))
        hang_up(self._group)

    def _aborted_by(self) -> int | None:
        """The rank that was the first to abort."""
        key = self._key("abort")
        rank = _ask_store(lambda store: store.get(key) if store.check([key]) else None)
        return None if rank is None else int(rank)

    def rally(self, deadline: timedelta) -> bool:
        """After an abort: waits until every rank has come here, also without any connection.

        Returns:
            Whether all came in time.
        """
        key, seconds = self._key("rally"), deadline.total_seconds()

        def come(store: Any) -> bool:
            store.add(key, 1)
            until = time.monotonic() + seconds
            while store.add(key, 0) < self.size:
                if time.monotonic() > until:
                    return False
                time.sleep(0.02)
            return True

        return bool(_ask_store(come, seconds + _STORE_TIMEOUT_S))

    def _key(self, name: str) -> str:
        return f"lightning_zero/{self._name}/{name}"

    def close(self) -> None:
        """Destroys the group. Local: ranks may come here at different times."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def hang_up(group: Any) -> None:
    """Closes a gloo group's connections, so that what is under way on it fails on both sides.

    Destroying it does not while anything, a transfer or a traceback, refers to it. A receive that
    times out does; but where the peer has gone it fails, and closes nothing else.
    """
    if dist.get_backend(group) != "gloo":
        return
    nothing = torch.empty(1)
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([nothing], peer, 2**30).wait(timedelta(milliseconds=1))


def _ask_store(question: Callable[[Any], Any], timeout_s: float = _STORE_TIMEOUT_S) -> Any:
    """What the store answers; None where it has gone with rank 0, or does not answer in time."""
    answer: list[Any] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):  # ValueError: there is no default group any more
            answer.append(question(dist.distributed_c10d._get_default_store()))

    thread = threading.Thread(target=ask, daemon=True, name="lightning-zero-store")
    thread.start()
    thread.join(timeout_s)
    return answer[0] if answer else None


def _both_ways(mark: int | None) -> tuple[int, int]:
    """The least of the first is the least mark of all, and that of the second, turned, the most."""
    return (_NO_MARK, _NO_MARK) if mark is None else (mark, -mark)


def _is_one(least: int, most: int) -> bool:
    return least == _NO_MARK or least == -most
