"""Read, step, write: jobs on files pass through a few buffers while the disk works both ways.

[Note: Time in a pipeline] With three buffers, r reads into a buffer, * runs, w writes it back:

    buffer 0   r0 *0 w0 r3 *3 w3
    buffer 1   r1 .. *1 w1 r4 *4 w4
    buffer 2   r2 .. .. *2 w2 r5 *5 w5

Jobs run on the caller's thread, in order; an actor ([Note: Signals]) begins reads and writes, so
that the disk does not wait for the caller. What a job reads may have been read before an earlier
job asked to write it: then it is read again ([Note: Order of transfers]).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind
from lightning_zero.tiers.memory import ALIGNMENT, BufferPool
from lightning_zero.tiers.nvme_file import Actor, NvmeFile, Transfer

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
    run: Callable[[list[Tensor]], object]

    @property
    def nbytes(self) -> int:
        """Of the buffer that it takes."""
        return sum(piece.nbytes for piece in self.pieces)


class Pipeline:
    """Runs jobs through the buffers of a pool that nobody else uses meanwhile.

    One thread at a time may call it; only `cancel` may come from another one, and ends `run` there.
    After an exception, wherever it came from, it can be used again.
    """

    wait_read_s: float  # the caller waited for reads, since construction
    wait_write_s: float  # the caller waited for buffers that were being written, or in `drain`
    compute_s: float  # in `Job.run`

    def __init__(self, pool: BufferPool, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder()
        self.wait_read_s = self.wait_write_s = self.compute_s = 0.0
        self._buffer_bytes = pool.nbytes
        self._actor = Actor("pipeline")
        self._traffic = _Traffic(pool, self._actor)

    def prefetch(self, jobs: Sequence[Job]) -> None:
        """Begin to read the first jobs, as far as free buffers go.

        The next `run` begins with them where its jobs have the same pieces; else they are dropped.

        Raises:
            ValueError: A job needs more than a buffer.
        """
        self._check(jobs)
        self._actor.ask(lambda: self._traffic.prefetch(jobs))

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs in order; writes may be on their way when it returns.

        After an exception, one of a job too, nothing is read ahead any more; `cancel` waits for
        the writes.

        Raises:
            OSError: A read, or a write so far, failed.
            ValueError: A job needs more than a buffer.
            RuntimeError: Others hold all buffers, or another thread called `cancel`.
        """
        self._check(jobs)
        loads: _Loads = SimpleQueue()
        try:
            self._actor.tell(lambda: self._traffic.begin(jobs, loads))
            for _ in jobs:
                self._run_one(loads)
        except BaseException:
            # The job that failed may have changed its buffer.
            self._actor.tell(self._traffic.drop)
            raise

    def drain(self) -> None:
        """Wait for all writes.

        Raises:
            OSError: One of them failed.
        """
        idle: SimpleQueue[BaseException | None] = SimpleQueue()
        with self._waiting_for_writes():
            self._actor.tell(lambda: self._traffic.when_written(idle))
            error = idle.get()
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Drop what was read, finish what is being written, and forget errors.

        Then no transfer touches a buffer and all are back. Bytes whose write failed are not
        forgotten: reading them is an error.
        """
        idle: SimpleQueue[BaseException | None] = SimpleQueue()
        self._actor.tell(self._traffic.drop)
        self._actor.tell(lambda: self._traffic.when_written(idle))
        idle.get()

    @contextmanager
    def _waiting_for_writes(self) -> Iterator[None]:
        with (
            _Clock(self, "wait_write_s"),
            self._recorder.span(Kind.WRITE, is_wait=True, on_host=True),
        ):
            yield

    def _check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.nbytes > self._buffer_bytes:
                raise ValueError(
                    f"expected jobs of at most {self._buffer_bytes} bytes, the size of a buffer, "
                    f"got one of {job.nbytes}; use a larger buffer_size"
                )
            for piece in job.pieces:
                assert piece.offset % ALIGNMENT == 0, piece
                assert piece.nbytes % ALIGNMENT == 0, piece

    def _run_one(self, loads: _Loads) -> None:
        with self._waiting_for_writes():
            load = loads.get()
        if isinstance(load, BaseException):
            raise load
        with _Clock(self, "wait_read_s"):
            load.wait()
            while load.is_stale:
                self._actor.ask(load.begin_reads)
                load.wait()
        with _Clock(self, "compute_s"):
            load.job.run(load.views)
        # Waits until the writes are asked for: the next job may have read these bytes before.
        self._actor.ask(lambda: self._traffic.write(load))


class _Load:
    """A job that has a buffer."""

    def __init__(self, job: Job, buffer: Tensor) -> None:
        self.job = job
        self.buffer = buffer
        self.views = list(buffer[: job.nbytes].split([piece.nbytes for piece in job.pieces]))
        self.transfers: list[Transfer] = []

    @property
    def is_stale(self) -> bool:
        return any(transfer.is_stale for transfer in self.transfers)

    @property
    def is_settled(self) -> bool:
        return all(transfer.is_done for transfer in self.transfers)

    def begin_reads(self) -> None:
        self.transfers = []
        for piece, view in zip(self.job.pieces, self.views, strict=True):
            if piece.is_read:
                self.transfers.append(piece.file.read(piece.offset, view))

    def begin_writes(self) -> None:
        self.transfers = []
        for piece, view in zip(self.job.pieces, self.views, strict=True):
            if piece.is_written:
                self.transfers.append(piece.file.write(piece.offset, view))

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()

    def abandon(self) -> None:
        """Wait until no transfer touches the buffer; those that have not begun do not begin."""
        for transfer in self.transfers:
            transfer.cancel()
        for transfer in self.transfers:
            transfer.settle()


_Loads = SimpleQueue[_Load | BaseException]


class _Traffic:
    """Which buffer is where. Every method runs on the actor's thread."""

    def __init__(self, pool: BufferPool, actor: Actor) -> None:
        self._pool = pool
        self._tell = actor.tell
        self._waiting: deque[Job] = deque()  # have no buffer yet
        self._loads: deque[_Load] = deque()  # are read, being read or run, in order
        self._out: _Loads | None = None  # to the caller that runs, which has got all of the loads
        self._stores: set[_Load] = set()  # are being written
        self._errors: list[BaseException] = []  # of writes that nobody has been told of
        self._idle: list[SimpleQueue[BaseException | None]] = []  # wait for no more stores

    def prefetch(self, jobs: Sequence[Job]) -> None:
        self.drop()
        self._waiting.extend(jobs)
        try:
            self._fill()
        except BaseException:
            self.drop()
            raise

    def begin(self, jobs: Sequence[Job], out: _Loads) -> None:
        begun = [list(load.job.pieces) for load in self._loads]
        expected = [list(job.pieces) for job in jobs[: len(begun)]]
        # What a caller had that was interrupted may be changed.
        if self._out is not None or begun != expected or self._errors:
            self.drop()
        for load, job in zip(self._loads, jobs, strict=False):
            load.job = job
            out.put(load)
        self._waiting = deque(jobs[len(self._loads) :])
        self._out = out if jobs else None
        self._go_on()

    def write(self, load: _Load) -> None:
        """The job has run.

        Raises:
            RuntimeError: It was dropped meanwhile.
        """
        if load not in self._loads:
            raise _cancelled()
        self._loads.remove(load)
        self._stores.add(load)
        if not self._loads and not self._waiting:
            self._out = None  # the caller returns: `drain` tells of errors
        try:
            load.begin_writes()
        except Exception as error:
            self._errors.append(error)
            load.abandon()
        tell, written = self._tell, self._written
        for transfer in load.transfers:
            transfer.when_done(lambda: tell(lambda: written(load)))
        self._written(load)

    def drop(self) -> None:
        """Give back the buffers of all jobs that have not run."""
        self._waiting.clear()
        if self._out is not None:
            self._out.put(_cancelled())  # a thread may wait there
            self._out = None
        while self._loads:
            load = self._loads.popleft()
            load.abandon()
            self._pool.give(load.buffer)

    def when_written(self, idle: SimpleQueue[BaseException | None]) -> None:
        """Answer with the first error, or None, when nothing is being written."""
        self._idle.append(idle)
        self._tell_idle()

    def _written(self, load: _Load) -> None:
        if load in self._stores and load.is_settled:
            self._stores.remove(load)
            self._errors += [t.error for t in load.transfers if t.error is not None]
            self._pool.give(load.buffer)
            self._go_on()
            self._tell_idle()

    def _go_on(self) -> None:
        """Begin what can begin, and tell the caller what cannot."""
        try:
            self._fill()
        except Exception as error:
            self._errors.append(error)
        if self._out is None:
            return
        if self._errors:
            self._out.put(self._errors[0])
            self._errors.clear()
        elif self._waiting and not self._loads and not self._stores:
            self._out.put(
                RuntimeError(
                    f"all {self._pool.count} buffers are in use elsewhere; a pipeline needs a pool "
                    "of its own"
                )
            )
        else:
            return
        self._out = None
        self._waiting.clear()

    def _fill(self) -> None:
        while self._waiting and not self._errors:
            buffer = self._pool.take()
            if buffer is None:
                return
            load = _Load(self._waiting.popleft(), buffer)
            self._loads.append(load)
            load.begin_reads()
            if self._out is not None:
                self._out.put(load)

    def _tell_idle(self) -> None:
        if self._stores:
            return
        while self._idle:
            self._idle.pop().put(self._errors[0] if self._errors else None)
            self._errors.clear()


def _cancelled() -> RuntimeError:
    return RuntimeError("the pipeline was cancelled while it ran jobs")


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
