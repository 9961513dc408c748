"""A file of fixed size that threads read and write in blocks, past the page cache.

[Note: Order of transfers] A transfer begins when all earlier ones of the same file that touch a
common byte are done, if one of the two is a write: so a read sees every write that was asked for
before it, and none that was asked for after. What waits takes no thread. Bytes whose write failed
or was given up are broken: a read of them raises that error until a write has covered them.

[Note: Signals] A signal, Ctrl-C say, raises an exception anywhere in Python code of the main
thread: between two lines, inside the library's locks, between taking a buffer and writing down that
it is taken. So whoever calls the tier only puts a call into a queue, which is one step that cannot
be cut in two, and waits for an answer. All bookkeeping of files and pipelines is done by actors,
whose threads see no signals.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind
from lightning_zero.tiers.memory import ALIGNMENT, aligned_empty

__all__ = [
    "GUARD_BYTES",
    "Actor",
    "NvmeFile",
    "Transfer",
    "allocate",
    "explained",
    "file_system_of",
    "free_bytes",
    "takes_direct",
]


class Transfer:
    """A read or write of the bytes [start, stop) of one file.

    It is made by `NvmeFile.read` and `NvmeFile.write`. Until it is done its memory belongs to it:
    what a read fills must not be used, what a write takes must not be changed.
    """

    is_write: bool
    start: int  # bytes, in the file
    stop: int
    # A write to the same bytes was asked for after this read: what was read is out of date.
    is_stale: bool
    is_cancelled: bool
    is_done: bool  # the memory is free again, be it after success, failure or `cancel`
    error: BaseException | None  # what went wrong so far

    def __init__(
        self, name: str, recorder: Recorder, *, is_write: bool, start: int, view: memoryview
    ) -> None:
        self.is_write = is_write
        self.start = start
        self.stop = start + len(view)
        self._what = (Kind.WRITE if is_write else Kind.READ, name)
        self._recorder = recorder
        self._span = recorder.span(*self._what, len(view), on_host=True)
        self.is_stale = self.is_cancelled = self.is_done = False
        self.error = None
        self._view: memoryview | None = view  # None when done
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        # A lock, not an Event: it stays whole if a signal ends the wait ([Note: Signals]).
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def wait(self) -> None:
        """Return when all bytes are moved; any thread may call it, any number of times.

        Raises:
            OSError: The transfer failed; says the path, the offset and the bytes.
        """
        with self._recorder.span(*self._what, is_wait=True, on_host=True):
            self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Return when the memory is free, whatever came of it."""
        with self._under_way:
            pass

    def cancel(self) -> None:
        """Move no block that is not under way yet; `settle` says when the memory is free."""
        self.is_cancelled = True

    def overlaps(self, other: Transfer) -> bool:
        """Whether both touch a common byte."""
        return self.start < other.stop and other.start < self.stop

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when done, on the thread that ends it, or now if it is done."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and move no further block."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.is_cancelled = True

    def block(self, start: int, stop: int) -> memoryview:
        """The memory of the bytes [start, stop) counted from this transfer's own start."""
        assert self._view is not None
        return self._view[start:stop]

    def finish(self) -> None:
        """The last block is moved or given up: the memory is free."""
        with self._lock:
            self._view = None
            self._span.end()
            self.is_done = True
            self._under_way.release()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def allocate(path: Path, nbytes: int) -> None:
    """Make a file of `nbytes` zeros that have their room on the disk.

    Raises:
        OSError: There is no such room, and no file then; or the file cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot make a file of {nbytes} bytes: {error.strerror}", str(path)
        ) from None
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)  # what could be allocated stays allocated otherwise
        free = free_bytes(path.parent)
        raise OSError(
            error.errno,
            f"cannot allocate {nbytes} bytes ({error.strerror}; {free} bytes are free there); "
            "free space, take another nvme_path or offload less",
            str(path),
        ) from None
    finally:
        os.close(descriptor)


def takes_direct(directory: Path) -> bool:
    """Whether a page can be written and read past the page cache; some refuse only then."""
    path = directory / "probe"
    array: Any = aligned_empty(ALIGNMENT, pin=False).numpy()
    page = memoryview(array)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    try:
        return os.pwritev(descriptor, [page], 0) == os.preadv(descriptor, [page], 0) == ALIGNMENT
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def explained(error: OSError, path: Path, verb: str, offset: int, nbytes: int) -> OSError:
    """`error`, with what was tried on which bytes of which file."""
    reason = f"cannot {verb} {nbytes} bytes at offset {offset}: {error.strerror}"
    return OSError(error.errno, reason, str(path))


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: Path) -> str:
    """The type of the file system of `path` ("ext4", "tmpfs"); "unknown" where none is told."""
    best, kind = "", "unknown"
    resolved = str(path.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mounted, this_kind, *_ = line.split(" ")
            mounted = mounted.replace("\\040", " ")
            inside = mounted == "/" or f"{resolved}/".startswith(f"{mounted}/")
            if inside and len(mounted) >= len(best):
                best, kind = mounted, this_kind
    return kind


# A page at the end of each file that is never written: a file that was cut short cannot grow back
# to its size by our own writes, and so is always noticed.
GUARD_BYTES = ALIGNMENT


class Store(Protocol):
    """Whose file it is: its threads, its recorder and its counters; see `NvmeStore`."""

    recorder: Recorder
    block_bytes: int

    def check_open(self) -> None:
        """Raises a RuntimeError in a forked child and after `close`."""

    def tell(self, call: Callable[[], object]) -> None:
        """Has `call` run on the actor, after those told before it."""

    def submit(self, work: Callable[[], None], *, is_write: bool) -> None:
        """Runs `work` on a thread."""

    def count(self, nbytes: int, *, is_write: bool) -> None:
        """Adds to the bytes read or written."""


class NvmeFile:
    """A file of fixed size in a store. See [Note: Order of transfers]."""

    path: Path
    name: str  # of what is in it
    nbytes: int  # a multiple of 4096

    def __init__(self, store: Store, path: Path, nbytes: int, descriptor: int, name: str) -> None:
        self.path = path
        self.name = name
        self.nbytes = nbytes
        self._store = store
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._in_flight: list[Transfer] = []
        self._reads: list[weakref.ref[Transfer]] = []  # whose values somebody may still use
        self._broken: list[tuple[Transfer, BaseException]] = []

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Begin to fill `into` from `offset`.

        Args:
            offset: Bytes, a multiple of 4096.
            into: 1-D, contiguous, any dtype, CPU; its memory begins at a multiple of 4096 and has
                a multiple of 4096 bytes. It must not be used before the transfer is done.
        """
        return self._begin(offset, into, is_write=False)

    def write(self, offset: int, source: Tensor) -> Transfer:
        """Begin to write `source` at `offset`.

        Args:
            offset: Bytes, a multiple of 4096.
            source: As `into` of `read`. It must not be changed before the transfer is done.
        """
        return self._begin(offset, source, is_write=True)

    def cancel(self) -> None:
        """Begin no block any more that is not under way yet."""
        with self._lock:
            for transfer in self._in_flight:
                transfer.cancel()

    def _begin(self, offset: int, tensor: Tensor, *, is_write: bool) -> Transfer:
        self._store.check_open()
        view = _memory(tensor)
        assert offset % ALIGNMENT == 0, offset
        assert len(view) % ALIGNMENT == 0, len(view)
        assert 0 <= offset <= self.nbytes - len(view), (offset, len(view), self.nbytes)
        new = Transfer(self.name, self._store.recorder, is_write=is_write, start=offset, view=view)
        with self._lock:
            reads = [read for read in self._reads if read() is not None]
            if is_write:
                for read in map(weakref.ref.__call__, reads):
                    if read is not None and read.overlaps(new):
                        read.is_stale = True
            else:
                self._reads = [*reads, weakref.ref(new)]
            # Last and at once: it is asked for, or it is not ([Note: Signals]).
            self._store.tell(lambda: self._enter(new))
        return new

    def _enter(self, new: Transfer) -> None:
        """Begin it when those before it are done; on the store's actor, in order of `_begin`."""
        with self._lock:
            before = [
                other
                for other in self._in_flight
                if other.overlaps(new) and (new.is_write or other.is_write)
            ]
            self._in_flight.append(new)
        # One more than there are, so that it cannot begin before all are counted.
        arrived = _Countdown(len(before) + 1, lambda: self._start(new))
        for other in before:
            other.when_done(arrived)
        arrived()

    def _start(self, transfer: Transfer) -> None:
        if not transfer.is_write:
            with self._lock:
                broken = [error for write, error in self._broken if write.overlaps(transfer)]
            if broken:
                transfer.fail(broken[0])
        nbytes, size = transfer.stop - transfer.start, self._store.block_bytes
        starts = range(0, nbytes, size)
        moved = _Countdown(max(1, len(starts)), lambda: self._finish(transfer))
        if not starts:
            moved()
        for start in starts:
            work = _Block(self, transfer, start, min(start + size, nbytes), moved)
            try:
                self._store.submit(work, is_write=transfer.is_write)
            except RuntimeError as error:  # the store is closed, or the interpreter going down
                transfer.fail(error)
                moved()

    def _finish(self, transfer: Transfer) -> None:
        with self._lock:
            self._in_flight.remove(transfer)
            if transfer.is_write and transfer.error is not None:
                self._broken.append((transfer, transfer.error))
            elif transfer.is_write:
                self._broken = [
                    (write, error)
                    for write, error in self._broken
                    if write.start < transfer.start or transfer.stop < write.stop
                ]
        transfer.finish()

    def move(self, transfer: Transfer, start: int, stop: int) -> None:
        """Move the bytes [start, stop) of `transfer`, on a thread of the store.

        Raises:
            OSError: Says the path, the offset and the bytes.
        """
        offset, nbytes = transfer.start + start, stop - start
        verb = "write" if transfer.is_write else "read"
        try:
            if transfer.is_cancelled:
                raise OSError(errno.ECANCELED, "it was given up before it began")
            view = transfer.block(start, stop)
            size = os.fstat(self._descriptor).st_size
            if size < self.nbytes + GUARD_BYTES:
                raise OSError(errno.EIO, f"another process cut the file to {size} bytes")
            done = 0
            while done < nbytes:
                call = os.pwritev if transfer.is_write else os.preadv
                count = call(self._descriptor, [view[done:]], offset + done)
                count -= count % ALIGNMENT  # O_DIRECT goes on at a page only
                if count == 0:
                    raise OSError(errno.EIO, f"the disk moved nothing after {done} bytes")
                done += count
        except OSError as error:
            raise explained(error, self.path, verb, offset, nbytes) from None
        self._store.count(nbytes, is_write=transfer.is_write)


