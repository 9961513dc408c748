"""Rounds: what every rank says at once, and all hear, after log2(N) messages.

[Note: Rounds] In round k every rank says its k-th saying: a few integers, of which all hear the
lowest of any rank, and bytes, of which all hear the highest. A rank may begin a round and go on; a
thread carries it through, for its later messages depend on earlier ones. Rounds never overtake each
other: the k-th saying of one rank meets the k-th of every other, whatever those were for, so that
ranks which have come to different points find it out.

Messages go along a dissemination network: in hop i rank r sends what it has heard to r + 2^i and
hears from r - 2^i (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988).
After ceil(log2 N) hops, for any N, it has heard from all, some of them twice, which neither a
minimum nor a maximum minds. Receives are posted before the first hop.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from lightning_zero.comm.groups import cut_connections
from lightning_zero.layout.talk import Heard, Judge

__all__ = ["Rounds"]


_Task = tuple[Sequence[int], bytes, Judge | None, "Future[Heard]"]
_FIRST_TAG = 1 << 20  # of nobody else on the group
_EXIT_S = 2.0  # for the thread to end with the process


class Rounds:
    """The rounds of one group of ranks.

    Args:
        group: Of all ranks, on gloo; None: this rank is alone.
        rank: In it.
        size: Of it.
    """

    def __init__(self, group: Any, *, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._distances = [1 << hop for hop in range((size - 1).bit_length())] if group else []
        self._size = size
        self._width = 0  # bytes of every saying
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Heard] | None = None  # begun last; rounds end in their order
        self.num_begun = 0

    def widen(self, num_bytes: int) -> None:
        """From now on all sayings have room for `num_bytes`, the same on every rank. Local."""
        self._width = max(self._width, num_bytes)

    def say(self, numbers: Sequence[int], mask: bytes = b"", judge: Judge | None = None) -> Heard:
        """One round, which ends before this returns; inside a `judge` at once.

        Args:
            numbers: Of less than 63 bits, equally many on every rank.
            mask: Bytes, at most as many as `widen` has made room for.
            judge: Is asked, on every rank, what is wrong with what was heard; in the thread where
                there is one, so that it is asked also where nobody waits.
        """
        if threading.current_thread() is not self._thread:
            if self._last is not None and not self._last.done():
                return self.begin(numbers, mask, judge).result()
            self.num_begun += 1
        return self._carry(numbers, mask, judge)

    def begin(
        self, numbers: Sequence[int], mask: bytes = b"", judge: Judge | None = None
    ) -> Future[Heard]:
        """As `say`, but this rank goes on meanwhile."""
        future: Future[Heard] = Future()
        self.num_begun += 1
        if not self._distances:
            _fulfil(future, lambda: self._carry(numbers, mask, judge))
            return future
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._tasks), daemon=True, name="zero-rounds"
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
            _end_at_exit(self)
        self._last = future
        self._tasks.put((numbers, mask, judge, future))
        return future

    def end_with_process(self) -> None:
        """Ends the thread, also where it waits for a rank that does not come. Local."""
        thread, last = self._thread, self._last
        self.close()
        if thread is not None and thread.is_alive():
            if last is not None and not last.done():
                cut_connections([self._group])
            thread.join(_EXIT_S)

    def close(self) -> None:
        """Ends the thread, when it has ended the rounds under way. Local; does not wait."""
        self._tasks.put(None)
        self._thread = None

    def work(self, task: _Task) -> None:
        """One round of the thread."""
        numbers, mask, judge, future = task
        _fulfil(future, lambda: self._carry(numbers, mask, judge))

    def _carry(self, numbers: Sequence[int], mask: bytes, judge: Judge | None) -> Heard:
        """Carries one saying through the network."""
        if self._distances:
            assert len(mask) <= self._width, "see `widen`"
            with torch.inference_mode(mode=False), torch.device("cpu"):
                numbers, mask = self._exchange(numbers, mask)
        heard = Heard(list(numbers), mask)
        return heard if judge is None else heard._replace(error=judge(heard))

    def _exchange(self, numbers: Sequence[int], mask: bytes) -> tuple[list[int], bytes]:
        split = 8 * len(numbers)
        said = torch.zeros(split + self._width, dtype=torch.uint8)
        lowest, highest = said[:split].view(torch.int64), said[split:]
        lowest.copy_(torch.tensor(numbers, dtype=torch.int64))
        if mask:
            highest[: len(mask)] = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        others = [torch.empty_like(said) for _ in self._distances]
        receives = [
            self._group.recv([other], (self._rank - distance) % self._size, _FIRST_TAG + hop)
            for hop, (distance, other) in enumerate(zip(self._distances, others, strict=True))
        ]
        sends = []
        for hop, distance in enumerate(self._distances):
            travelling = said.clone()
            target = (self._rank + distance) % self._size
            sends.append((self._group.send([travelling], target, _FIRST_TAG + hop), travelling))
            receives[hop].wait()
            torch.minimum(lowest, others[hop][:split].view(torch.int64), out=lowest)
            torch.maximum(highest, others[hop][split:], out=highest)
        for send, _ in sends:
            send.wait()
        return lowest.tolist(), bytes(highest.numpy())


def _run(rounds: weakref.ref[Rounds], tasks: queue.SimpleQueue[_Task | None]) -> None:
    """The thread: it keeps no `Rounds` alive while it waits for work."""
    while (task := tasks.get()) is not None:
        owner = rounds()
        if owner is None:
            return
        owner.work(task)
        del owner, task


def _end_at_exit(rounds: Rounds) -> None:
    """A thread that waits in torch while the interpreter ends would crash it."""
    reference = weakref.ref(rounds)

    def end() -> None:
        if (alive := reference()) is not None:
            alive.end_with_process()

    atexit.register(end)
    weakref.finalize(rounds, atexit.unregister, end).atexit = False


def _fulfil(future: Future[Heard], run: Callable[[], Heard]) -> None:
    try:
        result = run()
    except BaseException as error:  # whoever waits raises it
        future.set_exception(error)
    else:
        future.set_result(result)
