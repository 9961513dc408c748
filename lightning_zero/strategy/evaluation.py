"""Validation, test and prediction with a different number of batches on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightning_zero.core.lockstep import Lockstep
from lightning_zero.strategy.patches import Patches

__all__ = ["LockstepEvaluation", "keep_in_loop"]

# No hook of Lightning's comes between the last batch and the first collective after it, which
# synchronises the metrics, so these methods of the running loop are wrapped: the first ends a data
# loader's batches (prediction has none of it), the second ends the loop.
_END_OF_LOADER = "_store_dataloader_outputs"
_END_OF_LOOP = "on_run_end"


class _NoBatches:
    """In place of a data loader that is empty on this rank alone: nothing, of a length.

    Lightning leaves a loop out in which a rank has no batches, and the others would wait for it.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def keep_in_loop(loader: object, trainer: Trainer) -> object:
    """A data loader of an evaluation loop that every rank enters. Collective where it has a length.

    Args:
        loader: Of this rank.
        trainer: About to run a loop; in training nothing changes.
    """
    if not (trainer.evaluating or trainer.predicting):
        return loader
    length = sized_len(loader)
    if length is None:
        return loader
    strategy = trainer.strategy
    total = strategy.reduce(torch.tensor(length, device=strategy.root_device), reduce_op="sum")
    return _NoBatches(int(total)) if length == 0 and int(total) > 0 else loader


class LockstepEvaluation:
    """Around the batches of Lightning's running evaluation loop."""

    def __init__(self) -> None:
        self._patches = Patches()

    def begin(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Before the first batch. Collective."""
        self.end()
        loop: Any = trainer._active_loop
        if hasattr(loop, _END_OF_LOADER):
            self._patches.within(loop, _END_OF_LOADER, partial(_end_of_loader, loop, lockstep))
        self._patches.before(loop, _END_OF_LOOP, partial(_end_loop, lockstep))
        lockstep.begin_loop()

    def end(self) -> None:
        """After the loop, or after an exception in it. Local."""
        self._patches.undo()


@contextmanager
def _end_of_loader(loop: Any, lockstep: Lockstep) -> Iterator[None]:
    _meet(lockstep, _synchronised(loop), is_end=False)
    yield
    lockstep.begin_loop()


def _end_loop(lockstep: Lockstep) -> None:
    while not _meet(lockstep, [], is_end=True):  # others have a data loader that is empty here
        lockstep.begin_loop()


def _meet(lockstep: Lockstep, metrics: list[str], *, is_end: bool) -> bool:
    """Serves until all ranks are at the end of a data loader; whether all are at the loop's.

    Raises:
        RuntimeError: They would wait for each other in metrics that some of them have not.
    """
    lockstep.end_loop()
    ends = lockstep.gather_objects((metrics, is_end))
    if any(names != metrics for names, _ in ends):
        listed = ", ".join(f"rank {rank} {names}" for rank, (names, _) in enumerate(ends))
        raise RuntimeError(
            "at the end of a data loader the ranks would synchronise different metrics and wait "
            f"for each other: {listed}; give every rank a batch of each data loader, and log the "
            "same names with sync_dist=True on all."
        )
    return all(is_at_end for _, is_at_end in ends)


def _synchronised(loop: Any) -> list[str]:
    """Names of the metrics that the end of the data loader computes across ranks."""
    results = loop.trainer._results
    if loop.trainer.sanity_checking or results is None:
        return []
    names = []
    for name, metric in results.valid_items():
        sync = metric.meta.sync
        if (
            metric.meta.on_epoch
            and not sync.rank_zero_only
            and (sync.should or not metric.is_tensor)
        ):
            names.append(name)
    return names
