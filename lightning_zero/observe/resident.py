"""Memory that this process has now, and the most that it has had."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

__all__ = ["allocated_and_peak_bytes"]


def allocated_and_peak_bytes(device: torch.device) -> tuple[int, int]:
    """On CUDA the bytes in tensors there; else what of this process is resident.

    The peak is that since the process began, or since somebody has reset it.

    Args:
        device: Where the module computes.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux: nobody tells what is resident now
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        return peak, peak
    kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024
