"""`Trainer(strategy="zero3")`: the names and settings that a user gives.

    ProcessStrategy     who the ranks are, how they start, how they talk      processes.py
    EngineStrategy      an engine for each run, its steps and its end         engine_strategy.py
    CheckpointStrategy  states of that engine, saved and loaded               checkpointing.py
    ZeroStrategy        all settings, DeepSpeed's too, and registered names   here

Lightning asks one object for all of it, so each is a subclass of the one above.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_zero.comm.alike import check_alike
from lightning_zero.comm.world import DEFAULT_TIMEOUT, gather_objects
from lightning_zero.deepspeed import Translation, translate
from lightning_zero.layout.config import Modules
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import STAGES
from lightning_zero.strategy.checkpointing import CheckpointStrategy
from lightning_zero.strategy.engine_strategy import WholeAfterFit
from lightning_zero.strategy.precision import ZeroDoublePrecision
from lightning_zero.strategy.processes import StartMethod
from lightning_zero.strategy.saving import CheckpointForm, Saving
from lightning_zero.strategy.settings import Settings

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


class ZeroStrategy(CheckpointStrategy):
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
            writes its own part. "auto": full below 2^31 parameter elements.
        check_memory: Refuse to begin where model states alone are more than all the memory there
            is, and say what would fit.
        whole_after_fit: Give every rank the whole module, in CPU memory, when a fit has ended.
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
        checkpoint: CheckpointForm = "auto",
        async_save: bool = False,
        check_memory: bool = True,
        whole_after_fit: WholeAfterFit = "auto",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        wait_report_s: float | None = 30.0,
        start_method: StartMethod = "popen",
    ) -> None:
        super().__init__(
            Settings(locals()),  # by their names
            Saving(checkpoint, is_async=async_save),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            wait_report_s=wait_report_s,
            whole_after_fit=whole_after_fit,
            start_method=start_method,
        )
        self.trainer_kwargs: dict[str, Any] = {}  # what `from_deepspeed` hands back
        self.translation: Translation | None = None  # all that the DeepSpeed file says

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
        fields = self._settings.facts() | {"precision": str(self.precision_plugin.precision)}
        with self._waiting("the settings of all ranks"):
            everyone = gather_objects({"ZeroStrategy": fields})
        check_alike(everyone)

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


# Lightning takes modules from torch.compile for some strategies of its own only. Of these it asks
# for this class nowhere else, while a DDPStrategy is distributed also on one device.
SingleDeviceStrategy.register(ZeroStrategy)
