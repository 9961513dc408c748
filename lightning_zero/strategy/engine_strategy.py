"""A strategy whose module an engine holds from the set-up of a run to its teardown.

Lightning owns the loop, the optimizers and the precision; the strategy opens and closes the
engine's steps around `training_step` and backward, and keeps ranks from waiting for one that has
failed or has fewer batches.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.core.building import move_all_but_parameters
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.mesh import Mesh
from lightning_zero.strategy.checks import refuse_callbacks, refuse_module
from lightning_zero.strategy.children import release_children
from lightning_zero.strategy.evaluation import LockstepEvaluation, keep_in_loop
from lightning_zero.strategy.launch import check_numbering
from lightning_zero.strategy.lifecycle import EngineLife, WholeAfterFit, run_state
from lightning_zero.strategy.precision import ZeroPrecision, sharded_precision
from lightning_zero.strategy.processes import ProcessStrategy
from lightning_zero.strategy.settings import Place, Settings
from lightning_zero.strategy.signals import BatchBoundary, RequeuedExit, with_status
from lightning_zero.tensors.guarded import as_plain, has_placement
from lightning_zero.tensors.meta import ConstantStates, check_none_left_out, forget_awaited

__all__ = ["EngineStrategy"]

_CPU = torch.device("cpu")


class EngineStrategy(ProcessStrategy):
    """Begins and ends an engine with each run, and forwards to it what Lightning asks for.

    Args:
        settings: The engine's.
        timeout: Of collectives; None: the backend's.
        wait_report_s: See `ProcessStrategy`.
        whole_after_fit: See `EngineLife`.
        **of_processes: As in `ProcessStrategy`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        timeout: timedelta | None,
        wait_report_s: float | None,
        whole_after_fit: WholeAfterFit,
        **of_processes: Any,
    ) -> None:
        self._settings = settings
        self._life = EngineLife(timeout, whole_after_fit)
        self._boundary = BatchBoundary()
        self._evaluation = LockstepEvaluation()
        self._grad_scaler_kwargs: dict[str, Any] = {}
        super().__init__(timeout=timeout, wait_report_s=wait_report_s, **of_processes)

    @property
    def config(self) -> ZeroConfig:
        """The engine's settings; where the stage is "auto", those chosen once a run has begun."""
        return self._settings.config

    @property
    def engine(self) -> Engine:
        """The engine, between setup and teardown.

        Raises:
            RuntimeError: At another time.
        """
        return self._life.engine

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds, by state and tier, counted from the engine's own buffers."""
        return self.engine.memory_report()

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin: ZeroPrecision | None = None
        if precision_plugin is not None:
            self._precision_plugin = sharded_precision(
                precision_plugin, partial(getattr, self, "engine"), self._grad_scaler_kwargs
            )

    # ---------------------------------------------------------------- before the engine

    @property
    def _group_size(self) -> int | None:
        return self.config.group_size(local_world_size=self.num_processes)

    @override
    def _configure_launcher(self) -> None:
        Mesh.of(0, self.num_nodes * self.num_processes, self._group_size)  # raises if it cannot be
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.config.sharding_group_size == "node":
            check_numbering(self.global_rank, self.node_rank, self.num_processes)

    @override
    def connect(self, model: LightningModule) -> None:
        refuse_module(model, is_ours=self._life.current is not None)
        super().connect(model)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """For `configure_model` and `Trainer.init_module`: empty modules are on the meta device.

        Others are on the device where they compute, but for one that would be whole there and is
        to be sharded later: that one is on the CPU.
        """
        device = self.root_device
        is_running = run_state(self.lightning_module).status == TrainerStatus.RUNNING
        if self.config.states.gathers_before_use and not is_running:
            device = _CPU
        with (
            torch.device("meta") if empty_init else device,
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around `configure_model`: what it builds is sharded as it is built, where that helps."""
        on_cpu = self.root_device.type == "cpu"
        helps = self.world_size > 1 or (self.config.offload_param is not None and not on_cpu)
        if not helps or not self.config.states.gathers_before_use:
            yield
            return
        with self._life.watching(self.root_device):
            yield

    # ---------------------------------------------------------------- set-up

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._life.start(self._watchdog)
        check_none_left_out(self.model)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        with self._life.taking_over():
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            self._reset_optimizers_and_schedulers()
            if is_fitting:
                with ConstantStates():
                    self.setup_optimizers(trainer)
            self._life.make_room()
            self._begin(trainer)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        """Moves all but parameters: they follow by bucket when the engine takes them over."""
        assert self.lightning_module is not None
        move_all_but_parameters(self.lightning_module, self.root_device)

    def _begin(self, trainer: Trainer) -> None:
        optimizers = [opt for opt in self.optimizers if not isinstance(opt, _MockOptimizer)]
        place = Place(self.root_device, self.world_size, self.num_processes)
        config = self._settings.decide(trainer, optimizers, place, self._precision_plugin)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_callbacks(trainer.callbacks, config)  # type: ignore[attr-defined]
        self._life.begin(trainer.lightning_module, optimizers, config, self.root_device)
        self._boundary.begin(trainer, self.engine.lockstep)

    # ---------------------------------------------------------------- steps

    def _step(
        self, context: AbstractContextManager[Any], name: str, args: Any, kwargs: Any
    ) -> STEP_OUTPUT:
        """Runs a step method of the module: it does not pass through `Module.__call__`."""
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

    # ---------------------------------------------------------------- ranks that differ

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        return keep_in_loop(dataloader, self.lightning_module.trainer)

    def _begin_evaluation(self) -> None:
        assert self.lightning_module is not None
        self._boundary.agree()
        self._evaluation.begin(self.lightning_module.trainer, self.engine.lockstep)

    def _end_evaluation(self) -> None:
        self._evaluation.end()

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation
    on_validation_end = on_test_end = on_predict_end = _end_evaluation

    @override
    def _meets(self, name: str, *, everyone: bool = True) -> bool:
        return super()._meets(name, everyone=everyone) and self._life.meets(name, everyone=everyone)

    # ---------------------------------------------------------------- failure and the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, RequeuedExit):
            self._life.hurry()
        elif isinstance(exception, SIGTERMException):
            with_status(exception)  # Lightning's own says that all is done
        if self._watchdog is not None:
            if self._life.current is None:
                self._watchdog.abort(exception)
            self._watchdog.explain(exception)
        self._life.is_together()

    @override
    def teardown(self) -> None:
        self._boundary.end()
        self._evaluation.end()
        self._life.end(_CPU)
        if self._watchdog is not None:
            self._watchdog.leave()
        release_children()  # nothing collective comes from here on
        self._give_module_back()
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _give_module_back(self) -> None:
        module = self.lightning_module
        if module is None:
            return
        forget_awaited(module)  # a set-up that failed has left it
        parameters = list(module.parameters())
        has_all = not any(has_placement(p) or p.is_meta for p in parameters)
        with as_plain(parameters):
            if self._layer_sync and run_state(module).fn == TrainerFn.FITTING:
                self.model = self._layer_sync.revert(module)
            if not has_all:
                move_all_but_parameters(module, _CPU)
        if has_all:
            module.cpu()
