"""The engine: shards a module, its gradients and its optimizers' states over ranks.

It can be used without Lightning, in a hand-written loop:

    engine = Engine(module, optimizers=[optimizer], config=ZeroConfig(stage=3))
    loss = module(x)
    engine.backward(loss)
    engine.step()
    engine.zero_grad()
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket, BucketResources
from lightning_zero.core.bucket_access import BucketAccess
from lightning_zero.core.coordinator import StepCoordinator, TrainingState
from lightning_zero.core.guard import NonfiniteGuard
from lightning_zero.core.hooks import Hooks
from lightning_zero.core.lockstep import Lockstep
from lightning_zero.core.mixed_dtypes import explain_dtype_error
from lightning_zero.core.norm import clip_by_norm, clip_by_value, grad_norms, total_norm
from lightning_zero.core.recompute import apply_checkpointing
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.core.unit import Unit
from lightning_zero.engine.beginning import (
    EngineParts,
    average_gradients,
    open_storage,
    open_together,
    plan_together,
    wrap_parameters,
)
from lightning_zero.engine.counting import count_memory
from lightning_zero.engine.held import lose_held, unshard_held
from lightning_zero.engine.offloaded import as_states, device_memory
from lightning_zero.engine.optimizers import AttachedOptimizers
from lightning_zero.health.failures import PeerFailedError
from lightning_zero.health.watchdog import Watchdog
from lightning_zero.layout.config import ZeroConfig, as_timeout
from lightning_zero.layout.foreign_options import explain_unknown_options
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.stage import State
from lightning_zero.optim.state import optimizer_state_dict
from lightning_zero.optim.state_view import raw_states
from lightning_zero.record import streams
from lightning_zero.tensors.composite import plain_tensors
from lightning_zero.tensors.guarded import explain_copy_error
from lightning_zero.tensors.live import LiveTensors
from lightning_zero.tiers.grad_offload import GradQueue

__all__ = ["Engine"]

_RUN_TIMEOUT = timedelta(seconds=60)  # in which all ranks must come after an exception


@explain_unknown_options
class Engine:
    """Shards the state of `module` and `optimizers` over all ranks of the default process group.

    Every rank must create it with the same module, optimizers and settings, which are compared, and
    call its methods in the same order. Parameters keep their identity, and the optimizers stay the
    same objects: their `step()` may be called directly.

    Args:
        module: Module to shard, on the device where it computes, or on the meta device, where the
            `reset_parameters` of its modules initialize it. The values of rank 0 are used.
        optimizers: One optimizer or several over parameters of `module`, with or without state.
            More can be attached later.
        config: Stage and sizes. None: stage 3 with defaults.
        device: Device to compute on. Parameters move there bucket by bucket, so that in stage 3 the
            device never holds the full model. None: the device of the parameters.
        timeout: timedelta or seconds, default None. Timeout of each collective. None: the
            backend's.
        watchdog: Watchdog that reports failures of other ranks. None: a new one.
        broadcasts_every_forward: bool, default True. Copy rank 0's buffers before every forward of
            the module, as DDP does, if `broadcast_buffers` is set. False: only in
            `forward_context`, where the Trainer's strategy runs `training_step`.

    Attributes:
        plan: Units and buckets.
        buckets: Buckets at run time, in layout order.
        coordinator: Runs each moment of a step; the hooks and this class call its methods.
        lockstep: Support for loops in which ranks use the module a different number of times.
        optimizers: Attached optimizers, in the order in which they were attached.
        average_buckets: Buckets of averages of the weights; see `Shadow`.
        live_tensors: Sharded tensors of this engine that are alive.
        worker: Thread that steps buckets during the next forward.
        recorder: Recorder of spans and bytes, one window at a time; off at first.

    Raises:
        ValueError: The module has no parameters, is on several devices, is held by another engine,
            or is on the meta device and cannot initialize itself; an optimizer holds parameters of
            another module or cannot be sharded; parameters partly share memory; the group size
            does not divide the number of ranks; or ranks differ in model, optimizers or settings.
        TypeError: An optimizer or the timeout has the wrong type.
        RuntimeError: Another rank was given an argument that cannot be used.
    """

    _parts = EngineParts()

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        config: ZeroConfig | None = None,
        *,
        device: torch.device | None = None,
        timeout: timedelta | float | None = None,
        watchdog: Watchdog | None = None,
        broadcasts_every_forward: bool = True,
    ) -> None:
        self.module = module
        self.config = config = config or ZeroConfig()
        self._is_closed = False
        self._lost_by: str | None = None  # why no further run is possible
        self.average_buckets: list[Bucket] = []
        self.live_tensors = LiveTensors()
        parts = self._parts
        open_comm = partial(parts.communicator, timeout=as_timeout(timeout), watchdog=watchdog)
        self.comm, given = open_together(
            module, optimizers, config, device=device, open_comm=open_comm, look=parts.probe
        )
        self.device = device = given.device
        self.recorder = self.comm.recorder
        with ExitStack() as undo, self.comm.closed_on_error():
            average_gradients(module, self.comm)
            self.plan = plan_together(module, config, self.comm, given.probed)
            self.storage = open_storage(parts.storage, config, self.plan, self.comm)
            undo.callback(self.storage.close)
            self.worker = StepWorker(device)
            undo.callback(self.worker.close)
            self._end_checkpointing = apply_checkpointing(
                module, given.checkpointed_modules, is_selective=config.saves_matmuls
            )
            undo.callback(self._end_checkpointing)
            queue = GradQueue(self.storage)
            shared = BucketResources(self.comm, queue, self.worker, self.live_tensors)
            units, self.buckets = wrap_parameters(module, self.plan, shared)
            self._coordinate(units, broadcasts_every_forward=broadcasts_every_forward)
            undo.callback(self.lose, "the engine was not built")
            self._hooks = Hooks(module, self.buckets, self.coordinator)
            undo.callback(self._hooks.detach)
            self.optimizers = AttachedOptimizers(
                self.buckets,
                self.coordinator,
                self.storage,
                self.comm,
                worker=self.worker if config.overlap_step else None,
                check_and_probe=partial(parts.probe, module=module, config=config, device=device),
            )
            for optimizer, found in given.probed:
                self.optimizers.add(optimizer, found)
            undo.pop_all()

    def _coordinate(self, units: Sequence[Unit], *, broadcasts_every_forward: bool) -> None:
        """Makes the coordinator and the lockstep, which parameters then use. Local."""
        self.coordinator = coordinator = StepCoordinator(
            self.module,
            units,
            self.buckets,
            self.comm,
            self.config,
            self._begin_run,
            broadcasts_every_forward=broadcasts_every_forward,
        )
        self.comm.set_before_collective(lambda name: coordinator.order.announce_collective(name))
        self.lockstep = Lockstep(coordinator, self.comm)
        for bucket in self.buckets:
            BucketAccess(bucket, self.lockstep, coordinator.unshard_out_of_order).install()

    @property
    def guard(self) -> NonfiniteGuard:
        """Guard against non-finite gradients, with its last report."""
        return self.coordinator.guard

    def lose(self, reason: str) -> None:
        """Ends the run for good, for `reason`: using a parameter is an error then. Local."""
        self._lost_by = self._lost_by or reason
        self.coordinator.end_run(RuntimeError(reason))

    def attach(self, optimizer: Optimizer) -> None:
        """Makes `optimizer` step this rank's shards from now on. Collective.

        Raises:
            ValueError: The optimizer holds parameters of another module, cannot be sharded, needs
                full tensors that the engine has already sharded, or differs between ranks.
            RuntimeError: Another rank makes another call.
        """
        self.lockstep.barrier("the attachment of an optimizer")
        self.optimizers.attach(optimizer)

    # ---------------------------------------------------------------- the loop

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs `loss.backward(...)` and averages gradients over ranks. Collective."""
        retain_graph = bool(kwargs.get("retain_graph") or kwargs.get("create_graph"))
        with self.backward_context(retain_graph=retain_graph):
            loss.backward(*args, **kwargs)

    def backward_context(
        self, *, retain_graph: bool = False, has_scaler: bool = False
    ) -> AbstractContextManager[None]:
        """Context for a backward that the caller runs itself.

        Args:
            retain_graph: Whether another backward through the same graph follows.
            has_scaler: Whether a loss scaler skips steps with non-finite gradients, so that
                `on_nonfinite` only reports them.
        """
        self.guard.use_scaler(has_scaler)
        self._hooks.run_last()
        ends_step = not self.coordinator.is_accumulating
        if ends_step:
            self.optimizers.read_ahead()
        return self.coordinator.backward_context(ends_step=ends_step, retain_graph=retain_graph)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context for code that uses the module's parameters without calling the module."""
        try:
            with self.coordinator.step_context():
                yield
        except Exception as error:
            explain_dtype_error(error, self.module, self.buckets)
            explain_copy_error(error)
            raise

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Makes every call of method `name` of `module` run as a forward. Local.

        As FSDP2's `register_fsdp_forward_method`, for methods such as `generate` or `encode` that
        are called instead of the module. Their calls are then collective, like those of the module.
        Copies and pickles of the module have the method as it was, and so has the module after
        `close`.

        Args:
            module: The engine's module or a submodule of it.
            name: Name of a method other than `forward`.

        Raises:
            ValueError: `module` does not belong to the engine, or `name` is "forward".
            AttributeError: `module` has no such method.
            TypeError: `name` names no method, but a submodule or a value.
        """
        self._hooks.register_forward_method(module, name, self.forward_context)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for all micro-batches of a step but the last, as in PyTorch.

        In stages 0 and 1 gradients stay local. Stages 2 and 3 keep no unsharded gradients and
        reduce every micro-batch.
        """
        with self.coordinator.accumulating():
            yield

    def finish_reductions(self) -> None:
        """Reduces the gradients that micro-batches under `no_sync` left local. Collective."""
        self.storage.state_offload.check(State.GRAD)
        self.coordinator.reducer.complete_means()

    def step(self) -> None:
        """Steps every attached optimizer. Collective."""
        self.optimizers.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of all parameters.

        Args:
            set_to_none: Set gradients to None and free the memory of their shards.
        """
        self.ensure_run()
        self.storage.state_offload.check(State.GRAD)
        for bucket in self.buckets:
            bucket.grads.param_grads.zero(set_to_none=set_to_none)
            bucket.free_zeroed()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips mean gradients to a total norm, as `torch.nn.utils.clip_grad_norm_`. Collective.

        Args:
            max_norm: Maximum norm.
            norm_type: p of the p-norm; may be `math.inf`.
            parameters: Parameters to clip. None: all parameters of the module.
            error_if_nonfinite: Raise an error, on every rank and before any gradient changes, if
                the norm is infinite or NaN, unless `on_nonfinite="skip"` skips this step.

        Returns:
            The total norm before clipping, 0-dim.

        Raises:
            RuntimeError: The norm is not finite, if that is an error.
        """
        self.finish_reductions()
        return clip_by_norm(
            self.buckets,
            self.comm,
            float(max_norm),
            parameters=None if parameters is None else set(parameters),
            order=float(norm_type),
            error_if_nonfinite=error_if_nonfinite and not self.guard.skips_step,
        )

    def clip_grad_value_(
        self, clip_value: float, *, parameters: Iterable[nn.Parameter] | None = None
    ) -> None:
        """Clamps every element of the mean gradients to [-clip_value, clip_value]. Collective."""
        self.finish_reductions()
        chosen = None if parameters is None else set(parameters)
        clip_by_value(self.buckets, float(clip_value), parameters=chosen)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Total norm of the mean gradients, 0-dim. Collective."""
        self.finish_reductions()
        return total_norm(self.buckets, self.comm, order=float(norm_type))

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Norm of the mean gradients of each bucket, 0-dim, by bucket name. Collective.

        Buckets without a gradient are left out.
        """
        self.finish_reductions()
        return grad_norms(self.buckets, self.comm, order=float(norm_type))

    # ---------------------------------------------------------------- reports and states

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds now, counted from the engine's own buffers. Local."""
        self.worker.drain()
        return count_memory(
            self.buckets, self.optimizers, self.storage, self.comm, self.average_buckets
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict that `optimizer` would have without sharding. Collective.

        Returns:
            On rank 0 full tensors on the CPU, with torch's parameter numbers; on other ranks an
            empty dict. `optimizer.load_state_dict` accepts it on every rank.
        """
        self.storage.state_offload.check(State.OPTIM)
        self.lockstep.barrier("the state of an optimizer")
        return optimizer_state_dict(optimizer, self.buckets, is_recipient=self.comm.rank == 0)

    # ---------------------------------------------------------------- memory between steps

    def offload_states(self, states: Iterable[str] | str | None = None) -> None:
        """Moves states to CPU memory between two steps; frees their memory here. Collective.

        For generation between training steps. The values are the same after `reload_states`. Until
        then the calls that need an offloaded state raise an error, and views of it that you hold,
        such as `parameter.grad`, have no values.

        Args:
            states: "parameters", "gradients", "optimizer" (with float32 main parameters that are
                tensors of their own), or several of these. None: all. States that are in CPU memory
                or files already stay there.

        Raises:
            ValueError: Another state is named.
            RuntimeError: A forward has no backward yet, a state is offloaded already, or ranks name
                other states.
        """
        chosen = as_states(states)
        kinds = ", ".join(repr(state.value) for state in chosen)
        self.lockstep.barrier(f"offload_states([{kinds}])")  # ranks that differ raise
        state = self.coordinator.training_state
        if state is not TrainingState.IDLE:
            raise RuntimeError(f"offload_states() was called {state.value}, not between steps.")
        if chosen:
            self.storage.state_offload.check(*chosen)
        self.worker.drain()
        for bucket in self.buckets:
            bucket.wait_for_update()
            bucket.params.sync_writes()
            bucket.params.reshard()
        self._free_device_memory(chosen)

    def _free_device_memory(self, states: Sequence[State]) -> None:
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            streams.synchronize(self.device)
        # All of it is found before any of it is freed: an error leaves every state as it is.
        found = {s: list(device_memory(s, self.buckets, self.optimizers)) for s in states}
        for state, memory in found.items():
            self.storage.state_offload.offload(state, memory, pin=on_cuda)
        if State.PARAM in states:
            for bucket in self.buckets:
                bucket.params.hide_replicated()
        self.comm.free_scratch()
        if on_cuda:
            torch.cuda.empty_cache()  # for another process on this device

    def reload_states(self, states: Iterable[str] | str | None = None) -> None:
        """Moves offloaded states back to the device. Local; call it on every rank.

        Args:
            states: As for `offload_states`. None: all that are offloaded.
        """
        offloaded = self.storage.state_offload
        for state in set(as_states(states)) & set(offloaded.states):
            offloaded.reload(state)
            for bucket in self.buckets if state is State.PARAM else ():
                bucket.params.restore_data_pointers()

    # ---------------------------------------------------------------- runs, and the end

    def end_run(self, error: BaseException) -> None:
        """Ends the run, as an exception that leaves a step does. Local.

        The other ranks raise a PeerFailedError where they wait for this one. Parameters, main
        parameters and optimizer states stay. The next use begins another run, without gradients.
        """
        self.coordinator.end_run(error)

    def ensure_run(self) -> None:
        """Begins another run if an exception has ended the last, as every use does. Collective.

        Raises a PeerFailedError if a rank raised none of its own, or does not come in a minute.
        """
        self.coordinator.ensure_run()

    def _begin_run(self) -> None:
        """Begins a run, which adopts the shards, after an exception. Collective."""
        if self._lost_by is None:
            self.worker.drain()  # it waits for no rank, and uses the present groups
            self.reload_states()
            if not self.comm.begin_run(_RUN_TIMEOUT):
                self._lost_by = self.comm.control.watchdog.runs.why_none_follows()
        if self._lost_by is not None:
            raise PeerFailedError(
                f"{self._lost_by}; the ranks cannot continue: load a checkpoint into a new module."
            )
        dropped = self.coordinator.dropped_gradients()
        buckets = (*self.buckets, *self.average_buckets)
        try:
            self.coordinator.begin_run()
            self.lockstep.begin_run()
            failures = [str(f) for bucket in buckets if (f := bucket.begin_run()) is not None]
            for bucket in buckets:
                bucket.publish()
            for bucket in buckets:
                bucket.wait_for_update()
        except BaseException as error:
            self.end_run(error)
            raise
        for text in [*failures, *dropped][:1]:
            warnings.warn(f"after an exception: {text}", stacklevel=2)

    def abandon(self, reason: str) -> None:
        """As `lose`, and frees hooks and groups. The Trainer's strategy calls it. Local."""
        self._is_closed = True
        self.lose(reason)
        self.worker.drain()
        self.optimizers.detach()
        self._end_checkpointing()
        self._hooks.detach()
        for bucket in self.buckets:
            bucket.grads.close()
        lose_held(self.live_tensors, "a rank failed, and its elements are gone")
        self.worker.close()
        self.storage.close()
        self.comm.close()

    def close(
        self,
        device: torch.device | None = None,
        *,
        keep_optimizer_shards: bool = False,
        keep_parameters: bool = True,
    ) -> None:
        """Unwraps the module: full tensors, no hooks. Collective. Closing twice is harmless.

        Sharded tensors that the user holds on every rank become plain full ones, too.

        Args:
            device: Device for parameters and optimizer states. None: their current one.
            keep_optimizer_shards: Leave each rank its shards of the optimizer states, from which
                `optimizer_state_dict` can still build full states. Call `comm.close()` when done.
                States on NVMe or a GPU that would fill more than half of the CPU memory, with the
                module, are dropped instead (`optimizers.check_has_states` then raises).
            keep_parameters: False: parameters and optimizer states have no values afterwards, and
                using them is an error.

        Raises:
            RuntimeError: After unwrapping: the last overlapped step failed, or an entry of a state
                dict was changed in place.
            ValueError: After unwrapping: a parameter's data was replaced by one of a wrong shape.
        """
        if self._is_closed:
            return
        try:
            self.ensure_run()
        except PeerFailedError as error:
            self.abandon(str(error))
            raise
        self.reload_states()
        target = (device or self.device) if keep_parameters else None
        if self.comm.control.is_open:
            self.lockstep.barrier("the end of the engine")
        self._is_closed = True
        failure = self._find_failure()
        self.optimizers.detach()
        # Before states are dropped, which the compute stream may still read.
        self.worker.close(plain_tensors([list(raw_states(o).values()) for o in self.optimizers]))
        self._end_checkpointing()
        self._hooks.detach()
        for bucket in reversed(self.buckets):
            failure = bucket.params.try_to_reshard() or failure
        self.optimizers.unwrap(target, keep_shards=keep_optimizer_shards)
        for bucket in self.buckets:
            bucket.unwrap(target)
        if target is None:
            lose_held(self.live_tensors, "the parameters were dropped as well")
        else:
            unshard_held(self.live_tensors, self.comm, target)
        self.storage.close()
        if not keep_optimizer_shards:
            self.comm.close()
        if failure is not None:
            raise failure

    def _find_failure(self) -> Exception | None:
        """The error of an overlapped step that failed, or else of a lost write. Collective.

        After a failed step another run begins.
        """
        self.worker.drain()
        failure: Exception | None = self.optimizers.find_failure()
        if self.config.overlap_step and self.comm.control.union([failure is not None])[0]:
            self.end_run(failure or RuntimeError("the last step has failed on another rank"))
            self.ensure_run()
        return failure or self.coordinator.find_lost_write()
