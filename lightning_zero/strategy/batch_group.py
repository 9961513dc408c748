"""Groups of ranks that get the same samples, for parallelism in the user's own code.

[Note: Sum inside, mean over groups] The ranks of a group compute parts of one loss, such as those
of their part of the sequence, so the gradient of the group is the sum of theirs. The engine takes
the mean over all ranks, which is 1/size of the mean over groups of that sum. So every loss is
multiplied by the size before its backward, and what the user, callbacks and loggers see is not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from lightning_zero._lightning.fabric import pl_worker_init_function
from lightning_zero.comm.world import close_group, split_world
from lightning_zero.health.watchdog import Watchdog

__all__ = ["BatchGroup", "check_batch_group_size"]


@dataclass(frozen=True)
class BatchGroup:
    """The batch group of this rank: consecutive ranks that get the same samples.

    Attributes:
        size: Number of ranks in each group.
        index: Number of this rank's group, from 0. Samples are distributed by it.
        num_groups: Number of groups.
        rank: Number of this rank in its group, from 0.
        process_group: Process group of its ranks, for collectives of torch.distributed. None: the
            group is this rank alone.
    """

    size: int
    index: int
    num_groups: int
    rank: int
    process_group: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, rank: int, num_ranks: int, size: int) -> BatchGroup:
        """Group of `rank` before there is a process group."""
        return cls(size, rank // size, num_ranks // size, rank % size)

    @classmethod
    def open(
        cls,
        rank: int,
        num_ranks: int,
        size: int,
        timeout: timedelta | None,
        watchdog: Watchdog,
    ) -> BatchGroup:
        """Group of `rank`, with a new process group. Collective: every rank."""
        own = cls.of(rank, num_ranks, size)
        if size == 1:
            return own
        groups = [list(range(first, first + size)) for first in range(0, num_ranks, size)]
        return replace(own, process_group=split_world(watchdog, groups, timeout))

    def close(self) -> None:
        """Ends the process group. Local."""
        if self.process_group is not None:
            close_group(self.process_group)

    def seed_workers(self, dataloader: object) -> None:
        """Seeds the loader's worker processes by group, after `seed_everything(workers=True)`.

        Lightning seeds them by rank, so random augmentations would differ inside a group. A
        `worker_init_fn` of the user is left alone.
        """
        if self.size == 1 or not hasattr(dataloader, "worker_init_fn"):
            return
        given = dataloader.worker_init_fn
        is_wanted = given is None and int(os.environ.get("PL_SEED_WORKERS", 0)) > 0
        if is_wanted or (isinstance(given, partial) and given.func is pl_worker_init_function):
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.index)


def check_batch_group_size(size: int, num_ranks: int | None = None) -> None:
    """Raises if the ranks cannot form groups of `size`; None: their number is not known yet.

    Raises:
        TypeError: It is no integer.
        ValueError: It is not positive, or does not divide the number of ranks.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"batch_group_size must be a number of ranks, got {size!r}.")
    if size < 1:
        raise ValueError(f"batch_group_size must be at least 1, got {size}.")
    if num_ranks is not None and num_ranks % size:
        fitting = [str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        raise ValueError(
            f"batch_group_size must divide the number of ranks, got {size} with {num_ranks} "
            f"rank(s); use {' or '.join(fitting)}."
        )
