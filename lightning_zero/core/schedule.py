"""Time: which bucket is gathered, released and reduced when.

[Note: Streams] In which order gathers and reductions are issued, and why no rank waits for ever, is
told in layout/order.py. On this rank:

* A gather is issued on a side stream after everything queued on the compute stream, which
  allocated the buffer; compute waits for it in `wait_for_unshard`, before the first use. So a buffer
  is written only after its former user, and read only after its gather.
* A reduction is issued likewise, on a side stream of its own, once the last gradient of a bucket is
  queued. Before the next reduction is issued, the one before it is finished: at most two whole
  gradient buffers exist at a time.
* Buffers are freed on the compute stream, after it has waited for the collective that used them. A
  pending collective keeps its tensors alive.
* The forward after a step waits for the gather of a bucket when one of its parameters is first
  used.
* The average of a reduced shard over replicas is issued when the reduction is finished, in the same
  order on every rank. Nobody waits for it before all ranks have ended their backward and so issued
  it, and meanwhile nobody writes to that shard. It takes no memory of its own.
* Where groups of ranks hold shards of their own, a gather moves data within a group only, but the
  order is that of all ranks: averages over replicas, and a failure, concern all of them.

[Note: What a gather waits for] On the host, before it is issued: for its turn in the order, so for
reductions of the plan before it, and where there is no plan for a round of all ranks
(layout/order.py); for the worker that steps its bucket (`Bucket.wait_for_step`); where its shard
rests in a file, for the read and a free buffer (`ParamReader`). After that: on gloo, in
`wait_for_unshard`, for what the peers send; on CUDA the host does not wait, the gather's stream waits
for compute and for the copy of a shard that rests in CPU memory, its kernel for the peers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.profiler import record_function

from lightning_zero.comm.collectives import UserCollectiveMode
from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.unit import Call, Unit, Unsharder
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.order import CollectiveOrder
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.guarded import (
    BetweenStepsError,
    has_placement,
    has_unmanaged_parameters,
)

__all__ = ["TrainingState", "Schedule", "is_compiled"]


class TrainingState(Enum):
    """What the training loop is doing."""

    IDLE = "between steps"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    LOST = "after other ranks were lost"


class SharedBuffers:
    """Buffers such as BatchNorm's statistics, which all ranks have from rank 0.

    They are copied when DDP copies them: before a forward that follows one which may have changed
    them, also where a backward of that one is still to come.

    Attributes:
        are_fresh: No forward with gradients, but of a micro-batch that ends no step, has come
            since they were copied.
        are_alike: They have been copied once.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, is_on: bool) -> None:
        self.are_fresh = self.are_alike = False
        self._module = module
        self._comm = comm
        self._is_on = is_on and comm.size > 1  # else each rank keeps its own
        self._has_shared = False  # by the last `refresh`

    @property
    def is_due(self) -> bool:
        """`refresh` is collective."""
        if self.are_fresh or not self._is_on:
            return False
        return next(self._module.buffers(), None) is not None

    def refresh(self) -> None:
        """Copies rank 0's to all ranks, unless they are fresh. Collective."""
        self._has_shared = not self.are_fresh
        if self._has_shared:
            self._share()
        self.are_fresh = self.are_alike = True

    def share_again(self) -> None:
        """After each rank has written to those that `refresh` has copied, if any. Collective."""
        has_shared, self._has_shared = self._has_shared, False
        if has_shared:
            self._share()

    def _share(self) -> None:
        if not self._is_on:
            return
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._module.buffers():
            if buffer.layout is not torch.strided:
                continue  # no backend sends it: each rank has its own
            groups.setdefault(buffer.dtype, []).append(buffer)
        for buffers in groups.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._comm.broadcast_(flat.view(torch.uint8))  # backends do not know every dtype
            if self._comm.rank:
                parts = flat.split([buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    # A backward that has saved it goes on, as under DDP.
                    with torch.autograd._unsafe_preserve_version_counter(buffer):  # type: ignore[attr-defined]
                        buffer.detach().copy_(part.view_as(buffer))


class Schedule:
    """What happens at which moment of a step; hooks on the module and the loop tell the moments.

    Attributes:
        units: The root first.
        shared: Buffers.
        is_accumulating: Forwards from now on are of micro-batches that end no step.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        comm: Communicator,
        config: ZeroConfig,
    ) -> None:
        self.units = list(units)
        self.order = CollectiveOrder(
            comm.control,
            self,
            numels=[unit.numel for unit in units],
            num_buckets=len(buckets),
            names=[slot.name for bucket in buckets for slot in bucket.plan.layout.slots],
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
        )
        self.unsharder = Unsharder(units, self.order, comm.recorder, config)
        self.reducer = Reducer(buckets, self.order, comm, config)
        self.is_accumulating = False
        self._module = module
        self._buckets = list(buckets)
        self._comm = comm
        self._recorder = comm.recorder
        self._config = config
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._retain_graph = False  # the backward under way leaves its graph for another one
        self._has_computed = False  # with gradients, since the last backward
        self._depth = 0  # nested openings of a step: the strategy's, the root module's
        self._is_in_backward = self._is_lost = False
        self._collectives = UserCollectiveMode(
            self.order.barrier_before_collective, comm.control.watchdog
        )
        self._sees_collectives = False  # it is entered
        # A graph of torch.compile would be made once more, without it.
        can_see = comm.size > 1 and self.unsharder.is_needed
        self._can_see_collectives = can_see and not any(map(is_compiled, module.modules()))
        self.shared = SharedBuffers(module, comm, is_on=config.broadcast_buffers)
        self._is_compiled = is_compiled(module)
        self._last_used = ""  # the unit whose forward or backward has begun last
        comm.control.watchdog.set_status_source(self._describe)

    @property
    def training_state(self) -> TrainingState:
        """What the training loop is doing, as far as it follows from what all ranks do."""
        if self._is_lost:
            return TrainingState.LOST
        if self._is_in_backward:
            return TrainingState.BACKWARD
        return TrainingState.FORWARD if self._depth or self._awaits_backward else TrainingState.IDLE

    @property
    def is_in_step(self) -> bool:
        """Code of a step runs: what the module calls, or a backward."""
        return self._depth > 0 or self._is_in_backward

    @property
    def _awaits_backward(self) -> bool:
        """A forward with gradients has come, and no rank has ended the pass since."""
        return self._has_computed and (self.order.is_training or not self.unsharder.is_needed)

    # ---------------------------------------------------------------- forward

    def open(self, *, is_step: bool = False) -> None:
        """Begins a step or a part of one: the root's parameters are whole, buffers are rank 0's.

        `is_step`: a step of the loop. Under a Trainer buffers are copied before these alone, as
        DDP does, which calls of the module itself pass by.
        """
        self._depth += 1
        self._has_computed |= torch.is_grad_enabled()
        if self._depth > 1 or self._is_in_backward:
            return
        self._recorder.begin_phase(Kind.FORWARD)
        self.compare_assigned()
        copies = is_step or not self._comm.can_regroup or not self.shared.are_alike
        if copies and self.shared.is_due and self.unsharder.is_needed and self.order.is_training:
            # In the middle of a pass; others might still ask this rank for a gather.
            self.order.barrier("the buffers of rank 0")
        self.begin_pass()
        self.prepare(copies_buffers=copies)
        if copies:
            # A forward in training may change them (BatchNorm), whether a backward follows or not.
            self.shared.are_fresh = self.is_accumulating or not torch.is_grad_enabled()
        self.unsharder.unshard_for_step()
        for unit in self.units:
            if unit.stays_unsharded:
                unit.is_saved_for_backward |= torch.is_grad_enabled()
        self._see_collectives()

    def begin_pass(self) -> None:
        """All ranks come here, if there is anything in this forward that they do together."""
        ends_step = self.reducer.ends_step = not self.is_accumulating
        if self.order.is_training:
            return  # one more forward before its backward
        if not torch.is_grad_enabled():
            if self.unsharder.is_needed:
                self.order.begin("a forward")
        elif self.unsharder.is_needed or self.reducer.has_stepped:
            # Where nothing is gathered before use, a forward after a step waits for its gathers.
            kind = f"a forward and its backward{'' if ends_step else ', of several'}"
            self.order.begin(kind, self.reducer.trainable())

    def compare_assigned(self) -> None:
        """Before a pass: ranks that have assigned other `parameter.data` find it out. Local."""
        for bucket in self._buckets:
            bucket.compare_assigned()

    def prepare(self, *, copies_buffers: bool = True) -> None:
        """Before the first forward after a step: what else is collective in it. Collective."""
        if copies_buffers and self.shared.is_due:
            self.order.wait_for_begin()  # else others might still ask this rank for a gather
            for bucket in self._buckets[:1]:
                bucket.wait_for_all_steps()  # their gathers have one order with what comes now
        for bucket in self._buckets:
            if self.unsharder.is_needed and bucket.plan.stage.all_gathers_after_step:
                # A worker must not gather while units are gathered: the order would differ by rank.
                bucket.wait_for_step()
            if self._is_compiled and not bucket.shards_params:
                bucket.wait_for_unshard()  # See [Note: Graphs end at hooks]
            bucket.detect_writes()
            bucket.free_zeroed()
        if copies_buffers:
            self.shared.refresh()

    def close(self) -> None:
        """Ends what `open` began. Without gradients nothing stays whole; else backward follows."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._is_in_backward:
            return
        self._see_no_collectives()
        self._recorder.begin_phase(None)
        if not torch.is_grad_enabled() or not self._awaits_backward:
            self.unsharder.reshard_all()

    def _see_collectives(self) -> None:
        """Until `close`. See [Note: Collectives of the user]."""
        if not self._can_see_collectives or self._sees_collectives:
            return
        if self.order.expects_collectives:
            self._collectives.__enter__()
            self._sees_collectives = True

    def _see_no_collectives(self) -> None:
        if self._sees_collectives:
            self._sees_collectives = False
            self._collectives.__exit__(None, None, None)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        try:
            self.open(is_step=True)
            yield
        except BaseException:
            self.reset()
            raise
        self.close()

    def root_post_forward(self, *, has_failed: bool) -> None:
        """A call of the whole module has ended, perhaps by an exception; `open` began it."""
        if has_failed and self._depth == 1 and not self._is_in_backward:
            self.reset()
        else:
            self.close()

    def _describe(self) -> str:
        """What the loop is doing, for people; from any thread."""
        in_pass = self.training_state in (TrainingState.FORWARD, TrainingState.BACKWARD)
        return self.training_state.value + f" of {self._last_used}" * (
            in_pass and bool(self._last_used)
        )

    def pre_forward(self, unit: Unit) -> None:
        self._last_used = unit.name
        self.unsharder.unshard(unit)
        unit.is_saved_for_backward |= torch.is_grad_enabled()
        self._recorder.begin_layer(Kind.FORWARD, unit.name)
        self._has_computed |= torch.is_grad_enabled()

    def post_forward(self, unit: Unit) -> None:
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
        return self.order.is_last_of_forward(unit.index)  # backward begins with it

    # ---------------------------------------------------------------- out of turn

    def keep_unsharded(self, unit: Unit, reason: str) -> None:
        """Keeps `unit` whole from the beginning to the end of every step, from now on."""
        if not unit.stays_unsharded and self._comm.rank == 0:
            warnings.warn(
                f"{reason}; its {unit.numel} elements stay whole throughout each step.",
                stacklevel=2,
            )
        unit.stays_unsharded = True

    def unshard_out_of_order(self, bucket: Bucket, name: str) -> None:
        """Somebody reads parameter `name` outside the forward of its unit.

        A BetweenStepsError outside a step, where ranks do not act in lockstep.
        """
        if self.training_state is TrainingState.LOST:
            raise RuntimeError(
                f"parameter {name} is lost: another rank failed and took its shard with it; load a "
                "checkpoint into a new module."
            )
        if self.training_state is TrainingState.IDLE and not self.order.allows_uneven_calls:
            raise BetweenStepsError(
                f"parameter {name} rests as a shard of 1/{self._comm.mesh.num_shards} outside "
                "forward and backward. To compute with it, as a call of a part of the module does, "
                "be in a call of the whole module, in Lightning in training_step or the like, or "
                "in `with engine.forward_context():`, on every rank.\n"
                "To look at it, or to change it, do so under torch.no_grad() on every rank; or, on "
                "some ranks, inside `with lightning_zero.gathered(module):` on every rank, with "
                "`writeback=True` to change it; to run forwards on some, inside `with "
                "lightning_zero.uneven_calls(module):` on every rank."
            )
        unit = self._unit_of[bucket]
        self._has_computed |= torch.is_grad_enabled()
        self.keep_unsharded(unit, f"parameter {name} is used outside its module's forward")
        self.unsharder.unshard(unit)
        unit.is_saved_for_backward |= torch.is_grad_enabled()

    # ---------------------------------------------------------------- backward

    @contextmanager
    def backward_context(self, *, reduces: bool, retain_graph: bool = False) -> Iterator[None]:
        """Around `loss.backward()`; if it does not reduce, gradients stay local where they can."""
        self._retain_graph = retain_graph
        try:
            self._begin_backward(reduces)
            yield
            self._finalize_backward()
        except BaseException:
            self.reset()
            raise

    def _begin_backward(self, reduces: bool) -> None:
        if not self.reducer.is_mid_step:  # once for each step: it looks at every parameter
            _check_all_hooked(self._module)
        self._is_in_backward = True
        self._recorder.begin_phase(Kind.BACKWARD)
        self.reducer.ends_step = reduces
        trainable = self.reducer.trainable()
        if self.reducer.reduces:
            self.order.begin_backward(trainable, "a backward", self.reducer.eager(trainable))
        self.reducer.begin(trainable)
        self.unsharder.begin_backward()
        self.unsharder.unshard_for_step()

    def pre_backward(self, unit: Unit, call: Call) -> None:
        """Backward has come to an output of `call`, one of `unit`."""
        if unit.is_unsharded and call in unit.entered:
            return  # by another output, or by the base of a view
        self._last_used = unit.name
        if call.is_done:  # the graph is walked again
            call.is_done = False
            call.awaited = set(call.inputs)
            unit.num_awaited += 1
        unit.entered.add(call)
        if self._is_in_backward:
            with record_function(f"zero::pre_backward {unit.name}"):
                self.unsharder.unshard(unit)
                self._recorder.begin_layer(Kind.BACKWARD, unit.name)
        else:
            # torch.autograd.grad inside a forward: the graph will be walked again.
            unit.stays_unsharded = True
            self.unsharder.unshard(unit)

    def post_backward(self, unit: Unit, call: Call) -> None:
        unit.num_awaited -= 1
        call.is_done = True
        unit.entered.discard(call)
        if unit.entered:
            return  # of an earlier call, which has made this one's input and tells nothing
        if self._is_in_backward and not unit.stays_unsharded and unit.num_awaited <= 0:
            self._recorder.end_layer(Kind.BACKWARD, unit.name)
            self._reshard_after_backward(unit)
            self.unsharder.prefetch()

    def _reshard_after_backward(self, unit: Unit) -> None:
        """Backward has left `unit`: no graph needs its memory, unless it is to be walked again."""
        unit.is_saved_for_backward = self._retain_graph
        unit.reshard()

    def post_accumulate_grad(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """`parameter`, slot `index` of `bucket`, has got a gradient."""
        if not self._is_in_backward:
            name = bucket.plan.layout.slots[index].name
            raise RuntimeError(
                f"backward reached parameter {name} outside the engine; call "
                "engine.backward(loss), in Lightning self.manual_backward(loss), instead of "
                "loss.backward()."
            )
        if self.reducer.under_way is bucket:
            self.reducer.finish()  # a second gradient, after the first was sent off
        if bucket.grads.accumulate(index):
            unit = self._unit_of.get(bucket)
            if unit is not None and unit.is_backward_done:
                self._recorder.end_layer(Kind.BACKWARD, unit.name)
                self._reshard_after_backward(unit)
            self.reducer.complete(bucket)

    def _finalize_backward(self) -> None:
        self.reducer.end()
        self.unsharder.reset()
        for unit in self.units:
            unit.is_saved_for_backward = self._retain_graph
        self.unsharder.reshard_all()
        self._has_computed = self._is_in_backward = False
        self._recorder.begin_phase(Kind.FORWARD if self._depth else None)

    # ---------------------------------------------------------------- what the order decides

    def issue_unshard(self, unit: int, *, is_kept: bool) -> None:
        self.unsharder.issue_unshard(self.units[unit], is_kept=is_kept)

    def issue_reduction(self, bucket: int) -> None:
        self.reducer.reduce(self._buckets[bucket])

    # ---------------------------------------------------------------- failures

    def reset(self) -> None:
        """Back to rest after an exception: nothing stays gathered, no gradient is half reduced.

        What fails meanwhile is a warning: the exception is what users should see.
        """
        error = self.reset_all()
        if error is not None:
            warnings.warn(f"after an exception: {error}", stacklevel=2)

    def reset_all(self) -> Exception | None:
        """As `reset`; what fails for one bucket keeps none from its rest.

        Returns the first failure, such as data of a wrong shape in the place of a parameter's.
        """
        self._has_computed = self._is_in_backward = False
        self._depth = 0
        self._see_no_collectives()
        self._recorder.discard_open_spans()
        errors: list[Exception] = []
        if not self._comm.can_regroup and isinstance(sys.exc_info()[1], Exception):
            _attempt(self.order.flush_schedule, errors)  # others may follow the same plan
        self.order.reset()
        self.unsharder.reset()
        for bucket in self._buckets:
            for act in (bucket.undo_step, bucket.shards.stop_reading, bucket.grads.drop):
                _attempt(act, errors)
        self.reducer.reset()
        for bucket in self._buckets:
            for _ in range(len(bucket.parameters) + 1):  # data that it refuses is gone next time
                if not isinstance(_attempt(bucket.reshard, errors), ValueError):
                    break
        for unit in self.units:
            unit.is_saved_for_backward = False
        return errors[0] if errors else None

    def recover(self) -> None:
        """As `reset`, where collectives under way will never end: their groups are gone."""
        self.order.restart()
        self.reducer.recover()
        for bucket in self._buckets:
            bucket.cancel_unshard(is_lost=False)
        self.reset()
        for bucket in self._buckets:
            bucket.unshard_again()

    def abandon(self) -> None:
        """Leaves parameters where they are; those that are not whole say so when used."""
        for bucket in self._buckets:
            bucket.cancel_unshard(is_lost=True)
            bucket.grads.drop()
        self._is_lost = True


def _attempt(act: Callable[[], None], errors: list[Exception]) -> Exception | None:
    """Calls `act`; what it raises is appended to `errors` and returned."""
    try:
        act()
    except Exception as error:
        errors.append(error)
        return error
    return None


def is_compiled(module: nn.Module) -> bool:
    """`torch.compile(module)`, `module.compile()` or a compiled method on the instance."""
    if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
        return True
    return any(hasattr(value, "_torchdynamo_orig_callable") for value in vars(module).values())


def _check_all_hooked(module: nn.Module) -> None:
    """Raises for a trainable parameter that has come to `module` after its hooks."""
    with torch._C.DisableTorchFunctionSubclass():  # guarded ones would take their time
        if not has_unmanaged_parameters(module):
            return
        for name, parameter in module.named_parameters():
            if not has_placement(parameter) and parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was put into the module after the engine was built: its "
                    "gradient would be averaged by nobody. Put it there before (in Lightning, in "
                    "configure_model or setup), or write into the parameter that was there: "
                    "parameter.data = values."
                )
