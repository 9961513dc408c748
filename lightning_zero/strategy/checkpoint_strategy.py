"""A strategy that answers for whole states, in checkpoints of any form, from an engine's shards.

[Note: Whole or for a file] Lightning asks `lightning_module_state_dict` for what goes into a
checkpoint, and users ask it for the weights. In the sharded form the first are entries that each
rank writes for itself; of these nobody but a save can make anything. So the Trainer's checkpoints
get theirs by a way of their own, and all others whole tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.strategy.after_fit import save_unsaved
from lightning_zero.strategy.batch_boundary import BatchBoundary
from lightning_zero.strategy.checkpoint_io import ZeroCheckpointIO
from lightning_zero.strategy.checkpointing import Checkpoints
from lightning_zero.strategy.engine_strategy import EngineStrategy
from lightning_zero.strategy.evaluation import LockstepEvaluation
from lightning_zero.strategy.lifecycle import run_state
from lightning_zero.strategy.saving import NOTE_KEY, Saving
from lightning_zero.strategy.settings import Settings

__all__ = ["CheckpointStrategy"]

_FOR_CHECKPOINTS = "_get_lightning_module_state_dict"  # of the Trainer's checkpoint connector


class CheckpointStrategy(EngineStrategy):
    """Forwards what Lightning saves and loads to `Checkpoints`.

    Args:
        settings: The engine's.
        saving: Decides on the form.
        checkpoint_io: Writes and reads whole files. None: `ZeroCheckpointIO`.
        **of_processes: As in `ProcessStrategy`.

    Raises:
        ValueError: A `checkpoint_io` that the form does not use.
    """

    def __init__(
        self,
        settings: Settings,
        saving: Saving,
        *,
        checkpoint_io: CheckpointIO | None,
        **of_processes: Any,
    ) -> None:
        saving.check(checkpoint_io)
        self._saving = saving
        super().__init__(settings, checkpoint_io=checkpoint_io, **of_processes)
        self._checkpoints = Checkpoints(self, self._life, saving)
        self.before_saving: Callable[[], object] | None = None  # called before tensors are gathered
        self._has_lost_states = False  # pickled after a run, without the optimizers' states

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = ZeroCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = ZeroCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    # ---------------------------------------------------------------- a run

    @override
    def connect(self, model: LightningModule) -> None:
        self._saving.check(self._checkpoint_io)
        super().connect(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._saving.check_callbacks(trainer, is_sharded=self._checkpoints.is_sharded)
        connector = trainer._checkpoint_connector
        assert hasattr(type(connector), _FOR_CHECKPOINTS), "not in this release of Lightning"
        setattr(connector, _FOR_CHECKPOINTS, self._module_state_for_checkpoint)
        super().setup(trainer)
        self._has_lost_states = False
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._life.adopt_averages(callbacks, self._checkpoints.average_state)

    @override
    def on_train_end(self) -> None:
        self.finish_saving()

    def finish_saving(self, *, warns: bool = False) -> None:
        """Waits until a checkpoint that is written while training goes on is complete. Local.

        Args:
            warns: Only warn of its failure.

        Raises:
            OSError: It could not be written.
        """
        self._saving.finish(warns=warns)

    @override
    def teardown(self) -> None:
        has_failed = run_state(self.lightning_module).status == TrainerStatus.INTERRUPTED
        try:
            if not has_failed and self._life.loses_weights():
                assert self.lightning_module is not None
                save_unsaved(self.lightning_module.trainer)
            self.finish_saving(warns=has_failed)
        finally:
            self._saving.free()
            super().teardown()

    # ---------------------------------------------------------------- saving

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0, whatever the form; on the meta device elsewhere. Collective."""
        if self.before_saving is not None:
            self.before_saving()
        return self._checkpoints.module_state()

    def _module_state_for_checkpoint(self) -> dict[str, Any]:
        """See [Note: Whole or for a file]. Collective."""
        if self.before_saving is not None:
            self.before_saving()
        return self._checkpoints.module_entries()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What it would save unsharded, on rank 0; or shards by name on every rank. Collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        owner = self._life.owner
        if self._has_lost_states:
            raise RuntimeError(
                "the optimizer states are not there: the Trainer was pickled after a run, and the "
                "ranks that hold them were not; save with weights_only=True, or resume from a "
                "checkpoint (ckpt_path=...) that was saved before."
            )
        if owner is None or optimizer not in owner.optimizers:
            return super().optimizer_state(optimizer)
        return self._checkpoints.optimizer_state(optimizer, owner)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        if (choice := self._settings.choice) is not None:
            chosen = {"reason": choice.reason, **choice.as_hyperparameters()}
            checkpoint[NOTE_KEY] = {"auto": chosen}
        self._checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._checkpoints.is_left_to_io(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saving.remove(filepath)

    # ---------------------------------------------------------------- loading

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint of any format, the same on every rank. Collective.

        A `checkpoint_io` other than the default one reads for itself.
        """
        self._saving.finish()
        path = self.broadcast(checkpoint_path)
        if self._checkpoints.is_left_to_io(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        return self._checkpoints.open(path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_module(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(checkpoint["optimizer_states"])

    # ---------------------------------------------------------------- pickling

    @override
    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to a run; a copy begins runs of its own. Local.

        Raises:
            RuntimeError: In the middle of a run, whose shards other ranks hold.
        """
        if self._life.current is not None:
            raise RuntimeError(
                "a ZeroStrategy and its Trainer cannot be pickled or copied while the Trainer "
                "runs: other ranks hold parts of the module; do it after fit, or use "
                "trainer.save_checkpoint()."
            )
        state = super().__getstate__()
        state["_has_lost_states"] |= self._life.owner is not None
        launcher: Any = copy.copy(self._launcher)
        if hasattr(launcher, "procs"):
            launcher.procs = []  # what it has started is this process's
        state["_launcher"] = launcher
        renewed = {
            "_life": self._life.renewed(),
            "_boundary": BatchBoundary(),
            "_evaluation": LockstepEvaluation(),
            "_checkpoints": None,
        }
        return state | renewed

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checkpoints = Checkpoints(self, self._life, self._saving)
