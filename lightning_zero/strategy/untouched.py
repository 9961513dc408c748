"""A process before its first launch, so that it can be made so again for the next job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_zero.comm.world import leave_world

__all__ = ["Untouched"]

_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Untouched:
    """What a launch changes in the process that becomes rank 0, as it was.

    The process group and the variables would make the next job of this process believe that its
    ranks are already there, and the threads are those of its share of the processors.

    Attributes:
        environment: All variables.
        num_threads: Of torch.
        excepthook: What prints an exception that nobody catches; a process group puts one around
            it that says the rank.
    """

    environment: dict[str, str]
    num_threads: int
    excepthook: Callable[..., Any]

    @classmethod
    def now(cls) -> Untouched:
        """This process, before a launch."""
        return cls(dict(os.environ), torch.get_num_threads(), sys.excepthook)

    def restore(self) -> None:
        """Leaves no trace of the launch. The ranks must have ended, or need this one no more."""
        leave_world()
        if getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d":
            sys.excepthook = self.excepthook
        for name in _VARIABLES:
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                os.environ.pop(name, None)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
