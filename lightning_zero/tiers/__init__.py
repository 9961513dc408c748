"""Where shards rest, and how they travel: the device, CPU memory, files on an NVMe disk.

Imports record, layout and tensors.

    home          `Home`: where one shard rests; in memory, or in a file
    storage       `Storage`: all homes of an engine, and the copies between tiers
    grad_offload  gradient shards that rest off the device
    pipeline      reads, works and writes chunks of files, each behind the other
    nvme_store    the files of one process, in a directory that goes with it
    nvme_file     one file: reads and writes in order, past the page cache
    memory        page-aligned, pinned buffers, and how much CPU memory there is

Begin with `home`. A new tier for optimizer state is a new `Home`, made in `storage`.
"""

from lightning_zero.tiers.home import PAGE_BYTES, Home, InFile, InMemory
from lightning_zero.tiers.memory import BufferPool, aligned_empty
from lightning_zero.tiers.nvme_file import NvmeFile, Transfer
from lightning_zero.tiers.nvme_store import NvmeStore
from lightning_zero.tiers.pipeline import Job, Piece, Pipeline
from lightning_zero.tiers.storage import ParamReader, Storage

__all__ = [
    "PAGE_BYTES",
    "BufferPool",
    "Home",
    "InFile",
    "InMemory",
    "Job",
    "NvmeFile",
    "NvmeStore",
    "ParamReader",
    "Piece",
    "Pipeline",
    "Storage",
    "Transfer",
    "aligned_empty",
]
