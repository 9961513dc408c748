"""Pipeline that reads, processes and writes ranges of files through a few buffers.

[Note: Time in a pipeline] With three buffers; r: read into the buffer, *: run, w: write it back:

    buffer 0   r0 *0 w0 r3 *3 w3
    buffer 1   r1 .. *1 w1 r4 *4 w4
    buffer 2   r2 .. .. *2 w2 r5 *5 w5

Jobs run on the caller's thread, in order, each in a context of its own. At the end of a context its
writes are queued and, behind them, the reads of the next job that uses its buffer: so the disk
never waits for the caller. If bytes were read before an earlier job has queued a write to them,
they are read again (see `Transfer.is_stale`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.layout.offload import PAGE_BYTES
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind
from lightning_zero.tiers.nvme import NvmeFile, Transfer

__all__ = ["FileRange", "Job", "Pipeline"]


@dataclass(frozen=True)
class FileRange:
    """Range of one file that a job reads, writes or both."""

    file: NvmeFile
    offset: int  # bytes, a multiple of 4096
    nbytes: int  # a multiple of 4096
    is_written: bool
    is_read: bool = True  # False: the buffer keeps the content that an earlier job left

    def __post_init__(self) -> None:
        assert self.offset % PAGE_BYTES == self.nbytes % PAGE_BYTES == 0, self


# Ranges that share one buffer.
Job = Sequence[FileRange]


class _Slot:
    """A buffer and the transfers that use it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.clear()
        self.writes: list[Transfer] = []  # writes of the previous job, until waited for

    def clear(self) -> None:
        """Drops the ranges and all references to their data."""
        self.ranges: Sequence[FileRange] = ()
        self.views: list[Tensor] = []
        self.reads: list[Transfer] = []

    def begin_reads(self, ranges: Sequence[FileRange]) -> None:
        self.ranges = ranges
        sizes = [part.nbytes for part in ranges]
        self.views = list(self.buffer[: sum(sizes)].split(sizes))
        self.reads = [
            part.file.read(part.offset, view, after=self.writes)
            for part, view in zip(ranges, self.views, strict=True)
            if part.is_read
        ]

    def wait_for_reads(self) -> None:
        while True:
            for transfer in self.reads:
                transfer.wait()
            if not any(transfer.is_stale for transfer in self.reads):
                return
            self.begin_reads(self.ranges)

    def begin_writes(self) -> None:
        assert not self.writes
        for part, view in zip(self.ranges, self.views, strict=True):
            if part.is_written:
                self.writes.append(part.file.write(part.offset, view))
        self.clear()

    def finish_writes(self) -> list[Transfer]:
        """Waits for all writes, successful or not, and returns them."""
        for transfer in self.writes:
            transfer.wait_until_done()
        writes, self.writes = self.writes, []
        return writes

    def drop_reads(self) -> None:
        for transfer in self.reads:
            transfer.cancel()
        for transfer in self.reads:
            transfer.wait_until_done()
        self.clear()


class Pipeline:
    """Runs jobs through buffers of its own; one thread at a time may call it.

    It stays usable after an exception of a job or of a transfer. The buffers are uint8, of one
    size, page-aligned.
    """

    def __init__(self, buffers: Iterable[Tensor], recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder()
        self._slots = [_Slot(buffer) for buffer in buffers]
        self._free = deque(self._slots)  # by the time at which their writes were queued
        self._loaded: deque[_Slot] = deque()  # slots of the next jobs, in order
        self._waiting: Iterator[Job] = iter(())  # jobs that have no slot yet

    def prefetch(self, jobs: Sequence[Job]) -> None:
        """Begins to read the ranges of the first jobs, as far as buffers suffice.

        The next `begin` uses them if its first jobs have the same ranges; else they are dropped.
        """
        self._check(jobs)
        self._drop()
        self._waiting = iter(jobs)
        self._load()
        self._waiting = iter(())

    def begin(self, jobs: Sequence[Job]) -> None:
        """Begins to read the ranges of `jobs`, for which `next_job` is called in this order."""
        self._check(jobs)
        begun = [list(slot.ranges) for slot in self._loaded]
        if begun != [list(job) for job in jobs[: len(begun)]]:
            self._drop()
        self._waiting = iter(jobs[len(self._loaded) :])
        try:
            self._load()
        except BaseException:
            self._drop()
            raise

    @contextmanager
    def next_job(self) -> Iterator[list[Tensor]]:
        """Context of the next job: its ranges in a buffer, one uint8 view each.

        After it, nothing may use the views, not even a copy on a CUDA stream; writes may be in
        flight. After an exception (in the context, or an OSError of a read or an earlier write) all
        reads are dropped; `reset` waits for the writes.
        """
        try:
            slot = self._loaded[0]
            self._finish_writes([slot])
            slot.wait_for_reads()
            yield slot.views
            slot.begin_writes()
            self._free.append(self._loaded.popleft())
            self._load()
        except BaseException:
            self._drop()  # the job that failed may have changed its buffer
            raise

    def drain(self) -> None:
        """Waits for all writes; raises an OSError if one of them failed."""
        self._finish_writes(self._slots)

    def reset(self) -> None:
        """Drops what was read, finishes the writes, and discards errors.

        Then no transfer uses a buffer. Reading bytes whose write has failed is still an error.
        """
        self._drop()
        for slot in self._slots:
            slot.finish_writes()

    def _check(self, jobs: Sequence[Job]) -> None:
        size = self._slots[0].buffer.numel()
        for job in jobs:
            nbytes = sum(part.nbytes for part in job)
            if nbytes > size:
                raise ValueError(
                    f"expected jobs of at most {size} bytes, the size of a buffer, got one of "
                    f"{nbytes}; use a larger buffer_size."
                )

    def _load(self) -> None:
        """Begins the reads of jobs that get a buffer; its previous writes may be in flight."""
        while self._free and (job := next(self._waiting, None)) is not None:
            self._free[0].begin_reads(job)
            self._loaded.append(self._free.popleft())

    def _finish_writes(self, slots: Sequence[_Slot]) -> None:
        with self._recorder.span(Kind.WRITE, is_wait=True, on_host=True):
            finished = [transfer for slot in slots for transfer in slot.finish_writes()]
        for transfer in finished:
            transfer.wait()

    def _drop(self) -> None:
        for slot in self._slots:
            slot.drop_reads()
        self._loaded.clear()
        self._waiting = iter(())
        self._free = deque(self._slots)
