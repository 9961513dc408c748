"""`Trainer(strategy="zero3")`: the names and settings that a user gives; what is saved of a run.

    ProcessStrategy     who the ranks are, how they start, how they talk      processes.py
    EngineStrategy      an engine for each run, its steps and its end         engine_strategy.py
    ZeroStrategy        all settings, DeepSpeed's too; states of that engine, saved and loaded

Lightning asks one object for all of it, so each is a subclass of the one above.

[Note: Whole or for a file] Lightning asks `lightning_module_state_dict` for what goes into a
checkpoint, and users ask it for the weights. In the sharded form the first are entries that each
rank writes for itself; of these nobody but a save can make anything. So the Trainer's checkpoints
get theirs by a way of their own, and all others whole tensors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning import __version__ as lightning_version
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zero.checkpoint import (
    full_state_dict,
    load_masters,
    load_module,
    load_optimizer,
    narrow_masters,
    open_checkpoint,
)
from lightning_zero.checkpoint.atomic import locate, recover
from lightning_zero.checkpoint.modules import replace_sharded_parameters
from lightning_zero.checkpoint.remote import check_shared
from lightning_zero.checkpoint.source import raise_damage_on_any_rank
from lightning_zero.comm.consistency import check_equal
from lightning_zero.comm.world import (
    DEFAULT_TIMEOUT,
    WaitLimits,
    failing_together,
    gather_objects,
)
from lightning_zero.deepspeed import Translation, translate
from lightning_zero.engine.counting import full_bytes
from lightning_zero.layout.config import Modules
from lightning_zero.layout.names import with_saved_names
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES
from lightning_zero.optim.state import optimizer_state_dict
from lightning_zero.strategy.averages import Averages, check_restorable
from lightning_zero.strategy.engine_strategy import (
    REGROUP_TIMEOUT,
    EngineStrategy,
    UnshardAfterFit,
    run_state,
)
from lightning_zero.strategy.loops import LockstepLoops
from lightning_zero.strategy.patches import Patches
from lightning_zero.strategy.precision import ZeroDoublePrecision
from lightning_zero.strategy.processes import StartMethod
from lightning_zero.strategy.resume import tidy_folders
from lightning_zero.strategy.saving import (
    MASTERS_KEY,
    METADATA_KEY,
    CheckpointType,
    Saving,
    ZeroCheckpointIO,
    is_download,
    is_user_io,
)
from lightning_zero.strategy.settings import Settings
from lightning_zero.tensors.meta import accepting_pending_values, set_pending_values

__all__ = ["ZeroStrategy"]

# The offloading ones mean what Lightning's DeepSpeed names of the same form mean.
_REGISTERED: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "zero3_offload_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
}

# Other tensors of a checkpoint may be kept (by callbacks, say), while its file is written anew.
_COPIED_ON_LOADING = {"state_dict", "optimizer_states", "current_model_state", MASTERS_KEY}
_FOR_CHECKPOINTS = "_get_lightning_module_state_dict"  # of the Trainer's checkpoint connector


class ZeroStrategy(EngineStrategy):
    """ZeRO stages 1-3 for any LightningModule.

    Registered as `zero1`, `zero2`, `zero3`, `zero1_offload`, `zero2_offload`, `zero3_offload` and
    `zero3_offload_nvme`, each also with `_notebook`.

    Args:
        stage: 0 (plain data parallel in the same engine, the control), 1, 2 or 3. "auto": the
            fastest of 1, 2 and 3 that leaves 30 % of the free memory to activations, and
            offload where none does; to files only where `nvme_path` or its variable names a folder.
            `config` says it once training has begun, as do the log, the loggers and checkpoints.
        reduce_bucket_size: See `ZeroConfig` for this and the following, up to
            `sharding_group_size`. Only two of them know the Trainer:
        param_dtype: None: that of the Trainer's precision. "float32" under "bf16-mixed" leaves the
            casts to autocast, as DDP does, for twice the parameter bytes.
        keep_float32: Under "bf16-mixed" and "16-mixed" vectors and what autocast does not cast stay
            anyway.
        checkpoint: "full" is one file, as DDP's; "sharded" is a directory to which every rank
            writes its own part. "auto": sharded where parameters or optimizer states are
            offloaded, where a full checkpoint takes more than half of rank 0's free CPU memory,
            and from 2^31 parameter elements on; else full.
        check_memory: Refuse to begin where model states alone are more than all the memory there
            is, and say what would fit.
        unshard_after_fit: Give every rank the whole module, in CPU memory, when a fit has ended.
            False: its parameters have no values then, and using one is an error. "auto": where it
            takes at most half of the memory that is free for all ranks of a node; else the last
            step is saved, if no callback has done so.
        async_save: Train on while a sharded checkpoint is written, from a copy of this rank's
            shards in CPU memory.
        accelerator: As in every Lightning strategy, for this and the following.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer where it is not given.
        checkpoint_io: Writes and reads the file; with one of your own the form is full. None:
            `ZeroCheckpointIO`.
        precision_plugin: One of Lightning's own; replaced by ours of the same precision.
        process_group_backend: None: nccl on CUDA, gloo on CPU.
        timeout: Of every collective: a `timedelta`, or seconds. None: the backend's.
        wait_report_s: When a rank has waited so many seconds for others, rank 0's output tells what
            every rank is doing, once. None: never.
        heartbeat_timeout_s: A rank that has been silent for so many seconds, because its process is
            stopped or its node cannot be reached, is lost, and the job ends on all ranks. None:
            silence alone ends nothing.
        start_method: "popen" runs the script once for each rank; "fork" is for notebooks.

    Raises:
        ValueError: A setting out of range, or one that has no meaning in this stage.
        TypeError: A setting of the wrong type.
    """

    strategy_name = "zero"

    def __init__(
        self,
        stage: int | str = 3,
        *,
        reduce_bucket_size: int | float | str | None = None,
        allgather_bucket_size: int | float | str | None = None,
        prefetch_bucket_size: int | float | str | None = None,
        param_persistence_threshold: int | float | str | None = None,
        max_live_parameters: int | float | str | None = None,
        unit_classes: Modules | None = None,
        reshard_after_forward: bool | None = None,
        overlap_comm: bool = True,
        reduce_dtype: str | None = None,
        param_dtype: str | None = None,
        keep_float32: Modules | None = None,
        activation_checkpointing: bool | Modules = False,
        broadcast_buffers: bool = True,
        assume_elementwise: bool = False,
        offload_optimizer: OffloadConfig | str | Mapping[str, Any] | None = None,
        offload_param: OffloadConfig | str | Mapping[str, Any] | None = None,
        overlap_step: bool = False,
        sharding_group_size: int | str | None = None,
        checkpoint: CheckpointType = "auto",
        async_save: bool = False,
        check_memory: bool = True,
        unshard_after_fit: UnshardAfterFit = "auto",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        wait_report_s: float | None = 30.0,
        heartbeat_timeout_s: float | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        settings = Settings(locals())  # by their names
        self._saving = Saving(checkpoint, is_async=async_save)
        self._saving.check(checkpoint_io)
        super().__init__(
            settings,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            limits=WaitLimits(wait_report_s, heartbeat_timeout_s),
            unshard_after_fit=unshard_after_fit,
            start_method=start_method,
        )
        self.trainer_kwargs: dict[str, Any] = {}  # what `from_deepspeed` hands back
        self.translation: Translation | None = None  # all that the DeepSpeed file says
        self.before_saving: Callable[[], object] | None = None  # called before tensors are gathered
        self._has_lost_states = False  # pickled after a run, without the optimizers' states

    @classmethod
    def from_deepspeed(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        world_size: int | None = None,
        **kwargs: Any,
    ) -> ZeroStrategy:
        """The strategy for a DeepSpeed configuration: a JSON file or the same as a dict.

        What the Trainer owns comes back in `strategy.trainer_kwargs`:
        `Trainer(strategy=strategy, **strategy.trainer_kwargs)`. Settings without effect are named
        once.

        Args:
            source: Path or mapping.
            world_size: Number of ranks, where the file gives a global batch size only.
            **kwargs: Further arguments of this class; they win over the file. With another `stage`,
                what the file says of its own stage alone is left out.

        Raises:
            ValueError: Unknown keys, or settings that would change the training and do not exist
                here.
        """
        translation = translate(source, world_size=world_size)
        if message := translation.message():
            rank_zero_warn(message)
        config = translation.config
        stage = kwargs.get("stage", config.stage)
        if stage in STAGES:
            config = config.for_stage(stage)  # options of the file's own may have no meaning there
        strategy = cls(**{**vars(config), **kwargs})
        strategy.translation = translation
        strategy.trainer_kwargs = dict(translation.trainer_kwargs)
        strategy._grad_scaler_kwargs = dict(translation.grad_scaler_kwargs)
        return strategy

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for name, settings in _REGISTERED.items():
            for suffix, start_method in (("", "popen"), ("_notebook", "fork")):
                if name + suffix not in strategy_registry:
                    description = f"ZeRO {settings}, processes started by {start_method}"
                    strategy_registry.register(
                        name + suffix, cls, description, start_method=start_method, **settings
                    )

    # ---------------------------------------------------------------- a run

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        is_double = isinstance(self.precision_plugin, ZeroDoublePrecision)
        if self.config.param_dtype is torch.float64 and not is_double:
            raise ValueError(
                f'param_dtype="float64" needs precision="64-true", got '
                f'precision="{self.precision_plugin.precision}", in which inputs are not float64; '
                "set precision, or leave param_dtype out."
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Before any rank does what the others would have to do with it.
        fields = self._settings.describe() | {"precision": str(self.precision_plugin.precision)}
        with self._waiting("the settings of all ranks"):
            everyone = gather_objects({"ZeroStrategy": fields})
        check_equal(everyone)

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
        connector, state = trainer._checkpoint_connector, self._module_state
        Patches().put(connector, _FOR_CHECKPOINTS, state)  # for good: a save may come after the run
        super().setup(trainer)
        self._saving.decide(self.engine, trainer.ckpt_path)
        if trainer.state.fn == TrainerFn.FITTING:
            self._saving.check_callbacks(trainer, is_sharded=self._saves_shards)
        self._has_lost_states = False
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._averages = Averages(self.engine, callbacks, self._average_state)

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
            if not has_failed and self._drops_weights():
                assert self.lightning_module is not None
                _save_last_step(self.lightning_module.trainer)
            self.finish_saving(warns=has_failed)
        finally:
            self._saving.free()
            super().teardown()

    # ---------------------------------------------------------------- what is saved

    @property
    def _saves_shards(self) -> bool:
        """Whether the next checkpoint is written in the sharded form."""
        assert self.lightning_module is not None
        return self._saving.is_sharded(self.lightning_module, self.checkpoint_io)

    def _uses_io_only(self, path: _PATH) -> bool:
        """Whether the `CheckpointIO` alone deals with `path`: the user's own, or a download."""
        return is_user_io(self.checkpoint_io) or is_download(path)

    def _meet(self, name: str) -> None:
        """During a run: a rank that does so alone would wait for data of the others. Collective."""
        if (engine := self._engine) is not None:
            engine.lockstep.barrier(name)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors in CPU memory on every rank, whatever the form. Collective.

        Raises:
            RuntimeError: They do not fit into the memory of some node.
        """
        return self._module_state(is_for_file=False)

    def _module_state(self, *, is_for_file: bool = True) -> dict[str, Any]:
        """See [Note: Whole or for a file]. Collective."""
        if self.before_saving is not None:
            self.before_saving()
        module = self.lightning_module
        assert module is not None
        if not self._can_communicate():
            return {}
        self._meet("the state of the module, for a checkpoint")
        if is_for_file and self._owner is not None and self._saves_shards:
            is_closed = self._engine is None
            state = self._saving.state_dict(self._owner, module, is_closed=is_closed)
        else:
            state = self._full_state(is_for_file)
        return with_saved_names(state)

    def _full_state(self, is_for_file: bool) -> dict[str, Any]:
        """Whole tensors, for a file on rank 0 only. Collective."""
        engine, module = self._engine, self.lightning_module
        assert module is not None
        if engine is None:
            return module.state_dict()
        if not is_for_file:
            num_bytes = sum(full_bytes(bucket) for bucket in engine.buckets)
            engine.lockstep.check_cpu_memory("lightning_module_state_dict()", num_bytes)
        return full_state_dict(engine, is_on_all_ranks=not is_for_file)

    def _average_state(self, average: nn.Module, kind: str) -> dict[str, Any]:
        """As `_module_state`, of a callback's averaged module. Collective."""
        if not self._can_communicate():
            return {}
        if self._saves_shards:
            return self._saving.state_dict(self.engine, average, kind)
        return full_state_dict(self.engine, average)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What it would save unsharded, on rank 0; or shards by name on every rank. Collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        owner = self._owner
        if self._has_lost_states:
            raise RuntimeError(
                "the optimizer states are not there: the Trainer was pickled after a run, and the "
                "ranks that hold them were not; save with weights_only=True, or resume from a "
                "checkpoint (ckpt_path=...) that was saved before."
            )
        if owner is None or optimizer not in owner.optimizers:
            return super().optimizer_state(optimizer)
        if not self._can_communicate():
            return {}
        owner.optimizers.check_has_states()
        self._meet("the state of an optimizer, for a checkpoint")
        if self._saves_shards:
            return self._saving.optimizer_state(optimizer, owner)
        return optimizer_state_dict(optimizer, owner.buckets, is_recipient=self.is_global_zero)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Writes what Lightning has dumped. Collective.

        Raises:
            TypeError: Storage options for the sharded form.
            OSError: It cannot be written; on every rank.
        """
        if (choice := self._settings.choice) is not None:
            chosen = {"reason": choice.reason, **choice.as_hyperparameters()}
            checkpoint[METADATA_KEY] = {"auto": chosen}
        if not self._can_communicate():
            rank_zero_warn(
                f"{filepath} was not saved: other ranks did not come together within "
                f"{REGROUP_TIMEOUT.seconds} s after the exception, so that no whole state exists."
            )
            return
        if self._engine is not None:
            replace_sharded_parameters(checkpoint, self._engine)
        if self._owner is not None and self._saves_shards:
            if storage_options is not None:
                raise TypeError(
                    "storage_options are for a CheckpointIO, and a sharded checkpoint uses none; "
                    'leave them out, or use ZeroStrategy(checkpoint="full").'
                )
            last_masters = self._last_masters if self._engine is None else None
            self._saving.save(checkpoint, filepath, self._owner, last_masters=last_masters)
        else:
            self._save_full(checkpoint, filepath, storage_options)

    def _save_full(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        engine = self._engine
        if "optimizer_states" in checkpoint:
            masters = self._last_masters if engine is None else narrow_masters(engine)
            if masters:
                checkpoint[MASTERS_KEY] = masters
        io, is_left_to_io = self.checkpoint_io, self._uses_io_only(filepath)

        def write() -> None:
            if not is_left_to_io:
                check_shared(filepath, self.world_size)
            io.save_checkpoint(checkpoint, filepath, storage_options)

        # Else the others would wait in the next collective for a rank 0 that has raised.
        self._on_rank_zero(f"save {filepath}", write)

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

        A `checkpoint_io` other than the default one reads for itself.

        Raises:
            ValueError: It is damaged, or of no known format.
            OSError, RuntimeError: Another rank could not open it.
        """
        self._saving.finish()
        path = self.broadcast(checkpoint_path)
        if self._uses_io_only(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        with failing_together(f"reach {path}"):
            check_shared(path, self.world_size)
        self._on_rank_zero(f"recover {path}", lambda: recover(locate(path)))
        raise_damage_on_any_rank(path, self.global_rank, self.world_size, gather_objects)
        with failing_together(f"open {path}"):
            checkpoint = open_checkpoint(path, weights_only=weights_only)
        checkpoint.setdefault("pytorch-lightning_version", lightning_version)
        for key, value in checkpoint.items():
            if key not in _COPIED_ON_LOADING:
                checkpoint[key] = tree_map_only(Tensor, Tensor.clone, value)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Into the module and the masters: each rank its own elements. Collective."""
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
        """Into the strategy's optimizers: each rank its own elements. Collective.

        Raises:
            ValueError: There are more or fewer optimizers.
        """
        states: Sequence[Mapping[str, Any]] = checkpoint["optimizer_states"]
        optimizers = self.optimizers
        if len(states) != len(optimizers):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers, expected "
                f"{len(optimizers)}; resume with the configure_optimizers that was saved."
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            if not isinstance(optimizer, _MockOptimizer):
                load_optimizer(self.engine, optimizer, state)

    # ---------------------------------------------------------------- pickling

    @override
    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to a run; a copy begins runs of its own. Local."""
        if self._engine is not None:
            raise RuntimeError(
                "a ZeroStrategy and its Trainer cannot be pickled or copied while the Trainer "
                "runs: other ranks hold parts of the module; do it after fit, or use "
                "trainer.save_checkpoint()."
            )
        state = super().__getstate__()
        state["_has_lost_states"] |= self._owner is not None
        launcher: Any = copy.copy(self._launcher)
        if hasattr(launcher, "procs"):
            launcher.procs = []  # what it has started is this process's
        state["_launcher"] = launcher
        of_runs = ("_building", "_closed", "_watched_by", "_has_regrouped", "_keeps_full_module")
        renewed = {"_masters_to_load": {}, "_loops": LockstepLoops()}
        return state | dict.fromkeys(of_runs) | renewed


# Lightning takes modules from torch.compile for some strategies of its own only. Of these it asks
# for this class nowhere else, while a DDPStrategy is distributed also on one device.
SingleDeviceStrategy.register(ZeroStrategy)


def _save_last_step(trainer: Trainer) -> None:
    """Saves what would be lost with the parameters, unless a callback has just done so. Collective.

    To `last-step-N.ckpt` in the Trainer's `default_root_dir`.
    """
    callbacks: list[Any] = list(trainer.checkpoint_callbacks)
    saved = [getattr(callback, "_last_global_step_saved", None) for callback in callbacks]
    if trainer.global_step in (0, *saved) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    path = Path(trainer.default_root_dir) / f"last-step-{trainer.global_step}.ckpt"
    rank_zero_warn(f"no checkpoint has the last step, so it is saved to {path}.")
    trainer.save_checkpoint(path)
