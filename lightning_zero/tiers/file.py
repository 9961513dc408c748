"""A file of fixed size that threads read and write in blocks.

[Note: Order of transfers] A transfer begins when all earlier ones of the same file that touch a
common byte are done, if one of the two is a write: so a read sees every write that was asked for
before it, and none that was asked for after. What waits takes no thread. Bytes whose write failed
or was given up are broken: a read of them raises that error until a write has covered them.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero.tiers.buffers import ALIGNMENT
from lightning_zero.tiers.disk import explained
from lightning_zero.tiers.transfer import Transfer

if TYPE_CHECKING:
    from lightning_zero.tiers.files import NvmeStore

__all__ = ["GUARD_BYTES", "NvmeFile"]

# A page at the end of each file that is never written: a file that was cut short cannot grow back
# to its size by our own writes, and so is always noticed.
GUARD_BYTES = ALIGNMENT


class NvmeFile:
    """A file of fixed size in a store. See [Note: Order of transfers]."""

    path: Path
    name: str  # of what is in it
    nbytes: int  # a multiple of 4096

    def __init__(
        self, store: NvmeStore, path: Path, nbytes: int, descriptor: int, name: str
    ) -> None:
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
