"""`Trainer(strategy="zero3")`: the engine under Lightning.

Lightning owns the loop, the optimizers and the precision; the strategy opens and closes the
engine's steps around `training_step` and backward, answers for whole state dicts, and keeps ranks
from waiting for one that has failed.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning import __version__ as lightning_version
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator, MPSAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zero.after_fit import (
    WholeAfterFit,
    check_whole_after_fit,
    keeps_whole,
    save_unsaved,
)
from lightning_zero.auto import (
    AUTO,
    AutoChoice,
    auto_base,
    choose,
    measure_room,
    refuse_what_cannot,
)
from lightning_zero.averages import Averages, check_restorable
from lightning_zero.awaited import await_values, forget_awaited
from lightning_zero.building import Building
from lightning_zero.checkpoint import (
    full_state_dict,
    load_masters,
    load_module,
    load_optimizer,
    narrow_masters,
    open_checkpoint,
)
from lightning_zero.checkpoint.directory import recover
from lightning_zero.checkpoint.names import with_saved_names
from lightning_zero.checkpoint.place import local_path
from lightning_zero.checkpoint_io import ZeroCheckpointIO, find_damage_together, on_rank_zero
from lightning_zero.config import ZeroConfig
from lightning_zero.deepspeed import Translation, translate
from lightning_zero.engine import Engine
from lightning_zero.evaluation import LockstepEvaluation, keep_in_loop
from lightning_zero.from_meta import ConstantStates
from lightning_zero.guard import has_placement
from lightning_zero.launcher import (
    START_METHODS,
    StartMethod,
    check_numbering,
    check_world_size,
    make_launcher,
)
from lightning_zero.launcher.children import release_children
from lightning_zero.left_out import (
    check_none_left_out,
    expecting_values,
    forget_left_out,
    is_left_out,
)
from lightning_zero.memory import MemoryReport
from lightning_zero.mesh import Mesh
from lightning_zero.offload import OffloadConfig
from lightning_zero.optim_state import optimizer_state_dict
from lightning_zero.piece import hidden_pieces
from lightning_zero.precision import ZeroMixedPrecision, ZeroPrecision, sharded_precision
from lightning_zero.refused import refuse_callbacks
from lightning_zero.requeue import RequeuedExit
from lightning_zero.saving import (
    MASTERS_KEY,
    NOTE_KEY,
    CheckpointForm,
    Saving,
    is_own_io,
)

__all__ = ["ZeroStrategy"]

# Other tensors of a checkpoint may be kept (by callbacks, say), while its file is written anew.
_COPIED_ON_LOADING = {"state_dict", "optimizer_states", "current_model_state", MASTERS_KEY}
_SETTINGS_OF_EVERY_STAGE = ("stage", "reduce_bucket_size", "overlap_comm", "reduce_dtype")
_RALLY_DEADLINE = timedelta(seconds=60)
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


class ZeroStrategy(ParallelStrategy):
    """ZeRO stages 1-3 for any LightningModule.

    Registered as `zero1`, `zero2`, `zero3`, `zero1_offload`, `zero2_offload`, `zero3_offload` and
    `zero3_offload_nvme`, each also with `_notebook`.

    Args:
        stage: 0 (plain data parallel in the same engine, the control), 1, 2 or 3. "auto": the
            fastest of 1, 2 and 3 that leaves 30 % of the free memory to activations, and
            offload where none does; to files only where `nvme_path` or its variable names a folder.
            `config` says it once training has begun, as do the log, the loggers and checkpoints.
        reduce_bucket_size: See `ZeroConfig` for this and the following, up to
            `sharding_group_size`.
        allgather_bucket_size: Stages 1 and 2, in elements.
        prefetch_bucket_size: Stage 3, in elements.
        param_persistence_threshold: Stage 3, in elements.
        max_live_parameters: Stage 3, in elements.
        reshard_after_forward: Stage 3.
        overlap_comm: Communicate while computing.
        reduce_dtype: Dtype in which gradients are summed and kept, such as "float32".
        param_dtype: Dtype of whole parameters. None: that of the Trainer's precision. "float32"
            under "bf16-mixed" leaves the casts to autocast, as DDP does, for twice the parameter
            bytes.
        broadcast_buffers: Rank 0's buffers are copied to all ranks, as in DDP.
        assume_elementwise: Skip the check of what an optimizer looks at.
        offload_optimizer: Stages 1 to 3: None, "cpu", "nvme", "auto", a mapping or an
            `OffloadConfig`: where optimizer shards rest, with their gradients.
        offload_param: Stage 3: likewise for parameter shards.
        overlap_step: Step beside the next forward.
        sharding_group_size: Stages 1 to 3: how many ranks share one set of shards, or "node". None:
            all.
        checkpoint: "full" is one file, as DDP's; "sharded" is a directory to which every rank
            writes its own part. "auto": full below 2^31 parameter elements.
        check_memory: Refuse to begin where model states alone are more than all the memory there
            is, and say what would fit.
        whole_after_fit: Give every rank the whole module, in CPU memory, when a run has ended.
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
        timeout: Of every collective.
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
        reduce_bucket_size: int | float | None = None,
        allgather_bucket_size: int | float | None = None,
        prefetch_bucket_size: int | float | None = None,
        param_persistence_threshold: int | float | None = None,
        max_live_parameters: int | float | None = None,
        reshard_after_forward: bool | None = None,
        overlap_comm: bool = True,
        reduce_dtype: str | None = None,
        param_dtype: str | None = None,
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
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
    ) -> None:
        settings: dict[str, Any] = {
            "reduce_bucket_size": reduce_bucket_size,
            "allgather_bucket_size": allgather_bucket_size,
            "prefetch_bucket_size": prefetch_bucket_size,
            "param_persistence_threshold": param_persistence_threshold,
            "max_live_parameters": max_live_parameters,
            "reshard_after_forward": reshard_after_forward,
            "overlap_comm": overlap_comm,
            "reduce_dtype": reduce_dtype,
            "param_dtype": param_dtype,
            "broadcast_buffers": broadcast_buffers,
            "assume_elementwise": assume_elementwise,
            "offload_optimizer": offload_optimizer,
            "offload_param": offload_param,
            "overlap_step": overlap_step,
            "sharding_group_size": sharding_group_size,
        }
        is_auto = stage == AUTO
        self.config = auto_base(settings) if is_auto else ZeroConfig(stage, **settings)  # type: ignore[arg-type]
        self._auto_base = self.config if is_auto else None
        self._auto: AutoChoice | None = None  # once there is a model
        if not isinstance(check_memory, bool):
            raise TypeError(f"check_memory must be True or False, got {check_memory!r}.")
        self._checks_memory = check_memory
        check_whole_after_fit(whole_after_fit)
        self._whole_after_fit = whole_after_fit
        self._keeps_whole: bool | None = None  # once that is decided for this run
        if start_method not in START_METHODS:
            raise ValueError(f"start_method must be one of {START_METHODS}, got {start_method!r}.")
        self._saving = Saving(checkpoint, is_async=async_save)
        self._saving.check(checkpoint_io)
        self.trainer_kwargs: dict[str, Any] = {}  # what `from_deepspeed` hands back
        self.translation: Translation | None = None  # all that the DeepSpeed file says
        self._grad_scaler_kwargs: dict[str, Any] = {}
        self._engine: Engine | None = None
        self._averages: Averages | None = None  # as long as the engine
        self._building: Building | None = None  # between configure_model and setup
        # After fit: its optimizers' shards, from which a late save can still build whole states.
        self._last_engine: Engine | None = None
        self._last_masters: dict[str, Tensor] = {}  # likewise, of a 16-bit module; on rank 0
        # From a checkpoint that was opened before the engine was built.
        self._masters_to_load: Mapping[str, Tensor] = {}
        self._evaluation = LockstepEvaluation()
        self._has_rallied: bool | None = None  # after an exception: all ranks came together again
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method: StartMethod = start_method
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

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
                the file's stage-specific sizes are left out.

        Raises:
            ValueError: Unknown keys, or settings that would change the training and do not exist
                here.
        """
        translation = translate(source, world_size=world_size)
        if message := translation.message():
            rank_zero_warn(message)
        settings = vars(translation.config)
        if kwargs.get("stage", settings["stage"]) != settings["stage"]:
            # Sizes of the file's own stage may have no meaning in the other one.
            sharding = ["offload_optimizer", "sharding_group_size"] if kwargs["stage"] else []
            kept = [*_SETTINGS_OF_EVERY_STAGE, *sharding]
            settings = {name: settings[name] for name in kept}
        strategy = cls(**{**settings, **kwargs})
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

    # ---------------------------------------------------------------- who and where

    @property
    def is_distributed(self) -> bool:
        """The Trainer shards data and synchronises logged values, where there are several ranks."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group; None before it is chosen."""
        return self._process_group_backend

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is None:
            self._precision_plugin: ZeroPrecision | None = None
            return
        plugin = sharded_precision(precision_plugin, lambda: self.engine)
        if isinstance(plugin, ZeroMixedPrecision) and plugin.scaler and self._grad_scaler_kwargs:
            plugin.scaler = torch.amp.GradScaler(plugin.device, **self._grad_scaler_kwargs)
        self._precision_plugin = plugin

    @property
    def engine(self) -> Engine:
        """The engine, between setup and teardown.

        Raises:
            RuntimeError: At another time.
        """
        if self._engine is None:
            raise RuntimeError(
                "the engine exists only while the Trainer runs: use it in hooks and callbacks "
                "between setup and teardown."
            )
        return self._engine

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds, by state and tier, counted from the engine's own buffers."""
        return self.engine.memory_report()

    # ---------------------------------------------------------------- launch and setup

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._refuse_mps()
        Mesh.of(0, self.num_nodes * self.num_processes, self._group_size)
        self._launcher = make_launcher(self, self.cluster_environment, self._start_method)

    @property
    def _group_size(self) -> int | None:
        return self.config.group_size(local_world_size=self.num_processes)

    def _refuse_mps(self) -> None:
        devices = self.parallel_devices or []
        if isinstance(self.accelerator, MPSAccelerator) or any(d.type == "mps" for d in devices):
            raise ValueError(
                "ZeroStrategy shards over several devices, and a machine has one MPS device; use "
                "accelerator='cpu', or strategy='auto' to train on MPS."
            )

    @override
    def connect(self, model: LightningModule) -> None:
        self._saving.check(self._checkpoint_io)
        for name, parameter in model.named_parameters():
            is_held = has_placement(parameter) and not is_left_out(parameter)
            if is_held and self._engine is None:
                raise ValueError(
                    f"parameter {name} is already held by another engine; one module trains under "
                    "one strategy at a time: let the other fit end first."
                )
        builds_later = any(is_overridden(hook, model) for hook in ("setup", "configure_model"))
        if not builds_later and not any(True for _ in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} has no parameters, so there is nothing to shard; build "
                "its layers in __init__, setup() or configure_model()."
            )
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        self._refuse_mps()
        if self.cluster_environment.creates_processes_externally:
            check_world_size(self.cluster_environment, self.num_processes, self.num_nodes)
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        backend = self._process_group_backend
        self._process_group_backend = backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device_id,
        )
        check_world_size(self.cluster_environment, self.num_processes, self.num_nodes)
        if self.config.sharding_group_size == "node":
            check_numbering(self.global_rank, self.node_rank, self.num_processes)

    def set_world_ranks(self) -> None:
        """Tells the environment and Lightning's rank-zero helpers who this rank is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # Some environments ignore the setters, so the getter is asked again.
        # Lightning's `rank_zero_only` is this one, and keeps its rank on the function.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._has_rallied = self._keeps_whole = None
        check_none_left_out(self.model)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if is_fitting:
            self._saving.check_callbacks(trainer, is_sharded=self._is_sharded)
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        with self._taking_over() as building:
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            self._reset_optimizers_and_schedulers()
            if is_fitting:
                with ConstantStates():
                    self.setup_optimizers(trainer)
            if building is not None:
                building.settle()
            self._build_engine()
        self._averages = Averages(self.engine, callbacks, self._average_state_dict)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        """Moves all but parameters: they follow by bucket when the engine takes them over."""
        assert self.lightning_module is not None

        def move(tensor: Tensor) -> Tensor:
            stays = tensor.is_meta or isinstance(tensor, nn.Parameter)
            return tensor if stays else tensor.to(self.root_device)

        # Metrics keep their state in plain attributes and move them in an `_apply` of their own.
        with hidden_pieces(self.lightning_module):
            self.lightning_module._apply(move)

    def _build_engine(self) -> None:
        assert self.lightning_module is not None
        if self._last_engine is not None:
            self._last_engine.comm.close()
            self._last_engine = None
        self._last_masters = {}
        plugin = self.precision_plugin
        param_dtype = plugin.param_dtype if isinstance(plugin, ZeroPrecision) else None
        config = self._plan(param_dtype)
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_callbacks(trainer.callbacks, config)  # type: ignore[attr-defined]
        if config.param_dtype is None:
            config = config.replace(param_dtype=param_dtype)
        self._engine = Engine(
            self.lightning_module,
            [opt for opt in self.optimizers if not isinstance(opt, _MockOptimizer)],
            config,
            device=self.root_device,
            timeout=self._timeout,
        )
        forget_left_out(self.lightning_module)
        load_masters(self._engine, self._masters_to_load)
        self._masters_to_load = {}

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """For `configure_model` and `Trainer.init_module`: empty modules are on the meta device.

        Others are on the device where they compute, but for one that would be whole there and is
        to be sharded later: that one is on the CPU.
        """
        device = self.root_device
        if self.config.states.gathers_before_use and not self._is_running:
            device = torch.device("cpu")
        with (
            torch.device("meta") if empty_init else device,
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    @property
    def _is_running(self) -> bool:
        """The Trainer is in one of its runs, in which all ranks are there."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around `configure_model`: what it builds is sharded as it is built, where that helps."""
        on_cpu = self.root_device.type == "cpu"
        helps = self.world_size > 1 or (self.config.offload_param is not None and not on_cpu)
        if not helps or not self.config.states.gathers_before_use:
            yield
            return
        self._building = Building(self.root_device, self._timeout)
        with self._building.watching():
            yield

    @contextmanager
    def _taking_over(self) -> Generator[Building | None, None, None]:
        """Around the set-up that takes over what `configure_model` has built, if anything."""
        building, self._building = self._building, None
        if building is None:
            yield None
            return
        try:
            with building.cutting():
                yield building
        except BaseException:
            building.abort()
            raise
        building.close()

    def _plan(self, param_dtype: torch.dtype | None) -> ZeroConfig:
        """The settings to train with: chosen where `stage="auto"`, refused where nothing fits."""
        assert self.lightning_module is not None
        module, trainer = self.lightning_module, self.lightning_module.trainer
        base = (self._auto_base or self.config).replace(sharding_group_size=self._group_size)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._auto_base is None and not (is_fitting and self._checks_memory):
            return base
        if base.param_dtype is None:
            base = base.replace(param_dtype=param_dtype)
        optimizers = [opt for opt in self.optimizers if not isinstance(opt, _MockOptimizer)]
        room = measure_room(self.root_device, self.num_processes, base)
        shape: dict[str, Any] = {
            "num_ranks": self.world_size,
            "ranks_per_node": self.num_processes,
            "is_apart": self.root_device.type != "cpu",
        }
        if self._auto_base is not None:
            micro_batches = trainer.accumulate_grad_batches
            self._auto = choose(
                module, optimizers, base, room, **shape, num_micro_batches=micro_batches
            )
            base = self.config = self._auto.config
            rank_zero_info(f'stage="auto": {self._auto.reason}')
            if is_fitting:
                for logger in trainer.loggers:
                    logger.log_hyperparams(self._auto.as_hyperparameters())
        if is_fitting and self._checks_memory:
            refuse_what_cannot(module, optimizers, base, room, **shape)
        return base

    # ---------------------------------------------------------------- steps

    def _step(
        self, context: AbstractContextManager[Any], name: str, args: Any, kwargs: Any
    ) -> STEP_OUTPUT:
        """Runs a step method of the module: it does not pass through `Module.__call__`."""
        assert self.lightning_module is not None
        with context, self.engine.forward_context():
            output: STEP_OUTPUT = getattr(self.lightning_module, name)(*args, **kwargs)
            return output

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        context = self.precision_plugin.train_step_context()
        return self._step(context, "training_step", args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        context = self.precision_plugin.val_step_context()
        return self._step(context, "validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        context = self.precision_plugin.test_step_context()
        return self._step(context, "test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        context = self.precision_plugin.predict_step_context()
        return self._step(context, "predict_step", args, kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        return keep_in_loop(dataloader, self.lightning_module.trainer)

    def _begin_evaluation(self) -> None:
        assert self.lightning_module is not None
        self._evaluation.begin(self.lightning_module.trainer, self.engine.lockstep)

    @override
    def on_validation_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._evaluation.end()

    @override
    def on_test_end(self) -> None:
        self._evaluation.end()

    @override
    def on_predict_end(self) -> None:
        self._evaluation.end()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # As the base class, but gradients are reduced before `on_after_backward` sees them.
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        plugin = self.precision_plugin
        closure_loss = plugin.pre_backward(closure_loss, self.lightning_module)
        with self.engine.backward_context():
            plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.no_sync():
            yield

    # ---------------------------------------------------------------- small collectives

    def _wait_for_collective(self) -> None:
        if self._engine is not None:
            self._engine.lockstep.wait_for_collective()

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized() or self._has_rallied is False:
            return
        self._wait_for_collective()
        on_nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[self.root_device.index] if on_nccl else None)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _distributed_is_initialized():
            return obj
        self._wait_for_collective()
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        if isinstance(tensor, Tensor):
            self._wait_for_collective()
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        self._wait_for_collective()
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    # ---------------------------------------------------------------- checkpoints

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
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere; or shards on every rank. Collective."""
        return with_saved_names(self._state_dict())

    def _state_dict(self) -> dict[str, Any]:
        if not self._is_together():
            return {}
        engine = self._engine or self._last_engine
        if engine is not None and self._is_sharded:
            assert self.lightning_module is not None
            is_closed = self._engine is None
            return self._saving.state_dict(engine, self.lightning_module, is_closed=is_closed)
        if self._engine is None:
            return super().lightning_module_state_dict()
        return full_state_dict(self._engine)

    def _average_state_dict(self, average: nn.Module, kind: str) -> dict[str, Any]:
        """As `lightning_module_state_dict`, of a callback's averaged module. Collective."""
        if not self._is_together():
            return {}
        if self._is_sharded:
            return self._saving.average_state_dict(self.engine, average, kind)
        return full_state_dict(self.engine, average)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What it would save unsharded, on rank 0; or shards by name on every rank. Collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        engine = self._engine or self._last_engine
        if engine is None or optimizer not in engine.optimizers:
            return super().optimizer_state(optimizer)
        if not self._is_together():
            return {}
        engine.check_has_states()
        if self._is_sharded:
            return self._saving.optimizer_state(optimizer, engine)
        return optimizer_state_dict(optimizer, engine.buckets, is_recipient=self.is_global_zero)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        if not self._is_together():
            rank_zero_warn(
                f"{filepath} was not saved: other ranks did not come together within "
                f"{_RALLY_DEADLINE.seconds} s after the exception, so that no whole state exists."
            )
            return
        if self._auto is not None:
            chosen = {"reason": self._auto.reason, **self._auto.as_hyperparameters()}
            checkpoint[NOTE_KEY] = {"auto": chosen}
        engine = self._engine
        if (owner := engine or self._last_engine) is not None and self._is_sharded:
            if storage_options is not None:
                raise TypeError(
                    "storage_options are for a CheckpointIO, and a sharded checkpoint uses none; "
                    'leave them out, or use ZeroStrategy(checkpoint="full").'
                )
            last_masters = self._last_masters if engine is None else None
            self._saving.save(checkpoint, filepath, owner, last_masters=last_masters)
            return
        if "optimizer_states" in checkpoint:
            masters = self._last_masters if engine is None else narrow_masters(engine)
            if masters:
                checkpoint[MASTERS_KEY] = masters
        io = self.checkpoint_io
        # Else the others would wait in the next collective for a rank 0 that has raised.
        on_rank_zero(self, lambda: io.save_checkpoint(checkpoint, filepath, storage_options))

    @property
    def _is_sharded(self) -> bool:
        assert self.lightning_module is not None
        return self._saving.is_sharded(self.lightning_module, self._checkpoint_io)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if is_own_io(self._checkpoint_io) or not _is_local_file_protocol(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saving.remove(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint of any format, the same on every rank. Collective.

        A `checkpoint_io` other than the default one reads for itself.
        """
        self._saving.finish()
        path = self.broadcast(checkpoint_path)
        if is_own_io(self._checkpoint_io) or not _is_local_file_protocol(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        on_rank_zero(self, lambda: recover(local_path(path)))
        find_damage_together(local_path(path), self.global_rank, self.world_size)
        checkpoint: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            checkpoint = open_checkpoint(path, weights_only=weights_only)
        except Exception as error:
            failure = error
        self._raise_together(failure, f"open {path}")
        checkpoint.setdefault("pytorch-lightning_version", lightning_version)
        for key, value in checkpoint.items():
            if key not in _COPIED_ON_LOADING:
                checkpoint[key] = tree_map_only(Tensor, Tensor.clone, value)
        return checkpoint

    def _raise_together(self, failure: Exception | None, what: str) -> None:
        """Raises on every rank where it failed on any, so that none waits for another."""
        failures: list[str | None] = [None if failure is None else repr(failure)]
        if _distributed_is_initialized():
            own = failures[0]
            failures = [None] * dist.get_world_size()
            dist.all_gather_object(failures, own)
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                raise RuntimeError(f"rank {rank} could not {what}: {text}")

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state_dict, masters = checkpoint["state_dict"], checkpoint.get(MASTERS_KEY, {})
        awaited: dict[str, Tensor] = {}
        with expecting_values(self.lightning_module):
            load_module(self.lightning_module, state_dict, strict=strict, awaited=awaited)
            if awaited and _was_fitting(self.lightning_module):
                check_restorable(checkpoint)
            await_values(self.lightning_module, awaited)
        if self._engine is None:
            self._masters_to_load = masters
        else:
            load_masters(self._engine, masters)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers, expected "
                f"{len(self.optimizers)}; resume with the configure_optimizers that was saved."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if not isinstance(optimizer, _MockOptimizer):
                load_optimizer(self.engine, optimizer, state)

    def finish_saving(self, *, warns: bool = False) -> None:
        """Waits until a checkpoint that is written while training goes on is complete. Local.

        Args:
            warns: Only warn of its failure.

        Raises:
            OSError: It could not be written.
        """
        self._saving.finish(warns=warns)

    # ---------------------------------------------------------------- failure and the end

    @override
    def on_train_end(self) -> None:
        self.finish_saving()

    def _loses_weights(self) -> bool:
        """Whether this run was a fit whose result nobody will hold, unasked. Collective."""
        if self._engine is None or self._whole_after_fit != AUTO:
            return False
        assert self.lightning_module is not None
        return _was_fitting(self.lightning_module) and not self._is_kept_whole()

    def _is_kept_whole(self) -> bool:
        """Whether every rank gets the module when this run has ended. Collective."""
        if self._keeps_whole is None:
            num_averages = len(self._averages or ())
            self._keeps_whole = keeps_whole(
                self._whole_after_fit, self.engine, num_averages=num_averages
            )
        return self._keeps_whole

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, RequeuedExit):
            self._has_rallied = False  # all is saved, and time is short: nothing is gathered
        self._is_together()

    def _is_together(self) -> bool:
        """Whether collectives are possible. After an exception the ranks first rally, once.

        The failing rank tells the others, which fail at their next agreement; those that come here
        within the deadline go on with fresh process groups, at rest.
        """
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        if self._engine is None or trainer is None:
            return True
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            return True
        if self._has_rallied is None:
            timeout = self._timeout or _RALLY_DEADLINE
            self._has_rallied = self._engine.rally(min(timeout, _RALLY_DEADLINE))
        return self._has_rallied

    @override
    def teardown(self) -> None:
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        has_failed = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        try:
            if trainer is not None and not has_failed and self._loses_weights():
                save_unsaved(trainer)
            self._saving.finish(warns=has_failed)
        finally:
            self._saving.free()
            self._tear_down()

    def _tear_down(self) -> None:
        self._evaluation.end()
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        cpu = torch.device("cpu")
        if self._engine is not None:
            if self._is_together():
                is_whole = self._is_kept_whole()
                if self._averages is not None:
                    self._averages.give_back(cpu if is_whole else None)
                self._last_masters = narrow_masters(self._engine) if is_whole else {}
                self._engine.close(cpu, keeps_optimizer_shards=True, keeps_parameters=is_whole)
                if is_whole:
                    self._last_engine = self._engine
                else:
                    self._engine.comm.close()
            else:
                self._engine.abandon()
                if self._averages is not None:
                    self._averages.let_go()
            self._engine = self._averages = None
        self._masters_to_load = {}
        if self._building is not None:
            self._building.abort()  # what came before set-up has failed
            self._building = None
        module = self.lightning_module
        release_children()  # nothing collective comes from here on
        if module is not None:
            forget_awaited(module)  # a set-up that failed has left it
            if not any(has_placement(p) or p.is_meta for p in module.parameters()):
                if self._layer_sync and _was_fitting(module):
                    self.model = self._layer_sync.revert(module)
                module.cpu()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _was_fitting(module: LightningModule) -> bool:
    trainer = module._trainer
    return trainer is not None and trainer.state.fn == TrainerFn.FITTING


# Lightning takes modules from torch.compile for some strategies of its own only. Of these it asks
# for this class nowhere else, while a DDPStrategy is distributed also on one device.
SingleDeviceStrategy.register(ZeroStrategy)
