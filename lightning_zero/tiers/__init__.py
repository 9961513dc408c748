"""Where shards rest, and how they travel: the device, CPU memory, files on an NVMe disk."""

from lightning_zero.tiers.buffers import BufferPool, aligned_empty
from lightning_zero.tiers.file import NvmeFile
from lightning_zero.tiers.files import NvmeStore
from lightning_zero.tiers.home import PAGE_BYTES, Home, InFile, InMemory
from lightning_zero.tiers.param_reader import ParamReader
from lightning_zero.tiers.pipeline import Job, Piece, Pipeline
from lightning_zero.tiers.storage import Storage
from lightning_zero.tiers.transfer import Transfer

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
