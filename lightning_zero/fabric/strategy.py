"""`Fabric(strategy="zero3")`: an engine for each module that `fabric.setup` is given.

[Note: Gradients in a forward] A gradient penalty calls `torch.autograd.grad` on outputs. Fabric
refuses all gradients outside of `fabric.backward` if a strategy overrides `backward`, which it
finds by comparing code. The engine refuses only those that reach parameters. So our method names
the base's as the one that it wraps, and Fabric compares that one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_zero._lightning.fabric import (
    _PATH,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    Optimizable,
    ParallelStrategy,
    Precision,
)
from lightning_zero.checkpoint.engine_checkpoint import write_full_together, write_sharded
from lightning_zero.checkpoint.modules import replace_sharded_parameters
from lightning_zero.checkpoint.source import open_objects_on_all_ranks
from lightning_zero.construction.materialize import move_all_but_parameters
from lightning_zero.engine.engine import Engine
from lightning_zero.fabric.module import SyncControl, ZeroModule, engines_in_graph, is_part
from lightning_zero.fabric.objects import NamedObjects
from lightning_zero.fabric.precision import autocast_dtype, checked_precision
from lightning_zero.health.together import failing_together
from lightning_zero.health.world import DEFAULT_TIMEOUT
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.foreign_options import unknown_option_error
from lightning_zero.strategy.announce import announce
from lightning_zero.strategy.processes import Processes, StartMethod
from lightning_zero.strategy.saving import (
    CheckpointType,
    ZeroCheckpointIO,
    check_checkpoint_type,
    is_user_io,
    why_sharded,
)
from lightning_zero.strategy.settings import Hardware, Settings, check_memory_together

__all__ = ["ZeroStrategy"]

_SETTINGS = {field.name for field in fields(ZeroConfig)}
_TRAINERS_SETTINGS = {"async_save", "unshard_after_fit"}


class ZeroStrategy(Processes, ParallelStrategy):  # type: ignore[misc]  # see `Processes`
    """ZeRO stages 1-3 for Fabric, under the names of the Trainer's strategy.

    Each call of `fabric.setup` or `fabric.setup_module` makes an engine of its own.

    Args:
        stage: ZeRO stage, 0 to 3.
        checkpoint: "auto", "full" or "sharded", default "auto". Kind of checkpoint, as for
            `lightning_zero.ZeroStrategy`.
        accelerator: Accelerator, as in every strategy of Fabric. Set by Fabric.
        parallel_devices: Devices of this node. Set by Fabric.
        cluster_environment: ClusterEnvironment. None: chosen by Fabric.
        checkpoint_io: CheckpointIO. With a custom plugin, "auto" means full checkpoints.
        precision: Precision plugin. Set by Fabric.
        process_group_backend: Backend of collectives. None: "nccl" on CUDA, "gloo" on CPU.
        timeout: timedelta or seconds, default 30 minutes. Timeout of each collective.
        start_method: "popen", "spawn", "fork" or "forkserver".
        batch_group_size: Number of consecutive ranks that get the same samples, as for
            `lightning_zero.ZeroStrategy`.
        **settings: The other settings of `ZeroConfig`.

    Raises:
        ValueError: A setting is out of range, or has no meaning in this stage.
        TypeError: A setting is unknown, or has the wrong type.
    """

    strategy_name = "zero"
    _user = "Fabric"

    def __init__(
        self,
        stage: int = 3,
        *,
        checkpoint: CheckpointType = "auto",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        batch_group_size: int = 1,
        **settings: Any,
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(
                f'stage must be 0, 1, 2 or 3 with Fabric, got {stage!r}; "auto" needs the Trainer.'
            )
        if unknown := sorted(settings.keys() - _SETTINGS):
            if unknown[0] in _TRAINERS_SETTINGS:
                raise TypeError(f"{unknown[0]} is no option with Fabric: it needs the Trainer.")
            own = inspect.signature(type(self)).parameters.keys() - {"settings"}
            raise unknown_option_error("ZeroStrategy with Fabric", unknown[0], own | _SETTINGS)
        check_checkpoint_type(checkpoint)
        self._settings = Settings(
            stage, settings, checkpoint=checkpoint, batch_group_size=batch_group_size
        )
        self._checkpoint_type = checkpoint
        self._engines: list[Engine] = []
        self._num_nodes = 1
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            batch_group_size=batch_group_size,
        )
        self._backward_sync_control = SyncControl()

    @property
    def config(self) -> ZeroConfig:
        """The engines' settings, before precision and hardware are known."""
        return self._settings.config

    @property
    def engines(self) -> list[Engine]:
        """The engines, in the order of the calls of `setup`."""
        return list(self._engines)

    def engine_of(self, module: nn.Module) -> Engine:
        """The engine of a module that `fabric.setup` has returned, or was given.

        Raises:
            ValueError: The module was not set up.
        """
        parts = set(module.modules())
        for engine in self._engines:
            if engine.module in parts:
                return engine
        raise ValueError(
            f"{type(module).__name__} was not set up: call fabric.setup(module, optimizer) first."
        )

    @property
    @override
    def precision(self) -> Precision:
        return self._precision or Precision()

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        self._precision = checked_precision(precision)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = ZeroCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    # ---------------------------------------------------------------- ranks

    @property
    def num_nodes(self) -> int:
        """Number of nodes; Fabric sets `_num_nodes`."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def _set_world_ranks(self) -> None:
        """Called by Fabric before the launch."""
        self.set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        self._check_group_size(self.config)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        self._settings.check_folders()
        super().setup_environment()
        self._compare_settings(self._settings, str(self.precision.precision))
        self._open_batch_group()

    @override
    def _enter_collective(self, name: str, *, everyone: bool = True) -> bool:
        """As in the base class; an error if ranks are in different passes of an engine."""
        if not super()._enter_collective(name, everyone=everyone):
            return False
        for engine in self._engines:
            lockstep = engine.lockstep
            (lockstep.barrier if everyone else lockstep.barrier_in_loop)(name)
        return True

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        self._position.seed_workers(dataloader)
        return dataloader

    # ---------------------------------------------------------------- set-up

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Context for `fabric.init_module`. Empty modules are on the meta device.

        Others are on the device where they compute, or on the CPU if their parameters will be
        sharded.
        """
        return self._init_context(is_empty=bool(empty_init))

    @contextmanager
    def _init_context(self, *, is_empty: bool) -> Generator[None, None, None]:
        device = torch.device("cpu") if self.config.states.shards_params else self.root_device
        with torch.device("meta") if is_empty else device, self.precision.module_init_context():
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Moves a module; if parameters will be sharded, the engine moves these."""
        if self.config.states.shards_params or any(p.is_meta for p in module.parameters()):
            move_all_but_parameters(module, self.root_device)
        else:
            module.to(self.root_device)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Makes an engine for `module` and its optimizers. Collective."""
        if next(module.parameters(), None) is None:
            if optimizers:
                raise ValueError(f"{type(module).__name__} has no parameters to optimize.")
            return module, [], scheduler
        self._enter_collective("the set-up of a module")
        precision = self.precision
        hardware = Hardware(self.root_device, self.world_size, self.num_processes)
        dtype = autocast_dtype(precision)
        config = self._settings.resolve(hardware, dtype, is_autocast=dtype is not None)
        gather = self.gather_for("all ranks to set up a module")
        check_memory_together(module, optimizers, config, hardware, gather)
        engine = Engine(
            module,
            optimizers,
            config,
            device=self.root_device,
            timeout=self._timeout,
        )
        announce(engine)
        self._engines.append(engine)
        return ZeroModule(module, engine), optimizers, scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Makes an engine for `module`; its optimizers may follow. Collective."""
        return self.setup_module_and_optimizers(module, [])[0]

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Attaches an optimizer to the engine that holds its parameters. Collective."""
        held = {p for group in optimizer.param_groups for p in group["params"]}
        engines = [e for e in self._engines if not held.isdisjoint(e.module.parameters())]
        name = type(optimizer).__name__
        if len(engines) > 1:
            raise ValueError(
                f"{name} holds parameters of {len(engines)} modules that were set up; make an "
                "optimizer for each, or set up one module that contains them, such as "
                "torch.nn.ModuleList([first, second])."
            )
        if engines:
            engines[0].attach(optimizer)
            return optimizer
        raise ValueError(
            f"{name} holds no parameter of a module that was set up: call "
            "fabric.setup_module(module) first, or fabric.setup(module, optimizer)."
        )

    # ---------------------------------------------------------------- steps

    # mypy sees the Trainer's base class, too: see `Processes`.

    @override
    @wraps(ParallelStrategy.backward)  # see [Note: Gradients in a forward]
    def backward(  # type: ignore[override]
        self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        retain_graph = bool(kwargs.get("retain_graph") or kwargs.get("create_graph"))
        with ExitStack() as contexts:
            for engine in engines_in_graph(tensor, self._engines):
                context = engine.backward_context(
                    retain_graph=retain_graph,
                    has_scaler=getattr(self.precision, "scaler", None) is not None,
                )
                contexts.enter_context(context)
            super().backward(self.scaled_loss(tensor), module, *args, **kwargs)  # type: ignore[arg-type]

    def _engine_stepping(self, optimizer: Any) -> Engine:
        for engine in self._engines:
            if optimizer in engine.optimizers:
                return engine
        raise ValueError(
            f"{type(optimizer).__name__} was not set up: call fabric.setup(module, optimizer)."
        )

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, **kwargs: Any
    ) -> Any:
        self._engine_stepping(optimizer).finish_reductions()  # a loss scaler reads gradients first
        return super().optimizer_step(optimizer, **kwargs)  # type: ignore[arg-type]

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips the mean gradients that `optimizer` steps; returns their norm before. Collective.

        Raises:
            RuntimeError: The norm is not finite; no gradient has changed.
        """
        return self._unscaled(optimizer).clip_grad_norm_(
            max_norm,
            norm_type,
            parameters=self.precision.main_params(optimizer),
            error_if_nonfinite=error_if_nonfinite,
        )

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        """Clamps the mean gradients that `optimizer` steps. Collective."""
        engine = self._unscaled(optimizer)
        engine.clip_grad_value_(clip_val, parameters=self.precision.main_params(optimizer))

    def _unscaled(self, optimizer: Optimizer) -> Engine:
        """The engine of `optimizer`, with complete gradients that no loss scale multiplies."""
        engine = self._engine_stepping(optimizer)
        engine.finish_reductions()
        self.precision.unscale_gradients(optimizer)
        return engine

    # ---------------------------------------------------------------- checkpoints

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """State dict of full tensors on rank 0; empty on other ranks. Collective."""
        return self._engine_stepping(optimizer).optimizer_state(optimizer)

    @override
    def save_checkpoint(  # type: ignore[override]
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Saves the objects of `state`. Collective.

        Raises:
            TypeError: Storage options were given, which only a `CheckpointIO` uses.
            OSError: The checkpoint cannot be written. Raised on every rank.
        """
        path = self.broadcast(path)  # with a check that all ranks are here
        objects = self._named_together(state)
        io = self.checkpoint_io if is_user_io(self.checkpoint_io) else None
        if not objects.engines or io is not None or storage_options is not None:
            self._save_by_io(path, objects, storage_options, filter or {})
            return
        is_sharded = self._saves_shards(objects)
        checkpoint = objects.checkpoint(filter or {}, is_sharded=is_sharded)
        replace_sharded_parameters(checkpoint, self._engines, objects.skipped_keys)
        comm = next(iter(objects.engines.values())).comm
        (write_sharded if is_sharded else write_full_together)(checkpoint, path, comm)

    def _save_by_io(
        self, path: _PATH, objects: NamedObjects, storage_options: Any, filters: Mapping[str, Any]
    ) -> None:
        if objects.engines:
            contents = objects.checkpoint(filters, is_sharded=False)
        else:
            contents = self._convert_stateful_objects_in_state(objects.state, dict(filters))
        if self._engines:
            replace_sharded_parameters(contents, self._engines, objects.skipped_keys)

        def write() -> None:
            self.checkpoint_io.save_checkpoint(contents, path, storage_options)

        self.run_on_rank_zero(f"save {path}", write)

    def _saves_shards(self, objects: NamedObjects) -> bool:
        """Whether the next checkpoint is a sharded one. Collective."""
        if self._checkpoint_type != "auto":
            return self._checkpoint_type == "sharded"
        engines = set(objects.engines.values())
        has_reason = any(why_sharded(engine) is not None for engine in engines)
        return next(iter(engines)).comm.control.union([has_reason])[0]

    @override
    def load_checkpoint(  # type: ignore[override]
        self,
        path: _PATH,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of Fabric or of the Trainer, of any strategy. Collective.

        Each rank reads its own part. As in every strategy, `state` is a dict of objects, or the
        module or the optimizer of a file that holds its state dict alone.
        """
        path = self.broadcast(path)
        contents = open_objects_on_all_ranks(
            path, self.global_rank, self.world_size, self.gather_for, weights_only=weights_only
        )
        if not state and not isinstance(state, nn.Module):
            return contents
        if isinstance(state, (nn.Module, Optimizer)):
            if isinstance(state, nn.Module):
                contents = contents.get("state_dict", contents)
            self._named({"raw": state}).load({"raw": contents}, strict=strict)
            return {}
        objects = self._named_together(state)
        remainder = objects.load(contents, strict=strict)
        state.update(objects.state)
        return remainder

    def _order_together(self, objects: NamedObjects) -> None:
        """Puts the objects of engines, whose states are collective, in rank 0's order. Collective.

        Raises:
            ValueError: Ranks have other objects of engines, or under other names.
        """
        own = {
            key: f"{key!r} ({'module' if key in objects.modules else 'optimizer'} of engine "
            f"{self._engines.index(engine)})"
            for key, engine in objects.engines.items()
        }
        everyone = self.gather_for("the objects of a checkpoint")(own)
        if any(other != everyone[0] for other in everyone):
            texts = [", ".join(texts_of_rank.values()) or "none" for texts_of_rank in everyone]
            lines = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ValueError(
                "the state of a checkpoint must have the same modules and optimizers under the "
                f"same names on every rank, got{lines}\nNumbers are those of the calls of setup."
            )
        if list(own) != list(everyone[0]):
            objects.reorder(everyone[0])

    def _named_together(self, state: Mapping[str, Any]) -> NamedObjects:
        """As `_named`, in the same order on every rank; if a rank fails, all do. Collective."""
        gather = self.gather_for("the objects of a checkpoint")
        with failing_together("name the objects of a checkpoint", gather=gather):
            objects = self._named(state)
        self._order_together(objects)
        return objects

    def _named(self, state: Mapping[str, Any]) -> NamedObjects:
        engines: dict[str, Engine] = {}
        for key, value in state.items():
            inside = _in(value)
            for engine in self._engines:
                held = (engine.module, *engine.optimizers)
                if any(value is part for part in held) or is_part(value, engine):
                    engines[key] = engine
                elif any(is_part(part, engine) or part in engine.optimizers for part in inside):
                    raise ValueError(
                        f"the state has a module or optimizer that was set up inside of {key!r}; "
                        'give each a key of its own: {"model": model, "optimizer": optimizer}.'
                    )
        return NamedObjects(dict(state), engines)

    @override
    def teardown(self) -> None:
        """Gives every module its full tensors, and ends the engines. Collective."""
        for engine in self._engines:
            engine.close()
        self._engines.clear()
        if self._watchdog is not None:
            self._watchdog.finish()
        super().teardown()


def _in(value: object) -> list[nn.Module | Optimizer]:
    """Modules and optimizers inside of `value`, a container."""
    leaves = [leaf for leaf in tree_leaves(value) if leaf is not value]
    return [leaf for leaf in leaves if isinstance(leaf, (nn.Module, Optimizer))]
