"""Time: which bucket is gathered, released and reduced when.

[Note: Streams] In which order gathers and reductions are issued, and why no rank waits for ever, is
told in layout/order.py. On this rank:

* A gather is issued on a side stream after everything queued on the compute stream, which
  allocated the buffer; compute waits for it in `finish_gather`, before the first use. So a buffer
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
`finish_gather`, for what the peers send; on CUDA the host does not wait, the gather's stream waits
for compute and for the copy of a shard that rests in CPU memory, its kernel for the peers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import nn
from torch.profiler import record_function

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.gathering import Gathering
from lightning_zero.core.hooks import Hooks, check_all_hooked, is_compiled
from lightning_zero.core.module_buffers import SharedBuffers
from lightning_zero.core.reducing import Reducing
from lightning_zero.core.unit import Call, Unit
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.order import Order
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.guarded import BetweenStepsError

__all__ = ["Moment", "Schedule"]


class Moment(Enum):
    """What the training loop is doing."""

    IDLE = "between steps"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    LOST = "after other ranks were lost"


class Schedule:
    """What happens at which moment of a step; hooks on the module and the loop tell the moments.

    Attributes:
        moment: What the loop is doing.
        units: The root first.
        order: Of all ranks.
        gathering: Makes units whole.
        reducing: Reduces gradients.
        shared: Buffers.
        hooks: On the module.
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
        self.moment = Moment.IDLE
        self.units = list(units)
        self.order = Order(
            comm.control,
            self,
            numels=[unit.numel for unit in units],
            num_buckets=len(buckets),
            names=[slot.name for bucket in buckets for slot in bucket.plan.layout.slots],
            ahead=config.prefetch_bucket_size if config.overlap_comm else 0,
        )
        self.gathering = Gathering(units, self.order, comm.recorder, config)
        self.reducing = Reducing(buckets, self.order, comm, config)
        self._ends_step = True  # the backward that comes, or is under way
        self.is_accumulating = False
        self._module = module
        self._buckets = list(buckets)
        self._comm = comm
        self._recorder = comm.recorder
        self._config = config
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._awaits_backward = False  # a forward came after the last backward
        self._depth = 0  # nested openings of a step: the strategy's, the root module's
        self.shared = SharedBuffers(module, comm, is_on=config.broadcast_buffers)
        self._is_compiled = is_compiled(module)
        self.hooks = Hooks(module, units, buckets, self)
        self._last_used = ""  # the unit whose forward or backward has begun last
        comm.control.watchdog.describe_by(self._describe)

    # ---------------------------------------------------------------- forward

    def open(self) -> None:
        """Begins a step or a part of one: the root's parameters are whole, buffers are rank 0's."""
        self._depth += 1
        self._awaits_backward = True
        if self._depth > 1 or self.moment is Moment.BACKWARD:
            return
        if self.moment is Moment.FORWARD and torch.is_grad_enabled():
            self.shared.are_fresh = True  # a backward that follows has saved them
        self.moment = Moment.FORWARD
        self._recorder.phase(Kind.FORWARD)
        self.begin_pass()
        self.prepare()
        # A forward in training may change them (BatchNorm), whether a backward follows or not.
        self.shared.are_fresh = self.is_accumulating or not torch.is_grad_enabled()
        self.gathering.unshard_held()

    def begin_pass(self) -> None:
        """All ranks come here, if there is anything in this forward that they do together."""
        self._ends_step = not self.is_accumulating
        if self.order.is_training:
            return  # one more forward before its backward
        if not torch.is_grad_enabled():
            if self.gathering.is_needed:
                self.order.begin("a forward")
        elif self.gathering.is_needed or self.reducing.has_stepped:
            # Where nothing is gathered before use, a forward after a step waits for its gathers.
            kind = f"a forward and its backward{'' if self._ends_step else ', of several'}"
            self.order.begin(kind, self.reducing.trainable())

    def prepare(self) -> None:
        """Before the first forward after a step: what else is collective in it. Collective."""
        if self.shared.is_due:
            self.order.confirm()  # else others might still ask this rank for a gather
            for bucket in self._buckets[:1]:
                bucket.wait_for_all_steps()  # their gathers have one order with what comes now
        self._wait_for_gathers_of_steps()
        if self._is_compiled:
            self._finish_gathers()
        for bucket in self._buckets:
            bucket.take_rewritten()
            bucket.free_zeroed()
        self.shared.refresh()

    def _wait_for_gathers_of_steps(self) -> None:
        """A worker must not gather while units are gathered: the order would differ by rank."""
        if self.gathering.is_needed:
            for bucket in self._buckets:
                if bucket.plan.stage.gathers_after_step:
                    bucket.wait_for_step()

    def _finish_gathers(self) -> None:
        """Waits for the gathers after the last step. See [Note: Graphs end at hooks]."""
        for bucket in self._buckets:
            if not bucket.is_gathered_before_use:
                bucket.finish_gather()

    def close(self) -> None:
        """Ends what `open` began. Without gradients nothing stays whole; else backward follows."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self.moment is not Moment.FORWARD:
            return
        self._recorder.phase(None)
        if not torch.is_grad_enabled():
            self.gathering.release_all()
            if not self._awaits_backward:  # of a forward before this one
                self.moment = Moment.IDLE
        elif not self._awaits_backward:
            for unit in self.units:
                unit.release()
            self.moment = Moment.IDLE

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """`open` and `close` around code that uses the module."""
        try:
            self.open()
            yield
        except BaseException:
            self.reset()
            raise
        self.close()

    def before_root(self) -> None:
        """The whole module is called."""
        self.open()

    def after_root(self, *, has_failed: bool) -> None:
        """The call has ended, perhaps by an exception."""
        if has_failed and self._depth == 1 and self.moment is Moment.FORWARD:
            self.reset()
        else:
            self.close()

    def _describe(self) -> str:
        """What the loop is doing, for people; from any thread."""
        in_pass = self.moment in (Moment.FORWARD, Moment.BACKWARD)
        return (
            f"{self.moment.value}{f' of {self._last_used}' * (in_pass and bool(self._last_used))}"
        )

    def before_forward(self, unit: Unit) -> None:
        """The module of `unit` is called."""
        self._last_used = unit.name
        self.gathering.unshard(unit)
        self._recorder.enter(Kind.FORWARD, unit.name)
        self._awaits_backward = True

    def after_forward(self, unit: Unit) -> None:
        """The call has ended."""
        self._recorder.leave(Kind.FORWARD, unit.name)
        if not self._stays_after_forward(unit):
            unit.release()

    def _stays_after_forward(self, unit: Unit) -> bool:
        if unit.is_held or self.moment is Moment.BACKWARD:
            return True
        if not torch.is_grad_enabled():
            return False
        if self._config.reshard_after_forward is False:
            return True
        return self.gathering.stays_after_forward(unit)

    # ---------------------------------------------------------------- out of turn

    def hold(self, unit: Unit, reason: str) -> None:
        """Keeps `unit` whole from the beginning to the end of every step, from now on."""
        if not unit.is_held and self._comm.rank == 0:
            warnings.warn(
                f"{reason}; its {unit.numel} elements stay whole throughout each step.",
                stacklevel=2,
            )
        unit.is_held = True

    def use_out_of_turn(self, bucket: Bucket, name: str) -> None:
        """Somebody reads parameter `name` outside the forward of its unit.

        Raises:
            BetweenStepsError: Outside a step, where ranks do not act in lockstep.
            RuntimeError: After other ranks were lost.
        """
        if self.moment is Moment.LOST:
            raise RuntimeError(
                f"parameter {name} is lost: another rank failed and took its shard with it; load a "
                "checkpoint into a new module."
            )
        if self.moment is Moment.IDLE:
            raise BetweenStepsError(
                f"parameter {name} rests as a shard of 1/{self._comm.mesh.num_shards} outside "
                "forward and backward. To compute with it, as a call of a part of the module does, "
                "be in a call of the whole module, in Lightning in training_step or the like, or "
                "in `with engine.forward_context():`, on every rank. To look at it, use "
                "`with lightning_zero.gathered(...)` on every rank, with `writeback=True` to "
                "change it; and trainer.save_checkpoint() or "
                "strategy.lightning_module_state_dict() for state dicts."
            )
        unit = self._unit_of[bucket]
        self._awaits_backward = True
        self.hold(unit, f"parameter {name} is used outside its module's forward")
        self.gathering.unshard(unit)

    # ---------------------------------------------------------------- backward

    @contextmanager
    def backward_context(self, *, reduces: bool) -> Iterator[None]:
        """Around `loss.backward()`: prepares gradients, and ends with reduced ones.

        Args:
            reduces: Reduce now, or leave gradients local where the stage can keep them whole.
        """
        try:
            self._begin_backward(reduces)
            yield
            self._end_backward()
        except BaseException:
            self.reset()
            raise

    def _begin_backward(self, reduces: bool) -> None:
        if not self.reducing.is_mid_step:  # once for each step: it looks at every parameter
            check_all_hooked(self._module)
        self.moment = Moment.BACKWARD
        self._recorder.phase(Kind.BACKWARD)
        self._ends_step = reduces
        trainable = self.reducing.trainable()
        if self.reducing.reduces(ends_step=reduces):
            self.order.turn(trainable, "a backward", self.reducing.eager(trainable))
        self.reducing.begin(trainable, ends_step=reduces)
        self.gathering.begin_backward()
        self.gathering.unshard_held()

    def before_backward_of(self, unit: Unit, call: Call) -> None:
        """Backward has come to an output of `call`, one of `unit`."""
        self._last_used = unit.name
        if not call.is_done:
            unit.entered.add(call)
        if self.moment is Moment.BACKWARD:
            with record_function(f"zero::before_backward {unit.name}"):
                self.gathering.unshard(unit)
                self._recorder.enter(Kind.BACKWARD, unit.name)
        else:
            # torch.autograd.grad inside a forward: the graph will be walked again.
            unit.is_held = True
            self.gathering.unshard(unit)

    def after_backward_of(self, unit: Unit, call: Call) -> None:
        """The gradients of all inputs of `call` are there."""
        unit.num_awaited -= 1
        call.is_done = True
        unit.entered.discard(call)
        if unit.entered:
            return  # of an earlier call, which has made this one's input and tells nothing
        if self.moment is Moment.BACKWARD and not unit.is_held and unit.num_awaited <= 0:
            self._recorder.leave(Kind.BACKWARD, unit.name)
            unit.release()
            self.gathering.prefetch()

    def on_gradient(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """`parameter`, slot `index` of `bucket`, has got a gradient.

        Raises:
            RuntimeError: By a backward that the engine does not know of.
        """
        if self.moment is not Moment.BACKWARD:
            name = bucket.plan.layout.slots[index].name
            raise RuntimeError(
                f"backward reached parameter {name} outside the engine; call "
                "engine.backward(loss), in Lightning self.manual_backward(loss), instead of "
                "loss.backward()."
            )
        if self.reducing.under_way is bucket:
            self.reducing.finish()  # a second gradient, after the first was sent off
        if bucket.grads.receive(index):
            unit = self._unit_of.get(bucket)
            if unit is not None and _has_done_backward(unit):
                self._recorder.leave(Kind.BACKWARD, unit.name)
                unit.release()
            self.reducing.complete(bucket)

    def _end_backward(self) -> None:
        self.reducing.end(ends_step=self._ends_step)
        self.gathering.forget()
        self.gathering.release_all()
        self._awaits_backward = False
        self.moment = Moment.FORWARD if self._depth else Moment.IDLE
        self._recorder.phase(Kind.FORWARD if self._depth else None)

    # ---------------------------------------------------------------- what the order decides

    def issue_gather(self, unit: int, *, is_kept: bool) -> None:
        """See `Issuer`."""
        self.gathering.issue(self.units[unit], is_kept=is_kept)

    def issue_reduction(self, bucket: int) -> None:
        """See `Issuer`."""
        self.reducing.reduce(self._buckets[bucket], ends_step=self._ends_step)

    # ---------------------------------------------------------------- failures

    def reset(self) -> None:
        """Back to rest after an exception: nothing stays gathered, no gradient is half reduced.

        What fails meanwhile is a warning: the exception is what users should see.
        """
        error = self.come_to_rest()
        if error is not None:
            warnings.warn(f"after an exception: {error}", stacklevel=2)

    def come_to_rest(self) -> Exception | None:
        """As `reset`; what fails for one bucket keeps none from its rest.

        Returns:
            The first failure, such as data of a wrong shape in the place of a parameter's.
        """
        self._awaits_backward = False
        self._depth = 0
        self.moment = Moment.IDLE
        self._recorder.forget()
        errors: list[Exception] = []
        if not self._comm.rallies and isinstance(sys.exc_info()[1], Exception):
            _attempt(self.order.give_up_pass, errors)  # others may follow the same plan
        self.order.forget()
        self.gathering.forget()
        for bucket in self._buckets:
            for act in (bucket.undo_step, bucket.shards.stop_reading, bucket.grads.drop):
                _attempt(act, errors)
        self.reducing.reset()
        for bucket in self._buckets:
            for _ in range(len(bucket.parameters) + 1):  # data that it refuses is gone next time
                if not isinstance(_attempt(bucket.release, errors), ValueError):
                    break
        return errors[0] if errors else None

    def recover(self) -> None:
        """As `reset`, where collectives under way will never end: their groups are gone."""
        self.order.restart()
        self.reducing.recover()
        for bucket in self._buckets:
            bucket.cancel_gather(is_lost=False)
        self.reset()
        for bucket in self._buckets:
            bucket.gather_again()

    def abandon(self) -> None:
        """Leaves parameters where they are; those that are not whole say so when used."""
        for bucket in self._buckets:
            bucket.cancel_gather(is_lost=True)
            bucket.grads.drop()
        self.moment = Moment.LOST


def _attempt(act: Callable[[], None], errors: list[Exception]) -> Exception | None:
    """Calls `act`; what it raises is appended to `errors` and returned."""
    try:
        act()
    except Exception as error:
        errors.append(error)
        return error
    return None


def _has_done_backward(unit: Unit) -> bool:
    """Nothing in this backward needs its parameters again."""
    return unit.num_awaited <= 0 and not unit.is_held and unit.has_all_grads
