"""Read, step, write: jobs on files pass through a few buffers while the disk works both ways.

[Note: Time in a pipeline] With three buffers, r reads into a buffer, * runs, w writes it back:

    buffer 0   r0 *0 w0 r3 *3 w3
    buffer 1   r1 .. *1 w1 r4 *4 w4
    buffer 2   r2 .. .. *2 w2 r5 *5 w5

Jobs run on the caller's thread, in order. The thread that ends a buffer's last write begins the
next job's reads in it, so the disk does not wait for the caller. What a job reads may have been
read before an earlier job asked to write it: then it is read again ([Note: Order of transfers]).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.tiers.buffers import ALIGNMENT, BufferPool
from lightning_zero.tiers.file import NvmeFile
from lightning_zero.tiers.transfer import Transfer

__all__ = ["Job", "Piece", "Pipeline"]


@dataclass(frozen=True)
class Piece:
    """Bytes of one file that a job reads, writes or both."""

    file: NvmeFile
    offset: int  # bytes, a multiple of 4096
    nbytes: int  # a multiple of 4096
    is_written: bool
    is_read: bool = True  # False: the job finds what an earlier one left there


@dataclass(frozen=True, eq=False)
class Job:
    """Work on some pieces that are in one buffer together.

    `run` gets one uint8 view per piece, in order. When it returns nothing may use the views any
    more, no copy on a CUDA stream either.
    """

    pieces: Sequence[Piece]
    run: Callable[[list[Tensor]], None]

    @property
    def nbytes(self) -> int:
        """Of the buffer that it takes."""
        return sum(piece.nbytes for piece in self.pieces)


class _Load:
    """A job that has a buffer."""

    def __init__(self, job: Job, buffer: Tensor) -> None:
        self.job = job
        self.buffer = buffer
        self.views = list(buffer[: job.nbytes].split([piece.nbytes for piece in job.pieces]))
        self.transfers: list[Transfer] = []

    def begin_reads(self) -> None:
        self._begin(self.job.pieces, is_write=False)

    def begin_writes(self) -> None:
        self._begin(self.job.pieces, is_write=True)

    def _begin(self, pieces: Sequence[Piece], *, is_write: bool) -> None:
        self.transfers = []
        for piece, view in zip(pieces, self.views, strict=True):
            if is_write and piece.is_written:
                self.transfers.append(piece.file.write(piece.offset, view))
            elif not is_write and piece.is_read:
                self.transfers.append(piece.file.read(piece.offset, view))

    def wait_reads(self) -> None:
        for transfer in self.transfers:
            transfer.wait()
        while any(transfer.is_stale for transfer in self.transfers):
            self.begin_reads()
            for transfer in self.transfers:
                transfer.wait()

    def settle(self) -> None:
        """Wait until no transfer touches the buffer, whatever came of them."""
        for transfer in self.transfers:
            with contextlib.suppress(Exception):
                transfer.wait()


class Pipeline:
    """Runs jobs through the buffers of a pool that nobody else uses meanwhile.

    One thread at a time may call it.
    """

    wait_read_s: float  # the caller waited for reads, since construction
    wait_write_s: float  # the caller waited for buffers that were being written, or in `drain`
    compute_s: float  # in `Job.run`

    def __init__(self, pool: BufferPool) -> None:
        self.wait_read_s = self.wait_write_s = self.compute_s = 0.0
        self._pool = pool
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Job] = deque()  # have no buffer yet
        self._loads: deque[_Load] = deque()  # are read or being read, in order
        self._stores: set[_Load] = set()  # are being written
        self._errors: list[BaseException] = []  # of writes, and of reads begun behind them

    def prefetch(self, jobs: Sequence[Job]) -> None:
        """Begin to read the first jobs, as far as free buffers go.

        The next `run` begins with them where its jobs have the same pieces; else they are dropped.

        Raises:
            ValueError: A job needs more than a buffer.
        """
        self._check(jobs)
        self._drop_loads()
        with self._changed:
            self._waiting.extend(jobs)
            self._fill()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs in order; writes may be on their way when it returns.

        After an exception, one of a job too, nothing is read ahead any more; `cancel` waits for
        the writes.

        Raises:
            OSError: A read, or a write so far, failed.
            ValueError: A job needs more than a buffer.
            RuntimeError: Others hold all buffers.
        """
        self._check(jobs)
        self._plan(jobs)
        try:
            for _ in jobs:
                self._run_next()
        except BaseException:
            self._drop_loads()  # the job that failed may have changed its buffer
            raise

    def drain(self) -> None:
        """Wait for all writes.

        Raises:
            OSError: One of them failed.
        """
        with _Clock(self, "wait_write_s"), self._changed:
            self._changed.wait_for(lambda: not self._stores)
            self._raise_error()

    def cancel(self) -> None:
        """Drop what was read, finish what is being written, and forget errors.

        Then no transfer touches a buffer and all are back. Bytes whose write failed are not
        forgotten: reading them is an error.
        """
        self._drop_loads()
        with self._changed:
            self._changed.wait_for(lambda: not self._stores)
            self._errors.clear()

    def _check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.nbytes > self._pool.nbytes:
                raise ValueError(
                    f"expected jobs of at most {self._pool.nbytes} bytes, the size of a buffer, "
                    f"got one of {job.nbytes}; use a larger buffer_size"
                )
            for piece in job.pieces:
                assert piece.offset % ALIGNMENT == 0, piece
                assert piece.nbytes % ALIGNMENT == 0, piece

    def _plan(self, jobs: Sequence[Job]) -> None:
        """Keep what was prefetched if it is how `jobs` begin."""
        with self._changed:
            loaded = [load.job.pieces for load in self._loads]
        if loaded != [job.pieces for job in jobs[: len(loaded)]]:
            self._drop_loads()
        with self._changed:
            for load, job in zip(self._loads, jobs, strict=False):
                load.job = job
            self._waiting = deque(jobs[len(self._loads) :])
            self._fill()

    def _run_next(self) -> None:
        load = self._next_load()
        with _Clock(self, "wait_read_s"):
            load.wait_reads()
        with _Clock(self, "compute_s"):
            load.job.run(load.views)
        with self._changed:
            load.begin_writes()
            self._loads.popleft()
            self._stores.add(load)
            self._when_written(load)

    def _next_load(self) -> _Load:
        with _Clock(self, "wait_write_s"), self._changed:
            self._raise_error()
            while not self._loads:
                if not self._stores:
                    raise RuntimeError(
                        f"all {self._pool.count} buffers are in use elsewhere; a pipeline needs a "
                        "pool of its own"
                    )
                self._changed.wait()
                self._raise_error()
            return self._loads[0]

    def _fill(self) -> None:
        """Begin reads while there are buffers; any thread that holds the lock."""
        while self._waiting and not self._errors:
            buffer = self._pool.take()
            if buffer is None:
                return
            load = _Load(self._waiting.popleft(), buffer)
            self._loads.append(load)
            load.begin_reads()

    def _when_written(self, load: _Load) -> None:
        left = len(load.transfers)
        if left == 0:
            self._stored(load)

        def one_less() -> None:
            nonlocal left
            with self._changed:
                left -= 1
                if left == 0:
                    self._stored(load)

        for transfer in load.transfers:
            transfer.when_done(one_less)

    def _stored(self, load: _Load) -> None:
        """The buffer is free: the next reads begin in it. The lock is held."""
        self._errors += [t.error for t in load.transfers if t.error is not None]
        self._stores.remove(load)
        self._pool.give(load.buffer)
        try:
            self._fill()
        except Exception as error:  # this may be a thread of the store: the caller must learn it
            self._errors.append(error)
        self._changed.notify_all()

    def _drop_loads(self) -> None:
        with self._changed:
            self._waiting.clear()
            loads, self._loads = self._loads, deque()
        for load in loads:
            for transfer in load.transfers:
                transfer.cancel()
        for load in loads:
            load.settle()
            self._pool.give(load.buffer)

    def _raise_error(self) -> None:
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error


class _Clock:
    """Adds the time in its block to an attribute."""

    def __init__(self, owner: Pipeline, name: str) -> None:
        self._owner = owner
        self._name = name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._begin
        setattr(self._owner, self._name, getattr(self._owner, self._name) + spent)
