"""The optimizer step: steps this rank's slices with copies of the user's own optimizer.

[Note: One step of the user's optimizer] The optimizer object is kept, and its parameters and states
are never exchanged for what is stepped. `step` of the object runs `OptimizerStep`, between the
user's hooks, so it is correct for every caller: Lightning, a GradScaler, a hand-written loop. It
runs the closure, if any, completes the mean gradients, and then

    for each call:                  chunks of a bucket, several small buckets, or all at once
        load                        values, gradients, states of this rank; the next call's, too
        step the stand-ins          clone.py
        store                       values and states
        all-gather ended buckets    where parameters are replicated; overlaps the next call

An optimizer that counts its calls is called once, with all slices. `probe` determines this.

[Note: Steps that overlap the next forward] With `overlap_step`, a worker thread runs this loop, in
the order in which the next forward needs the buckets. Every use of a bucket waits until the loop
has stepped it (`Bucket.wait_for_step`); access from outside waits for all buckets. The settings of
the optimizer are copied when `step()` is called, and the gradients do not change until the next
backward, which waits, too. So the values are those of a step without overlap.

[Note: Methods of optimizers] Schedule-free optimizers have `train` and `eval`, which exchange what
the parameters are. Both run in the same loop, in one call without gradients, on every rank. Other
methods of a class get the user's parameters and states as they are between steps, sharded.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of, lockstep_of
from lightning_zero.core.coordinator import StepCoordinator
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.step_worker import StepLoop, StepWorker
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State
from lightning_zero.optim.blocks import state_blocks_of
from lightning_zero.optim.chunks import BucketStep, StepCall, calls_of, chunks_of
from lightning_zero.optim.clone import OptimizerClone, parameters_of, raw_step
from lightning_zero.optim.probe import ProbeResult, StepKind, probed_settings
from lightning_zero.optim.state import load_optimizer_state_dict, shard_initial_state
from lightning_zero.optim.state_view import StateView, as_plain_dicts, raise_partial_states
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tiers.storage import Storage

__all__ = ["OptimizerStep", "check_blocks", "check_full_tensors", "check_own_methods"]

_METHODS = ("train", "eval")  # see [Note: Methods of optimizers]


class OptimizerStep:
    """Steps this rank's slices when `step` of the user's optimizer is called.

    Args:
        optimizer: The user's optimizer.
        found: Result of its probe.
        probe: Probes an optimizer again, after its options have changed.
        coordinator: Coordinator of the engine, whose reducer has the buckets and their gradients.
        storage: Stores of the buckets.
        worker: Worker thread for overlapped steps; None: no overlap.

    Attributes:
        optimizer: The user's optimizer.
        is_detached: Whether the optimizer has its own methods again.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        found: ProbeResult,
        *,
        probe: Callable[[Optimizer], ProbeResult],
        coordinator: StepCoordinator,
        storage: Storage,
        worker: StepWorker | None,
    ) -> None:
        self.optimizer = optimizer
        self._result = found
        self._probe = probe
        self._known_settings = [probed_settings(optimizer)]  # settings that have been probed
        self._known_members: set[nn.Parameter] = set()  # parameters that have been checked
        self._coordinator = coordinator
        self._storage = storage
        self._worker = worker if found.kind is StepKind.BY_BUCKET else None  # None: step at once
        self._view = StateView(optimizer.state, self._before_access)
        self.optimizer.state = cast("Any", self._view)
        self.is_detached = False
        self._former_step = vars(optimizer).get("step")  # of a scheduler
        self._replaced = {
            "step": _between_hooks(optimizer, partial(_step, weakref.ref(self))),
            "state_dict": self._state_dict,
            "load_state_dict": self._load_state_dict,
            **{name: partial(self._run_method, name) for name in _METHODS if _has(optimizer, name)},
        }
        vars(optimizer).update(self._replaced)

    def detach(self) -> None:
        """Restores the optimizer's methods; it keeps this rank's slices as states."""
        own = vars(self.optimizer)
        for name, method in self._replaced.items():
            if own.get(name) is method:
                del own[name]
        if self._former_step is not None:
            own.setdefault("step", self._former_step)
        state: Any = self.optimizer.state
        if state is self._view:
            self.optimizer.state = self._view.raw
        self.is_detached = True

    # ---------------------------------------------------------------- states

    def _adopt_state(self) -> None:
        """Shards a dict of states that the user has assigned to `optimizer.state`."""
        state: Any = self.optimizer.state
        if state is not self._view:
            shard_initial_state(self.optimizer)
            self._view.show(state)
            self.optimizer.state = cast("Any", self._view)

    def _before_access(self) -> None:
        """Before states are read or replaced from outside of a step."""
        self._storage.state_offload.check(State.OPTIM)
        self._drain()

    def _state_dict(self) -> dict[str, Any]:
        """Replaces the optimizer's `state_dict`: slices appear as sharded tensors."""
        self._before_access()
        self._adopt_state()
        for bucket in self._own_buckets():
            if bucket.shards.has_tensor_owners and bucket.comm.mesh.num_shards > 1:
                raise_partial_states(f"state_dict() of {type(self.optimizer).__name__}")
        return as_plain_dicts(type(self.optimizer).state_dict(self.optimizer))

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the optimizer's `load_state_dict`: each rank takes its slices of full states."""
        self._before_access()
        self._adopt_state()
        load_optimizer_state_dict(self.optimizer, state_dict)

    @property
    def _reducer(self) -> Reducer:
        return self._coordinator.reducer

    def _own_buckets(self) -> list[Bucket]:
        members = set(parameters_of(self.optimizer))
        order = self._reducer.step_order()
        return [bucket for bucket in order if not members.isdisjoint(bucket.parameters)]

    # ---------------------------------------------------------------- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Replaces the optimizer's `step`. Collective, as in data parallel."""
        optimizer, loss = self.optimizer, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        self._reducer.before_step()
        members = self._members()
        self._adopt_state()
        if self._reducer.guard.skips(optimizer):
            self._reducer.drop_gradients()  # an optimizer that steps later would use the others
            return loss
        buckets = self._buckets_with_grads(members)
        clone = self._clone(closure, loss)
        for some, worker in self._divide(buckets):
            self._step_buckets(clone, some, worker)
        self._after_step(buckets)
        return clone.result if self._is_joint else loss

    def _clone(self, closure: object, loss: Any) -> OptimizerClone:
        """Copy of the optimizer's settings for a step, and the closure that has been called."""
        if not self._is_joint:
            return OptimizerClone(self.optimizer)
        call: Callable[[Optimizer], Any] = raw_step
        if closure is not None:
            call = partial(raw_step, closure=_evaluated(loss, type(self.optimizer).__name__))
        return OptimizerClone(self.optimizer, call, is_joint=True)

    @property
    def _is_joint(self) -> bool:
        return self._result.kind is StepKind.AT_ONCE

    def _buckets_with_grads(self, members: set[nn.Parameter]) -> list[Bucket]:
        """Buckets with a gradient of a parameter of the optimizer, in the order of the step."""
        with torch._C.DisableTorchFunctionSubclass():  # `.grad` of guarded parameters is slow
            with_grad = {parameter for parameter in members if parameter.grad is not None}
        self._reducer.note_stepped(with_grad)
        buckets = self._reducer.step_order()
        has_grads = [not with_grad.isdisjoint(bucket.parameters) for bucket in buckets]
        for bucket in buckets:
            is_member = not members.isdisjoint(bucket.parameters)
            if is_member and bucket.shards.full_tensors is not None:
                # The step is collective, also where one rank alone has dropped its gradients.
                name = type(self.optimizer).__name__
                lockstep_of(bucket.parameters[0]).barrier(f"{name}.step()")
                has_grads = bucket.comm.control.union(has_grads)
                break
        return [bucket for bucket, has_grad in zip(buckets, has_grads, strict=True) if has_grad]

    def _divide(self, buckets: Sequence[Bucket]) -> list[tuple[list[Bucket], StepWorker | None]]:
        """The buckets that are stepped at once, and those that a worker steps.

        The forward of stage 3 communicates, so there the worker does not: the order would differ
        between ranks.
        """
        at_once, overlapped = list[Bucket](), list[Bucket]()
        for bucket in buckets:
            is_local = bucket.params.are_sharded and bucket.shards.full_tensors is None
            is_overlapped = is_local or not self._coordinator.step.shards_params
            (overlapped if self._worker and is_overlapped else at_once).append(bucket)
        return [(at_once, None), (overlapped, self._worker)] if overlapped else [(at_once, None)]

    def _step_buckets(
        self,
        clone: OptimizerClone,
        buckets: Sequence[Bucket],
        worker: StepWorker | None = None,
        *,
        has_grads: bool = True,
    ) -> None:
        """Steps `buckets` in this order. Collective if parameters are replicated, or full tensors.

        Args:
            clone: Copy of the optimizer's settings.
            buckets: Buckets of the optimizer.
            worker: Its thread steps them after this call has returned. None: this call does.
            has_grads: Whether the call uses gradients.
        """
        uses_files = any(bucket.plan.tiers.optim is Tier.NVME for bucket in buckets)
        if buckets and worker is None and (uses_files or clone.is_joint):
            # The worker of another optimizer uses the same buffers; its all-gathers come first.
            buckets[0].wait_for_all_steps()
        steps = [BucketStep(bucket, clone, has_grads=has_grads) for bucket in buckets]
        loop = StepLoop(self._storage.device, steps)
        try:
            work = []
            for step in steps:
                step.bucket.begin_step(loop.add() if worker is not None else None)
                work.append(step.chunks())
            calls = calls_of(work, is_joint=clone.is_joint)
            run = partial(_step_calls, calls, clone, self._storage, loop)
            if worker is not None:
                worker.submit(loop, run)
            else:
                run()
        except BaseException as error:
            loop.fail(error)  # the next run waits for the end of the loop
            self._coordinator.end_run(error)
            raise

    def _after_step(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.sync_aliases()
        self._coordinator.after_step()

    def _drain(self) -> None:
        if self._worker is not None:
            self._worker.drain()

    def read_ahead(self) -> None:
        """Starts to read the files of the next step, as far as buffers are free."""
        buckets = [] if self._is_joint else self._reducer.step_order()
        # Gradients in files are written before the step.
        grad_tiers = {bucket.plan.tiers.grad for bucket in buckets}
        num_files = sum([len(bucket.shards.states.stores) for bucket in buckets])
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
            jobs += [chunk.ranges for chunk in chunks if chunk.files]
        self._storage.pipeline.prefetch(jobs)

    # ---------------------------------------------------------------- other methods

    def _run_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Replaces a method of the optimizer. Collective. See [Note: Methods of optimizers]."""
        buckets = self._own_buckets()
        call = f"{type(self.optimizer).__name__}.{name}()"
        if not buckets:
            return getattr(type(self.optimizer), name)(self.optimizer, *args, **kwargs)
        self._storage.state_offload.check()
        lockstep = lockstep_of(buckets[0].parameters[0])
        lockstep.barrier(call)
        self._drain()
        self._adopt_state()
        method = partial(_call, name, args, kwargs)
        clone = OptimizerClone(self.optimizer, method, is_joint=True)
        self._step_buckets(clone, buckets, has_grads=False)
        self._after_step(buckets)
        return clone.result

    # ---------------------------------------------------------------- changed options and groups

    def _probe_again(self) -> None:
        """Probes the optimizer again, after options were switched on or off or groups changed."""
        found = self._probe(self.optimizer)
        if found.kind is StepKind.AT_ONCE and not self._is_joint:
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
        check_blocks(self.optimizer)
        self._known_members = members
        return members


def _step_calls(
    calls: Sequence[StepCall],
    clone: OptimizerClone,
    storage: Storage,
    loop: StepLoop,
) -> None:
    """The loop of a step. See [Note: One step of the user's optimizer].

    Args:
        calls: Calls of the optimizer, in order.
        clone: Copy of the optimizer's settings.
        storage: Stores of the buckets.
        loop: Counts the buckets that are stepped, for other threads.
    """
    in_files = [call.ranges for call in calls if call.ranges]
    try:
        if in_files:
            storage.pipeline.begin(in_files)
        if not calls:
            clone.step([])  # an optimizer may count its calls
        for call in calls[:1]:
            call.start_load()
        for call, following in zip_longest(calls, calls[1:]):
            if following is not None:
                following.start_load()  # overlaps this call
            buffer: AbstractContextManager[list[Tensor]]
            buffer = storage.pipeline.next_job() if call.ranges else nullcontext([])
            with buffer as views, call.recorded():
                clone.step(call.load(views))
                call.store()
            for bucket in call.ended:
                bucket.end_step()  # issues the all-gather, where parameters are replicated
                loop.advance()
    except BaseException:
        for call in calls:
            call.discard()
        raise
    clone.finish()


def _evaluated(loss: Any, name: str) -> Callable[[], Any]:
    """A closure that returns the loss of one that has been called, once."""
    losses = iter([loss])

    def closure() -> Any:
        for value in losses:
            return value
        raise RuntimeError(
            f"{name} calls its closure more than once in a step, but the closure is run only once, "
            "before the step, so that the gradients of all ranks are averaged; use an optimizer "
            "that evaluates the loss once."
        )

    return closure


def _call(name: str, args: Any, kwargs: Any, optimizer: Optimizer) -> Any:
    return getattr(type(optimizer), name)(optimizer, *args, **kwargs)


def _has(optimizer: Optimizer, name: str) -> bool:
    return callable(getattr(type(optimizer), name, None))


def _step(
    attached: weakref.ref[OptimizerStep],
    optimizer: Optimizer,
    closure: Callable[[], Any] | None = None,
    **others: Any,
) -> Any:
    """Calls `OptimizerStep.step`, or after the end of the engine the step of the class.

    A scheduler that was made in between keeps this function in its wrapper.

    Raises:
        TypeError: There are other arguments than a closure.
    """
    step = attached()
    if step is None or step.is_detached:
        given = {} if closure is None else {"closure": closure}
        return raw_step(optimizer, **given, **others)
    if others:
        raise TypeError(
            f"{type(optimizer).__name__}.step() takes only a closure while an engine steps it, got "
            f"{', '.join(others)}; set options in param_groups instead."
        )
    return step.step(closure)


def check_own_methods(optimizer: Optimizer) -> None:
    """Checks that the methods that the engine replaces are those of the class, or a scheduler's.

    Raises:
        ValueError: One has been replaced, and the engine would not call the replacement.
    """
    state: Any = optimizer.state
    if isinstance(state, StateView):
        return  # another engine has replaced them, which is an error of its own
    for name in ("step", "state_dict", "load_state_dict", *_METHODS):
        former = vars(optimizer).get(name)
        if former is not None and not hasattr(former, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"{type(optimizer).__name__}.{name} has been replaced by "
                f"{getattr(former, '__qualname__', former)} before the engine was built, which "
                "would not call it any more; replace it afterwards, or override it in a subclass."
            )


def _between_hooks(optimizer: Optimizer, run: Callable[..., Any]) -> MethodType:
    """A method that calls `run(optimizer, closure)` between the hooks of `optimizer.step`."""
    former = vars(optimizer).get("step")
    hooked = functools.update_wrapper(Optimizer.profile_hook_step(run), type(optimizer).step)
    marks = {key: value for key, value in vars(former or run).items() if key != "__wrapped__"}
    vars(hooked).update(marks)
    return MethodType(hooked, optimizer)


def check_full_tensors(optimizer: Optimizer, found: ProbeResult) -> None:
    """Checks that an optimizer which must step full tensors does not get slices.

    Raises:
        ValueError: One of its parameters is sharded in slices.
    """
    for parameter in [] if found.is_elementwise else parameters_of(optimizer):
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        if not (bucket.shards.replicates_optim or bucket.plan.layout.has_tensor_owners):
            raise ValueError(
                f"{type(optimizer).__name__} must step full tensors, but {placement.name} was "
                "sharded in slices when the engine was built. Give this optimizer all of its "
                "parameters before that (in Lightning, in configure_optimizers)."
            )


def check_blocks(optimizer: Optimizer) -> None:
    """Checks that shards begin with a block if the optimizer's states have blocks.

    Raises:
        ValueError: One of its parameters was not of this optimizer when the engine was built.
    """
    blocks = state_blocks_of(optimizer)
    for parameter in parameters_of(optimizer) if blocks.keys else []:
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        if not bucket.shards.has_tensor_owners and bucket.plan.blocks != blocks:
            raise ValueError(
                f"{type(optimizer).__name__} has states of blocks, which no shard may divide, but "
                f"the engine was built without it for {placement.name}. Give this optimizer all of "
                "its parameters, and the engine this optimizer, before that (in Lightning, in "
                "configure_optimizers; in Fabric, with setup(module, optimizer))."
            )
