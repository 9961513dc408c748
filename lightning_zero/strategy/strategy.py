"""`Trainer(strategy="zero3")`: registered names, options, and saving and loading of checkpoints.

    ProcessStrategy     ranks: identity, start, small collectives             processes.py
    EngineStrategy      an engine for each run, its steps and its end         engine_strategy.py
    ZeroStrategy        all options, also DeepSpeed's; saving and loading the engine's states

Lightning calls one object for all of this, so each class is a subclass of the one above.

[Note: Two kinds of state dict] Lightning calls `lightning_module_state_dict` for the contents of a
checkpoint, and users call it for the weights. In a sharded checkpoint the contents are entries that
each rank writes for itself, which only a save can use. So the Trainer's checkpoints get theirs from
`_module_state`, and all other callers get full tensors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning.fabric import _PATH, CheckpointIO, ClusterEnvironment
from lightning_zero._lightning.pytorch import (
    Accelerator,
    LightningModule,
    LightningOptimizer,
    Precision,
    SingleDeviceStrategy,
    Trainer,
    TrainerFn,
    TrainerStatus,
    _MockOptimizer,
    _WrappingCheckpointIO,
)
from lightning_zero._lightning.pytorch import (
    __version__ as lightning_version,
)
from lightning_zero.checkpoint import (
    full_state_dict,
    load_masters,
    load_module,
    load_optimizer,
    narrow_masters,
)
from lightning_zero.checkpoint.modules import replace_sharded_parameters
from lightning_zero.checkpoint.rank_states import gather_rank_states
from lightning_zero.checkpoint.remote import check_shared
from lightning_zero.checkpoint.source import open_on_all_ranks
from lightning_zero.checkpoint.states import MASTERS_KEY, METADATA_KEY
from lightning_zero.comm.consistency import check_equal
from lightning_zero.deepspeed import Translation, translate
from lightning_zero.engine.counting import full_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.health.together import failing_together
from lightning_zero.health.world import DEFAULT_TIMEOUT
from lightning_zero.layout.config import Modules, WaitLimits
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
from lightning_zero.strategy.finite import (
    NONFINITE_KEY,
    FiniteCheckpoints,
    find_nonfinite_parameters,
)
from lightning_zero.strategy.loading import is_download
from lightning_zero.strategy.loops import LockstepLoops
from lightning_zero.strategy.patches import Patches
from lightning_zero.strategy.precision import ZeroDoublePrecision
from lightning_zero.strategy.processes import StartMethod
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

__all__ = ["ZeroStrategy"]

_STATE_DICT_METHOD = "_get_lightning_module_state_dict"  # of the Trainer's checkpoint connector


class ZeroStrategy(EngineStrategy):
    """ZeRO stages 1-3 for any LightningModule.

    Registered as `zero1`, `zero2`, `zero3`, `zero1_offload`, `zero2_offload`, `zero3_offload` and
    `zero3_offload_nvme`, each also with `_notebook`.

    Args:
        stage: int, default 3. ZeRO stage: 0 replicates all model states (plain data parallelism), 1
            shards optimizer states, 2 also gradients, 3 also parameters. With the Trainer, also
            "auto": the fastest of stages 1, 2 and 3 that leaves 30 % of the free memory to
            activations, with offload if no stage does without it, and with files only if
            `nvme_path` or its environment variable is set. The choice is in `config` once training
            has begun, in the log, the loggers and checkpoints.
        reduce_bucket_size: int (elements), default None. Largest number of gradient elements in one
            reduction; small parameters may add a sixteenth of it. None: 4 Mi, or 256 Ki for each
            rank if that is more. All stages; in stage 3 a repeated block is one bucket of any size.
        allgather_bucket_size: int (elements), default None. Largest number of parameter elements in
            one all-gather after the step. Reductions and all-gathers share their buckets, so the
            smaller of this and `reduce_bucket_size` applies. None: no limit of its own. Stages 1
            and 2.
        prefetch_bucket_size: int (elements), default None. Number of parameter elements to unshard
            before their use. None: one unit; 0: no prefetch. Stage 3.
        param_persistence_threshold: int (elements), default None. Parameters with fewer elements
            stay replicated; their gradients and optimizer states are sharded. None: 2^16 for those
            that keep float32 beside 16-bit ones, and 0 for all others, because a small parameter is
            in the bucket of its unit and needs no collective of its own. Stage 3.
        max_live_parameters: int (elements), default None. Prefetch no unit that would bring the
            unsharded parameters above this number. None: no limit. Stage 3.
        unit_classes: Class, str, or list of these, default None. Modules that are unsharded and
            resharded one by one, such as transformer blocks: a class, its name, the name of a
            module, or a pattern of names. None: repeated blocks in a ModuleList, ModuleDict or
            Sequential. Other large modules are units, too; all remaining parameters stay unsharded
            throughout a step. Stage 3.
        reshard_after_forward: bool, default None. Free the unsharded parameters of a unit after its
            forward, and all-gather them again for its backward. None: True. False needs more memory
            and a third less communication. Stage 3.
        overlap_comm: bool, default True. Communicate while computing. False: wait for every
            collective where it is issued. All stages.
        separate_reduce_scatter_group: bool, default False. Use two NCCL communicators, so that an
            all-gather and a reduce-scatter may run at the same time. It needs more device memory,
            and CUDA_DEVICE_MAX_CONNECTIONS must not be 1. Without effect on gloo. Stages 1 to 3.
        reduce_dtype: torch.dtype or its name, default None. Dtype in which gradients are reduced
            and stored. None: float32, or the parameters' dtype if that is wider. All stages.
        param_dtype: torch.dtype or its name, default None. Dtype of unsharded parameters, in which
            the module computes. None: the dtypes of the module. For a dtype narrower than float32
            the optimizer steps float32 main parameters. All stages. With the Trainer, None is the
            dtype of its precision. "float32" under "bf16-mixed" leaves the casts to autocast, as
            DDP does, for twice the parameter bytes.
        keep_float32: Class, str, or list of these, default None. Parameters that keep their dtype
            instead of `param_dtype`: the name of a parameter, or of a module for all parameters
            below it; the name of a class or base class of modules; a pattern of names, such as
            "*.router.*"; a class. "autocast" selects the parameters that `torch.autocast` does not
            cast; a mixed precision of the Trainer adds it. BatchNorm and other modules with running
            statistics always keep their dtype. All stages.
        activation_checkpointing: bool, class, str, or list of these, default False. Modules that
            save only their inputs and run again in backward, for less memory and about a third more
            computation. True: repeated blocks; or modules as in `unit_classes`. Values and random
            numbers do not change. All stages.
        broadcast_buffers: bool, default True. Copy rank 0's buffers, such as BatchNorm statistics,
            to all ranks at the first forward after a step, as DistributedDataParallel does. All
            stages.
        assume_elementwise: bool, default False. Promise that every optimizer treats each element by
            itself. False: a probe on small tensors determines this, and optimizers that need full
            tensors get them. True is for an optimizer that draws random numbers, for example; if
            the promise is wrong, training is wrong. Stages 1 to 3.
        offload_optimizer: str, mapping or OffloadConfig, default None. Tier of optimizer shards and
            of the gradients that step them: "cpu", "nvme", "auto", or an `OffloadConfig`. The CPU
            then steps them. None: the device. Stages 1 to 3.
        offload_param: str, mapping or OffloadConfig, default None. Tier of parameter shards, as in
            `offload_optimizer`. None: the device. Stage 3.
        overlap_step: bool, default False. Step bucket by bucket during the next forward, which
            waits for each bucket where it needs it. The values do not change. Reading
            `optimizer.state` waits for the step. Without effect on optimizers that can only step
            all parameters in one call and, in stage 3, on those that step full tensors. Stages 1 to
            3.
        sharding_group_size: int (ranks) or "node", default None. Number of consecutive ranks that
            form a shard group; each group holds all shards. It must divide the number of ranks.
            "node": the ranks that the launcher starts on a node, so that only gradient shards cross
            the links between nodes. None: all ranks. Stages 1 to 3.
        batch_group_size: int (ranks), default 1. Number of consecutive ranks that get the same
            samples, for context, spatial or ensemble parallelism in your module. Gradients are
            summed inside such a group and averaged over groups. `strategy.batch_group` has its
            process group. It must divide the number of ranks. All stages.
        on_nonfinite: "warn", "stop", "skip" or None, default "warn". Reaction to a NaN or an
            infinity in a gradient: its rank, parameter and micro-batch are named, and the step is
            taken with a warning on rank 0 ("warn"), not taken with an error on all ranks ("stop"),
            or left out ("skip"). None: gradients are not looked at. All stages. With the Trainer's
            precision "16-mixed" the loss scaler decides about the step, and all but None only warn.
        max_skips: int (steps), default 10. Skipped steps in a row of one optimizer after which one
            more is an error. Needs `on_nonfinite="skip"`.
        checkpoint: "auto", "full" or "sharded", default "auto". Kind of checkpoint. "full": one
            file, as with DDP. "sharded": a directory to which every rank writes its shards. "auto":
            sharded if parameters or optimizer states are offloaded, if a full checkpoint takes more
            than half of the free CPU memory of rank 0, or from 2^31 parameter elements on;
            otherwise full. All stages.
        async_save: bool, default False. Continue training while a sharded checkpoint is written,
            from a copy of this rank's shards in CPU memory. All stages.
        check_memory: bool, default True. Raise an error before training if model states alone
            exceed the total memory. The error lists changes that would fit. All stages.
        unshard_after_fit: bool or "auto", default "auto". Give every rank the full module in CPU
            memory after `fit`. False: its parameters have no values after `fit`, and using one is
            an error. "auto": as True if the full modules of all ranks of a node take at most half
            of its free memory; otherwise as False, and the last step is saved, unless a callback
            has saved it. All stages.
        accelerator: Accelerator, as in every Lightning strategy. Set by the Trainer.
        parallel_devices: Devices of this node. Set by the Trainer.
        cluster_environment: ClusterEnvironment, default None. Environment that assigns ranks. None:
            chosen by the Trainer.
        checkpoint_io: CheckpointIO, default None. Plugin that writes and reads full checkpoints.
            With a custom plugin, "auto" means full checkpoints. None: `ZeroCheckpointIO`.
        precision_plugin: Precision plugin of Lightning, which is replaced by a plugin of the same
            precision that supports shards. Set by the Trainer.
        process_group_backend: str, default None. Backend of collectives. None: "nccl" on CUDA,
            "gloo" on CPU.
        timeout: timedelta or seconds, default 30 minutes. Timeout of each collective. None: the
            backend's.
        wait_report_s: Seconds, default 30. Time of waiting for other ranks after which rank 0
            prints once what every rank is doing. None: never.
        heartbeat_timeout_s: Seconds, default None. Time without a heartbeat after which a rank
            counts as lost, because its process is stopped or its node cannot be reached. The job
            then ends on all ranks. None: missing heartbeats alone end nothing.
        start_method: str, default "popen". Way to start the ranks of a node: "popen" runs the
            script once for each rank; "fork" is for notebooks; "spawn" and "forkserver" are those
            of `multiprocessing`.

    Raises:
        ValueError: An option is out of range, or has no meaning in this stage.
        TypeError: An option has the wrong type.
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
        separate_reduce_scatter_group: bool = False,
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
        batch_group_size: int = 1,
        on_nonfinite: str | None = "warn",
        max_skips: int = 10,
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
        settings = Settings(locals())  # options by name
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
            batch_group_size=batch_group_size,
        )
        self.trainer_kwargs: dict[str, Any] = {}  # Trainer arguments of a DeepSpeed file
        self.translation: Translation | None = None  # the translated DeepSpeed file
        self._finite = FiniteCheckpoints()
        self._rank_state = RankState()
        self.last_checkpoint: str | None = None  # path of the last save in this process
        self.num_saves = 0  # in this process
        self._has_lost_states = False  # pickled after a run, without the optimizers' states

    @classmethod
    def from_deepspeed(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        world_size: int | None = None,
        **kwargs: Any,
    ) -> ZeroStrategy:
        """Creates the strategy for a DeepSpeed configuration.

        Settings that belong to the Trainer are in `strategy.trainer_kwargs`:
        `Trainer(strategy=strategy, **strategy.trainer_kwargs)`. One warning lists the settings
        without effect.

        Args:
            source: Path of a JSON file, or its content as a mapping.
            world_size: Number of ranks. Needed if the file has a global batch size only.
            **kwargs: Arguments of this class, which override the file. With another `stage`,
                options that have no meaning there are dropped.

        Raises:
            ValueError: The file has unknown keys, or settings that would change the training and
                have no equivalent.
        """
        translation = translate(source, world_size=world_size)
        message = translation.message()
        if message:
            rank_zero_warn(message)
        config = translation.config
        stage = kwargs.get("stage", config.stage)
        if stage in STAGES:
            config = config.for_stage(stage)  # drops options that have no meaning there
        strategy = cls(**{**vars(config), **kwargs})
        strategy.translation = translation
        strategy.trainer_kwargs = dict(translation.trainer_kwargs)
        strategy._grad_scaler_kwargs = dict(translation.grad_scaler_kwargs)
        return strategy

    # ---------------------------------------------------------------- a run

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        is_double = isinstance(self.precision_plugin, ZeroDoublePrecision)
        if self.config.param_dtype is torch.float64 and not is_double:
            raise ValueError(
                f'param_dtype="float64" needs precision="64-true", got '
                f'precision="{self.precision_plugin.precision}", in which inputs are not float64; '
                "set precision, or leave out param_dtype."
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Before the first collective that depends on a setting.
        fields = self._settings.describe() | {"precision": str(self.precision_plugin.precision)}
        gather = self.gather_for("the settings of all ranks")
        check_equal(gather({"ZeroStrategy": fields}))
        self._open_batch_group()

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
        # Never undone: a save may follow the run.
        Patches().put(connector, _STATE_DICT_METHOD, state)
        super().setup(trainer)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        self._saving.decide(self.engine, trainer.ckpt_path, is_reported=is_fit)
        if is_fit:
            self._saving.check_callbacks(trainer, is_sharded=self._saves_shards)
        self._has_lost_states = False
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
        owner = self._state_engine
        if self._has_lost_states:
            raise RuntimeError(
                "the optimizer states are not available: the Trainer was pickled after a run, "
                "without the shards of other ranks; save with weights_only=True, or resume from a "
                "checkpoint (ckpt_path=...) that was saved before."
            )
        if owner is None or optimizer not in owner.optimizers:
            return super().optimizer_state(optimizer)
        if not self._can_communicate():
            return {}
        owner.optimizers.check_has_states()
        self._synchronize("the state of an optimizer, for a checkpoint")
        if self._saves_shards:
            return self._saving.optimizer_state(optimizer, owner)
        return optimizer_state_dict(optimizer, owner.buckets, is_recipient=self.is_global_zero)

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
                f"{filepath} was not saved: the ranks did not regroup within "
                f"{REGROUP_TIMEOUT.seconds} s after the exception, so that shards are missing."
            )
            return
        filepath = self.broadcast(filepath)  # ranks may format different metrics into file names
        self.last_checkpoint = str(filepath)
        self.num_saves += 1
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
                last_masters=self._last_masters if self._engine is None else None,
                rank_state=self._collect_rank_state(checkpoint),
            )
        else:
            self._save_full(checkpoint, filepath, storage_options)

    def _mark_nonfinite(self, checkpoint: dict[str, Any], path: str, engine: Engine) -> None:
        """Marks a checkpoint with non-finite parameters, and keeps the last finite one."""
        if engine.config.on_nonfinite is None:
            return
        names = find_nonfinite_parameters(engine)
        if names:
            self.finish_saving(warns=True)  # the checkpoint in flight may be moved
            note = checkpoint.setdefault(METADATA_KEY, {})
            note[NONFINITE_KEY] = names
        is_movable = not self._uses_io_only(path)
        self._finite.prepare(path, names, self.run_on_rank_zero, is_movable=is_movable)

    def _collect_rank_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """What this rank adds to a checkpoint of a run in progress; None for another one. Local."""
        if "optimizer_states" not in checkpoint or self._engine is None:
            return None
        return self._rank_state.collect(checkpoint, self.root_device)

    def _save_full(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        engine = self._engine
        if "optimizer_states" in checkpoint:
            masters = self._last_masters if engine is None else narrow_masters(engine)
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
        if self._finite.keeps(str(filepath)):
            return
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
        self._finite.note_load(path, checkpoint.get(METADATA_KEY), is_resumed=is_resumed)
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
        state["_has_lost_states"] |= self._state_engine is not None
        launcher: Any = copy.copy(self._launcher)
        if hasattr(launcher, "procs"):
            launcher.procs = []  # the started processes belong to this process
        state["_launcher"] = launcher
        of_runs = ("_building", "_closed", "_watched_by", "_has_regrouped", "_keeps_full_module")
        renewed = {"_masters_to_load": {}, "_loops": LockstepLoops(), "_rank_state": RankState()}
        return state | dict.fromkeys(of_runs) | renewed


# Lightning accepts modules from torch.compile only with some of its own strategies. Registering as
# SingleDeviceStrategy has no other effect; a DDPStrategy would count as distributed on one device.
SingleDeviceStrategy.register(ZeroStrategy)


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
