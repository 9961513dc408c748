"""Where shards rest besides the device: files on an NVMe disk, and buffers to pass through."""

from lightning_zero.tiers.buffers import BufferPool, aligned_empty
from lightning_zero.tiers.file import NvmeFile
from lightning_zero.tiers.files import NvmeStore
from lightning_zero.tiers.pipeline import Job, Piece, Pipeline
from lightning_zero.tiers.transfer import Transfer

__all__ = [
    "BufferPool",
    "Job",
    "NvmeFile",
    "NvmeStore",
    "Piece",
    "Pipeline",
    "Transfer",
    "aligned_empty",
]
