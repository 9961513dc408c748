"""Time: which bucket is gathered, released and reduced when.

[Note: Who waits for whom]
* A gather is issued on the side stream after everything queued on the compute stream, which
  allocated the buffer; compute waits for it in `finish_gather`, before the first use. So a buffer
  is written only after its former user, and read only after its gather.
* A reduction is issued likewise once the last gradient of a bucket is queued. Before the next
  reduction is issued, the one before it is finished: at most two whole gradient buffers exist at a
  time.
* Buffers are freed on the compute stream, after it has waited for the collective that used them. A
  pending collective keeps its tensors alive.
* The forward after a step waits for the gather of a bucket when one of its parameters is first
  used.

[Note: Same order on every rank] No collective is decided on by this rank's data alone.
* Gathers before use go in rounds of `Communicator.agree`. A rank asks for a unit; the lowest
  request of all ranks goes first; every rank takes part in its gather, and a rank that wanted
  another asks again. A rank that has finished its backward asks for nothing but goes on taking part
  until all have. Ranks whose branches differ gather more than they need, and none hangs.
  Where groups of ranks hold shards of their own, a gather moves data within a group only, but all
  agreements stay those of all ranks: averages over replicas, and a failure, concern all of them,
  and one order on all is enough for each.
* Likewise a rank that has left a loop in which ranks use the module a different number of times
  (lockstep.py) takes part until all have left it. Inside the loop, any other collective first waits
  for a round in which every rank asks for one.
* Reductions have one fixed order. The *eager* buckets, those that the last backward touched on some
  rank, are reduced by every rank in every backward: as soon as their last gradient is there, at the
  latest when this rank's backward ends. Then ranks agree by one mask which parameters anybody
  touched, and reduce what is left in the same order.
* A rank waits for a reduction in the middle of a backward only when a round has told that all ranks
  have issued it; until then it goes on taking part in gathers. So no rank can wait for one that
  waits for it. Where nothing is gathered before use, a rank needs no other to reach the end of its
  backward, and may simply wait.
* The average of a reduced shard over replicas is issued when the reduction is finished, in the same
  order on every rank. Nobody waits for it before all ranks have ended their backward and so issued
  it, and meanwhile nobody writes to that shard. It takes no memory of its own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from lightning_zero.bucket import Bucket
from lightning_zero.comm import Communicator, Round
from lightning_zero.compiled import compiled_modules, is_compiled
from lightning_zero.config import ZeroConfig
from lightning_zero.guard import BetweenStepsError
from lightning_zero.recording import Kind
from lightning_zero.unit import Trace, Unit

__all__ = ["Moment", "Schedule"]


_Trainable = tuple[bool, ...]  # `requires_grad` of every parameter, in layout order


class Moment(Enum):
    """What the training loop is doing."""

    IDLE = "between steps"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    LOST = "after other ranks were lost"


class Schedule:
    """Hooks on the module, and the decisions they take.

    Attributes:
        moment: What the loop is doing.
        units: The root first.
        is_mid_round: Ranks have agreed on a gather that this one has not issued yet.
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
        self.moment = Moment.IDLE
        self.is_mid_round = False
        self.is_accumulating = False
        self._module = module
        self._buckets = list(buckets)
        self._comm = comm
        self._recorder = comm.recorder
        self._config = config
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._awaits_backward = False  # a forward came after the last backward
        self._gathers = any(unit.buckets for unit in units)
        self._depth = 0  # nested openings of a step: the strategy's, the root module's
        self._forward_trace, self._backward_trace = Trace(), Trace()
        self._unclaimed: set[Unit] = set()  # gathered because another rank asked, or ahead of use
        self._reduces = True  # this backward ends in reductions
        self._ends_step = True  # no further micro-batch will follow
        self._reduce_order = list(reversed(self._buckets))
        self._is_order_agreed = False
        self._arrived: list[Bucket] = []  # order of completion in this backward
        self._eager: list[Bucket] = []  # reduced by every rank in this backward, in this order
        self._num_eager = 0  # of them already reduced
        # What the last agreed backward touched, by what was trainable in it (GANs take turns).
        self._touched: dict[_Trainable, dict[Bucket, list[bool]]] = {}
        self._reducing: Bucket | None = None
        self._num_issued = 0  # reductions in this backward
        self._num_issued_by_all = 0  # as far as the last round told
        self._is_tail = False  # every rank has ended its backward: all issue the same from here on
        self._has_local = False  # the last backward left gradients local
        self._has_partial = False  # or reduced within the group only
        self._buffers_are_fresh = False
        self._has_shared = False  # by the last `prepare`
        self._handles: list[Any] = []
        self._is_compiled = is_compiled(module)
        self._register(module)

    # ---------------------------------------------------------------- hooks

    def _register(self, module: nn.Module) -> None:
        add, eager = self._handles.append, torch.compiler.disable  # a graph ends at our hooks
        add(module.register_forward_pre_hook(eager(self._before_root), prepend=True))
        add(module.register_forward_hook(eager(self._after_root), always_call=True))
        for unit in self.units[1:]:
            if not unit.buckets:
                continue
            owner = unit.module = module.get_submodule(unit.name)
            before = eager(self._before_forward(unit))
            after = eager(self._after_forward(unit))
            add(owner.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            add(owner.register_forward_hook(after, always_call=True))
        for compiled in compiled_modules(module):
            before = eager(self._before_compiled(compiled))
            add(compiled.register_forward_pre_hook(before, prepend=True))
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.is_floating_point():
                    hook = self._on_gradient(bucket, index)
                    was_trained = parameter.requires_grad
                    parameter.requires_grad_(True)  # torch registers on these only
                    add(parameter.register_post_accumulate_grad_hook(hook))
                    parameter.requires_grad_(was_trained)

    def detach(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is not unit.module:
                return  # a copy of the module took our hooks along
            self._unshard(unit)
            self._recorder.enter(Kind.FORWARD, unit.name)
            self._awaits_backward = True
            if torch.is_grad_enabled() and not unit.is_held:
                # A leaf has its gradient before the unit's last nodes have run: it tells nothing.
                leaves = tree_leaves((args, kwargs))
                inputs = [t for t in leaves if _wants_grad(t) and not t.is_leaf]
                if inputs:
                    unit.num_awaited += 1
                    register_multi_grad_hook(inputs, lambda _: self._after_backward_of(unit))

        return hook

    def _before_compiled(self, compiled: nn.Module) -> Any:
        inside = set(compiled.parameters())
        buckets = [
            bucket
            for bucket in self._buckets
            if not bucket.is_gathered_before_use and not inside.isdisjoint(bucket.parameters)
        ]

        def hook(module: nn.Module, args: Any) -> None:
            if module is compiled:
                for bucket in buckets:
                    bucket.finish_gather()

        return hook

    def _after_forward(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module is not unit.module:
                return
            self._recorder.leave(Kind.FORWARD, unit.name)
            leaves = tree_leaves(output)
            if any(isinstance(leaf, Tensor) and unit.owns(leaf) for leaf in leaves):
                self._hold(unit, f"module {unit.name} returns a view of its parameters")
            if torch.is_grad_enabled():
                self._watch_outputs(unit, leaves)
            if not self._stays_after_forward(unit):
                unit.release()

        return hook

    def _watch_outputs(self, unit: Unit, leaves: Sequence[Any]) -> None:
        """Gathers `unit` again when backward reaches one of its outputs."""
        wanting = [leaf for leaf in leaves if _wants_grad(leaf) and not leaf.is_leaf]
        for tensor in wanting:
            tensor.register_hook(lambda _: self._before_backward_of(unit))
        hidden = next((type(x).__name__ for x in leaves if not isinstance(x, _PLAIN)), None)
        if hidden is not None:
            # Backward may enter it through what we cannot see.
            self._hold(unit, f"module {unit.name} returns a {hidden}, which may hide tensors")

    def _hold(self, unit: Unit, reason: str) -> None:
        """Keeps `unit` whole from the beginning to the end of every step, from now on."""
        if not unit.is_held and self._comm.rank == 0:
            warnings.warn(
                f"{reason}; its {unit.numel} elements stay whole throughout each step.",
                stacklevel=2,
            )
        unit.is_held = True

    def _on_gradient(self, bucket: Bucket, index: int) -> Any:
        def hook(parameter: nn.Parameter) -> None:
            if self.moment is not Moment.BACKWARD:
                name = bucket.plan.layout.slots[index].name
                raise RuntimeError(
                    f"backward reached parameter {name} outside the engine; call "
                    "engine.backward(loss), in Lightning self.manual_backward(loss), instead of "
                    "loss.backward()."
                )
            if self._reducing is bucket:
                self._finish_reduction()  # a second gradient, after the first was sent off
            if bucket.grads.receive(index):
                self._on_complete(bucket)

        return hook

    # ---------------------------------------------------------------- forward

    def open(self) -> None:
        """Begins a step or a part of one: the root's parameters are whole, buffers are rank 0's."""
        self._depth += 1
        self._awaits_backward = True
        if self._depth > 1 or self.moment is Moment.BACKWARD:
            return
        if self.moment is Moment.FORWARD and torch.is_grad_enabled():
            self._buffers_are_fresh = True  # a backward that follows has saved them
        self.moment = Moment.FORWARD
        self._recorder.phase(Kind.FORWARD)
        self._forward_trace.begin()
        self.prepare()
        # A forward in training may change them (BatchNorm), whether a backward follows or not.
        self._buffers_are_fresh = self.is_accumulating or not torch.is_grad_enabled()
        for unit in self.units:
            if unit.is_held:
                self._unshard(unit)

    def prepare(self) -> None:
        """Before the first forward after a step: what else is collective in it. Collective."""
        self._wait_for_gathers_of_steps()
        if self._is_compiled:
            self.finish_gathers()
        self._has_shared = not self._buffers_are_fresh
        if self._has_shared:
            self._share_buffers()
        self._buffers_are_fresh = True

    def _wait_for_gathers_of_steps(self) -> None:
        """A worker must not gather while units are gathered: the order would differ by rank."""
        if self._gathers:
            for bucket in self._buckets:
                if bucket.plan.stage.gathers_after_step:
                    bucket.wait_for_step()

    def close(self) -> None:
        """Ends what `open` began. Without gradients nothing stays whole; else backward follows."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self.moment is not Moment.FORWARD:
            return
        self._recorder.phase(None)
        if not torch.is_grad_enabled():
            self._release_all()
            self.moment = Moment.IDLE
        elif not self._awaits_backward:
            for unit in self.units:
                unit.release()
            self.moment = Moment.IDLE

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """`open` and `close` around code that uses the module."""
        self.open()
        try:
            yield
        except BaseException:
            self.reset()
            raise
        self.close()

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if module is self._module:
            self.open()

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self._module:
            return
        # torch calls this after an exception too, with no output, while it is being handled.
        has_failed = output is None and sys.exc_info()[0] is not None
        if has_failed and self._depth == 1 and self.moment is Moment.FORWARD:
            self.reset()
        else:
            self.close()

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
                "forward and backward; use `with lightning_zero.gathered(...)` on every rank to "
                "see it whole, and trainer.save_checkpoint() or "
                "strategy.lightning_module_state_dict() for state dicts."
            )
        unit = self._unit_of[bucket]
        self._awaits_backward = True
        self._hold(unit, f"parameter {name} is used outside its module's forward")
        self._unshard(unit)

    def _stays_after_forward(self, unit: Unit) -> bool:
        if unit.is_held or self.moment is Moment.BACKWARD:
            return True
        if not torch.is_grad_enabled():
            return False
        if self._config.reshard_after_forward is False:
            return True
        return self._forward_trace.is_at_end  # backward begins with the last one

    # ---------------------------------------------------------------- gathering

    @property
    def _trace(self) -> Trace:
        return self._backward_trace if self.moment is Moment.BACKWARD else self._forward_trace

    def _unshard(self, unit: Unit) -> None:
        """Makes `unit` whole, then asks ahead for what followed it last time."""
        if not unit.buckets:
            return
        self._trace.record(unit, may_repeat=not torch.is_grad_enabled())
        self._drop_unclaimed(unit)
        if unit in self._unclaimed or not unit.is_whole:
            self._recorder.count(is_hit=unit.is_whole)
        while not unit.is_whole:
            self._gather_next(unit)
        self._unclaimed.discard(unit)
        unit.finish_gather()
        self._prefetch()

    def _gather_next(self, wanted: Unit) -> None:
        """One round in which this rank asks for `wanted`."""
        # Backward comes after forward, and walks the layout from its end.
        last = 2 * len(self.units) - 1
        backward = self.moment is Moment.BACKWARD
        self._round(last - wanted.index if backward else wanted.index)

    def _round(self, request: int) -> Round:
        """Every rank gathers the unit that the lowest request names."""
        agreed = self._comm.agree(request, self._num_issued)
        self._num_issued_by_all = agreed.fewest
        count, lowest = len(self.units), agreed.lowest
        if lowest < 2 * count:
            unit = self.units[lowest if lowest < count else 2 * count - 1 - lowest]
            if not unit.is_whole:
                self._unclaimed.add(unit)
            self.is_mid_round = True
            unit.gather()
            self.is_mid_round = False
        elif lowest == self.together < agreed.highest:
            raise RuntimeError(
                "a rank wants a collective (such as self.log(..., on_step=True, sync_dist=True), "
                "or torch.equal of sharded parameters) that another, which has fewer batches or "
                "calls, will not take part in; give all ranks equally many, or log with "
                "on_epoch=True only."
            )
        return agreed

    @property
    def _waiting(self) -> int:
        """The request of a rank that waits for a reduction: no unit, but not done."""
        return 2 * len(self.units)

    @property
    def together(self) -> int:
        """The request of a rank that wants another collective, inside a lockstep loop."""
        return 2 * len(self.units) + 1

    @property
    def done(self) -> int:
        """The request of a rank that has ended its step, or its backward."""
        return 2 * len(self.units) + 2

    @property
    def left(self) -> int:
        """The request of a rank that has left a lockstep loop of steps."""
        return 2 * len(self.units) + 3

    def _prefetch(self) -> None:
        self._gather_ahead()
        self._read_ahead()

    def _gather_ahead(self) -> None:
        budget = self._config.prefetch_bucket_size
        if not self._config.overlap_comm or (budget is None and self._num_whole() > 1):
            return
        ahead = 0
        for unit in self._trace.upcoming():
            if budget is not None and ahead + unit.numel > budget:
                return
            ahead += unit.numel
            if not unit.is_whole:
                limit = self._config.max_live_parameters
                if limit is not None and self._live_numel() + unit.numel > limit:
                    return
                self._gather_next(unit)
            if budget is None:
                return

    def _read_ahead(self) -> None:
        """Begins to read shards that rest in files, as far ahead as there are buffers."""
        for unit in self._trace.upcoming():
            if not all(bucket.read_ahead() for bucket in unit.buckets):
                return

    def _drop_unclaimed(self, wanted: Unit | None) -> None:
        """Frees what was gathered for other ranks, or ahead in vain."""
        upcoming = self._trace.upcoming()
        for unit in [u for u in self._unclaimed if u is not wanted]:
            if unit not in upcoming[:1]:
                self._unclaimed.discard(unit)
                unit.release()

    def _num_whole(self) -> int:
        """Units that are whole for their own use, not for the whole step."""
        return sum(unit.is_whole and not unit.is_held and bool(unit.buckets) for unit in self.units)

    def _live_numel(self) -> int:
        return sum(unit.numel for unit in self.units if unit.is_whole)

    def meet(self, request: int) -> None:
        """Takes part in what other ranks still ask for, until none asks for less than `request`.

        Raises:
            RuntimeError: A rank wants a collective that others will not take part in.
        """
        while self._round(request).lowest < request:
            self._drop_unclaimed(None)

    def _release_all(self) -> None:
        if self._gathers:
            self.meet(self.done)
            self.release_all()

    def release_all(self) -> None:
        """Frees whole parameters, also those that were gathered for other ranks. Local."""
        self._unclaimed.clear()
        for unit in self.units:
            unit.release()

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
        self.moment = Moment.BACKWARD
        self._recorder.phase(Kind.BACKWARD)
        self._ends_step = reduces
        self._reduces = reduces or self._config.states.reduces_every_backward
        self._arrived = []
        self._num_eager = self._num_issued = self._num_issued_by_all = 0
        self._is_tail = False
        touched = self._touched.get(self._trainable())
        self._eager = [b for b in self._reduce_order if self._reduces and _is_eager(b, touched)]
        for bucket in self._buckets:
            bucket.wait_for_step()
            expected = touched.get(bucket) if touched is not None else None
            bucket.grads.prepare(outlives_backward=not self._reduces, expected=expected)
        self._backward_trace.begin()
        for unit in self.units:
            if unit.is_held:
                self._unshard(unit)

    def _before_backward_of(self, unit: Unit) -> None:
        if self.moment is Moment.BACKWARD:
            with record_function(f"zero::before_backward {unit.name}"):
                self._unshard(unit)
                self._recorder.enter(Kind.BACKWARD, unit.name)
        else:
            # torch.autograd.grad inside a forward: the graph will be walked again.
            unit.is_held = True
            self._unshard(unit)

    def _after_backward_of(self, unit: Unit) -> None:
        """The gradients of all inputs of `unit` are there: its parameters have done their work."""
        unit.num_awaited -= 1
        if self.moment is Moment.BACKWARD and not unit.is_held and unit.num_awaited <= 0:
            self._recorder.leave(Kind.BACKWARD, unit.name)
            unit.release()
            self._prefetch()

    def _on_complete(self, bucket: Bucket) -> None:
        """The last gradient of `bucket` has come."""
        self._arrived.append(bucket)
        unit = self._unit_of.get(bucket)
        if unit is not None and not unit.num_awaited and not unit.is_held and unit.has_all_grads:
            self._recorder.leave(Kind.BACKWARD, unit.name)
            unit.release()
        self._reduce_eagerly()

    def _trainable(self) -> _Trainable:
        return tuple(p.requires_grad for bucket in self._buckets for p in bucket.parameters)

    def _reduce_eagerly(self) -> None:
        while self._num_eager < len(self._eager):
            bucket = self._eager[self._num_eager]
            if bucket not in self._arrived:
                return
            self._num_eager += 1
            self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        self._finish_reduction()
        bucket.grads.reduce()
        self._num_issued += 1
        self._reducing = bucket
        if not self._config.overlap_comm:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        """Waits for the reduction under way. See [Note: Same order on every rank]."""
        if self._reducing is None:
            return
        if self._gathers and not self._is_tail:
            while self._num_issued_by_all < self._num_issued:
                self._round(self._waiting)
                self._drop_unclaimed(None)
        self._reducing.grads.finish()
        if self._ends_step and self._config.overlap_comm:
            self._reducing.grads.begin_average()
        self._reducing = None

    def _end_backward(self) -> None:
        for bucket in self._eager[self._num_eager :]:
            self._reduce(bucket)
        self._num_eager = len(self._eager)
        if self._reduces or self._gathers:
            self.meet(self.done)
        self._is_tail = True
        if self._reduces:
            self._reduce_the_rest(completes=self._ends_step)
        else:
            for bucket in self._buckets:
                bucket.grads.show()  # means of earlier backwards, which this one has not touched
        self._has_local = not self._reduces
        has_replicas = self._comm.mesh.num_replicas > 1
        self._has_partial = has_replicas and self._reduces and not self._ends_step
        self._comm.free_scratch()
        self._unclaimed.clear()
        for unit in self.units:
            unit.num_awaited = 0
            unit.release()
        self._num_issued = 0
        self._awaits_backward = False
        self.moment = Moment.FORWARD if self._depth else Moment.IDLE
        self._recorder.phase(Kind.FORWARD if self._depth else None)

    def _reduce_the_rest(self, *, completes: bool) -> None:
        """Agrees on what anybody touched and reduces what has not been, in the fixed order.

        Args:
            completes: Average over replicas, too: no further micro-batch will follow.
        """
        buckets = self._buckets
        reduced = set(self._eager[: self._num_eager])
        late = [bucket in reduced and any(bucket.grads.is_local) for bucket in buckets]
        partial = [bucket.grads.replicas.is_partial for bucket in buckets]
        own = [t for bucket in buckets for t in bucket.grads.is_touched]
        mask = self._comm.union([*late, *partial, *own])
        is_late = dict(zip(buckets, mask, strict=False))
        is_partial = dict(zip(buckets, mask[len(buckets) :], strict=False))
        touched: dict[Bucket, list[bool]] = {}
        start = 2 * len(buckets)
        for bucket in buckets:
            stop = start + len(bucket.parameters)
            touched[bucket], start = mask[start:stop], stop
        for bucket in self._reduce_order:
            if bucket not in reduced and any(touched[bucket]):
                self._reduce(bucket)
        for bucket in self._reduce_order:
            if is_late[bucket]:
                self._reduce(bucket)
        self._finish_reduction()
        for bucket in self._reduce_order:
            if completes and (bucket in reduced or is_partial[bucket] or any(touched[bucket])):
                bucket.grads.average()
        for bucket in buckets:
            bucket.grads.publish(touched[bucket])
        self._touched[self._trainable()] = touched
        self._agree_on_order()

    def _agree_on_order(self) -> None:
        """Fixes the order of reductions once, to that in which rank 0's gradients were complete."""
        if not self._is_order_agreed and self._ends_step:
            self._is_order_agreed = True
            mine = [self._buckets.index(bucket) for bucket in self._arrived]
            first = [self._buckets[index] for index in self._comm.broadcast_object(mine)]
            rest = [bucket for bucket in self._reduce_order if bucket not in first]
            self._reduce_order = first + rest

    def reduce_local(self) -> None:
        """Reduces what earlier backwards left local, before somebody needs the mean. Collective."""
        if self._has_local:
            self.meet(self.done)
            for bucket in self._buckets:
                bucket.grads.prepare(outlives_backward=False)  # what was zeroed is not reduced
            self._eager, self._num_eager = [], 0
            self._reduce_the_rest(completes=True)
            self._comm.free_scratch()
        elif self._has_partial:
            self.meet(self.done)
            partial = self._comm.union([b.grads.replicas.is_partial for b in self._buckets])
            for bucket, is_partial in zip(self._buckets, partial, strict=True):
                if is_partial:
                    bucket.grads.average()
        self._has_local = self._has_partial = False

    # ---------------------------------------------------------------- the rest

    def finish_gathers(self) -> None:
        """Waits for the gathers after the last step. See [Note: Graphs end at hooks]."""
        for bucket in self._buckets:
            if not bucket.is_gathered_before_use:
                bucket.finish_gather()

    def step_order(self) -> Sequence[Bucket]:
        """The order in which the next forward needs the buckets, the same on every rank.

        Backward completes them from the end of the forward on.
        """
        return list(reversed(self._reduce_order))

    def reset(self) -> None:
        """Back to rest after an exception: nothing stays gathered, no gradient is half reduced."""
        for bucket in self._buckets:
            bucket.undo_step()
            bucket.shards.stop_reading()
            bucket.grads.drop()
        self._comm.free_scratch()
        self._reducing = None
        self._num_issued = 0
        self._has_local = self._has_partial = False
        self._awaits_backward = self.is_mid_round = False
        self._unclaimed.clear()
        for unit in self.units:
            unit.num_awaited = 0
            unit.release()
        self._depth = 0
        self.moment = Moment.IDLE
        self._recorder.forget()

    def recover(self) -> None:
        """As `reset`, where collectives under way will never end: their groups are gone."""
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

    def share_again(self) -> None:
        """After each rank has written to buffers that `prepare` may have shared. Collective."""
        has_shared, self._has_shared = self._has_shared, False
        if has_shared:
            self._share_buffers()

    def _share_buffers(self) -> None:
        """Copies rank 0's buffers to all ranks, unless each is to keep its own. Collective."""
        if not self._config.broadcast_buffers or self._comm.size == 1:
            return
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._module.buffers():
            groups.setdefault(buffer.dtype, []).append(buffer)
        for buffers in groups.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._comm.broadcast_(flat)
            if self._comm.rank:
                parts = flat.split([buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.detach().copy_(part.view_as(buffer))


_PLAIN = (Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def _wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_eager(bucket: Bucket, touched: dict[Bucket, list[bool]] | None) -> bool:
    """Touched in the last such backward; trainable where there was none yet."""
    if touched is None:
        return any(parameter.requires_grad for parameter in bucket.parameters)
    return any(touched[bucket])
