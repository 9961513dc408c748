"""Stores of the shards of one rank, and the copies between tiers.

A store holds one flat tensor, in memory or in a file, and gives access to ranges of its elements:
in memory by a view; in a file by a copy, which `write` writes back. To step many ranges in a row a
`Pipeline` moves them instead: `range_of` describes a range for it. `Storage` makes all stores of an
engine and owns their files and buffers.

[Note: Device memory] On a CUDA device the CPU tier is separate memory, and offloaded shards are
copied. If the module computes on the CPU both tiers are the same memory, and nothing is copied.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import assert_never

from lightning_zero.layout.offload import (
    NUM_UPLOAD_BLOCKS,
    PAGE_BYTES,
    UPLOAD_BLOCK_BYTES,
    OffloadConfig,
    Tier,
    padded_bytes,
    step_buffer_config,
)
from lightning_zero.record import streams
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.disk import free_bytes
from lightning_zero.tiers.memory import BufferPool, aligned_empty, make_buffers
from lightning_zero.tiers.nvme import NvmeStore, Transfer
from lightning_zero.tiers.pipeline import FileRange, Pipeline
from lightning_zero.tiers.state_offload import StateOffload

__all__ = ["FileShardStore", "MemoryShardStore", "ParamReader", "ShardStore", "Storage"]


class MemoryShardStore:
    """Store of a tensor in the memory of a device or of the CPU."""

    def __init__(self, tensor: Tensor, tier: Tier) -> None:
        self.tensor = tensor
        self.tier = tier
        self.numel = tensor.numel()
        self.dtype = tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def rebind(self, tensor: Tensor) -> None:
        """Stores the values in `tensor` from now on, which has them already."""
        self.tensor = tensor

    def fetch(self, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop), 1-D: a view of memory, or a copy in CPU memory."""
        return self.tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Overwrites the elements from `start` on with `values`, 1-D, of any floating dtype."""
        target = self.tensor[start : start + values.numel()]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)

    view = fetch  # elements for others to read: a view, or a LazyTensor


class FileShardStore:
    """Store of a tensor in a file, padded to full pages."""

    tier = Tier.NVME

    def __init__(self, store: NvmeStore, name: str, numel: int, dtype: torch.dtype) -> None:
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.nbytes = padded_bytes(numel, dtype)
        self._file = store.create(name, self.nbytes)

    def fetch(self, start: int, stop: int) -> Tensor:
        """As `MemoryShardStore.fetch`; waits for writes in flight."""
        memory, first, own = self._around(start, stop)
        self._file.read(first, memory).wait()
        return memory[own].view(self.dtype)

    def write(self, start: int, values: Tensor) -> None:
        """As `MemoryShardStore.write`; waits until the values are written."""
        memory, first, own = self._around(start, start + values.numel())
        if memory[own].numel() != memory.numel():
            self._file.read(first, memory).wait()  # the other elements of the outer pages
        memory[own].view(self.dtype).copy_(values)
        self._file.write(first, memory).wait()

    def view(self, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) as a LazyTensor, which reads them when it is used."""

        def read(first: int, last: int) -> Tensor:
            return self.fetch(start + first, start + last)

        return LazyTensor.of((stop - start,), self.dtype, read)

    def begin_fetch(self, start: int, stop: int, buffer: Tensor) -> Transfer:
        """Begins to read elements [start, stop) into `buffer`: uint8, aligned, large enough."""
        nbytes = padded_bytes(stop - start, self.dtype)
        return self._file.read(start * self.dtype.itemsize, buffer[:nbytes])

    def begin_write(self, values: Tensor) -> Transfer:
        """Begins to overwrite the first elements with `values`: 1-D, full pages or all elements."""
        memory = aligned_empty(padded_bytes(values.numel(), self.dtype), pin=False)
        memory[: values.numel() * self.dtype.itemsize].view(self.dtype).copy_(values)
        return self._file.write(0, memory)

    def range_of(
        self, start: int, stop: int, *, is_read: bool = True, is_written: bool = True
    ) -> FileRange:
        """Returns elements [start, stop) for a pipeline; `start` is a multiple of `PAGE_BYTES`."""
        nbytes = padded_bytes(stop - start, self.dtype)
        offset = start * self.dtype.itemsize
        return FileRange(self._file, offset, nbytes, is_read=is_read, is_written=is_written)

    def _around(self, start: int, stop: int) -> tuple[Tensor, int, slice]:
        """Returns memory for the pages around [start, stop), their offset, and the range in it."""
        first = start * self.dtype.itemsize // PAGE_BYTES * PAGE_BYTES
        last = padded_bytes(stop, self.dtype) if stop > start else first
        own = slice(start * self.dtype.itemsize - first, stop * self.dtype.itemsize - first)
        return aligned_empty(last - first, pin=False), first, own


