"""A strategy whose module is held by an engine from the set-up of a run to its teardown.

Lightning owns the loop, the optimizers and the precision. The strategy opens and closes the
engine's steps around `training_step` and backward, and keeps ranks from waiting for a rank that has
failed or has fewer batches.

[Note: A run] State that the strategy holds:
    before the engine   the main parameters of a checkpoint that was opened
    during a run        the engine, and the averages of callbacks
    after a run         the closed engine of the last fit with its optimizers' shards, and the main
                        parameters on rank 0: a late save can still build full states from them,
                        also during and after an evaluation
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning.pytorch import (
    STEP_OUTPUT,
    Callback,
    LightningModule,
    LightningOptimizer,
    ModelPruning,
    Precision,
    SIGTERMException,
    Strategy,
    Trainer,
    TrainerFn,
    TrainerState,
    TrainerStatus,
    _MockOptimizer,
    is_overridden,
)
from lightning_zero.checkpoint import load_masters, narrow_masters
from lightning_zero.construction.materialize import move_all_but_parameters
from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.beginning import held_error
from lightning_zero.engine.counting import cpu_param_bytes, full_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.health.failures import DesynchronizedError
from lightning_zero.health.tracebacks import print_once
from lightning_zero.health.watchdog import Watchdog
from lightning_zero.launch.children import release_children
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.plan import check_has_parameters
from lightning_zero.layout.stage import State
from lightning_zero.strategy.announce import announce
from lightning_zero.strategy.averages import Averages
from lightning_zero.strategy.loops import LockstepLoops, replace_empty_loader, with_status
from lightning_zero.strategy.precision import ZeroPrecision, sharded_precision
from lightning_zero.strategy.processes import ProcessStrategy
from lightning_zero.strategy.requeue import RequeuedExit
from lightning_zero.strategy.settings import Hardware, Settings
from lightning_zero.tensors.guarded import has_placement, unguarded
from lightning_zero.tensors.meta import (
    ConstantStates,
    check_none_dropped,
    clear_dropped,
    clear_pending_values,
    is_dropped,
)
from lightning_zero.tensors.ties import check_memory
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = ["EngineStrategy", "UnshardAfterFit", "run_state"]

UnshardAfterFit = bool | Literal["auto"]

_CPU = torch.device("cpu")
_GIB = 2**30


class EngineStrategy(ProcessStrategy):
    """Creates and closes an engine with each run, and forwards Lightning's calls to it.

    Arguments are those of `ZeroStrategy`, and the engine's settings.
    """

    def __init__(
        self, settings: Settings, *, unshard_after_fit: UnshardAfterFit, **of_processes: Any
    ) -> None:
        if not isinstance(unshard_after_fit, bool) and unshard_after_fit != "auto":
            raise ValueError(
                f'unshard_after_fit must be True, False or "auto", got {unshard_after_fit!r}.'
            )
        self._settings = settings
        self._unshard_after_fit = unshard_after_fit
        self._loops = LockstepLoops()
        # See [Note: A run].
        self._masters_to_load: Mapping[str, Tensor] = {}
        self._engine: Engine | None = None
        self._averages: Averages | None = None
        self._closed: Engine | None = None
        self._last_masters: dict[str, Tensor] = {}  # by name, for a 16-bit module; on rank 0
        self._lost_states_reason = ""  # why the last fit's optimizer states cannot be saved
        self._watched_by: Watchdog | None = None  # watchdog of the last run that was set up
        self._is_interrupted = False  # by an exception, after which no shard may be needed
        self._keeps_full_module: bool | None = None  # None: not decided yet for this run
        super().__init__(**of_processes)

    @property
    def config(self) -> ZeroConfig:
        """The engine's settings. With stage "auto", the chosen ones once a run has begun."""
        return self._settings.config

    @property
    def engine(self) -> Engine:
        """The engine, between setup and teardown.

        Raises:
            RuntimeError: The Trainer is not running.
        """
        if self._engine is None:
            raise RuntimeError(
                "the engine exists only while the Trainer runs: use it in hooks and callbacks "
                "between setup and teardown."
            )
        return self._engine

    @property
    def _state_engine(self) -> Engine | None:
        """The running engine, or the closed one, with which a late save communicates."""
        return self._engine or self._closed

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds now, by state and tier. Local."""
        return self.engine.memory_report()

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        Strategy.optimizers.__set__(self, optimizers)  # type: ignore[attr-defined]
        for wrapper in self._lightning_optimizers:
            _share_methods(wrapper)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin: ZeroPrecision | None = None
        if precision_plugin is not None:
            engine = partial(getattr, self, "engine")
            self._precision_plugin = sharded_precision(precision_plugin, engine)

    # ---------------------------------------------------------------- before the engine

    @override
    def _configure_launcher(self) -> None:
        self._settings.check_folders()
        self._check_group_size(self.config)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size == 1:  # Lightning advises sync_dist wherever there is a process group
            advice = r"It is recommended to use `self\.log\(.*sync_dist=True"
            warnings.filterwarnings("ignore", advice)
        self._compare_settings(self._settings, str(self.precision_plugin.precision))
        self._open_batch_group()

    @override
    def connect(self, model: LightningModule) -> None:
        _refuse_module(model, is_ours=self._engine is not None)
        check_memory(model)
        super().connect(model)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context for `configure_model` and `Trainer.init_module`.

        Empty modules are on the meta device. Others are on the device where they compute, as under
        DDP; before a run, if parameters will be sharded, on the CPU.
        """
        device = self.root_device
        is_running = run_state(self.lightning_module).status == TrainerStatus.RUNNING
        if self.config.states.shards_params and not is_running:
            device = _CPU
        with (
            torch.device("meta") if empty_init else device,
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    # ---------------------------------------------------------------- set-up

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._watched_by = self._watchdog
        self._is_interrupted, self._keeps_full_module = False, None  # of the previous run
        check_none_dropped(self.model)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.model = self._with_synced_layers(trainer.lightning_module)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if is_fitting:
            self._forget_last_fit()
            with ConstantStates():
                self.setup_optimizers(trainer)
        if self._masters_to_load:
            self._last_masters = {}
        self._begin(trainer)
        self.setup_precision_plugin()

    def _forget_last_fit(self) -> None:
        """Drops what a late save would write. An evaluation keeps it, as under DDP."""
        self._reset_optimizers_and_schedulers()
        if self._closed is not None:
            self._closed.comm.close()
            self._closed = None
        self._last_masters = {}
        self._lost_states_reason = ""

    def _with_synced_layers(self, module: LightningModule) -> LightningModule:
        """`module`, with other layers where they synchronize, as with `sync_batchnorm=True`."""
        if self._layer_sync is None:
            return module
        synced: Any = self._layer_sync.apply(module)
        return cast(LightningModule, synced)

    @override
    def model_to_device(self) -> None:
        """Moves all but parameters, which the engine moves bucket by bucket."""
        assert self.lightning_module is not None
        move_all_but_parameters(self.lightning_module, self.root_device)

    def _begin(self, trainer: Trainer) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        optimizers = [opt for opt in self.optimizers if not isinstance(opt, _MockOptimizer)]
        if not is_fitting:
            optimizers = []  # those of the last fit, which keep their states
        hardware = Hardware(self.root_device, self.world_size, self.num_processes)
        gather = self.gather_for("the memory of all ranks")
        precision = self._precision_plugin
        config = self._settings.decide(trainer, optimizers, hardware, precision, gather)
        if is_fitting:
            _refuse_callbacks(trainer.callbacks, config)  # type: ignore[attr-defined]
        self._engine = Engine(
            trainer.lightning_module,
            optimizers,
            config,
            device=self.root_device,
            timeout=self._timeout,
            watchdog=self._watched_by,
            broadcasts_every_forward=False,
        )
        announce(self._engine, num_micro_batches=trainer.accumulate_grad_batches)
        self.optimizers = self.optimizers  # see the setter
        clear_dropped(trainer.lightning_module)
        load_masters(self._engine, self._masters_to_load)
        self._masters_to_load = {}
        self._loops.begin(trainer, self._engine.lockstep)

    # ---------------------------------------------------------------- steps

    def _step(
        self, name: str, context: Callable[[], AbstractContextManager[Any]], args: Any, kwargs: Any
    ) -> STEP_OUTPUT:
        """Runs a step method of the module, which does not pass through `Module.__call__`."""
        with context(), self.engine.forward_context():
            output: STEP_OUTPUT = getattr(self.lightning_module, name)(*args, **kwargs)
            return output

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._step("training_step", self.precision_plugin.train_step_context, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._step("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._step("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._step("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # As in the base class, but gradients are reduced before `on_after_backward`.
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        plugin = self.precision_plugin
        closure_loss = plugin.pre_backward(closure_loss, self.lightning_module)
        retain_graph = bool(kwargs.get("retain_graph") or kwargs.get("create_graph"))
        has_scaler = getattr(plugin, "scaler", None) is not None
        with self.engine.backward_context(retain_graph=retain_graph, has_scaler=has_scaler):
            scaled = self.scaled_loss(closure_loss)
            plugin.backward(scaled, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.no_sync():
            yield

    # ---------------------------------------------------------------- ranks that differ

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        self._position.seed_workers(dataloader)
        return replace_empty_loader(dataloader, self.lightning_module.trainer)

    def _begin_evaluation(self) -> None:
        self._loops.begin_evaluation()

    def _end_evaluation(self) -> None:
        self._loops.end_evaluation()

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation
    on_validation_end = on_test_end = on_predict_end = _end_evaluation

    @override
    def _enter_collective(self, name: str, *, everyone: bool = True) -> bool:
        """As in the base class; a RuntimeError if another rank is not here, or has failed."""
        if not super()._enter_collective(name, everyone=everyone) or not self._can_communicate():
            return False
        if self._engine is not None:
            lockstep = self._engine.lockstep
            (lockstep.barrier if everyone else lockstep.barrier_in_loop)(name)
        return True

    # ---------------------------------------------------------------- failure and teardown

    def _can_communicate(self) -> bool:
        """Whether collectives are possible. Collective after an exception, which ends a run.

        The other ranks raise where they wait for the rank that has failed. If all ranks call this
        within a minute, they continue with new process groups and the same shards.
        """
        if self._engine is None:
            return self._watched_by is None or self._watched_by.failure is None
        if run_state(self._engine.module).status == TrainerStatus.INTERRUPTED:
            self._end_run(sys.exc_info()[1])
        try:
            self._engine.ensure_run()
        except DesynchronizedError:
            return False
        return True

    def _end_run(self, error: BaseException | None) -> None:
        """Ends the engine's run, once in each run of the Trainer. Local."""
        if self._engine is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._engine.end_run(error or RuntimeError("the run was interrupted"))

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._end_run(exception)
        if isinstance(exception, RequeuedExit):
            if self._engine is not None:  # all is saved and time is short: unshard nothing
                self._engine.lose("the job is queued again")
        elif isinstance(exception, SIGTERMException):
            with_status(exception)  # Lightning's own exception has status 0
        if self._watchdog is not None:
            if self._engine is None:
                self._watchdog.abort(exception)
            self._watchdog.explain(exception)
            print_once(exception, self.global_rank, self._watchdog.first_with)
        self._can_communicate()

    @override
    def teardown(self) -> None:
        self._loops.end()
        if self._engine is not None:
            self._end(self._engine)
        self._masters_to_load = {}
        if self._watchdog is not None:
            self._watchdog.finish()
        release_children()  # no collective follows
        self._unwrap_module()
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _end(self, engine: Engine) -> None:
        """Unwraps the module on the CPU if the ranks can communicate; otherwise aborts."""
        if self._can_communicate():
            keeps_module = self._should_keep_full_module()
            if self._averages is not None:
                self._averages.unwrap(_CPU if keeps_module else None)
            masters = narrow_masters(engine) if keeps_module else {}
            engine.close(_CPU, keep_optimizer_shards=True, keep_parameters=keeps_module)
            if keeps_module:
                self._last_masters = masters | self._present_masters()
            elif self._is_fitting:
                self._lost_states_reason = "they were dropped when training ended"
            if keeps_module and self._closed is None:
                self._closed = engine
            else:
                engine.comm.close()
        else:
            engine.abandon("a rank failed")
            if self._averages is not None:
                self._averages.restore_methods()
            if self._is_fitting:
                self._lost_states_reason = "a rank failed, and its shards of them are gone"
        self._engine = self._averages = None

    def _present_masters(self) -> dict[str, Tensor]:
        """Main parameters of the last fit, where the module has these values still. Local.

        An evaluation, or code after the run, may have changed the module.
        """
        if not self._last_masters or self.lightning_module is None:
            return {}
        named = parameters_by_name(self.lightning_module)
        return {
            name: master
            for name, master in self._last_masters.items()
            if name in named
            and torch.equal(master.to(named[name].dtype), named[name].detach().cpu())
        }

    def _should_keep_full_module(self) -> bool:
        """Whether every rank keeps the full module after this run. Collective."""
        if self._keeps_full_module is None:
            # Another rank may have one more batch or forward.
            self.engine.lockstep.barrier("the end of the run")
            if isinstance(self._unshard_after_fit, bool):
                self._keeps_full_module = self._unshard_after_fit
            else:  # only a fit saves its parameters before they are dropped
                self._keeps_full_module = not self._is_fitting or _full_module_fits(
                    self.engine, num_averages=len(self._averages or ())
                )
        return self._keeps_full_module

    @property
    def _is_fitting(self) -> bool:
        """Whether the engine is that of a fit, which is running or ending."""
        return self._engine is not None and run_state(self._engine.module).fn == TrainerFn.FITTING

    def _drops_weights(self) -> bool:
        """Whether this run is a fit after which "auto" drops the parameters. Collective."""
        if not self._is_fitting or self._unshard_after_fit != "auto":
            return False
        return not self._should_keep_full_module()

    def _unwrap_module(self) -> None:
        module = self.lightning_module
        if module is None:
            return
        clear_pending_values(module)  # left by a set-up that failed
        parameters = list(module.parameters())
        has_all = not any(has_placement(p) or p.is_meta for p in parameters)
        with unguarded(parameters):
            if self._layer_sync and run_state(module).fn == TrainerFn.FITTING:
                self.model = self._layer_sync.revert(module)
            if not has_all:
                move_all_but_parameters(module, _CPU)
        if has_all:
            module.cpu()


def run_state(module: nn.Module | None) -> TrainerState:
    """State of the Trainer of a `LightningModule`; without a Trainer, an idle state."""
    trainer = module._trainer if isinstance(module, LightningModule) else None
    return TrainerState() if trainer is None else trainer.state


def _share_methods(optimizer: LightningOptimizer) -> None:
    """Makes `self.optimizers().train()` call the method that the user's optimizer object has.

    Lightning's wrapper has the methods of the optimizer's class only.
    """
    of_class = type(optimizer.optimizer)
    for name, value in vars(optimizer.optimizer).items():
        if name != "step" and inspect.isfunction(getattr(of_class, name, None)):
            optimizer.__dict__[name] = value


def _full_module_fits(engine: Engine, *, num_averages: int) -> bool:
    """Whether each rank can hold the full module and its averages in CPU memory. Collective.

    They may take at most half of the free memory, divided by the ranks of a node, on every node.
    Warns once if they take more.
    """
    needed = (1 + num_averages) * sum(full_bytes(bucket) for bucket in engine.buckets)
    needed -= sum(cpu_param_bytes(bucket) for bucket in engine.buckets)
    if engine.comm.rank == 0:
        needed += sum(_masters_bytes(bucket) for bucket in engine.buckets)
    budget = available_memory_bytes() // (2 * local_world_size())
    fits = bool(engine.comm.control.min_ints([budget - needed])[0] >= 0)
    if not fits:
        rank_zero_warn(
            f'unshard_after_fit="auto": the full module takes {needed / _GIB:.3g} GiB more on each '
            f"of {local_world_size()} rank(s) of a node, and less than twice that is free for "
            "each: its parameters are dropped. Load them from a checkpoint with "
            "lightning_zero.load_from_checkpoint(Model, path) or ckpt_path=path; "
            "unshard_after_fit=True keeps them."
        )
    return fits


def _masters_bytes(bucket: Bucket) -> int:
    """Bytes of the main parameters that rank 0 keeps for a late save of a 16-bit module."""
    dtype = bucket.plan.master_dtype
    is_narrow = any(own.itemsize < dtype.itemsize for own in bucket.orig_dtypes)
    return bucket.plan.layout.numel * dtype.itemsize if is_narrow else 0


# -------------------------------------------------------------------- refused modules and callbacks


def _refuse_module(module: LightningModule, *, is_ours: bool) -> None:
    """Raises if another engine holds `module`, or if it has no parameters and builds none later."""
    for name, parameter in module.named_parameters():
        is_held = has_placement(parameter) and not is_dropped(parameter)
        if is_held and not is_ours:
            raise held_error(name)
    builds_later = any(is_overridden(hook, module) for hook in ("setup", "configure_model"))
    if not builds_later:
        check_has_parameters(module)


def _refuse_callbacks(callbacks: Iterable[Callback], config: ZeroConfig) -> None:
    """Raises for pruning if parameters are sharded, since it ranks all their elements."""
    if not config.states.has_shard(State.PARAM):
        return
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} ranks the elements of full parameters and replaces "
                f"parameters by masked ones, but in {config.states} parameters are sharded; use "
                "stage 1 or 2, where they are replicated."
            )
