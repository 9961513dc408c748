"""What surrounds the verbs of a step: begin and end of forwards, backwards and runs on this rank.

The verbs are those of `Step`, see [Note: A step] in step.py. An exception ends a *run*, and the
next use begins another with the same shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.compiling import GradHider
from lightning_zero.core.first_use import FirstUse
from lightning_zero.core.guard import NonfiniteGuard
from lightning_zero.core.order import CollectiveOrder
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.shared_buffers import SharedBuffers
from lightning_zero.core.step import Step
from lightning_zero.core.unit import Unit
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.stage import State
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.guarded import (
    BetweenStepsError,
    has_placement,
    has_unmanaged_parameters,
)

__all__ = ["StepCoordinator", "TrainingState"]


class TrainingState(Enum):
    """State of the training loop."""

    IDLE = "between steps"
    FORWARD = "in forward"
    BACKWARD = "in backward"


class StepCoordinator:
    """Begins and ends forwards, backwards and runs; the hooks and the training loop call it.

    Args:
        module: The sharded module.
        units: All units, the root first.
        buckets: All buckets, in layout order.
        comm: Communicator of all ranks.
        config: The engine's settings.
        begin_next_run: Begins a run after an exception has ended the last. Collective.
        broadcasts_every_forward: Whether buffers are copied from rank 0 before every forward. If
            not, only when the training loop begins a step, and once before.

    Attributes:
        units: All units, the root first.
        step: The verbs of a step, which hooks call.
        guard: Looks at gradients before they are reduced.
        shared: Buffers that are copied from rank 0.
        first_use: Waits of modules for parameters that were all-gathered after a step.
        is_accumulating: Whether the next forwards are of micro-batches that end no step.
    """

    _depth: int  # of nested `open` calls: the strategy's, the root module's

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        comm: Communicator,
        config: ZeroConfig,
        begin_next_run: Callable[[], None],
        *,
        broadcasts_every_forward: bool = True,
    ) -> None:
        self.units = list(units)
        self.guard = NonfiniteGuard(buckets, comm, config)
        self._stop_request: Callable[[], int | None] = lambda: None
        self.is_accumulating = False
        self._module = module
        self._buckets = list(buckets)
        self._comm = comm
        self._recorder = comm.recorder
        self._config = config
        self._state_offload = buckets[0].shards.storage.state_offload
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self.shared = SharedBuffers(module, comm, is_on=config.broadcast_buffers)
        self.first_use = FirstUse(module, buckets)
        self._broadcasts_every_forward = broadcasts_every_forward
        self._grad_hider = GradHider(self._buckets)
        self.step = Step(units, config, comm.recorder, begin_next_run, self.begin_pass)
        self.ensure_run = self.step.ensure_run
        self.begin_run()
        comm.control.watchdog.set_status_source(self._describe)

    @property
    def training_state(self) -> TrainingState:
        """State of the training loop, as far as all ranks are known to share it."""
        if self.step.is_in_backward:
            return TrainingState.BACKWARD
        return TrainingState.FORWARD if self._depth or self._awaits_backward else TrainingState.IDLE

    @property
    def is_in_step(self) -> bool:
        """Whether code of a step runs: the module's forward, or a backward."""
        return self._depth > 0 or self.step.is_in_backward

    @property
    def _awaits_backward(self) -> bool:
        """Whether a forward with gradients has run, and its pass is still open on all ranks."""
        is_open = self.step.order.is_training or not self.step.shards_params
        return self.step.has_forward and is_open

    def _describe(self) -> str:
        """The training state as text for reports. Called from any thread."""
        state = self.training_state
        in_pass = state in (TrainingState.FORWARD, TrainingState.BACKWARD)
        if in_pass and self.step.last_used:
            return f"{state.value} of {self.step.last_used}"
        return state.value

    # ---------------------------------------------------------------- begin and end of a forward

    def open(self, *, is_step: bool = False) -> None:
        """Begins a step or a part of one: unshards the root, copies rank 0's buffers.

        `is_step`: whether the training loop begins a step, and not a call of the module itself.

        Raises:
            RuntimeError: A write to an entry of a state dict would be lost.
        """
        self.ensure_run()
        self._state_offload.check(State.PARAM)
        if not self.is_in_step and (lost := self.find_lost_write()) is not None:
            raise lost
        self._depth += 1
        self.step.remember_graph()
        if self._depth > 1 or self.step.is_in_backward:
            return
        self._recorder.begin_phase(Kind.FORWARD)
        self._grad_hider.watch()
        self.compare_assigned()
        copies = is_step or self._broadcasts_every_forward or not self.shared.were_copied
        order = self.step.order
        if copies and self.shared.is_due and self.step.shards_params and order.is_training:
            # In the middle of a pass, other ranks might still request an all-gather from this rank.
            order.barrier("the buffers of rank 0")
        self.begin_pass()
        self.prepare(copies_buffers=copies)
        if copies:
            # A forward in training may change them (BatchNorm), whether a backward follows or not.
            self.shared.note_forward(
                may_change=not self.is_accumulating and torch.is_grad_enabled()
            )
        self.step.unshard_for_step()
        for unit in self.units:
            if unit.stays_unsharded:
                unit.note_graph()

    def begin_pass(self) -> None:
        """Begins a pass with all ranks, if this forward has any collective."""
        self._state_offload.check(State.PARAM)
        order, reducer, shards_params = self.step.order, self.step.reducer, self.step.shards_params
        reducer.set_ends_step(not self.is_accumulating)
        if order.is_training:
            return  # one more forward before its backward
        if not torch.is_grad_enabled():
            if shards_params:
                order.begin("a forward")
        elif shards_params or reducer.has_stepped:
            # Without sharded parameters, only a forward after a step waits for all-gathers.
            if self.is_accumulating:
                order.note("a micro-batch that ends no step")
            order.begin("a forward and its backward", reducer.trainable())

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context of forwards of micro-batches that end no step."""
        was_accumulating, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = was_accumulating

    def find_lost_write(self) -> RuntimeError | None:
        """An error if an entry of a state dict was changed in place. Local."""
        watching = [bucket.writes for bucket in self._buckets if bucket.writes.copies]
        errors = [writes.find_lost_write() for writes in watching]
        return next((error for error in errors if error is not None), None)

    def compare_assigned(self) -> None:
        """Before a pass: notes assigned `parameter.data` for the consistency check. Local."""
        for bucket in self._buckets:
            for name in bucket.writes.take_assigned():
                self.step.order.note(f"parameter.data of {name}")

    def prepare(self, *, copies_buffers: bool = True) -> None:
        """The other collectives before the first forward after a step. Collective."""
        self.ensure_run()
        if copies_buffers and self.shared.is_due and self.step.order.current is not None:
            self.step.order.wait_for_begin()  # else other ranks might still request an all-gather
        self._state_offload.check(State.PARAM)
        self.first_use.begin_forward()
        for bucket in self._buckets:
            bucket.params.sync_writes(reads_all=False)
            bucket.free_zeroed()
        if copies_buffers:
            self.shared.refresh()

    def close(self) -> None:
        """Ends `open`. Reshards all units unless a backward follows."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self.step.is_in_backward:
            return
        self.first_use.end_forward()
        self._recorder.begin_phase(None)
        if not torch.is_grad_enabled() or not self._awaits_backward:
            self.step.reshard_all()

    def after_step(self) -> None:
        """After the step of an optimizer. With manual optimization, code of the root follows."""
        if self._depth:
            self.first_use.wait_as_root()

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Context of one step of the training loop. An exception ends the run."""
        self.ensure_run()
        self._state_offload.check(State.PARAM)
        depth = self._depth
        try:
            self.open(is_step=True)
            yield
        except BaseException as error:
            if not depth:
                self.end_run(error)
            elif self._depth > depth:
                self.close()  # it has not left the step yet
            raise
        self.close()

    def root_post_forward(self, error: BaseException | None) -> None:
        """After a call of the root module, which `open` began.

        `error`: what it has raised; None: nothing.
        """
        if error is not None and self._depth == 1 and not self.step.is_in_backward:
            self.end_run(error)
        else:
            self.close()

    # ---------------------------------------------------------------- use outside of the forward

    def keep_unsharded(self, unit: Unit, reason: str) -> None:
        """Keeps `unit` unsharded from the beginning to the end of every step, from now on."""
        if not unit.stays_unsharded and self._comm.rank == 0:
            warnings.warn(
                f"{reason}; its {unit.numel} elements stay unsharded throughout each step.",
                stacklevel=2,
            )
        unit.keep_unsharded()

    def unshard_out_of_order(self, bucket: Bucket, name: str) -> None:
        """Unshards `bucket` because parameter `name` is used outside its unit's forward.

        Raises:
            BetweenStepsError: Outside of a step, where ranks may not use parameters together.
        """
        self.ensure_run()
        if self.training_state is TrainingState.IDLE and not self.step.order.allows_uneven_calls:
            raise BetweenStepsError(
                f"parameter {name} is sharded over {self._comm.mesh.num_shards} ranks outside "
                "forward and backward. To compute with it, for example by calling a part of the "
                "module, do so on every rank inside a call of the top-level module, inside "
                "Lightning's training_step or a similar hook, or inside `with "
                "engine.forward_context():`.\n"
                "To read or change it, use torch.no_grad() on every rank, or enter `with "
                "lightning_zero.gathered(module):` on every rank (`writeback=True` to change it) "
                "and read it there on any rank. To run forwards on some ranks only, enter `with "
                "lightning_zero.uneven_calls(module):` on every rank."
            )
        unit = self._unit_of[bucket]
        self.keep_unsharded(unit, f"parameter {name} is used outside its module's forward")
        self.step.remember_graph()
        self.step.unshard(unit)
        unit.note_graph()

    # ---------------------------------------------------------------- backward

    @contextmanager
    def backward_context(self, *, ends_step: bool, retain_graph: bool = False) -> Iterator[None]:
        """Context of `loss.backward()`. Without `ends_step`, gradients stay local if unsharded."""
        self.ensure_run()
        self._state_offload.check(State.PARAM, State.GRAD)
        try:
            if not self.step.reducer.is_mid_step:  # once per step: it checks every parameter
                _check_all_hooked(self._module)
            self.first_use.begin_backward()
            self._recorder.begin_phase(Kind.BACKWARD)
            self.step.begin_backward(ends_step=ends_step, retain_graph=retain_graph)
            yield
            self.first_use.end_backward()
            self.step.finalize_backward()
            self._recorder.begin_phase(Kind.FORWARD if self._depth else None)
            self.step.reducer.report_nonfinite()
        except BaseException as error:
            self.end_run(error)
            raise

    # ---------------------------------------------------------------- runs

    def end_run(self, error: BaseException) -> None:
        """Ends the run because an exception has left a step; the next use begins another. Local.

        The other ranks learn of it, and raise an error, too.
        """
        if self.step.ended_by is None:
            self.step.end_run(error)
            self._depth = 0
            self._recorder.discard_open_spans()
            self._comm.abort(error)

    def begin_run(self) -> None:
        """Makes the state of a run: no pass is open, and nothing is recorded. Local."""
        config = self._config
        order = CollectiveOrder(
            self._comm.control,
            self.step,
            numels=[unit.numel for unit in self.units],
            num_buckets=len(self._buckets),
            names=[slot.name for bucket in self._buckets for slot in bucket.plan.layout.slots],
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
            stop_request=lambda: self._stop_request(),
        )
        self.guard.begin_run()
        self.step.begin_run(
            order,
            Reducer(self._buckets, order, self._comm, config, self.guard),
        )
        self._depth = 0

    def set_stop_request(self, stop_request: Callable[[], int | None]) -> None:
        """Sets the function that returns this rank's stop request; see `CollectiveOrder`. Local."""
        self._stop_request = stop_request

    def dropped_gradients(self) -> list[str]:
        """On rank 0, a warning if the next run drops gradients of earlier backwards. Local."""
        if self._comm.rank or not self.step.reducer.has_unstepped_gradients:
            return []
        return ["the gradients of this step so far were dropped; begin it anew"]

    @property
    def order(self) -> CollectiveOrder:
        """The collective order of all ranks, in a run: see `ensure_run`."""
        self.ensure_run()
        return self.step.order

    @property
    def reducer(self) -> Reducer:
        """Reduces the gradients, in a run."""
        self.ensure_run()
        return self.step.reducer


def _check_all_hooked(module: nn.Module) -> None:
    """Raises for a trainable parameter that was added to `module` after its hooks."""
    with torch._C.DisableTorchFunctionSubclass():  # guarded parameters would be slow
        if not has_unmanaged_parameters(module):
            return
        for name, parameter in module.named_parameters():
            if not has_placement(parameter) and parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was added to the module after the engine was built, so its "
                    "gradient would not be averaged. Add it earlier (in Lightning, in "
                    "configure_model or setup), or write into the parameter that it replaces: "
                    "parameter.data = values."
                )