ShardStore = MemoryShardStore | FileShardStore


class _Uploader:
    """Casts blocks into page-locked memory; one block is copied while the next is cast.

    Any thread may use it.
    """

    def __init__(self, device: torch.device, *, pin: bool, recorder: Recorder) -> None:
        stream = streams.make_stream(device)
        assert stream is not None, device
        self._stream = stream
        # Blocks in the order of use, with the end of their last copy. Blocks stay in the queue
        # while in use, so that an interrupt loses none.
        self._blocks: deque[tuple[Tensor, streams.Event | None]] = deque(
            (aligned_empty(UPLOAD_BLOCK_BYTES, pin=pin), None) for _ in range(NUM_UPLOAD_BLOCKS)
        )
        self._recorder = recorder
        self._lock = threading.Lock()

    def send(self, values: Tensor, target: Tensor, name: str) -> None:
        """Copies `values` (1-D, CPU) to `target` (1-D, device); the current stream waits for it."""
        current = streams.current(target.device)
        self._stream.wait_stream(current)  # reads of the old values were queued before
        step = UPLOAD_BLOCK_BYTES // target.element_size()
        span = self._recorder.span
        with self._lock, streams.on(self._stream), span(Kind.TO_DEVICE, name, target.nbytes):
            for start in range(0, values.numel(), step):
                part = target[start : start + step]
                buffer, left = self._blocks[0]
                if left is not None:
                    left.synchronize()
                block = buffer.view(target.dtype)[: part.numel()]
                block.copy_(values[start : start + step])
                part.copy_(block, non_blocking=True)
                self._blocks[0] = buffer, self._stream.record_event()
                self._blocks.rotate(-1)
        with span(Kind.TO_DEVICE, name, is_wait=True):
            current.wait_stream(self._stream)


