"""Read, step, write: jobs on files pass through a few buffers while the disk works both ways.

[Note: Time in a pipeline] With three buffers, r reads into a buffer, * runs, w writes it back:

    buffer 0   r0 *0 w0 r3 *3 w3
    buffer 1   r1 .. *1 w1 r4 *4 w4
    buffer 2   r2 .. .. *2 w2 r5 *5 w5

Jobs run on the caller's thread, in order. As soon as a job has run, its writes are asked for and,
behind them, the reads of the job that gets its buffer next: so the disk never waits for the caller.
What a job reads may have been read before an earlier job asked to write it: then it is read again
(see `Transfer.is_stale`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.layout.offload import PAGE_BYTES
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind
from lightning_zero.tiers.nvme import NvmeFile, Transfer

__all__ = ["FileRange", "Task", "Pipeline"]


@dataclass(frozen=True)
class FileRange:
    """Bytes of one file that a job reads, writes or both."""

    file: NvmeFile
    offset: int  # bytes, a multiple of 4096
    nbytes: int  # a multiple of 4096
    is_written: bool
    is_read: bool = True  # False: the job finds what an earlier one left there

    def __post_init__(self) -> None:
        assert self.offset % PAGE_BYTES == self.nbytes % PAGE_BYTES == 0, self


@dataclass(frozen=True, eq=False)
class Task:
    """Work on some ranges that are in one buffer together.

    `run` gets one uint8 view per range, in order. When it returns nothing may use the views any
    more, no copy on a CUDA stream either.
    """

    ranges: Sequence[FileRange]
    run: Callable[[list[Tensor]], object] = lambda views: None

    @property
    def nbytes(self) -> int:
        """Of the buffer that it takes."""
        return sum(part.nbytes for part in self.ranges)


_NO_JOB = Task(())


class _Slot:
    """A buffer and the transfers that use it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.rest()
        self.writes: list[Transfer] = []  # of the job before, until somebody has waited for them

    def rest(self) -> None:
        """Keep nothing alive that a job knew."""
        self.job = _NO_JOB
        self.views: list[Tensor] = []
        self.reads: list[Transfer] = []

    def begin_reads(self, job: Task) -> None:
        self.job = job
        self.views = list(self.buffer[: job.nbytes].split([part.nbytes for part in job.ranges]))
        self.reads = [
            part.file.read(part.offset, view, after=self.writes)
            for part, view in zip(job.ranges, self.views, strict=True)
            if part.is_read
        ]

    def wait_for_reads(self) -> None:
        while True:
            for transfer in self.reads:
                transfer.wait()
            if not any(transfer.is_stale for transfer in self.reads):
                return
            self.begin_reads(self.job)

    def begin_writes(self) -> None:
        assert not self.writes
        for part, view in zip(self.job.ranges, self.views, strict=True):
            if part.is_written:
                self.writes.append(part.file.write(part.offset, view))
        self.rest()

    def finish_writes(self) -> list[Transfer]:
        """Those that this has waited for, be they good or not."""
        for transfer in self.writes:
            transfer.wait_until_done()
        writes, self.writes = self.writes, []
        return writes

    def drop_reads(self) -> None:
        for transfer in self.reads:
            transfer.cancel()
        for transfer in self.reads:
            transfer.wait_until_done()
        self.rest()


class Pipeline:
    """Runs jobs through buffers that nobody else uses; one thread at a time may call it.

    After an exception of a job or of a transfer it can be used again. The buffers: uint8, of one
    size, page-aligned.
    """

    def __init__(self, buffers: Iterable[Tensor], recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder()
        self._slots = [_Slot(buffer) for buffer in buffers]
        self._resting = deque(self._slots)  # the one whose writes were asked for first comes first
        self._loaded: deque[_Slot] = deque()  # with the next jobs, in order

    def prefetch(self, jobs: Sequence[Task]) -> None:
        """Begin to read the first jobs, as far as buffers go.

        The next `run` begins with them where its jobs have the same ranges; else they are dropped.
        """
        self._check(jobs)
        self._drop()
        self._load(iter(jobs))

    def run(self, jobs: Sequence[Task]) -> None:
        """Run all jobs in order; writes may be on their way when it returns.

        After an exception (of a job; an OSError of a read, or of a write so far) nothing is read
        ahead any more; `cancel` waits for the writes.
        """
        self._check(jobs)
        begun = [list(slot.job.ranges) for slot in self._loaded]
        if begun != [list(job.ranges) for job in jobs[: len(begun)]]:
            self._drop()
        for slot, job in zip(self._loaded, jobs, strict=False):
            slot.job = job
        waiting = iter(jobs[len(self._loaded) :])
        try:
            self._load(waiting)
            for _ in jobs:
                self._run_next()
                self._load(waiting)
        except BaseException:
            self._drop()  # the job that failed may have changed its buffer
            raise

    def drain(self) -> None:
        """Wait for all writes; an OSError if one of them failed."""
        self._finish_writes(self._slots)

    def cancel(self) -> None:
        """Drop what was read, finish what is being written, and forget errors.

        Then no transfer touches a buffer. Bytes whose write failed are not forgotten: reading them
        is an error.
        """
        self._drop()
        for slot in self._slots:
            slot.finish_writes()

    def _check(self, jobs: Sequence[Task]) -> None:
        size = self._slots[0].buffer.numel()
        for job in jobs:
            if job.nbytes > size:
                raise ValueError(
                    f"expected jobs of at most {size} bytes, the size of a buffer, got one of "
                    f"{job.nbytes}; use a larger buffer_size"
                )

    def _load(self, waiting: Iterator[Task]) -> None:
        """Begin to read what has a buffer; the writes of the job that had it may be under way."""
        while self._resting and (job := next(waiting, None)) is not None:
            self._resting[0].begin_reads(job)
            self._loaded.append(self._resting.popleft())

    def _run_next(self) -> None:
        slot = self._loaded[0]
        self._finish_writes([slot])
        slot.wait_for_reads()
        slot.job.run(slot.views)
        slot.begin_writes()
        self._resting.append(self._loaded.popleft())

    def _finish_writes(self, slots: Sequence[_Slot]) -> None:
        with self._recorder.span(Kind.WRITE, is_wait=True, on_host=True):
            finished = [transfer for slot in slots for transfer in slot.finish_writes()]
        for transfer in finished:
            transfer.wait()

    def _drop(self) -> None:
        for slot in self._slots:
            slot.drop_reads()
        self._loaded.clear()
        self._resting = deque(self._slots)
