"""`Trainer(strategy="zero3")`: all options, also DeepSpeed's.

    ProcessStrategy      ranks: identity, start, small collectives               processes.py
    EngineStrategy       an engine for each run, its steps and its end           engine_strategy.py
    CheckpointStrategy   saving and loading of checkpoints                       checkpointing.py
    ZeroStrategy         the options

Lightning calls one object for all of this, so each class is a subclass of the one above.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_zero._lightning.fabric import CheckpointIO, ClusterEnvironment
from lightning_zero._lightning.pytorch import (
    Accelerator,
    Precision,
    SingleDeviceStrategy,
    Trainer,
    TrainerFn,
)
from lightning_zero.deepspeed import Translation, translate
from lightning_zero.health.world import DEFAULT_TIMEOUT
from lightning_zero.layout.config import Modules
from lightning_zero.layout.foreign_options import explain_unknown_options
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES
from lightning_zero.strategy.checkpointing import CheckpointStrategy
from lightning_zero.strategy.engine_strategy import UnshardAfterFit
from lightning_zero.strategy.precision import ZeroDoublePrecision
from lightning_zero.strategy.processes import StartMethod
from lightning_zero.strategy.saving import CheckpointType
from lightning_zero.strategy.settings import Settings

__all__ = ["ZeroStrategy"]


@explain_unknown_options
class ZeroStrategy(CheckpointStrategy):
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
            computation. True: repeated blocks; or modules as in `unit_classes`. "selective" saves
            the outputs of attention and of every second matrix product, too, for less computation;
            alone, or in a list with modules. Values and random numbers do not change. All stages.
        broadcast_buffers: bool, default True. Copy rank 0's buffers, such as BatchNorm statistics,
            to all ranks at the first forward after a step, as DistributedDataParallel does. All
            stages.
        assume_elementwise: bool or list of class names, default False. Promise that all optimizers,
            or those of these classes, treat each element by itself. Others do if their class is
            known to, and step full tensors if not. With True, no optimizer is probed, and each
            steps all its parameters in one call. If the promise is wrong, training is wrong. Stages
            1 to 3.
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
            or left out ("skip"; after 10 in a row of one optimizer, one more is an error). None:
            gradients are not looked at. All stages. With the Trainer's precision "16-mixed" the
            loss scaler decides about the step, and all but None only warn.
        checkpoint: "auto", "full" or "sharded", default "auto". Kind of checkpoint. "full": one
            file, as with DDP. "sharded": a directory to which every rank writes its shards. "auto":
            sharded if parameters or optimizer states are offloaded, if a full checkpoint takes more
            than half of the free CPU memory of rank 0, or from 2^31 parameter elements on;
            otherwise full. All stages.
        async_save: bool, default False. Continue training while a sharded checkpoint is written,
            from a copy of this rank's shards in CPU memory. All stages.
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
        start_method: str, default "popen". Way to start the ranks of a node: "popen" runs the
            script once for each rank; "fork" is for notebooks; "spawn" and "forkserver" are those
            of `multiprocessing`.

    Raises:
        ValueError: An option is out of range, or has no meaning in this stage.
        TypeError: An option is unknown, or has the wrong type.
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
        unit_classes: Modules | None = None,
        reshard_after_forward: bool | None = None,
        overlap_comm: bool = True,
        reduce_dtype: str | None = None,
        param_dtype: str | None = None,
        keep_float32: Modules | None = None,
        activation_checkpointing: bool | Modules = False,
        broadcast_buffers: bool = True,
        assume_elementwise: bool | Sequence[str] = False,
        offload_optimizer: OffloadConfig | str | Mapping[str, Any] | None = None,
        offload_param: OffloadConfig | str | Mapping[str, Any] | None = None,
        overlap_step: bool = False,
        sharding_group_size: int | str | None = None,
        batch_group_size: int = 1,
        on_nonfinite: str | None = "warn",
        checkpoint: CheckpointType = "auto",
        async_save: bool = False,
        unshard_after_fit: UnshardAfterFit = "auto",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
    ) -> None:
        of_engine: dict[str, Any] = {
            "reduce_bucket_size": reduce_bucket_size, "overlap_comm": overlap_comm,
            "allgather_bucket_size": allgather_bucket_size, "reduce_dtype": reduce_dtype,
            "prefetch_bucket_size": prefetch_bucket_size, "keep_float32": keep_float32,
            "param_persistence_threshold": param_persistence_threshold, "param_dtype": param_dtype,
            "unit_classes": unit_classes, "reshard_after_forward": reshard_after_forward,
            "activation_checkpointing": activation_checkpointing, "on_nonfinite": on_nonfinite,
            "broadcast_buffers": broadcast_buffers, "assume_elementwise": assume_elementwise,
            "offload_optimizer": offload_optimizer, "offload_param": offload_param,
            "overlap_step": overlap_step, "sharding_group_size": sharding_group_size,
        }  # fmt: skip
        own: dict[str, Any] = {
            "checkpoint": checkpoint, "async_save": async_save,
            "unshard_after_fit": unshard_after_fit, "batch_group_size": batch_group_size,
        }  # fmt: skip
        _accept_compiled_modules()
        super().__init__(
            Settings(stage, of_engine, **own),
            **own,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.trainer_kwargs: dict[str, Any] = {}  # Trainer arguments of a DeepSpeed file
        self.translation: Translation | None = None  # the translated DeepSpeed file

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
        without effect, and for each "auto" what to set.

        Args:
            source: Path of a JSON file, or its content as a mapping.
            world_size: Number of ranks. Needed if the file has a global batch size only.
            **kwargs: Arguments of this class, which override the file. With another `stage`,
                options that have no meaning there are dropped.

        Raises:
            ValueError: The file has a wrong value, a setting that would change the training and has
                no equivalent, or an optimizer or scheduler section (with what to write instead);
                or, at set-up, its batch sizes do not match the ranks and the Trainer.
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
        return strategy

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _accept_compiled_modules()

    # ---------------------------------------------------------------- a run

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.translation is not None and trainer.state.fn == TrainerFn.FITTING:
            ranks = self.distributed_sampler_kwargs["num_replicas"]
            self.translation.check_batch_size(ranks, trainer.accumulate_grad_batches)
        super().setup(trainer)

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


def _accept_compiled_modules() -> None:
    """Makes Lightning accept modules from `torch.compile` with `ZeroStrategy`.

    It does so only with some of its own strategies. Registering as `SingleDeviceStrategy` has no
    other effect; a `DDPStrategy` would count as distributed on one device.
    """
    SingleDeviceStrategy.register(ZeroStrategy)
