"""Parameters from their file, read ahead of their use into buffers shared by all of them."""

from __future__ import annotations

from torch import Tensor

from lightning_zero.record.recorder import Recorder
from lightning_zero.tiers.buffers import BufferPool, aligned_empty
from lightning_zero.tiers.home import PAGE_BYTES, InFile
from lightning_zero.tiers.transfer import Transfer

__all__ = ["ParamReader"]


class ParamReader:
    """Reads one shard in chunks of at most one buffer, as far ahead as buffers are free."""

    def __init__(self, home: InFile, pool: BufferPool, recorder: Recorder) -> None:
        self._home = home
        self._recorder = recorder
        self._pool = pool
        step = pool.nbytes // home.dtype.itemsize // PAGE_BYTES * PAGE_BYTES
        self._chunks = [
            (start, min(start + step, home.numel)) for start in range(0, home.numel, step)
        ]
        self._begun: list[tuple[Tensor, Transfer]] = []  # reads of the first chunks

    @property
    def has_begun(self) -> bool:
        """Some of it has been read, or is being read."""
        return bool(self._begun)

    def begin(self) -> bool:
        """Begins to read what free buffers can take; whether that is all of it."""
        while len(self._begun) < len(self._chunks):
            buffer = self._pool.take()
            if buffer is None:
                return False
            chunk = self._chunks[len(self._begun)]
            self._begun.append((buffer, self._home.begin_fetch(*chunk, buffer)))
        return True

    def copy_to(self, target: Tensor) -> None:
        """Fills `target`: 1-D, all elements of the home, on any device. Waits until it is done."""
        try:
            for start, stop in self._chunks:
                buffer, transfer, is_pooled = self._next(start, stop)
                try:
                    transfer.wait()
                    nbytes = (stop - start) * self._home.dtype.itemsize
                    way = (buffer.device, target.device)
                    with self._recorder.moving(self._home.name, nbytes, *way):
                        target[start:stop].copy_(buffer[:nbytes].view(self._home.dtype))
                finally:
                    if is_pooled:
                        self._pool.give(buffer)
        finally:
            self.cancel()

    def _next(self, start: int, stop: int) -> tuple[Tensor, Transfer, bool]:
        """The read of the next chunk, begun if it was not; whether its buffer is the pool's."""
        if self._begun:
            return *self._begun.pop(0), True
        taken = self._pool.take()
        buffer = taken if taken is not None else self._spare(start, stop)
        return buffer, self._home.begin_fetch(start, stop, buffer), taken is not None

    def _spare(self, start: int, stop: int) -> Tensor:
        """Memory for one chunk while all buffers hold what others will need."""
        nbytes = (stop - start) * self._home.dtype.itemsize
        return aligned_empty(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, pin=False)

    def cancel(self) -> None:
        """Gives buffers back whose content nobody will use."""
        for buffer, transfer in self._begun:
            transfer.settle()
            self._pool.give(buffer)
        self._begun = []
