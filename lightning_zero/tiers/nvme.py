"""Files of fixed size that threads read and write in blocks, past the page cache.

[Note: Order of transfers] A transfer moves its bytes when all earlier ones of the same file that
touch a common byte are done, if one of the two is a write: so a read sees every write that was
asked for before it, and none that was asked for after. A thread that takes a block waits for what
comes before it; that was asked for earlier, and blocks are taken in the order in which they were
asked for, so no two wait for each other. Bytes whose write failed are broken: a read of them raises
that error until writes have covered them.

[Note: Signals] Ctrl-C raises an exception between any two steps of Python code in the main thread,
inside `threading.Condition` too, whose lock it then keeps for ever; futures and executors are built
on it. So what the main thread shares with the threads here are plain locks and a `SimpleQueue`,
which stay whole, and after an interrupt the store can be closed. It cannot be used any further.
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
_Thread = tuple[threading.Thread, _Queue]  # and what it takes its blocks from

# A page at the end of each file that is never written: a file that was cut short cannot grow back
# to its size by our own writes, and so is always noticed.
_GUARD_BYTES = PAGE_BYTES


class Transfer:
    """A read or write of the bytes [start, stop) of one file.

    It is made by `NvmeFile.read` and `NvmeFile.write`. Until it is done its memory belongs to it:
    what a read fills must not be used, what a write takes must not be changed.
    """

    def __init__(
        self, name: str, recorder: Recorder, *, is_write: bool, start: int, stop: int
    ) -> None:
        self.is_write = is_write
        self.start = start  # bytes, in the file
        self.stop = stop
        self.is_stale = False  # a write to the same bytes was asked for after this read
        self.is_cancelled = False
        self.is_done = False  # the memory is free again, after success, failure or `cancel`
        self.error: Exception | None = None  # what went wrong so far
        self._what = (Kind.WRITE if is_write else Kind.READ, name)
        self._recorder = recorder
        self._span = recorder.span(*self._what, stop - start, on_host=True)
        self._num_left = 0  # blocks
        self._lock = threading.Lock()
        self._under_way = threading.Lock()  # see [Note: Signals]
        self._under_way.acquire()

    def begin(self, blocks: Sequence[Callable[[], None]], queue: _Queue) -> None:
        """Queue the work on each block, which calls `end_block`."""
        self._num_left = len(blocks)
        for block in blocks:
            queue.put(block)
        if not blocks:
            self._finish()

    def abandon(self) -> None:
        """After an interrupt in `begin`: it is done, though a thread may still move a block."""
        self.cancel()
        with self._lock:  # a thread may end its last block at this moment
            if not self.is_done:
                self._finish()

    def end_block(self, error: Exception | None) -> None:
        """A block is moved or, for this reason, given up; then no further one is begun."""
        with self._lock:
            self.error = self.error or error
            self.is_cancelled |= error is not None
            self._num_left -= 1
            if self._num_left == 0 and not self.is_done:
                self._finish()

    def _finish(self) -> None:
        self._span.end()
        self.is_done = True
        self._under_way.release()

    def wait(self) -> None:
        """Return when all bytes are moved; any thread may call it, any number of times.

        An OSError with the path, the offset and the bytes, if the transfer failed.
        """
        with self._recorder.span(*self._what, is_wait=True, on_host=True):
            self.wait_until_done()
        if self.error is not None:
            raise self.error

    def wait_until_done(self) -> None:
        """Return when the memory is free, whatever came of it."""
        with self._under_way:
            pass

    def cancel(self) -> None:
        """Move no block that is not under way yet; `wait_until_done` says when the memory is free."""
        self.is_cancelled = True

    def overlaps(self, other: Transfer) -> bool:
        return self.start < other.stop and other.start < self.stop


class NvmeFile:
    """A file of fixed size in a store. See [Note: Order of transfers]."""

    def __init__(
        self, store: NvmeStore, path: Path, nbytes: int, descriptor: int, name: str
    ) -> None:
        self.path = path
        self.nbytes = nbytes  # a multiple of 4096
        self.name = name  # of what is in it
        self._store = store
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._in_flight: list[Transfer] = []
        self._reads: list[weakref.ref[Transfer]] = []  # whose values somebody may still use
        self._broken: list[tuple[int, int, Exception]] = []  # start, stop, why

    def read(self, offset: int, into: Tensor, *, after: Sequence[Transfer] = ()) -> Transfer:
        """Begin to fill `into` from `offset`.

        Args:
            offset: Bytes, a multiple of 4096.
            into: 1-D, contiguous, any dtype, CPU; its memory begins at a multiple of 4096 and has
                a multiple of 4096 bytes.
            after: Transfers that use the memory until they are done.
        """
        return self._begin(offset, into, after, is_write=False)

    def write(self, offset: int, source: Tensor) -> Transfer:
        """Begin to write `source` at `offset`; both as of `read`."""
        return self._begin(offset, source, (), is_write=True)

    def cancel(self) -> None:
        """Begin no block any more that is not under way yet."""
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
        with self._lock:  # in the order in which blocks are queued
            self._in_flight = [other for other in self._in_flight if not other.is_done]
            before = [
                other
                for other in self._in_flight
                if other.overlaps(new) and (is_write or other.is_write)
            ]
            before += after
            reads = [read for read in map(weakref.ref.__call__, self._reads) if read is not None]
            for read in reads:
                read.is_stale |= is_write and read.overlaps(new)
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
                new.abandon()  # nobody may wait for what was not begun
                raise
        return new

    def _run(
        self, transfer: Transfer, before: list[Transfer], offset: int, view: memoryview
    ) -> None:
        """Move a block, on a thread of the store."""
        stop = offset + len(view)
        failure: Exception | None = None
        try:
            for other in () if transfer.is_cancelled else before:
                other.wait_until_done()
            if transfer.is_cancelled:
                raise OSError(errno.ECANCELED, "it was given up before it began")
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
            raise OSError(errno.EIO, f"another process cut the file to {size} bytes")
        done = 0
        while done < len(view):
            count = call(self._descriptor, [view[done:]], offset + done)
            count -= count % PAGE_BYTES  # O_DIRECT goes on at a page only
            if count == 0:
                raise OSError(errno.EIO, f"the disk moved nothing after {done} bytes")
            done += count

    def _check_broken(self, start: int, stop: int) -> None:
        for first, last, error in self._broken:
            if first < stop and start < last:
                raise error

    def _mark(self, start: int, stop: int, error: Exception | None) -> None:
        """The bytes [start, stop) are broken or, with no error, whole again."""
        with self._lock:
            rest = [
                (first, last, old)
                for begin, end, old in self._broken
                for first, last in ((begin, min(end, start)), (max(begin, stop), end))
                if first < last
            ]
            self._broken = rest if error is None else [*rest, (start, stop, error)]


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of `tensor`, not copied."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.dim() == 1, tensor.shape
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.data_ptr() % PAGE_BYTES == 0, tensor.data_ptr()
    array: Any = tensor.detach().view(torch.uint8).numpy()  # a Buffer from Python 3.12 on only
    return memoryview(array)


class NvmeStore:
    """The files of one process under `path`, and the threads that move their bytes.

    They lie in a directory of their own that goes with `close`, with the process or, if it was
    killed, with the next store under `path` (see [Note: Whose directory]). A forked child can
    neither use nor remove it. Any thread may use it.
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
        """Make the directory and look whether the disk takes O_DIRECT.

        Args:
            path: An existing directory, to be shared with other jobs or not.
            rank: Of this process, for the directory's name.
            num_read_threads: Blocks that are read at once.
            num_write_threads: Blocks that are written at once.
            block_bytes: Bytes that a thread moves at once, a multiple of 4096.
            recorder: Of reads and writes, and the waits for them.
        """
        if min(num_read_threads, num_write_threads) < 1:
            raise ValueError(
                "expected at least 1 thread each to read and to write, got "
                f"num_read_threads={num_read_threads}, num_write_threads={num_write_threads}"
            )
        if block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
            raise ValueError(f"block_bytes must be a multiple of {PAGE_BYTES}, got {block_bytes}")
        self.block_bytes = block_bytes  # of transfers from now on; may be set
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
        # Runs at exit too.
        self._finalizer = weakref.finalize(
            self, _end, threads, self.directory, self._descriptors, self._pid
        )
        # An inherited lock would outlive this process in the child.
        os.register_at_fork(after_in_child=partial(_close_all, self._descriptors))
        try:
            self.is_direct = supports_o_direct(self.directory)
        except OSError as error:
            self._finalizer()
            raise describe_io_error(error, self.directory, "write", 0, PAGE_BYTES) from None
        if not self.is_direct and _local_rank(rank) == 0:
            warnings.warn(
                f"{path} ({file_system_of(Path(path))}) refuses O_DIRECT: its files pass through "
                "the page cache, which takes CPU time and memory; use a local NVMe disk.",
                stacklevel=2,
            )

    def create(self, name: str, nbytes: int) -> NvmeFile:
        """Make a file with room for `nbytes`, rounded up to 4096; its bytes are zero."""
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
        """Wait for what is under way, give up what is not, and remove everything; idempotent."""
        if os.getpid() != self._pid or not self._finalizer.alive:
            return
        for file in self._files:
            file.cancel()
        self._finalizer()

    def check_open(self) -> None:
        """Refuse, by a RuntimeError, to work in a forked child and after `close`."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the files in {self.directory} belong to process {self._pid}; a forked child "
                "(a DataLoader worker, say) must not use them"
            )
        if not self._finalizer.alive:
            raise RuntimeError(f"the files in {self.directory} are closed and removed")

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
    """End a store, in its own process only."""
    if os.getpid() != pid:
        return
    for _, queue in threads:
        queue.put(None)
    for thread, _ in threads:
        if thread is not threading.current_thread():  # which may collect garbage
            thread.join()
    # The lock, the first descriptor, goes last: until then nobody else looks into the directory.
    lock = descriptors[:1]
    del descriptors[:1]
    _close_all(descriptors)
    shutil.rmtree(directory, ignore_errors=True)
    _close_all(lock)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:  # emptied, for this runs again in the fork of a fork
        os.close(descriptors.pop())


def _local_rank(rank: int) -> int:
    """The rank on this machine where a launcher tells it."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return rank
