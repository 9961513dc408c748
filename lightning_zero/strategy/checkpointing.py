"""A strategy that saves and loads checkpoints with the states of its engine.

[Note: Two kinds of state dict] Lightning calls `lightning_module_state_dict` for the contents of a
checkpoint, and users call it for the weights. In a sharded checkpoint the contents are entries that
each rank writes for itself, which only a save can use. So the Trainer's checkpoints get theirs from
`_module_state`, and all other callers get full tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning.fabric import _PATH, CheckpointIO
from lightning_zero._lightning.pytorch import (
    LightningModule,
    LightningOptimizer,
    Trainer,
    TrainerFn,
    TrainerStatus,
    _MockOptimizer,
    _WrappingCheckpointIO,
)
from lightning_zero._lightning.pytorch import __version__ as lightning_version
from lightning_zero.checkpoint import (
    full_state_dict,
    load_masters,
    load_module,
    load_optimizer,
    narrow_masters,
)
from lightning_zero.checkpoint.modules import replace_sharded_parameters
from lightning_zero.checkpoint.rank_states import gather_rank_states
from lightning_zero.checkpoint.source import open_on_all_ranks
from lightning_zero.checkpoint.states import MASTERS_KEY, METADATA_KEY, full_optimizer_state
from lightning_zero.checkpoint.storage import check_shared
from lightning_zero.engine.counting import full_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.health.together import failing_together
from lightning_zero.layout.names import with_saved_names
from lightning_zero.strategy.averages import Averages, check_restorable
from lightning_zero.strategy.engine_strategy import EngineStrategy, run_state
from lightning_zero.strategy.finite import (
    NONFINITE_KEY,
    find_nonfinite_parameters,
)
from lightning_zero.strategy.loading import is_download
from lightning_zero.strategy.loops import LockstepLoops
from lightning_zero.strategy.patches import Patches
from lightning_zero.strategy.rank_state import RankState
from lightning_zero.strategy.resume import tidy_folders
from lightning_zero.strategy.saving import (
    CheckpointType,
    Saving,
    SavingCallback,
    ZeroCheckpointIO,
    is_user_io,
)
from lightning_zero.strategy.settings import Settings
from lightning_zero.tensors.meta import accepting_pending_values, set_pending_values

__all__ = ["CheckpointStrategy"]

_STATE_DICT_METHOD = "_get_lightning_module_state_dict"  # of the Trainer's checkpoint connector


class CheckpointStrategy(EngineStrategy):
    """Saves and loads checkpoints; a save may follow the end of a run.

    Arguments are those of `ZeroStrategy`, and the engine's settings.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        checkpoint: CheckpointType,
        async_save: bool,
        checkpoint_io: CheckpointIO | None,
        **of_engine: Any,
    ) -> None:
        self._saving = Saving(checkpoint, is_async=async_save)
        self._saving.check(checkpoint_io)
        super().__init__(settings, checkpoint_io=checkpoint_io, **of_engine)
        self._rank_state = RankState()
        # From one set-up to the next, even of another Trainer: a save may follow a run.
        self._trainer_patches = Patches()

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

    @override
    def connect(self, model: LightningModule) -> None:
        self._saving.check(self._checkpoint_io)
        super().connect(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self.is_global_zero:
            tidy_folders(trainer)
        self._trainer_patches.undo()
        connector = trainer._checkpoint_connector
        self._trainer_patches.put(connector, _STATE_DICT_METHOD, self._module_state)
        super().setup(trainer)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        self._saving.decide(self.engine, trainer.ckpt_path, is_reported=is_fit)
        if is_fit:
            self._saving.check_callbacks(trainer, is_sharded=self._saves_shards)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._averages = Averages(self.engine, callbacks, self._average_state)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self.engine.guard.begin_at(trainer.global_step)  # that of a checkpoint
        self._rank_state.restore_within_epoch(trainer, self.root_device)

    @override
    def on_train_end(self) -> None:
        self.finish_saving()
        self.engine.lockstep.barrier("the end of training")  # a rank may have fewer batches
        self.engine.guard.finish()

    def finish_saving(self, *, warns: bool = False) -> None:
        """Waits until the checkpoint that `async_save` is writing is complete. Local.

        Args:
            warns: Warn of a failure instead of raising.

        Raises:
            OSError: The checkpoint could not be written.
        """
        self._saving.finish(warns=warns)

    @override
    def teardown(self) -> None:
        has_failed = run_state(self.lightning_module).status == TrainerStatus.INTERRUPTED
        try:
            if not has_failed and self._drops_weights():
                assert self.lightning_module is not None
                _save_last_step(self.lightning_module.trainer)
            self.finish_saving(warns=has_failed)
        finally:
            self._saving.free()
            super().teardown()

    # ---------------------------------------------------------------- saving

    @property
    def _saves_shards(self) -> bool:
        """Whether the next checkpoint is a sharded one."""
        assert self.lightning_module is not None
        return self._saving.is_sharded(self.lightning_module, self.checkpoint_io)

    def _uses_io_only(self, path: _PATH) -> bool:
        """Whether only the `CheckpointIO` handles `path`: it is the user's, or `path` is a URL."""
        return is_user_io(self.checkpoint_io) or is_download(path)

    def _synchronize(self, name: str) -> None:
        """Waits until all ranks are here, during a run; an error if one is not. Collective.

        Otherwise a rank that saves alone would wait for data of the others.
        """
        if self._engine is not None:
            self._engine.lockstep.barrier(name)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State dict of full tensors in CPU memory on every rank. Collective.

        The same for `checkpoint="full"` and `"sharded"`.

        Raises:
            RuntimeError: The tensors do not fit into the memory of some node.
        """
        return self._module_state(is_for_file=False)

    def _module_state(self, *, is_for_file: bool = True) -> dict[str, Any]:
        """Contents of a checkpoint; see [Note: Two kinds of state dict]. Collective."""
        module = self.lightning_module
        assert module is not None
        trainer = module._trainer
        for callback in trainer.callbacks if trainer is not None else ():  # type: ignore[attr-defined]
            if isinstance(callback, SavingCallback):
                callback.before_saving()
        if not self._can_communicate():
            return {}
        self._synchronize("the state of the module, for a checkpoint")
        if self._engine is not None and (lost := self._engine.coordinator.find_lost_write()):
            raise lost
        if is_for_file and self._state_engine is not None and self._saves_shards:
            is_closed = self._engine is None
            state = self._saving.state_dict(self._state_engine, module, is_closed=is_closed)
        else:
            state = self._full_state(is_for_file)
        return with_saved_names(state)

    def _full_state(self, is_for_file: bool) -> dict[str, Any]:
        """Full tensors: for a file on rank 0 only, else on every rank. Collective."""
        engine, module = self._engine, self.lightning_module
        assert module is not None
        if engine is None:
            return module.state_dict()
        if not is_for_file:
            num_bytes = sum(full_bytes(bucket) for bucket in engine.buckets)
            engine.lockstep.check_cpu_memory("lightning_module_state_dict()", num_bytes)
        return full_state_dict(engine, is_on_all_ranks=not is_for_file)

    def _average_state(self, average: nn.Module, kind: str) -> dict[str, Any]:
        """As `_module_state`, for a callback's averaged module. Collective."""
        if not self._can_communicate():
            return {}
        if self._saves_shards:
            return self._saving.state_dict(self.engine, average, kind)
        return full_state_dict(self.engine, average)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of `optimizer`: full on rank 0, or shards by name on every rank. Collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._lost_states_reason:
            raise RuntimeError(
                f"the optimizer states are not available: {self._lost_states_reason}; save with "
                "weights_only=True, or resume from a checkpoint (ckpt_path=...) that was saved "
                "before."
            )
        engines = [e for e in (self._engine, self._closed) if e is not None]
        owner = next((e for e in engines if optimizer in e.optimizers), None)
        if owner is None:
            return super().optimizer_state(optimizer)
        if not self._can_communicate():
            return {}
        owner.optimizers.check_has_states()
        self._synchronize("the state of an optimizer, for a checkpoint")
        if self._saves_shards:
            return self._saving.optimizer_state(optimizer, owner)
        return full_optimizer_state(optimizer, owner)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Writes the checkpoint that Lightning has assembled. Collective.

        Raises:
            TypeError: Storage options were given for a sharded checkpoint.
            OSError: The checkpoint cannot be written. Raised on every rank.
        """
        choice = self._settings.choice
        if choice is not None:
            chosen = {"reason": choice.reason, **choice.as_hyperparameters()}
            checkpoint[METADATA_KEY] = {"auto": chosen}
        if not self._can_communicate():
            rank_zero_warn(
                f"{filepath} was not saved: the ranks could not continue together after the "
                "exception, so that shards are missing."
            )
            return
        filepath = self.broadcast(filepath)  # ranks may format different metrics into file names
        if self._engine is not None:
            replace_sharded_parameters(checkpoint, [self._engine])
            self._mark_nonfinite(checkpoint, str(filepath), self._engine)
        if self._state_engine is not None and self._saves_shards:
            if storage_options is not None:
                raise TypeError(
                    "storage_options are for a CheckpointIO, which a sharded checkpoint does not "
                    'use; leave them out, or use ZeroStrategy(checkpoint="full").'
                )
            self._saving.save(
                checkpoint,
                filepath,
                self._state_engine,
                last_masters=self._present_masters() if self._engine is None else None,
                rank_state=self._collect_rank_state(checkpoint),
            )
        else:
            self._save_full(checkpoint, filepath, storage_options)

    def _mark_nonfinite(self, checkpoint: dict[str, Any], path: str, engine: Engine) -> None:
        """Warns of non-finite parameters and marks the checkpoint with them. Collective."""
        if engine.config.on_nonfinite is None:
            return
        names = find_nonfinite_parameters(engine)
        if names:
            checkpoint.setdefault(METADATA_KEY, {})[NONFINITE_KEY] = names
            others = f" and {len(names) - 1} other parameters" if names[1:] else ""
            rank_zero_warn(f"{path} is saved with non-finite values in {names[0]}{others}.")

    def _collect_rank_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """What this rank adds to a checkpoint of a fit in progress; None for another one. Local."""
        if "optimizer_states" not in checkpoint or not self._is_fitting:
            return None
        return self._rank_state.collect(checkpoint, self.root_device)

    def _save_full(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        engine = self._engine
        if "optimizer_states" in checkpoint:
            masters = self._present_masters() if engine is None else narrow_masters(engine)
            if masters:
                checkpoint[MASTERS_KEY] = masters
        io, is_left_to_io = self.checkpoint_io, self._uses_io_only(filepath)
        rank_state = self._collect_rank_state(checkpoint)
        if engine is not None and rank_state is not None and not is_left_to_io:
            gather_rank_states(checkpoint, rank_state, engine.comm.control)

        def write() -> None:
            if not is_left_to_io:
                check_shared(filepath, self.world_size)
            io.save_checkpoint(checkpoint, filepath, storage_options)

        # All ranks raise if rank 0 does; else they would wait for it in the next collective.
        self.run_on_rank_zero(f"save {filepath}", write)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._uses_io_only(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saving.remove(filepath)

    # ---------------------------------------------------------------- loading

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint of any format, the same on every rank. Collective.

        A `checkpoint_io` other than the default one reads its own format.

        Raises:
            ValueError: The checkpoint is damaged, or its format is unknown.
            OSError, RuntimeError: Another rank could not open it.
        """
        self._saving.finish()
        path = self.broadcast(checkpoint_path)
        if self._uses_io_only(path):
            checkpoint = super().load_checkpoint(path, weights_only=weights_only)
        else:
            checkpoint = open_on_all_ranks(
                path, self.global_rank, self.world_size, self.gather_for, weights_only=weights_only
            )
            checkpoint.setdefault("pytorch-lightning_version", lightning_version)
        is_resumed = run_state(self.lightning_module).fn == TrainerFn.FITTING
        if is_resumed:
            gather = self.gather_for("the states of all ranks in a checkpoint")
            with failing_together(f"read the states of ranks in {path}", gather=gather):
                self._rank_state.take(
                    checkpoint, self.global_rank, self.world_size, weights_only=weights_only
                )
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this rank's shard of the module and the main parameters. Collective."""
        module = self.lightning_module
        assert module is not None
        awaited: dict[str, Tensor] = {}
        with accepting_pending_values(module):
            load_module(module, checkpoint["state_dict"], strict=strict, awaited=awaited)
            if awaited and run_state(module).fn == TrainerFn.FITTING:
                check_restorable(checkpoint)
            set_pending_values(module, awaited)
        masters = checkpoint.get(MASTERS_KEY, {})
        if self._engine is None:
            self._masters_to_load = masters
        else:
            load_masters(self._engine, masters)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's shard of the optimizers' states. Collective.

        Raises:
            ValueError: The checkpoint has more or fewer optimizers.
        """
        states: Sequence[Mapping[str, Any]] = checkpoint["optimizer_states"]
        optimizers = self.optimizers
        if len(states) != len(optimizers):
            raise ValueError(
                f"expected the states of {len(optimizers)} optimizers, got {len(states)} in the "
                "checkpoint; resume with the configure_optimizers of the saved run."
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            if not isinstance(optimizer, _MockOptimizer):
                load_optimizer(self.engine, optimizer, state)
        self._rank_state.restore(self.root_device)

    # ---------------------------------------------------------------- pickling

    @override
    def __getstate__(self) -> dict[str, Any]:
        """State without the parts that belong to a run; a copy starts its own runs. Local."""
        if self._engine is not None:
            raise RuntimeError(
                "a ZeroStrategy and its Trainer cannot be pickled or copied while the Trainer "
                "runs: other ranks hold shards of the module; do it after fit, or use "
                "trainer.save_checkpoint()."
            )
        state = super().__getstate__()
        if self._state_engine is not None:
            state["_lost_states_reason"] = (
                "the Trainer was pickled after a run, without the shards of other ranks"
            )
        launcher: Any = copy.copy(self._launcher)
        if hasattr(launcher, "procs"):
            launcher.procs = []  # the started processes belong to this process
        state["_launcher"] = launcher
        of_runs = ("_closed", "_watched_by", "_is_interrupted", "_keeps_full_module")
        renewed = {
            "_masters_to_load": {},
            "_loops": LockstepLoops(),
            "_rank_state": RankState(),
            "_trainer_patches": Patches(),
        }
        return state | dict.fromkeys(of_runs) | renewed


def _save_last_step(trainer: Trainer) -> None:
    """Saves the last step if no callback has, before parameters are dropped. Collective.

    The file is `last-step-N.ckpt` in the Trainer's `default_root_dir`.
    """
    callbacks: list[Any] = list(trainer.checkpoint_callbacks)
    saved = [getattr(callback, "_last_global_step_saved", None) for callback in callbacks]
    if trainer.global_step in (0, *saved) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    path = Path(trainer.default_root_dir) / f"last-step-{trainer.global_step}.ckpt"
    rank_zero_warn(f"no checkpoint contains the last step; saving it to {path}.")
    trainer.save_checkpoint(path)
