"""Coordinates a step on this rank: when units are unsharded and resharded, and buckets reduced.

[Note: Streams] core/order.py explains in which order all-gathers and reductions are issued, and
why no rank hangs. On this rank:

* An all-gather is issued on a side stream, after everything queued on the compute stream, which
  allocated the buffer. The compute stream waits for it in `wait_for_unshard`, before the first use.
  So a buffer is written only after its previous use, and read only after its all-gather.
* A reduction is issued in the same way, on a side stream of its own, once the last gradient of a
  bucket is queued. It is finished before the next reduction is issued: at most two unsharded
  gradient buffers exist at a time.
* Buffers are freed on the compute stream, after it has waited for the collective that used them. A
  pending collective keeps its tensors alive.
* The forward after a step waits for the all-gather of a bucket when one of its parameters is first
  used.
* The average of a reduced shard over replicas is issued when the reduction is finished, in the same
  order on every rank. A rank waits for it only after all ranks have ended their backward, and so
  have issued it. Nothing writes to that shard in the meantime. It takes no memory of its own.
* Where parameters are sharded within groups of ranks, an all-gather moves data within a group only,
  but the order is that of all ranks: averages over replicas, and failures, concern all of them.

[Note: What an all-gather waits for] On the host, before it is issued: for its turn in the
collective order, so for the reductions before it in the recorded schedule, or without one for a
round of all ranks (core/order.py); for the worker that steps its bucket
(`Bucket.wait_for_step`); if its shard is in a file, for the read and a free buffer
(`ParamReader`). After it is issued: on gloo, `wait_for_unshard` waits for the peers' data. On CUDA
the host does not wait; the all-gather's stream waits for the compute stream and for the copy of a
shard from CPU memory, and its kernel for the peers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import nn
from torch.profiler import record_function

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.compiling import GradHider
from lightning_zero.core.first_use import FirstUse
from lightning_zero.core.guard import NonfiniteGuard
from lightning_zero.core.order import CollectiveOrder
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.shared_buffers import SharedBuffers
from lightning_zero.core.unit import Call, Unit, Unsharder
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
    """Runs each moment of a step: the hooks of the module and the training loop call its methods.

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
        guard: Looks at gradients before they are reduced.
        shared: Buffers that are copied from rank 0.
        first_use: Waits of modules for parameters that were all-gathered after a step.
        is_accumulating: Whether the next forwards are of micro-batches that end no step.
    """

    _ended_by: BaseException | None  # what has ended the run; None: it goes on
    _order: CollectiveOrder
    _unsharder: Unsharder
    _reducer: Reducer
    _retain_graph: bool  # the backward in progress keeps its graph
    _has_forward: bool  # one with gradients, since the last backward
    _depth: int  # of nested `open` calls: the strategy's, the root module's
    _is_in_backward: bool

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
        self._begin_next_run = begin_next_run
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
        self._last_used = ""  # name of the unit whose forward or backward began last
        self.begin_run()
        comm.control.watchdog.set_status_source(self._describe)

    @property
    def training_state(self) -> TrainingState:
        """State of the training loop, as far as all ranks are known to share it."""
        if self._is_in_backward:
            return TrainingState.BACKWARD
        return TrainingState.FORWARD if self._depth or self._awaits_backward else TrainingState.IDLE

    @property
    def is_in_step(self) -> bool:
        """Whether code of a step runs: the module's forward, or a backward."""
        return self._depth > 0 or self._is_in_backward

    @property
    def _awaits_backward(self) -> bool:
        """Whether a forward with gradients has run, and its pass is still open on all ranks."""
        return self._has_forward and (self._order.is_training or not self._unsharder.is_needed)

    def _describe(self) -> str:
        """The training state as text for reports. Called from any thread."""
        state = self.training_state
        in_pass = state in (TrainingState.FORWARD, TrainingState.BACKWARD)
        if in_pass and self._last_used:
            return f"{state.value} of {self._last_used}"
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
        self._has_forward |= torch.is_grad_enabled()
        if self._depth > 1 or self._is_in_backward:
            return
        self._recorder.begin_phase(Kind.FORWARD)
        self._grad_hider.watch()
        self.compare_assigned()
        copies = is_step or self._broadcasts_every_forward or not self.shared.were_copied
        if copies and self.shared.is_due and self._unsharder.is_needed and self._order.is_training:
            # In the middle of a pass, other ranks might still request an all-gather from this rank.
            self._order.barrier("the buffers of rank 0")
        self.begin_pass()
        self.prepare(copies_buffers=copies)
        if copies:
            # A forward in training may change them (BatchNorm), whether a backward follows or not.
            self.shared.note_forward(
                may_change=not self.is_accumulating and torch.is_grad_enabled()
            )
        self._unsharder.unshard_for_step()
        for unit in self.units:
            if unit.stays_unsharded:
                unit.note_graph()

    def begin_pass(self) -> None:
        """Begins a pass with all ranks, if this forward has any collective."""
        self._state_offload.check(State.PARAM)
        self._reducer.set_ends_step(not self.is_accumulating)
        if self._order.is_training:
            return  # one more forward before its backward
        if not torch.is_grad_enabled():
            if self._unsharder.is_needed:
                self._order.begin("a forward")
        elif self._unsharder.is_needed or self._reducer.has_stepped:
            # Without sharded parameters, only a forward after a step waits for all-gathers.
            if self.is_accumulating:
                self._order.note("a micro-batch that ends no step")
            self._order.begin("a forward and its backward", self._reducer.trainable())

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
                self._order.note(f"parameter.data of {name}")

    def prepare(self, *, copies_buffers: bool = True) -> None:
        """The other collectives before the first forward after a step. Collective."""
        self.ensure_run()
        if copies_buffers and self.shared.is_due:
            self._order.wait_for_begin()  # else other ranks might still request an all-gather
        self._state_offload.check(State.PARAM)
        self.first_use.begin_forward()
        for bucket in self._buckets:
            bucket.sync_writes(reads_all=False)
            bucket.free_zeroed()
        if copies_buffers:
            self.shared.refresh()

    def close(self) -> None:
        """Ends `open`. Reshards all units unless a backward follows."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._is_in_backward:
            return
        self.first_use.end_forward()
        self._recorder.begin_phase(None)
        if not torch.is_grad_enabled() or not self._awaits_backward:
            self._unsharder.reshard_all()

    def _after_step(self) -> None:
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
        if error is not None and self._depth == 1 and not self._is_in_backward:
            self.end_run(error)
        else:
            self.close()

    # ---------------------------------------------------------------- forward of a unit

    def pre_forward(self, unit: Unit) -> None:
        """Unshards `unit` before its module's forward."""
        self.ensure_run()
        self._last_used = unit.name
        self._unsharder.unshard(unit)
        unit.note_graph()
        self._recorder.begin_layer(Kind.FORWARD, unit.name)
        self._has_forward |= torch.is_grad_enabled()

    def post_forward(self, unit: Unit) -> None:
        """Reshards `unit` after its module's forward, unless it stays unsharded."""
        self._recorder.end_layer(Kind.FORWARD, unit.name)
        if not self._stays_unsharded_after_forward(unit):
            unit.reshard()

    def _stays_unsharded_after_forward(self, unit: Unit) -> bool:
        if unit.stays_unsharded or self._is_in_backward:
            return True
        if not torch.is_grad_enabled():
            return False
        if self._config.reshard_after_forward is False:
            return True
        return self._order.is_last_of_forward(unit.index)  # backward begins with it

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
        if self.training_state is TrainingState.IDLE and not self._order.allows_uneven_calls:
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
        self._has_forward |= torch.is_grad_enabled()
        self.keep_unsharded(unit, f"parameter {name} is used outside its module's forward")
        self._unsharder.unshard(unit)
        unit.note_graph()

    # ---------------------------------------------------------------- backward

    @contextmanager
    def backward_context(self, *, reduces: bool, retain_graph: bool = False) -> Iterator[None]:
        """Context of `loss.backward()`. Without `reduces`, gradients stay local where possible."""
        self.ensure_run()
        self._state_offload.check(State.PARAM, State.GRAD)
        self._retain_graph = retain_graph
        try:
            self._begin_backward(reduces)
            yield
            self._finalize_backward()
        except BaseException as error:
            self.end_run(error)
            raise

    def _begin_backward(self, reduces: bool) -> None:
        """Begins the pass of a backward and unshards the root. Collective."""
        if not self._reducer.is_mid_step:  # once per step: it checks every parameter
            _check_all_hooked(self._module)
        self.first_use.begin_backward()
        self._is_in_backward = True
        self._recorder.begin_phase(Kind.BACKWARD)
        self._reducer.set_ends_step(reduces)
        trainable = self._reducer.trainable()
        if self._reducer.reduces:
            self._begin_backward_pass(trainable)
        self._reducer.begin_backward(trainable)
        self._unsharder.begin_backward()
        self._unsharder.unshard_for_step()

    def _begin_backward_pass(self, trainable: tuple[bool, ...]) -> None:
        """Begins the backward of the open pass, or a pass. Collective."""
        self._order.begin_backward(trainable, "a backward", self._reducer.eager(trainable))

    def pre_backward(self, unit: Unit, call: Call) -> None:
        """Unshards `unit` when backward reaches an output of `call`."""
        if unit.is_unsharded and call in unit.entered:
            return  # reached before, by another output or the base of a view
        self._last_used = unit.name
        unit.enter_backward(call)
        if self._is_in_backward:
            with record_function(f"zero::pre_backward {unit.name}"):
                self._unsharder.unshard(unit)
                self._recorder.begin_layer(Kind.BACKWARD, unit.name)
        else:
            # torch.autograd.grad inside a forward: the graph will be traversed again.
            unit.keep_unsharded()
            self._unsharder.unshard(unit)

    def post_backward(self, unit: Unit, call: Call) -> None:
        """Reshards `unit` when backward has left `call` and all other calls of it."""
        unit.leave_backward(call)
        if unit.entered:
            return  # this call's input came from an earlier call, which backward has not left yet
        if self._is_in_backward and not unit.stays_unsharded and unit.num_awaited <= 0:
            self._recorder.end_layer(Kind.BACKWARD, unit.name)
            self._reshard_after_backward(unit)
            self._unsharder.prefetch()

    def _reshard_after_backward(self, unit: Unit) -> None:
        """Reshards `unit`; its memory is needed again only if the graph is retained."""
        unit.end_graphs(is_retained=self._retain_graph)
        unit.reshard()

    def post_accumulate_grad(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Hook of slot `index` of `bucket`: autograd has accumulated its gradient."""
        if not self._is_in_backward:
            name = bucket.plan.layout.slots[index].name
            raise RuntimeError(
                f"backward reached parameter {name} outside the engine; replace loss.backward() by "
                "engine.backward(loss), fabric.backward(loss), or self.manual_backward(loss) in a "
                "LightningModule."
            )
        if self._reducer.in_flight is bucket:
            self._reducer.wait_for_reduction()  # a second gradient, after the first was sent
        if bucket.grads.accumulate(index):
            unit = self._unit_of.get(bucket)
            if unit is not None and unit.is_backward_done:
                self._recorder.end_layer(Kind.BACKWARD, unit.name)
                self._reshard_after_backward(unit)
            self._reducer.mark_ready(bucket)

    def _finalize_backward(self) -> None:
        """Completes the reductions and reshards all units. Collective."""
        self.first_use.end_backward()
        self._reducer.finalize_backward()
        self._unsharder.end_backward()
        for unit in self.units:
            unit.end_graphs(is_retained=self._retain_graph)
        self._unsharder.reshard_all()
        self._has_forward = self._is_in_backward = False
        self._recorder.begin_phase(Kind.FORWARD if self._depth else None)
        self._reducer.report_nonfinite()

    # ---------------------------------------------------------------- runs

    def end_run(self, error: BaseException) -> None:
        """Ends the run because an exception has left a step; the next use begins another. Local.

        The other ranks learn of it, and raise an error, too.
        """
        if self._ended_by is None:
            self._ended_by = error
            self._depth, self._is_in_backward, self._has_forward = 0, False, False
            self._recorder.discard_open_spans()
            self._comm.abort(error)

    def ensure_run(self) -> None:
        """Begins another run if an exception has ended the last. Collective then, else local.

        Raises:
            PeerFailedError: A rank has not come.
        """
        if self._ended_by is not None:
            self._begin_next_run()

    def begin_run(self) -> None:
        """Makes the state of a run: no pass is open, and nothing is recorded. Local."""
        self._ended_by = None
        config = self._config
        self._order = CollectiveOrder(
            self._comm.control,
            self,
            numels=[unit.numel for unit in self.units],
            num_buckets=len(self._buckets),
            names=[slot.name for bucket in self._buckets for slot in bucket.plan.layout.slots],
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
            stop_request=lambda: self._stop_request(),
        )
        self._unsharder = Unsharder(
            self.units, self._order, self.begin_pass, self._recorder, config
        )
        self._reducer = Reducer(
            self._buckets, self._order, self._comm, config, self.guard, self._after_step
        )
        self.guard.begin_run()
        self.issue_unshard = self._unsharder.issue_unshard
        self.issue_reduction = self._reducer.issue_reduction
        self._retain_graph = self._has_forward = self._is_in_backward = False
        self._depth = 0
        for unit in self.units:
            unit.reset_backward()

    def set_stop_request(self, stop_request: Callable[[], int | None]) -> None:
        """Sets the function that returns this rank's stop request; see `CollectiveOrder`. Local."""
        self._stop_request = stop_request

    def dropped_gradients(self) -> list[str]:
        """On rank 0, a warning if the next run drops gradients of earlier backwards. Local."""
        if self._comm.rank or not self._reducer.has_unstepped_gradients:
            return []
        return ["the gradients of this step so far were dropped; begin it anew"]

    @property
    def order(self) -> CollectiveOrder:
        """The collective order of all ranks, in a run: see `ensure_run`."""
        self.ensure_run()
        return self._order

    @property
    def unsharder(self) -> Unsharder:
        """Unshards and prefetches the units, in a run; the order calls its `issue_unshard`."""
        self.ensure_run()
        return self._unsharder

    @property
    def reducer(self) -> Reducer:
        """Reduces the gradients, in a run; the order calls its `issue_reduction`."""
        self.ensure_run()
        return self._reducer


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
