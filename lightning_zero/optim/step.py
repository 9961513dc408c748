"""The optimizer step: the user's own optimizer, on this rank's slices, bucket by bucket.

[Note: One step of the user's optimizer] The optimizer object is kept as it is; a pre-hook and a
post-hook do the work, so that `optimizer.step()` is right whoever calls it: Lightning, a
GradScaler, a hand-written loop. The pre-hook runs a closure first (parameters must be whole in it),
then steps bucket after bucket with stand-ins (clone.py), small ones together: the gather of a
stepped bucket travels while the next one is stepped, and what rests in files or in other memory is
on its way before its step. The body that follows finds no gradients and does nothing. An optimizer
that counts calls in its groups cannot be called once for each bucket; it runs its body once over
all of them instead. `probe` finds out which kind an optimizer is.

[Note: Steps beside the next forward] With `overlap_step` a worker runs the same loop over buckets,
in the order in which the next forward needs them. Every use of a bucket waits until the loop has
passed its number (`Bucket.wait_for_step`), and whoever looks from outside waits for all.
The settings of the optimizer are taken when `step()` is called, the gradients stay as they are
until the next backward, which waits too: the values are those of a step that nothing overlaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.world import failing_together
from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.step_worker import StepLoop, StepWorker
from lightning_zero.layout.offload import Tier
from lightning_zero.optim.chunks import BucketStep, ChunkStep, chunks_of, step_chunks
from lightning_zero.optim.clone import (
    OptimizerClone,
    is_device_scalar,
    parameters_of,
    scalars_to_cpu,
)
from lightning_zero.optim.methods import ElementwiseOnly, NoGradientAccess, wrap_methods
from lightning_zero.optim.probe import ProbeResult, StepKind
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

__all__ = ["MAX_NUMEL_PER_CALL", "OptimizerStep", "check_full_tensors"]

# Elements that one call steps, by type of device; one bucket may have more. On a CPU a step takes
# longer than the call, and gathers travel meanwhile.
MAX_NUMEL_PER_CALL = {"cuda": 2**25}


class OptimizerStep:
    """Runs the user's optimizer on the slices of this rank, from hooks on its `step`."""

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
        self._view: Any = StateView(optimizer.state, self._drain)
        self._kind = found.kind
        self._result = found
        self._probe = probe
        self._known_settings = [_settings_of(optimizer)]  # with which it has been looked at
        self._known_members: set[nn.Parameter] = set()  # that have been looked at
        self._reducer = reducer
        self._stepping: list[Bucket] = []
        self._storage = storage
        self._worker = worker if found.kind is StepKind.BY_BUCKET else None  # None: step at once
        # By setting that is on the CPU for this step: group, key, the user's number, its copy.
        self._brought: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._depth = 0  # a subclass's step may call its parent's, which calls hooks too
        self._is_inside = self._is_inside_bucket = self._is_detached = False
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_hook),
            optimizer.register_step_post_hook(self._post_hook),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(as_plain_dicts),
            optimizer.register_load_state_dict_pre_hook(self._drain),
        ]
        self._wrapped = [*wrap_methods(optimizer, self._run_method), "load_state_dict"]
        optimizer.__dict__["load_state_dict"] = self._load_state_dict
        self._install_state_view()

    def reset(self) -> None:
        """After an exception, which may have come between the two hooks."""
        self._is_inside = self._is_inside_bucket = False
        self._depth = 0
        self._stepping = []
        self._restore_scalars()
        if not self._is_detached:
            self._install_state_view()

    def detach(self) -> None:
        """The optimizer steps by itself again; its states are this rank's parts."""
        for handle in self._handles:
            handle.remove()
        for name in self._wrapped:
            self.optimizer.__dict__.pop(name, None)
        if self.optimizer.state is self._view:
            self.optimizer.state = raw_states(self.optimizer)
        self._is_detached = True

    # ---------------------------------------------------------------- what users see

    def _uninstall_state_view(self) -> None:
        """`optimizer.state` is the plain dict. See [Note: State view]."""
        state: Any = self.optimizer.state
        if state is not self._view and state is not self._view.raw:  # a user has put it there
            shard_initial_state(self.optimizer)
            self._view.raw = self.optimizer.state
        self.optimizer.state = self._view.raw

    def _install_state_view(self) -> None:
        """`optimizer.state` shows sharded tensors."""
        if self.optimizer.state is not self._view:
            self._view.raw = self.optimizer.state
            self.optimizer.state = self._view

    def _before_state_dict(self, *_: Any) -> None:
        self._drain()
        if self.optimizer.state is not self._view:
            return  # the engine asks, or the optimizer in its step
        for bucket in self._own_buckets():
            if bucket.shards.has_tensor_owners and bucket.comm.mesh.num_shards > 1:
                raise_partial_states(f"state_dict() of {type(self.optimizer).__name__}")

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In the place of the optimizer's: each rank takes its own part of whole states."""
        self._drain()
        if self.optimizer.state is self._view:
            load_optimizer_state_dict(self.optimizer, self._own_buckets(), state_dict)
        else:  # called by that function, with this rank's parts
            type(self.optimizer).load_state_dict(self.optimizer, state_dict)

    def _own_buckets(self) -> list[Bucket]:
        members = set(parameters_of(self.optimizer))
        order = self._reducer.step_order()
        return [bucket for bucket in order if not members.isdisjoint(bucket.parameters)]

    # ---------------------------------------------------------------- other methods

    def _run_method(
        self, name: str, method: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a method of the optimizer as `step` runs. See [Note: Methods of optimizers]."""
        buckets = [] if self._is_inside or self._is_detached else self._own_buckets()
        if not buckets:
            return method(*args, **kwargs)
        call = f"{type(self.optimizer).__name__}.{name}()"
        lockstep = buckets[0].lockstep
        lockstep.barrier(call)
        self._drain()
        self._uninstall_state_view()
        self._is_inside = True
        self._stepping = buckets
        try:
            with failing_together(f"run {call}", lockstep.gather_objects), self._on_parts(call):
                result = method(*args, **kwargs)
        finally:
            self._leave()
        return result

    @contextmanager
    def _on_parts(self, call: str) -> Iterator[None]:
        """Inside, parameters and states are what this rank steps; uses of more are refused."""
        members = parameters_of(self.optimizer)
        for bucket in self._stepping:
            bucket.masters.enter_step(has_grads=False)
            if bucket.shards.keeps_states_in_files:
                swap_in_states(self.optimizer, bucket)
        parts: dict[bool, list[Tensor]] = {False: [], True: []}  # by whether they are slices
        for bucket in self._stepping:
            if bucket.replicates_optim:
                continue
            for parameter in bucket.parameters:
                states = plain_tensors(raw_states(self.optimizer).get(parameter, {}))
                known = [value for value in states if value.dim()]
                parts[is_sliced(bucket)] += [parameter.data, *known]
        with NoGradientAccess(members, call), ElementwiseOnly(parts[True], parts[False], call):
            yield

    def _leave(self) -> None:
        """Ends what has begun with all of `_stepping` at their masters; gathers what was stepped.

        Collective.
        """
        stepped, self._stepping = self._stepping, []
        self._is_inside = False
        for bucket in stepped:
            bucket.masters.leave_step(is_changed=True)
            if bucket.shards.keeps_states_in_files:
                swap_out_states(self.optimizer, bucket)
        for bucket in stepped:
            bucket.sync_aliases()
        for parameter in (p for bucket in stepped for p in bucket.parameters):
            check_sliced_states(self.optimizer, parameter)
        self._install_state_view()

    # ---------------------------------------------------------------- around a closure

    def _begin_around(self, closure: object) -> Callable[[], Any]:
        """Parameters are at their masters until the optimizer calls its closure, and after it.

        Returns the closure to be called in the place of `closure`. Before it no gradients are
        shown: they are those of the step before.
        """
        if not callable(closure):
            raise TypeError(
                f"{type(self.optimizer).__name__} needs a closure: call optimizer.step(closure), "
                "where closure() runs the forward and the backward and returns the loss. A loss "
                "scaler (16-mixed) calls step() without one."
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
        for bucket in self._stepping:
            bucket.masters.enter_step(has_grads=has_grads)

    # ---------------------------------------------------------------- the step

    def _pre_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_inside:
            self._depth += 1
            return None
        # torch counts the optimizer itself among the arguments.
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
        members = self._members()  # an error leaves the states shown
        self._uninstall_state_view()
        with torch._C.DisableTorchFunctionSubclass():  # guarded ones would take their time
            self._stepping = [
                bucket
                for bucket in self._reducer.step_order()
                if any(p.grad is not None and p in members for p in bucket.parameters)
            ]
        self._is_inside = True
        if self._kind is StepKind.BY_BUCKET:
            self._is_inside_bucket = True
            try:
                self._step_by_bucket()
            except BaseException:
                self._is_inside = False
                self._install_state_view()
                raise
            finally:
                self._is_inside_bucket = False
            with torch._C.DisableTorchFunctionSubclass():
                for parameter in (p for bucket in self._stepping for p in bucket.parameters):
                    parameter.grad = None  # the body finds none and does nothing
        else:
            for bucket in self._stepping:
                bucket.masters.enter_step()
            self._move_scalars()
            self._storage.recorder.begin_layer(Kind.STEP, type(optimizer).__name__)
        return args, kwargs

    def _move_scalars(self) -> None:
        """Settings, and what a loss scaler lends. See [Note: Numbers on their way]."""
        first = (bucket.parameters[0] for bucket in self._stepping)  # they point at masters
        if all(parameter.device.type != "cpu" for parameter in first):
            return
        own = self.optimizer.__dict__
        names = own.keys() & {"grad_scale", "found_inf"}
        own.update(scalars_to_cpu({name: own[name] for name in names}))
        for group in self.optimizer.param_groups:
            numbers = {key: value for key, value in group.items() if is_device_scalar(value)}
            copies = scalars_to_cpu(numbers)
            group.update(copies)
            self._brought += [(group, key, numbers[key], copies[key]) for key in numbers]

    def _restore_scalars(self) -> None:
        """The settings are the user's own tensors again, with what has become of them."""
        for group, key, number, copy in self._brought:
            if group.get(key) is copy:  # else the step has set it anew
                if copy._version:
                    number.copy_(copy)
                group[key] = number
        self._brought = []

    def _post_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_inside_bucket:
            return
        if self._depth:
            self._depth -= 1
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
        self._install_state_view()

    def _step_by_bucket(self) -> None:
        clone = OptimizerClone(self.optimizer)
        steps = [BucketStep(bucket, clone) for bucket in self._stepping]
        loop = StepLoop(self._storage.device, steps)
        work: list[list[ChunkStep]] = []
        try:
            for step in steps:
                step.bucket.begin_step(loop.add() if self._worker is not None else None)
                work.append(step.chunks())
            run = partial(self._run, loop, list(self._stepping), work)
            if self._worker is not None:
                self._worker.submit(loop, run)
            else:
                run()
        except BaseException as error:
            loop.fail(error)  # nobody else will: a reset waits for it
            raise

    def _drain(self, *_: Any) -> None:
        if self._worker is not None:
            self._worker.drain()

    def _run(
        self, loop: StepLoop, buckets: Sequence[Bucket], work: Sequence[Sequence[ChunkStep]]
    ) -> None:
        """Steps every bucket; it has been stepped when its last writes have begun."""

        def end_before(number: int) -> None:
            for bucket in buckets[loop.num_stepped : number]:
                bucket.end_step()
                loop.advance()

        calls = list(_calls(work))
        in_files: list[Task] = []
        in_memory: list[Callable[[], object]] = []  # run with the next job that needs a buffer
        in_memory += [step.start_load for _, steps in calls[:1] for step in steps]
        for call, (number, steps) in enumerate(calls, start=1):
            in_memory.append(partial(end_before, number))
            in_memory += [
                step.start_load for _, others in calls[call : call + 1] for step in others
            ]
            if steps[0].chunk.files:
                in_files.append(Task(steps[0].chunk.ranges, partial(_run_all, in_memory, steps)))
                in_memory = []
            else:
                in_memory.append(partial(step_chunks, steps, []))
        if in_files:
            self._storage.pipeline.run(in_files)
        for run in in_memory:
            run()
        end_before(len(buckets))

    def read_ahead(self) -> None:
        """Begins to read what the next step will need, as far as there are buffers for it."""
        buckets = self._reducer.step_order() if self._kind is StepKind.BY_BUCKET else []
        # Gradients in files are written before the step.
        has_grads = any(bucket.plan.tiers.grad is Tier.NVME for bucket in buckets)
        if has_grads or not any(bucket.shards.state_stores for bucket in buckets):
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
        """At an optimizer with other parameters, or with options that were on or off before."""
        found = self._probe(self.optimizer)
        if found.kind is StepKind.AT_ONCE and self._kind is StepKind.BY_BUCKET:
            raise ValueError(
                f"{type(self.optimizer).__name__} counts its steps since its options were changed, "
                "so it can only step all parameters in one call; set them before the engine is "
                "built (in Lightning, in configure_optimizers)."
            )
        self._result = dataclasses.replace(self._result, is_elementwise=found.is_elementwise)
        self._known_settings.append(_settings_of(self.optimizer))

    def _members(self) -> set[nn.Parameter]:
        """The optimizer's parameters; it is looked at where they or its options have changed."""
        members = set(parameters_of(self.optimizer))
        is_known = _settings_of(self.optimizer) in self._known_settings
        if is_known and members == self._known_members:
            return self._known_members
        for parameter in members:
            if not has_placement(parameter):
                raise ValueError(
                    f"{type(self.optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that the engine does not: its gradient would not be "
                    "averaged. Add parameters to the module before the engine is built."
                )
        if not is_known:
            self._probe_again()
        check_full_tensors(self.optimizer, self._result)
        self._known_members = members
        return members


def _settings_of(optimizer: Optimizer) -> list[Any]:
    """What may decide what it looks at: not how large a number is, but whether it is zero."""
    return [
        len(group["params"]) if key == "params" else _choice_of(value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in ("lr", "initial_lr", "param_names")
    ]


def _choice_of(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return bool(value)
    if isinstance(value, (list, tuple)):
        return [_choice_of(part) for part in value]
    return value if isinstance(value, (str, type(None))) else type(value)


class _Evaluated:
    """In place of a closure that has been called: returns its loss, once in a step."""

    def __init__(self, loss: Any, name: str) -> None:
        self._loss = loss
        self._name = name
        self._is_called = False

    def __call__(self) -> Any:
        if self._is_called:
            raise RuntimeError(
                f"{self._name} calls its closure more than once in a step, and it is run once, "
                "before the step, so that the gradients of all ranks are averaged; use an "
                "optimizer that evaluates the loss once."
            )
        self._is_called = True
        return self._loss


def check_full_tensors(optimizer: Optimizer, found: ProbeResult) -> None:
    """Refuses, by a ValueError, an optimizer that would step slices as if they were tensors."""
    for parameter in [] if found.is_elementwise else parameters_of(optimizer):
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        if not (bucket.replicates_optim or bucket.plan.layout.has_tensor_owners):
            raise ValueError(
                f"{type(optimizer).__name__} must step whole tensors, and {placement.name} was "
                "cut when the engine was built: nothing asked for it whole. Give this "
                "optimizer all of its parameters before that (in Lightning, in "
                "configure_optimizers)."
            )


def _calls(work: Sequence[Sequence[ChunkStep]]) -> Iterator[tuple[int, list[ChunkStep]]]:
    """What each call of the optimizer steps, with the number of its first bucket.

    A call costs a millisecond of Python, so small buckets on a device have one together.
    """
    first, steps, numel = 0, list[ChunkStep](), 0
    for number, step in ((n, step) for n, of_bucket in enumerate(work) for step in of_bucket):
        own_numel = step.chunk.stop - step.chunk.start
        numel += own_numel
        is_alike = bool(steps) and steps[0].of.device == step.of.device
        is_much = numel > MAX_NUMEL_PER_CALL.get(step.of.device.type, 0)
        if not is_alike or is_much or steps[0].chunk.files or step.chunk.files:
            if steps:
                yield first, steps
            first, steps, numel = number, [], own_numel
        steps.append(step)
    if steps:
        yield first, steps


def _run_all(
    before: Sequence[Callable[[], object]], steps: Sequence[ChunkStep], views: list[Tensor]
) -> None:
    for run in before:
        run()
    step_chunks(steps, views)
