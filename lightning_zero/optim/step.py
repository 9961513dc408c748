"""The optimizer step: steps this rank's slices with the user's own optimizer, bucket by bucket.

[Note: One step of the user's optimizer] The optimizer object is not replaced. A pre-hook and a
post-hook do the work, so `optimizer.step()` is correct for every caller: Lightning, a GradScaler, a
hand-written loop. The pre-hook first runs the closure, if any, because parameters must be usable in
it. Then it steps bucket after bucket with stand-ins (clone.py), small buckets together. The
all-gather of a stepped bucket overlaps the step of the next one, and tensors in files or in other
memory are loaded ahead. The step function itself then finds no gradients and does nothing. An
optimizer that counts its calls cannot be called once for each bucket; instead, its step function
runs once over all buckets. `probe` determines the kind of an optimizer.

[Note: Steps that overlap the next forward] With `overlap_step`, a worker thread runs the same loop
over buckets, in the order in which the next forward needs them. Every use of a bucket waits until
the loop has stepped it (`Bucket.wait_for_step`); access from outside waits for all buckets. The
settings of the optimizer are copied when `step()` is called, and the gradients do not change until
the next backward, which waits, too. So the values are those of a step without overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of, lockstep_of
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.health.together import failing_together
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State
from lightning_zero.optim.bucket_loop import step_buckets
from lightning_zero.optim.chunks import chunks_of
from lightning_zero.optim.clone import (
    OptimizerClone,
    is_device_scalar,
    parameters_of,
    scalars_to_cpu,
)
from lightning_zero.optim.methods import ElementwiseOnly, NoGradientAccess, wrap_methods
from lightning_zero.optim.probe import ProbeResult, StepKind, probed_settings
from lightning_zero.optim.state import (
    check_sliced_states,
    load_optimizer_state_dict,
    shard_initial_state,
    swap_in_states,
    swap_out_states,
)
from lightning_zero.optim.state_view import (
    StateView,
    as_plain_dicts,
    is_sliced,
    raise_partial_states,
    raw_states,
)
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.composite import plain_tensors
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tiers.pipeline import Task
from lightning_zero.tiers.storage import Storage

__all__ = ["OptimizerStep", "check_full_tensors"]


class OptimizerStep:
    """Steps this rank's slices with the user's optimizer, in hooks of its `step`.

    Args:
        optimizer: The user's optimizer.
        found: Result of its probe.
        probe: Probes an optimizer again, after its options have changed.
        reducer: Reducer that has the buckets and their gradients.
        storage: Stores of the buckets.
        worker: Worker thread for overlapped steps; None: no overlap.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        found: ProbeResult,
        *,
        probe: Callable[[Optimizer], ProbeResult],
        reducer: Reducer,
        storage: Storage,
        worker: StepWorker | None,
    ) -> None:
        self.optimizer = optimizer
        self._view: Any = StateView(optimizer.state, self._before_access)
        self._kind = found.kind
        self._result = found
        self._probe = probe
        self._known_settings = [probed_settings(optimizer)]  # settings that have been probed
        self._known_members: set[nn.Parameter] = set()  # parameters that have been checked
        self._reducer = reducer
        self._stepping: list[Bucket] = []
        self._storage = storage
        self._worker = worker if found.kind is StepKind.BY_BUCKET else None  # None: step at once
        # Settings that are on the CPU for this step: group, key, the user's tensor, its copy.
        self._cpu_copies: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._depth = 0  # a subclass's step may call its parent's, which calls the hooks, too
        self._is_inside = self._is_inside_bucket = self._is_detached = self._is_skipping = False
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_hook),
            optimizer.register_step_post_hook(self._post_hook),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(as_plain_dicts),
            optimizer.register_load_state_dict_pre_hook(self._before_access),
        ]
        self._wrapped = [*wrap_methods(optimizer, self._run_method), "load_state_dict"]
        optimizer.__dict__["load_state_dict"] = self._load_state_dict
        self._install_state_view()

    def reset(self) -> None:
        """Resets after an exception, which may have occurred between the two hooks."""
        self._is_inside = self._is_inside_bucket = self._is_skipping = False
        self._depth = 0
        self._stepping = []
        self._restore_scalars()
        if not self._is_detached:
            self._install_state_view()

    def detach(self) -> None:
        """Removes all hooks and wrappers; the optimizer keeps this rank's slices as states."""
        for handle in self._handles:
            handle.remove()
        for name in self._wrapped:
            self.optimizer.__dict__.pop(name, None)
        if self.optimizer.state is self._view:
            self.optimizer.state = raw_states(self.optimizer)
        self._is_detached = True

    # ---------------------------------------------------------------- states

    def _uninstall_state_view(self) -> None:
        """Makes `optimizer.state` the plain dict. See [Note: State view]."""
        state: Any = self.optimizer.state
        if state is not self._view and state is not self._view.raw:  # assigned by the user
            shard_initial_state(self.optimizer)
            self._view.install(self.optimizer)
        self._view.uninstall(self.optimizer)

    def _install_state_view(self) -> None:
        """Makes `optimizer.state` the view with sharded tensors."""
        self._view.install(self.optimizer)

    def _before_access(self, *_: Any) -> None:
        """Before states are read or replaced from outside of a step."""
        self._storage.state_offload.check(State.OPTIM)
        self._drain()

    def _before_state_dict(self, *_: Any) -> None:
        self._before_access()
        if self.optimizer.state is not self._view:
            return  # called by the engine, or by the optimizer in its step
        for bucket in self._own_buckets():
            if bucket.shards.has_tensor_owners and bucket.comm.mesh.num_shards > 1:
                raise_partial_states(f"state_dict() of {type(self.optimizer).__name__}")

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the optimizer's `load_state_dict`: each rank takes its slices of full states."""
        self._before_access()
        if self.optimizer.state is self._view:
            load_optimizer_state_dict(self.optimizer, self._own_buckets(), state_dict)
        else:  # called by that function, with this rank's slices
            type(self.optimizer).load_state_dict(self.optimizer, state_dict)

    def _own_buckets(self) -> list[Bucket]:
        members = set(parameters_of(self.optimizer))
        order = self._reducer.step_order()
        return [bucket for bucket in order if not members.isdisjoint(bucket.parameters)]

    # ---------------------------------------------------------------- other methods

    def _run_method(
        self, name: str, method: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a method of the optimizer like `step`. See [Note: Methods of optimizers].

        Collective: every rank.
        """
        buckets = [] if self._is_inside or self._is_detached else self._own_buckets()
        if not buckets:
            return method(*args, **kwargs)
        call = f"{type(self.optimizer).__name__}.{name}()"
        self._storage.state_offload.check()
        lockstep = lockstep_of(buckets[0].parameters[0])
        lockstep.barrier(call)
        self._drain()
        self._uninstall_state_view()
        self._is_inside = True
        self._stepping = buckets
        try:
            with (
                failing_together(f"run {call}", gather=lockstep.gather_objects),
                self._on_slices(call),
            ):
                result = method(*args, **kwargs)
        finally:
            self._leave()
        return result

    @contextmanager
    def _on_slices(self, call: str) -> Iterator[None]:
        """Context in which parameters and states are slices; operators on full tensors raise."""
        members = parameters_of(self.optimizer)
        self._enter(has_grads=False)
        for bucket in self._stepping:
            if bucket.shards.keeps_states_in_files:
                swap_in_states(self.optimizer, bucket)
        slices: list[Tensor] = []
        full: list[Tensor] = []
        for bucket in self._stepping:
            if bucket.replicates_optim:
                continue
            for parameter in bucket.parameters:
                states = plain_tensors(raw_states(self.optimizer).get(parameter, {}))
                tensors = slices if is_sliced(bucket) else full
                tensors += [parameter.data, *(value for value in states if value.dim())]
        with NoGradientAccess(members, call), ElementwiseOnly(slices, full, call):
            yield

    def _leave(self) -> None:
        """Ends the step of all buckets in `_stepping`, and all-gathers them. Collective."""
        stepped, self._stepping = self._stepping, []
        self._is_inside = False
        for bucket in stepped:
            bucket.leave_step(is_changed=True)
            if bucket.shards.keeps_states_in_files:
                swap_out_states(self.optimizer, bucket)
        for bucket in stepped:
            bucket.sync_aliases()
        self._reducer.after_step()
        for parameter in (p for bucket in stepped for p in bucket.parameters):
            check_sliced_states(self.optimizer, parameter)
        self._install_state_view()

    # ---------------------------------------------------------------- around a closure

    def _begin_around(self, closure: object) -> Callable[[], Any]:
        """Points parameters at their main parameters, except while the closure runs.

        Before the closure, parameters have no gradients: those would be of the previous step.

        Returns:
            The closure that replaces `closure`.
        """
        if not callable(closure):
            raise TypeError(
                f"{type(self.optimizer).__name__} needs a closure: call optimizer.step(closure), "
                "where closure() runs the forward and the backward and returns the loss. It cannot "
                "be used with a loss scaler (16-mixed), which calls step() without a closure."
            )
        self._members()
        self._reducer.before_step()
        self._enter_all(has_grads=False)

        def run_closure() -> Any:
            self._leave()
            with torch.enable_grad():
                loss = closure()
            self._reducer.before_step()
            self._enter_all(has_grads=True)
            return loss

        return run_closure

    def _enter_all(self, *, has_grads: bool) -> None:
        self._uninstall_state_view()
        self._is_inside = True
        self._stepping = self._own_buckets()
        self._enter(has_grads=has_grads)

    def _enter(self, *, has_grads: bool) -> None:
        """Enters the step of all buckets in `_stepping`. Collective with tensor owners."""
        for bucket in self._stepping[:1]:
            bucket.wait_for_all_steps()  # the worker of another optimizer communicates, too
        for bucket in self._stepping:
            bucket.enter_step(has_grads=has_grads)

    # ---------------------------------------------------------------- the step

    def _pre_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_inside:
            self._depth += 1
            return None
        # In the hook, the first of `args` is the optimizer itself.
        _, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if self._kind is StepKind.AROUND_CLOSURE:
            around = self._begin_around(closure)
            return ((optimizer, around, *rest[1:]), kwargs) if rest else (args, {"closure": around})
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
            evaluated = _Evaluated(loss, type(optimizer).__name__)
            args = (optimizer, evaluated, *rest[1:]) if rest else args
            kwargs = kwargs if rest else {**kwargs, "closure": evaluated}
        self._reducer.before_step()
        members = self._members()  # before the state view is removed: it may raise
        self._uninstall_state_view()
        if self._reducer.guard.skips(optimizer):
            return self._begin_skip(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # `.grad` of guarded parameters is slow
            with_grad = {parameter for parameter in members if parameter.grad is not None}
        self._reducer.note_stepped(with_grad)
        buckets = self._reducer.step_order()
        has_grads = [not with_grad.isdisjoint(bucket.parameters) for bucket in buckets]
        for bucket in buckets:
            is_member = not members.isdisjoint(bucket.parameters)
            if is_member and bucket.shards.full_tensors is not None:
                # The step is collective, also where one rank alone has dropped its gradients.
                lockstep_of(bucket.parameters[0]).barrier(f"{type(optimizer).__name__}.step()")
                has_grads = bucket.comm.control.union(has_grads)
                break
        self._stepping = [b for b, has_grad in zip(buckets, has_grads, strict=True) if has_grad]
        self._is_inside = True
        if self._kind is StepKind.BY_BUCKET:
            self._is_inside_bucket = True
            try:
                self._step_by_bucket()
            except BaseException as error:
                self._is_inside = False
                self._install_state_view()
                if isinstance(error, Exception):
                    self._end_failed_step()
                raise
            finally:
                self._is_inside_bucket = False
            with torch._C.DisableTorchFunctionSubclass():
                for bucket in self._stepping:
                    for parameter in bucket.parameters:
                        parameter.grad = None  # so that the step function does nothing
        else:
            self._enter(has_grads=True)
            self._move_scalars()
            self._storage.recorder.begin_layer(Kind.STEP, type(optimizer).__name__)
        return args, kwargs

    def _begin_skip(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Drops all gradients, and lets the step function step a copy of the optimizer's settings.

        An optimizer that steps later would use the others. A hook cannot leave the step function
        out, and some optimizers count its calls.
        """
        self._reducer.drop_gradients()
        stand_in = object.__new__(type(self.optimizer))
        vars(stand_in).update(
            vars(self.optimizer),
            state=self.optimizer.state.copy(),
            param_groups=[
                {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items()}
                for group in self.optimizer.param_groups
            ],
        )
        self._is_inside = self._is_skipping = True
        return (stand_in, *args[1:]), kwargs

    def _move_scalars(self) -> None:
        """Copies scalar settings, and tensors set by a loss scaler, to the CPU for a CPU step.

        See [Note: Asynchronous copies of scalars].
        """
        # The parameters are views of the main parameters now.
        first = (bucket.parameters[0] for bucket in self._stepping)
        if all(parameter.device.type != "cpu" for parameter in first):
            return
        own = self.optimizer.__dict__
        names = own.keys() & {"grad_scale", "found_inf"}
        own.update(scalars_to_cpu({name: own[name] for name in names}))
        for group in self.optimizer.param_groups:
            scalars = {
                key: value
                for key, value in group.items()
                if isinstance(value, Tensor) and is_device_scalar(value)
            }
            copies = scalars_to_cpu(scalars)
            group.update(copies)
            self._cpu_copies += [(group, key, scalars[key], copies[key]) for key in scalars]

    def _restore_scalars(self) -> None:
        """Restores the user's tensors as settings, with changes made in the step."""
        for group, key, scalar, copy in self._cpu_copies:
            if group.get(key) is copy:  # else the step has replaced it
                if copy._version:
                    scalar.copy_(copy)
                group[key] = scalar
        self._cpu_copies = []

    def _post_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_inside_bucket:
            return
        if self._depth:
            self._depth -= 1
            return
        if self._is_skipping:
            self._is_inside = self._is_skipping = False
            self._install_state_view()
            return
        self._restore_scalars()
        if self._kind is not StepKind.AROUND_CLOSURE:
            self._storage.recorder.end_layer(Kind.STEP, type(optimizer).__name__)
        if self._kind is not StepKind.BY_BUCKET:
            self._leave()
            return
        self._is_inside = False
        stepped, self._stepping = self._stepping, []
        for bucket in stepped:
            bucket.grads.set_param_grads()
        for bucket in stepped:
            bucket.sync_aliases()
        self._reducer.after_step()
        self._install_state_view()

    def _step_by_bucket(self) -> None:
        clone = OptimizerClone(self.optimizer)
        at_once, overlapped = list[Bucket](), list[Bucket]()
        for bucket in self._stepping:
            # The forward of stage 3 communicates, so there the worker does not: the order would
            # differ between ranks. What needs collectives is stepped at once.
            is_local = bucket.shards_params and bucket.shards.full_tensors is None
            is_overlapped = is_local or not self._reducer.shards_params
            (overlapped if self._worker and is_overlapped else at_once).append(bucket)
        if any(bucket.plan.tiers.optim is Tier.NVME for bucket in at_once):
            self._drain()  # a loop of another optimizer may use the buffers
        for buckets, worker in ((at_once, None), (overlapped, self._worker)):
            if buckets:
                step_buckets(buckets, clone, self._storage, worker)

    def _end_failed_step(self) -> None:
        """Issues the all-gathers after the step, for which ranks where it has not failed wait."""
        self._reducer.note_failed_step()
        for bucket in self._stepping:
            bucket.leave_failed_step(communicates=True)

    def _drain(self, *_: Any) -> None:
        if self._worker is not None:
            self._worker.drain()

    def read_ahead(self) -> None:
        """Starts to read the files of the next step, as far as buffers are free."""
        buckets = self._reducer.step_order() if self._kind is StepKind.BY_BUCKET else []
        # Gradients in files are written before the step.
        grad_tiers = {bucket.plan.tiers.grad for bucket in buckets}
        num_files = sum([len(bucket.shards.state_stores) for bucket in buckets])
        if Tier.NVME in grad_tiers or not num_files:
            return
        self._drain()
        members = set(parameters_of(self.optimizer))
        jobs = []
        for bucket in buckets:
            slots = [
                index
                for index, parameter in enumerate(bucket.parameters)
                if parameter.requires_grad and parameter in members
            ]
            chunks = chunks_of(bucket, slots) if slots else []
            jobs += [Task(chunk.ranges) for chunk in chunks if chunk.files]
        self._storage.pipeline.prefetch(jobs)

    def _probe_again(self) -> None:
        """Probes the optimizer again, after options were switched on or off or groups changed."""
        found = self._probe(self.optimizer)
        if found.kind is StepKind.AT_ONCE and self._kind is StepKind.BY_BUCKET:
            raise ValueError(
                f"the options of {type(self.optimizer).__name__} were changed, and with the new "
                "ones it counts its steps, so it can only step all parameters in one call; set "
                "the options before the engine is built (in Lightning, in configure_optimizers)."
            )
        self._result = dataclasses.replace(self._result, is_elementwise=found.is_elementwise)
        self._known_settings.append(probed_settings(self.optimizer))

    def _members(self) -> set[nn.Parameter]:
        """The optimizer's parameters; checks them, and probes new options, after changes."""
        members = set(parameters_of(self.optimizer))
        is_known = probed_settings(self.optimizer) in self._known_settings
        if is_known and members == self._known_members:
            return self._known_members
        for parameter in members:
            if not has_placement(parameter):
                raise ValueError(
                    f"{type(self.optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that does not belong to the engine, so its gradient "
                    "would not be averaged. Add parameters to the module before the engine is "
                    "built."
                )
        if not is_known:
            self._probe_again()
        check_full_tensors(self.optimizer, self._result)
        self._known_members = members
        return members


class _Evaluated:
    """Replaces a closure that has been called: returns its loss, once per step."""

    def __init__(self, loss: Any, name: str) -> None:
        self._loss = loss
        self._name = name
        self._is_called = False

    def __call__(self) -> Any:
        if self._is_called:
            raise RuntimeError(
                f"{self._name} calls its closure more than once in a step, but the closure is run "
                "only once, before the step, so that the gradients of all ranks are averaged; use "
                "an optimizer that evaluates the loss once."
            )
        self._is_called = True
        return self._loss


def check_full_tensors(optimizer: Optimizer, found: ProbeResult) -> None:
    """Checks that an optimizer which must step full tensors does not get slices.

    Raises:
        ValueError: One of its parameters is sharded in slices.
    """
    for parameter in [] if found.is_elementwise else parameters_of(optimizer):
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        if not (bucket.replicates_optim or bucket.plan.layout.has_tensor_owners):
            raise ValueError(
                f"{type(optimizer).__name__} must step full tensors, but {placement.name} was "
                "sharded in slices when the engine was built. Give this optimizer all of its "
                "parameters before that (in Lightning, in configure_optimizers)."
            )
