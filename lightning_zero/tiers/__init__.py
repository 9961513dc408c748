"""Where shards rest, and how they travel: the device, CPU memory, files on an NVMe disk."""

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
