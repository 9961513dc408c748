"""Files of fixed size that threads read and write in blocks, past the page cache.

[Note: Order of transfers] A transfer moves its bytes once all earlier transfers of the same file
that overlap it are done, if one of the two is a write: so a read sees every write that was
requested before it, and none that was requested after. A thread that takes a block waits for the
earlier transfers. Those were requested before, and blocks are taken in the order of the requests,
so no two threads wait for each other. Bytes whose write has failed are broken: reading them raises
that error until a write has covered them.

[Note: Signals] Ctrl-C raises an exception between any two steps of Python code in the main thread,
also inside `threading.Condition`, whose lock then stays locked; futures and executors are built on
it. So the main thread shares with the threads here only plain locks and a `SimpleQueue`, which stay
consistent, and after an interrupt the store can be closed. It cannot be used any further.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from lightning_zero.layout.offload import PAGE_BYTES
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind
from lightning_zero.tiers.disk import (
    allocate,
    describe_io_error,
    file_system_of,
    locked_directory,
    remove_abandoned,
    supports_o_direct,
)

__all__ = ["NvmeFile", "NvmeStore", "Transfer"]

_Queue = SimpleQueue[Callable[[], None] | None]  # of blocks; None ends a thread
_Thread = tuple[threading.Thread, _Queue]  # a thread and its queue of blocks

# A page at the end of each file that is never written: so a truncated file cannot grow back to its
# size by our own writes, and is always detected.
_GUARD_BYTES = PAGE_BYTES


class Transfer:
    """A read or write of the bytes [start, stop) of one file.

    Made by `NvmeFile.read` and `NvmeFile.write`. Until it is done the target of a read must not be
    used, and the source of a write must not be changed.
    """

    def __init__(
        self, name: str, recorder: Recorder, *, is_write: bool, start: int, stop: int
    ) -> None:
        self.is_write = is_write
        self.start = start  # bytes, in the file
        self.stop = stop
        self.is_stale = False  # a write to the same bytes was requested after this read
        self.is_cancelled = False
        self.is_done = False  # the memory is free again, after success, failure or `cancel`
        self.error: Exception | None = None  # first error so far
        self._kind = Kind.WRITE if is_write else Kind.READ
        self._name = name
        self._recorder = recorder
        self._span = recorder.span(self._kind, name, stop - start, on_host=True)
        self._num_left = 0  # blocks
        self._lock = threading.Lock()
        self._in_flight = threading.Lock()  # held until done; see [Note: Signals]
        self._in_flight.acquire()

    def begin(self, blocks: Sequence[Callable[[], None]], queue: _Queue) -> None:
        """Queues the blocks; each calls `end_block`."""
        self._num_left = len(blocks)
        for block in blocks:
            queue.put(block)
        if not blocks:
            self._finish()

    def end_block(self, error: Exception | None) -> None:
        """Marks one block as moved or, with an error, as failed; then no further block begins."""
        with self._lock:
            self.error = self.error or error
            self.is_cancelled |= error is not None
            self._num_left -= 1
            if self._num_left == 0 and not self.is_done:
                self._finish()

    def _finish(self) -> None:
        self._span.end()
        self.is_done = True
        self._in_flight.release()

    def wait(self) -> None:
        """Waits until all bytes are moved; any thread may call it, any number of times.

        Raises:
            OSError: The transfer failed; with the path, the offset and the number of bytes.
        """
        with self._recorder.span(self._kind, self._name, is_wait=True, on_host=True):
            self.wait_until_done()
        if self.error is not None:
            raise self.error

    def wait_until_done(self) -> None:
        """Waits until the memory is free, after success or failure."""
        with self._in_flight:
            pass

    def cancel(self, *, is_queued: bool = True) -> None:
        """Begins no further block; the memory is free after `wait_until_done`.

        `is_queued`: whether `begin` has queued all blocks; after an interrupt in `begin` this is
        done at once, and a thread may still move a block.
        """
        self.is_cancelled = True
        if is_queued:
            return
        with self._lock:  # a thread may end its last block at this moment
            if not self.is_done:
                self._finish()

    def note_write(self, write: Transfer) -> None:
        """Marks this read as stale if the later `write` is to the same bytes."""
        self.is_stale |= self.overlaps(write)

    def overlaps(self, other: Transfer) -> bool:
        return self.start < other.stop and other.start < self.stop


class NvmeFile:
    """A file of fixed size in a store. See [Note: Order of transfers]."""

    def __init__(
        self, store: NvmeStore, path: Path, nbytes: int, descriptor: int, name: str
    ) -> None:
        self.path = path
        self.nbytes = nbytes  # a multiple of 4096
        self.name = name  # name of its content
        self._store = store
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._in_flight: list[Transfer] = []
        self._reads: list[weakref.ref[Transfer]] = []  # reads that may still be used
        self._broken: list[tuple[int, int, Exception]] = []  # start, stop, error of the write

    def read(self, offset: int, into: Tensor, *, after: Sequence[Transfer] = ()) -> Transfer:
        """Begins to fill `into` with the bytes from `offset` on.

        Args:
            offset: Offset in bytes, a multiple of 4096.
            into: 1-D, contiguous, any dtype, CPU; its memory begins at a multiple of 4096 and has
                a multiple of 4096 bytes.
            after: Transfers that use this memory, which the read waits for.
        """
        return self._begin(offset, into, after, is_write=False)

    def write(self, offset: int, source: Tensor) -> Transfer:
        """Begins to write `source` at `offset`; both as in `read`."""
        return self._begin(offset, source, (), is_write=True)

    def cancel(self) -> None:
        """Begins no further block of any transfer of this file."""
        with self._lock:
            for transfer in self._in_flight:
                transfer.cancel()

    def _begin(
        self, offset: int, tensor: Tensor, after: Sequence[Transfer], *, is_write: bool
    ) -> Transfer:
        store = self._store
        store.check_open()
        view = _memory(tensor)
        stop = offset + len(view)
        assert offset % PAGE_BYTES == len(view) % PAGE_BYTES == 0, (offset, len(view))
        assert 0 <= offset <= stop <= self.nbytes, (offset, stop, self.nbytes)
        new = Transfer(self.name, store.recorder, is_write=is_write, start=offset, stop=stop)
        with self._lock:  # transfers are listed in the order in which their blocks are queued
            self._in_flight = [other for other in self._in_flight if not other.is_done]
            before = [
                other
                for other in self._in_flight
                if other.overlaps(new) and (is_write or other.is_write)
            ]
            before += after
            reads = [read for read in map(weakref.ref.__call__, self._reads) if read is not None]
            for read in reads if is_write else ():
                read.note_write(new)
            if not is_write:
                self._reads = [weakref.ref(read) for read in (*reads, new)]
            size = store.block_bytes
            blocks = [
                partial(self._run, new, before, offset + start, view[start : start + size])
                for start in range(0, len(view), size)
            ]
            try:
                self._in_flight.append(new)
                new.begin(blocks, store.writing if is_write else store.reading)
            except BaseException:
                new.cancel(is_queued=False)  # otherwise a later transfer would wait for it forever
                raise
        return new

    def _run(
        self, transfer: Transfer, before: list[Transfer], offset: int, view: memoryview
    ) -> None:
        """Moves a block; runs on a thread of the store."""
        stop = offset + len(view)
        failure: Exception | None = None
        try:
            for other in () if transfer.is_cancelled else before:
                other.wait_until_done()
            if transfer.is_cancelled:
                raise OSError(errno.ECANCELED, "cancelled before it began")
            if transfer.is_write:
                self._move(os.pwritev, offset, view)
            else:
                self._check_broken(offset, stop)
                self._move(os.preadv, offset, view)
            self._store.count(len(view), is_write=transfer.is_write)
        except OSError as error:
            verb = "write" if transfer.is_write else "read"
            failure = describe_io_error(error, self.path, verb, offset, len(view))
        except Exception as error:
            failure = error
        if transfer.is_write and (failure or self._broken):
            self._mark(offset, stop, failure)
        transfer.end_block(failure)

    def _move(self, call: Callable[..., int], offset: int, view: memoryview) -> None:
        size = os.fstat(self._descriptor).st_size
        if size < self.nbytes + _GUARD_BYTES:
            raise OSError(errno.EIO, f"another process truncated the file to {size} bytes")
        done = 0
        while done < len(view):
            count = call(self._descriptor, [view[done:]], offset + done)
            count -= count % PAGE_BYTES  # O_DIRECT can only continue at a page
            if count == 0:
                raise OSError(errno.EIO, f"the disk moved nothing after {done} bytes")
            done += count

    def _check_broken(self, start: int, stop: int) -> None:
        for first, last, error in self._broken:
            if first < stop and start < last:
                raise error

    def _mark(self, start: int, stop: int, error: Exception | None) -> None:
        """Marks the bytes [start, stop) as broken or, without an error, as intact again."""
        with self._lock:
            rest = [
                (first, last, old)
                for begin, end, old in self._broken
                for first, last in ((begin, min(end, start)), (max(begin, stop), end))
                if first < last
            ]
            self._broken = rest if error is None else [*rest, (start, stop, error)]


def _memory(tensor: Tensor) -> memoryview:
    """Returns the bytes of `tensor`, not copied."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.dim() == 1, tensor.shape
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.data_ptr() % PAGE_BYTES == 0, tensor.data_ptr()
    array: Any = (
        tensor.detach().view(torch.uint8).numpy()
    )  # typed as a Buffer only from Python 3.12 on
    return memoryview(array)


