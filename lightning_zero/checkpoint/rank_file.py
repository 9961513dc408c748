"""The file that one rank writes of a sharded checkpoint.

torch's own writer keeps every tensor of a file in memory until the file is done. Here values are
read one item at a time, so that states which rest on a disk are never in memory all at once, and
hashed on their way.
"""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from lightning_zero.checkpoint.shard_tensor import ShardTensor

__all__ = ["RankFile", "Written"]

_SYNC_BYTES = 2**26


@dataclass(frozen=True)
class Written:
    """What one rank has written.

    Attributes:
        file: Name in the directory.
        num_bytes: Its size.
        digest: Its SHA-256, in hexadecimal.
        results: For torch's metadata.
    """

    file: str
    num_bytes: int
    digest: str
    results: list[WriteResult]


class RankFile:
    """The items of `rank` in `folder`, each as `torch.save` writes it, one after another."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._name = f"__{rank}_0.distcp"

    def write(self, planner: DefaultSavePlanner) -> Written:
        """Writes the items of `planner.plan` and syncs; what two names share is written once."""
        places: dict[Any, _StorageInfo] = {}
        results = []
        with (
            open(self._folder / self._name, "wb", buffering=0) as raw,
            ThreadPoolExecutor(2, thread_name_prefix="zero-save") as threads,
        ):
            file = _HashedFile(raw, threads)
            for item in planner.plan.items:
                value = planner.state_dict[item.index.fqn]
                key: Any = item.index
                if isinstance(value, ShardTensor):
                    key = (value.source, value.dtype, item.index.offset)
                if key not in places:
                    start = file.tell()
                    _append(planner.resolve_data(item), file)
                    places[key] = _StorageInfo(self._name, start, file.tell() - start)
                results.append(WriteResult(item.index, places[key].length, places[key]))
            file.sync()
        return Written(self._name, file.tell(), file.digest.hexdigest(), results)


def _append(data: Tensor | io.BytesIO, file: _HashedFile) -> None:
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    data = data.detach().cpu()
    if data.untyped_storage().nbytes() != data.nbytes:
        data = data.clone()  # torch.save would write the whole storage
    try:
        torch.save(data, cast(Any, file))
    except RuntimeError:  # of torch's archive, that has not all of its bytes
        if file.error is not None:
            raise file.error from None
        raise


class _HashedFile(io.RawIOBase):
    """A file that is appended to, and beside that hashed and brought to the disk.

    Attributes:
        digest: Of what was written.
        error: Why a write failed.
    """

    def __init__(self, raw: io.FileIO, threads: ThreadPoolExecutor) -> None:
        self._raw = raw
        self._threads = threads
        self._position = self._synced = 0
        self._syncing: Future[None] | None = None
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        hashing = self._threads.submit(self.digest.update, view)
        written = 0
        try:
            while written < view.nbytes:
                written += self._raw.write(view[written:]) or 0
            self._position += written
            self._sync_behind()
        except OSError as error:
            self.error = error
            raise
        finally:
            hashing.result()  # it reads `data`
        return written

    def _sync_behind(self) -> None:
        """Has the disk write while the next items are read: else it waits for the last one."""
        if self._syncing is not None and self._syncing.done():
            self._syncing.result()
            self._syncing = None
        if self._syncing is None and self._position - self._synced >= _SYNC_BYTES:
            self._synced = self._position
            self._syncing = self._threads.submit(os.fdatasync, self._raw.fileno())

    def sync(self) -> None:
        """All of it is on the disk."""
        if self._syncing is not None:
            self._syncing.result()
        os.fsync(self._raw.fileno())