class _Block:
    """The work of one thread: a block of a transfer."""

    def __init__(
        self, file: NvmeFile, transfer: Transfer, start: int, stop: int, done: _Countdown
    ) -> None:
        self._file = file
        self._transfer = transfer
        self._range = (start, stop)
        self._done = done

    def __call__(self) -> None:
        try:
            self._file.move(self._transfer, *self._range)
        except BaseException as error:
            self._transfer.fail(error)
        finally:
            self._done()


class _Countdown:
    """Calls `then` when it has been called `count` times, by any threads."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left = count
        self._then = then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._then()


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of `tensor`, not copied."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.dim() == 1, tensor.shape
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.data_ptr() % ALIGNMENT == 0, tensor.data_ptr()
    array: Any = tensor.detach().view(torch.uint8).numpy()  # a Buffer from Python 3.12 on only
    return memoryview(array)


_Calls = SimpleQueue[Callable[[], object] | None]


class Actor:
    """Runs calls one after another, in the order of `tell`, on a thread of its own.

    The thread ends when nobody holds the actor any more.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._pid = os.getpid()
        threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def tell(self, call: Callable[[], object]) -> None:
        """Have `call` run and do not wait. It must not raise.

        Raises:
            RuntimeError: This is a forked child, which has no such thread.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"files and buffers belong to process {self._pid}; a forked child (a DataLoader "
                "worker, say) must not use them"
            )
        self._calls.put(call)

    def ask(self, call: Callable[[], None]) -> None:
        """Have `call` run and wait until it has.

        Raises:
            BaseException: What `call` raised.
        """
        answer: SimpleQueue[BaseException | None] = SimpleQueue()

        def run() -> None:
            try:
                call()
            except BaseException as error:
                answer.put(error)
            else:
                answer.put(None)

        self.tell(run)
        error = answer.get()
        if error is not None:
            raise error


def _run(calls: _Calls) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call()
        del call  # it may hold the last reference to what holds the actor
