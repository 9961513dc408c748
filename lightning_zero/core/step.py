"""A step in the order of time: the verbs that the hooks of modules and of autograd call.

[Note: A step]

    forward of a unit   pre_forward -> unshard -> ... -> Params.wait_for_unshard -> prefetch
                        post_forward -> reshard
    backward of a unit  pre_backward -> unshard -> ... -> Params.wait_for_unshard -> prefetch
                        post_accumulate_grad; the last of a bucket -> Reducer.mark_ready -> ...
                        post_backward -> reshard -> prefetch
    end of backward     finalize_backward -> Reducer: the rest is reduced, `.grad` is set
    step                clip_by_norm (core/norm.py); for each bucket load, step, store, publish: the
                        all-gather of replicated parameters (optim/step.py)

    In place of `...` the order of all ranks (core/order.py) decides. In their turn it calls
    issue_unshard   -> Params.unshard    all-gather: shard -> unsharded parameters; parameter dtype
    issue_reduction -> Gradients.reduce  reduce-scatter: gradients -> shard of the mean; its dtype

[Note: Streams] A collective is queued on a side stream, where it starts after all that is queued on
the compute stream: there the buffer of an all-gather was allocated, its previous use ended, and the
last gradient of a bucket was written. The compute stream waits for an all-gather in
`wait_for_unshard`, for a reduction before the next one is issued, and frees the buffers after that.
Over replicas a reduced shard is averaged when its reduction has ended, in one order on all ranks.

[Note: What an all-gather waits for] The host first issues all earlier events of the schedule; a
reduction among them waits for the one before it, and a unit that is not kept for its own data. At
the beginning of a pass that does not repeat the last one, and for a unit without a schedule, it
waits for a round of all ranks. Then for the worker that steps the bucket, and for a shard in a
file. After it is issued, gloo waits for the peers' data in `wait_for_unshard`. On CUDA the host
goes on; the stream of all-gathers waits for the compute stream, for the copy of a shard from CPU
memory, and for what is queued before on the same communicator, its kernel for the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.profiler import record_function

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.order import CollectiveOrder
from lightning_zero.core.param_grads import outside_engine_error
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.unit import Call, Prefetcher, Unit
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind

__all__ = ["Step"]


class Step:
    """The verbs of a step, in one run after another: an exception ends a run.

    Args:
        units: All units, the root first.
        config: The engine's settings.
        recorder: Counts prefetches that were in time, and those that were late.
        begin_next_run: Begins another run. Collective.
        begin_pass: Begins a pass with all ranks; called before a use if none is open.

    Attributes:
        units: All units, the root first.
        shards_params: Whether the parameters of any unit are sharded.
        ended_by: What has ended the run; None: it goes on.
        order: The collective order of all ranks, in this run.
        reducer: Reduces the gradients, in this run.
        prefetcher: Unshards units before their use, in this run.
        is_in_backward: Whether a backward is in progress.
        has_forward: Whether a forward with gradients has run since the last backward.
        last_used: Name of the unit whose forward or backward began last.
    """

    ended_by: BaseException | None
    order: CollectiveOrder
    reducer: Reducer
    prefetcher: Prefetcher
    is_in_backward: bool
    has_forward: bool
    _retain_graph: bool  # the backward in progress keeps its graph

    def __init__(
        self,
        units: Sequence[Unit],
        config: ZeroConfig,
        recorder: Recorder,
        begin_next_run: Callable[[], None],
        begin_pass: Callable[[], None],
    ) -> None:
        self.units = list(units)
        self.shards_params = any(unit.buckets for unit in units)
        self.last_used = ""
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._config = config
        self._recorder = recorder
        self._begin_next_run, self._begin_pass = begin_next_run, begin_pass

    def begin_run(self, order: CollectiveOrder, reducer: Reducer) -> None:
        """Begins a run, in which nothing is recorded yet. Local."""
        self.ended_by = None
        self.order, self.reducer = order, reducer
        self.prefetcher = Prefetcher(self.units, order, self._config)
        self._retain_graph = self.has_forward = self.is_in_backward = False
        for unit in self.units:
            unit.reset_backward()

    def end_run(self, error: BaseException) -> None:
        """Ends the run because of `error`. Local."""
        self.ended_by = self.ended_by or error
        self.has_forward = self.is_in_backward = False

    def ensure_run(self) -> None:
        """Begins another run if an exception has ended the last. Collective then, else local.

        Raises:
            PeerFailedError: A rank has not come.
        """
        if self.ended_by is not None:
            self._begin_next_run()

    # ---------------------------------------------------------------- forward

    def pre_forward(self, unit: Unit) -> None:
        """Unshards `unit` before its module's forward."""
        self.ensure_run()
        self.last_used = unit.name
        self.unshard(unit)
        unit.note_graph()
        self._recorder.begin_layer(Kind.FORWARD, unit.name)
        self.remember_graph()

    def remember_graph(self) -> None:
        """Remembers that a forward with gradients awaits a backward."""
        self.has_forward |= torch.is_grad_enabled()

    def unshard(self, unit: Unit) -> None:
        """Unshards `unit` and waits for it, then prefetches. Collective."""
        if not unit.buckets:
            return
        order, unclaimed = self.order, self.prefetcher.unclaimed
        is_unsharded = unit.is_unsharded
        if not is_unsharded:  # inside a transform, ranks cannot agree
            unit.buckets[0].params.check_outside_transform()
        if order.current is None:
            self._begin_pass()
        is_again = order.allows_uneven_calls and not torch.is_grad_enabled()
        order.mark_used(unit.index, may_repeat=is_again and not is_unsharded)
        if not unit.is_unsharded or unit in unclaimed:
            self._recorder.count_prefetch(is_hit=unit.is_unsharded)
            self.prefetcher.reshard_before(unit)
        while not unit.is_unsharded:
            order.request_unshard(unit.index, is_backward=self.is_in_backward)
        unclaimed.pop(unit, None)
        for bucket in unit.buckets:
            bucket.params.wait_for_unshard()
        self.prefetcher.prefetch()

    def issue_unshard(self, index: int, *, is_kept: bool) -> None:
        """Issues the all-gather of unit `index`, in its turn: called by the order. Collective.

        A rank on which it is unsharded sends its shard again. `is_kept`: it stays unsharded until
        this or another unit is used; else it is resharded, unless backward begins with it.
        """
        unit = self.units[index]
        was_unsharded = unit.is_unsharded
        for bucket in unit.buckets:
            bucket.params.unshard()
        if was_unsharded:
            return
        if is_kept or self.order.is_last_of_forward(index):
            self.prefetcher.unclaimed[unit] = None
        else:
            unit.reshard()

    def unshard_for_step(self) -> None:
        """Unshards the root, and other units that stay unsharded throughout a step."""
        for unit in self.units:
            if unit.stays_unsharded:
                self.unshard(unit)

    def post_forward(self, unit: Unit) -> None:
        """Reshards `unit` after its module's forward, unless it stays unsharded."""
        self._recorder.end_layer(Kind.FORWARD, unit.name)
        if unit.stays_unsharded or self.is_in_backward:
            return
        if torch.is_grad_enabled() and (
            self._config.reshard_after_forward is False
            or self.order.is_last_of_forward(unit.index)  # backward begins with it
        ):
            return
        unit.reshard()

    # ---------------------------------------------------------------- backward

    def begin_backward(self, *, ends_step: bool, retain_graph: bool) -> None:
        """Begins a backward, and its pass if it reduces; unshards the root. Collective."""
        self.is_in_backward, self._retain_graph = True, retain_graph
        self.reducer.set_ends_step(ends_step)
        trainable = self.reducer.trainable()
        if self.reducer.reduces:
            self.order.begin_backward(trainable, "a backward", self.reducer.eager(trainable))
        self.reducer.begin_backward(trainable)
        self.unshard_for_step()

    def pre_backward(self, unit: Unit, call: Call) -> None:
        """Unshards `unit` when backward reaches an output of `call`."""
        if unit.is_unsharded and call in unit.entered:
            return  # reached before, by another output or the base of a view
        self.last_used = unit.name
        unit.enter_backward(call)
        if self.is_in_backward:
            with record_function(f"zero::pre_backward {unit.name}"):
                self.unshard(unit)
                self._recorder.begin_layer(Kind.BACKWARD, unit.name)
        else:  # torch.autograd.grad inside a forward: the graph will be traversed again
            unit.keep_unsharded()
            self.unshard(unit)

    def post_accumulate_grad(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Takes the gradient of slot `index`; the last one of `bucket` makes it ready to reduce."""
        if not self.is_in_backward:
            raise outside_engine_error(bucket.plan.layout.slots[index].name)
        if bucket.grads.accumulate(index):
            unit = self._unit_of.get(bucket)
            if unit is not None and unit.is_backward_done:
                self._reshard_after_backward(unit)
            self.reducer.mark_ready(bucket)

    def issue_reduction(self, number: int) -> None:
        """Issues the reduction of bucket `number`, in its turn: called by the order. Collective."""
        self.reducer.issue_reduction(number)

    def post_backward(self, unit: Unit, call: Call) -> None:
        """Reshards `unit` when backward has left `call` and all other calls of it."""
        unit.leave_backward(call)
        if unit.entered:
            return  # this call's input came from an earlier call, which backward has not left yet
        if self.is_in_backward and not unit.stays_unsharded and unit.num_awaited <= 0:
            self._reshard_after_backward(unit)
            self.prefetcher.prefetch()

    def _reshard_after_backward(self, unit: Unit) -> None:
        """Reshards `unit`; its memory is needed again only if the graph is retained."""
        self._recorder.end_layer(Kind.BACKWARD, unit.name)
        unit.end_graphs(is_retained=self._retain_graph)
        unit.reshard()

    def finalize_backward(self) -> None:
        """Reduces the remaining gradients, sets `.grad`, and reshards all units. Collective."""
        self.reducer.finalize_backward()
        for unit in self.units:
            if unit.num_awaited or unit.entered:
                unit.reset_backward()
            unit.end_graphs(is_retained=self._retain_graph)
        self.has_forward = self.is_in_backward = False
        self.reshard_all()

    def reshard_all(self) -> None:
        """Reshards all units, including those that were unsharded for other ranks. Local."""
        self.prefetcher.unclaimed.clear()
        for unit in self.units:
            if unit.num_unsharded:
                unit.reshard()