class ParamReader:
    """Reads one shard in chunks of at most one buffer, prefetching as far as buffers are free."""

    def __init__(self, store: FileShardStore, pool: BufferPool, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder
        self._pool = pool
        step = pool.nbytes // store.dtype.itemsize // PAGE_BYTES * PAGE_BYTES
        self._chunks = [
            (start, min(start + step, store.numel)) for start in range(0, store.numel, step)
        ]
        self._begun: list[tuple[Tensor, Transfer]] = []  # reads of the first chunks

    @property
    def has_begun(self) -> bool:
        """Whether a read is in flight or done."""
        return bool(self._begun)

    def begin(self) -> bool:
        """Begins to read as many chunks as there are free buffers; returns whether that is all."""
        while len(self._begun) < len(self._chunks):
            buffer = self._pool.acquire(waits=False)
            if buffer is None:
                return False
            chunk = self._chunks[len(self._begun)]
            self._begun.append((buffer, self._store.begin_fetch(*chunk, buffer)))
        return True

    def copy_to(self, target: Tensor) -> None:
        """Fills `target`: 1-D, all elements of the store, on any device.

        Waits for the file. Copies to a device run on the current stream.
        """
        has_streams = target.device.type == "cuda"
        try:
            for start, stop in self._chunks:
                buffer, transfer, is_pooled = self._next(start, stop)
                left = None
                try:
                    transfer.wait()
                    nbytes = (stop - start) * self._store.dtype.itemsize
                    way = (buffer.device, target.device)
                    part = buffer[:nbytes].view(self._store.dtype)
                    with self._recorder.copy_span(self._store.name, nbytes, *way):
                        target[start:stop].copy_(part, non_blocking=is_pooled)
                    if has_streams:
                        left = streams.current(target.device).record_event()
                finally:
                    if is_pooled:
                        self._pool.release(buffer, left)
        finally:
            self.reset()

    def _next(self, start: int, stop: int) -> tuple[Tensor, Transfer, bool]:
        """Returns buffer and read of the next chunk, and whether the buffer is the pool's."""
        if self._begun:
            return *self._begun.pop(0), True
        taken = self._pool.acquire()
        if taken is not None:
            return taken, self._store.begin_fetch(start, stop, taken), True
        # All buffers hold chunks of other shards.
        spare = aligned_empty(padded_bytes(stop - start, self._store.dtype), pin=False)
        return spare, self._store.begin_fetch(start, stop, spare), False

    def reset(self) -> None:
        """Returns the buffers of reads that are not used."""
        for buffer, transfer in self._begun:
            transfer.wait_until_done()
            self._pool.release(buffer)
        self._begun = []


class Storage:
    """Makes the stores of one rank, and owns their files and buffers.

    Attributes:
        device: Device on which the module computes.
        has_device_memory: Whether the CPU tier is separate from the device's memory. See [Note:
            Device memory].
        buffer_bytes: Bytes of the buffers through which files are read and written.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rank: int,
        offload_param: OffloadConfig | None = None,
        offload_optimizer: OffloadConfig | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.device = device
        self.has_device_memory = device.type != "cpu"
        self.recorder = recorder or Recorder(device)
        self._rank = rank
        self._param = offload_param or OffloadConfig()
        self._optimizer = offload_optimizer or OffloadConfig()
        self._step = step_buffer_config(offload_param, offload_optimizer)
        self._stores: dict[str, NvmeStore] = {}  # by folder
        self.buffer_bytes = 0
        self.state_offload = StateOffload()  # states that the user has offloaded between steps
        for config in (offload_param, offload_optimizer):
            if config is not None and config.device != "cpu":
                self._store(config)

    def check_free_space(self, param_bytes: int, optim_bytes: int, *, num_ranks: int) -> None:
        """Raises an OSError if a disk is too small for the shards that are certain to be stored.

        Args:
            param_bytes: Bytes of this rank's parameter shards on NVMe.
            optim_bytes: Bytes of this rank's optimizer shards on NVMe.
            num_ranks: Number of ranks that share the disk.
        """
        needed: dict[str, int] = {}
        for config, nbytes in ((self._param, param_bytes), (self._optimizer, optim_bytes)):
            needed[config.folder] = needed.get(config.folder, 0) + nbytes * num_ranks
        for folder, nbytes in needed.items():
            if nbytes and nbytes > (free := free_bytes(Path(folder))):
                raise OSError(
                    errno.ENOSPC,
                    f"{num_ranks} ranks of this machine need {nbytes} bytes for shards on NVMe, "
                    f"and {free} are free; free space, use another nvme_path, or offload less "
                    "(ratio)",
                    folder,
                )

    # ---------------------------------------------------------------- stores

    def step_device(self, tier: Tier) -> torch.device:
        """Returns the device on which an optimizer shard stored in `tier` is stepped."""
        return self.device if tier is Tier.DEVICE else torch.device("cpu")

    def is_offloaded(self, tier: Tier) -> bool:
        """Whether a shard in `tier` is stored off the device."""
        return tier.is_offloaded(has_device_memory=self.has_device_memory)

    def make_param_store(self, name: str, values: Tensor, tier: Tier) -> ShardStore:
        """Makes a store of `values` (1-D), whose memory it may keep."""
        return self._keep(f"{name}.param", values, tier, self._param)

    def make_master_store(self, name: str, values: Tensor, tier: Tier) -> ShardStore:
        """As `make_param_store`, for the main parameters."""
        return self._keep(f"{name}.master", values, tier, self._optimizer)

    def make_optim_store(self, name: str, numel: int, dtype: torch.dtype) -> FileShardStore:
        """Makes a file for an optimizer state or a gradient of `numel` elements."""
        return FileShardStore(self._store(self._optimizer), name, numel, dtype)

    def cpu_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates 1-D CPU memory that the device can copy from and to while it computes."""
        return self._cpu_empty(numel, dtype, self._optimizer)

    def _cpu_empty(self, numel: int, dtype: torch.dtype, config: OffloadConfig) -> Tensor:
        if not self.has_device_memory:
            return torch.empty(numel, dtype=dtype)
        pin = config.pin_memory and self.device.type == "cuda"
        return aligned_empty(padded_bytes(numel, dtype), pin=pin).view(dtype)[:numel]

    def upload(self, values: Tensor, store: ShardStore, start: int, name: str) -> None:
        """Casts updated values into `store`, from element `start` on.

        Args:
            values: 1-D, on the CPU or on the device of `store`.
            store: Store to be written to.
            start: First element.
            name: Name of the bucket, for the recorder.
        """
        target = store.tensor.device if isinstance(store, MemoryShardStore) else torch.device("cpu")
        if target.type != "cuda" or values.device.type == "cuda":
            with self.recorder.copy_span(name, values.nbytes, values.device, target):
                store.write(start, values)
            return
        self._uploader.send(values, store.fetch(start, start + values.numel()), name)

    def _keep(self, name: str, values: Tensor, tier: Tier, config: OffloadConfig) -> ShardStore:
        if tier is Tier.NVME:
            store = FileShardStore(self._store(config), name, values.numel(), values.dtype)
            store.write(0, values)
            return store
        if tier is Tier.CPU:
            if self.has_device_memory:
                values = self._cpu_empty(values.numel(), values.dtype, config).copy_(values)
        elif tier is not Tier.DEVICE:
            assert_never(tier)
        return MemoryShardStore(values, tier)

    def _store(self, config: OffloadConfig) -> NvmeStore:
        folder = config.folder
        if folder not in self._stores:
            self._stores[folder] = NvmeStore(folder, rank=self._rank, recorder=self.recorder)
        return self._stores[folder]

    # ---------------------------------------------------------------- buffers

    @cached_property
    def pipeline(self) -> Pipeline:
        """Pipeline that moves optimizer states between files and memory."""
        return Pipeline(self._buffers(self._step), self.recorder)

    @cached_property
    def param_pool(self) -> BufferPool:
        """Buffers through which parameters are read from files."""
        return BufferPool(self._buffers(self._param))

    @cached_property
    def _uploader(self) -> _Uploader:
        return _Uploader(self.device, pin=self._optimizer.pin_memory, recorder=self.recorder)

    @property
    def step_buffer_bytes(self) -> int:
        """Bytes of one buffer of `pipeline`."""
        return self._step.buffer_size_bytes

    def _buffers(self, config: OffloadConfig) -> list[Tensor]:
        pin = config.pin_memory and self.device.type == "cuda"
        self.buffer_bytes += config.total_buffer_bytes
        return make_buffers(config.buffer_count, config.buffer_size_bytes, pin=pin)

    @property
    def bytes_read(self) -> int:
        """Bytes read from all files since construction."""
        return sum(store.bytes_read for store in self._stores.values())

    @property
    def bytes_written(self) -> int:
        """Bytes written to all files since construction."""
        return sum(store.bytes_written for store in self._stores.values())

    def close(self) -> None:
        """Removes all files; every store in a file is lost. Closing twice is harmless."""
        made = self.__dict__  # holds the cached properties that have been used
        if "pipeline" in made:
            self.pipeline.reset()
        if "param_pool" in made:
            self.param_pool.close()
        for store in self._stores.values():
            store.close()
        self._stores, self.buffer_bytes = {}, 0
        for name in ("pipeline", "param_pool", "_uploader"):
            made.pop(name, None)