class NvmeStore:
    """Files of one process under `path`, and the threads that move their bytes.

    The files have a directory of their own. It is removed by `close`, at the end of the process or,
    after a kill, by the next store under `path` (see [Note: Whose directory]). A forked child can
    neither use nor remove it. Any thread may use the store.
    """

    directory: Path
    is_direct: bool  # O_DIRECT works here; else files pass through the page cache

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        num_read_threads: int = 4,
        num_write_threads: int = 4,
        block_bytes: int = 4 * 2**20,
        recorder: Recorder | None = None,
    ) -> None:
        """Makes the directory and checks whether the disk supports O_DIRECT.

        Args:
            path: An existing directory, which other jobs may use, too.
            rank: Rank of this process, part of the directory's name.
            num_read_threads: Number of blocks that are read at once.
            num_write_threads: Number of blocks that are written at once.
            block_bytes: Bytes that a thread moves at once, a multiple of 4096.
            recorder: Records reads and writes, and the waits for them; None: no records.

        Raises:
            ValueError: A number of threads or the size of blocks is wrong.
            OSError: The directory cannot be made or written to.
        """
        if min(num_read_threads, num_write_threads) < 1:
            raise ValueError(
                "expected at least 1 thread each to read and to write, got "
                f"num_read_threads={num_read_threads}, num_write_threads={num_write_threads}"
            )
        if block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
            raise ValueError(f"block_bytes must be a multiple of {PAGE_BYTES}, got {block_bytes}")
        self.block_bytes = block_bytes
        self.recorder = recorder or Recorder()
        self.bytes_read = self.bytes_written = 0  # since construction
        self._pid = os.getpid()
        self._lock = threading.Lock()
        remove_abandoned(Path(path))
        self.directory, lock = locked_directory(Path(path), rank=rank)
        self.reading: _Queue = SimpleQueue()
        self.writing: _Queue = SimpleQueue()
        threads = [_start("nvme-read", self.reading) for _ in range(num_read_threads)]
        threads += [_start("nvme-write", self.writing) for _ in range(num_write_threads)]
        self._files: list[NvmeFile] = []
        self._descriptors = [lock]
        # Also runs at exit.
        self._finalizer = weakref.finalize(
            self, _end, threads, self.directory, self._descriptors, self._pid
        )
        # An inherited lock would outlive this process in the child.
        os.register_at_fork(after_in_child=partial(_close_all, self._descriptors))
        self.is_direct = self._probe_direct(Path(path), rank)

    def _probe_direct(self, path: Path, rank: int) -> bool:
        """Whether the disk supports O_DIRECT; warns if not, and closes the store after an error."""
        try:
            is_direct = supports_o_direct(self.directory)
        except OSError as error:
            self._finalizer()
            raise describe_io_error(error, self.directory, "write", 0, PAGE_BYTES) from None
        if not is_direct and _local_rank(rank) == 0:
            warnings.warn(
                f"{path} ({file_system_of(path)}) does not support O_DIRECT: its files are "
                "read and written through the page cache, which costs CPU time and memory; use a "
                "local NVMe disk.",
                stacklevel=3,
            )
        return is_direct

    def create(self, name: str, nbytes: int) -> NvmeFile:
        """Makes a file of `nbytes` zeros, rounded up to a multiple of 4096."""
        self.check_open()
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            path = self.directory / f"{len(self._files):04d}-{quote(name, safe='')[:100]}"
            allocate(path, nbytes + _GUARD_BYTES)
            descriptor = os.open(path, os.O_RDWR | (os.O_DIRECT if self.is_direct else 0))
            self._descriptors.append(descriptor)
            file = NvmeFile(self, path, nbytes, descriptor, name)
            self._files.append(file)
        return file

    def close(self) -> None:
        """Finishes the blocks in flight, cancels the others and removes all files; idempotent."""
        if os.getpid() != self._pid or not self._finalizer.alive:
            return
        for file in self._files:
            file.cancel()
        self._finalizer()

    def check_open(self) -> None:
        """Raises a RuntimeError in a forked child and after `close`."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the files in {self.directory} belong to process {self._pid}; a forked child "
                "(such as a DataLoader worker) must not use them."
            )
        if not self._finalizer.alive:
            raise RuntimeError(f"the files in {self.directory} are closed and removed.")

    def count(self, nbytes: int, *, is_write: bool) -> None:
        with self._lock:
            if is_write:
                self.bytes_written += nbytes
            else:
                self.bytes_read += nbytes


def _start(name: str, queue: _Queue) -> _Thread:
    thread = threading.Thread(target=_work, args=(queue,), name=name, daemon=True)
    thread.start()
    return thread, queue


def _work(queue: _Queue) -> None:
    while (block := queue.get()) is not None:
        block()
        del block  # it may hold the last reference to the store


def _end(threads: list[_Thread], directory: Path, descriptors: list[int], pid: int) -> None:
    """Ends a store, in its own process only."""
    if os.getpid() != pid:
        return
    for _, queue in threads:
        queue.put(None)
    for thread, _ in threads:
        if thread is not threading.current_thread():  # garbage collection may run this there
            thread.join()
    # The lock is the first descriptor. It is closed last, so that no other process removes the
    # directory before.
    lock = descriptors[:1]
    del descriptors[:1]
    _close_all(descriptors)
    shutil.rmtree(directory, ignore_errors=True)
    _close_all(lock)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:  # emptied, because this runs again in a fork of a fork
        os.close(descriptors.pop())


def _local_rank(rank: int) -> int:
    """Returns the rank on this machine if a launcher has set it, else `rank`."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return rank
