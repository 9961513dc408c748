"""Random generators and data loaders of this rank, saved and restored by the strategy.

Lightning saves the loaders' states of rank 0, loads them on all ranks, and saves no random state.

[Note: When random numbers are restored] An iterator over a loader draws from the generators. A
checkpoint from the end of an epoch was saved before the next iterator; one from within an epoch,
after it. A resumed run makes its iterator before it trains. So the state is set when the optimizers
are loaded, and within an epoch once more when training starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero._lightning.pytorch import Trainer
from lightning_zero.checkpoint.rank_states import (
    random_state,
    read_rank_state,
    saved_num_ranks,
    set_random_state,
)

__all__ = ["RankState"]

_LOADERS = "combined_loader"  # Lightning's key for the states of the training loaders


class RankState:
    """State of this rank alone, from the opening of a checkpoint to the start of training."""

    def __init__(self) -> None:
        self._random: Mapping[str, Any] | None = None  # None: nothing to restore

    @staticmethod
    def collect(checkpoint: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """What this rank saves, with the loaders' states that Lightning has collected here."""
        loaders = _fit_loop_of(checkpoint).get(_LOADERS, [])
        return {"loaders": loaders, "random": random_state(device)}

    def take(
        self, checkpoint: dict[str, Any], rank: int, num_ranks: int, *, weights_only: bool | None
    ) -> None:
        """Takes the state of `rank`, and puts its loaders' states in the place of rank 0's.

        With another number of ranks it takes nothing, and reports that.

        Raises:
            ValueError: The state is damaged.
            pickle.UnpicklingError: It has classes that `weights_only` refuses.
        """
        self._random = None
        saved = saved_num_ranks(checkpoint)
        fit_loop = _fit_loop_of(checkpoint)
        if saved == num_ranks:
            state = read_rank_state(checkpoint, rank, weights_only=weights_only)
            self._random = state["random"]
            if _LOADERS in fit_loop:
                fit_loop[_LOADERS] = state["loaders"]
        elif saved:
            text = f"{saved} ranks saved the checkpoint, and {num_ranks} resume from it: "
            if fit_loop.get(_LOADERS):
                rank_zero_warn(
                    f"{text}every rank loads the data loaders' states of rank 0, and the random "
                    "generators are not restored."
                )
            else:
                rank_zero_info(f"{text}the random generators are not restored.")

    def restore(self, device: torch.device) -> None:
        """Sets the random generators. See [Note: When random numbers are restored]."""
        if self._random is not None:
            set_random_state(self._random, device)

    def restore_within_epoch(self, trainer: Trainer, device: torch.device) -> None:
        """Sets them once more if training resumes within an epoch; the last use."""
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch:
            self.restore(device)
        self._random = None


def _fit_loop_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """State of the fit loop in a checkpoint; empty if it has none."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state
