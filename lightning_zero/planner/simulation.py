"""Peak device memory of a step: the engine's schedule run on a trace, with bytes for tensors.

[Note: Simulated step] `StepSimulation` follows the rules of `Schedule`, `Unit` and `Gradients`, in
a step whose schedule has been recorded, and uses the engine's `CollectiveOrder`. Units are
prefetched or unsharded before their use; gradient buckets are filled, reduced and freed. Besides
the model states, memory holds at each moment: unsharded units, unsharded gradient buckets, the
receive buffers of a reduction, and activations. On the CPU, memory of a gradient bucket is reused
for the next one until backward ends (`CountedScratch`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

from lightning_zero.comm.control import GlooControlPlane, RoundCheck, RoundResult
from lightning_zero.core.order import CollectiveOrder
from lightning_zero.core.unit import prefetch
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import MAX_GRADS_IN_FLIGHT
from lightning_zero.layout.plan import BucketPlan, Plan, UnitPlan
from lightning_zero.layout.stage import State
from lightning_zero.layout.units import ROOT
from lightning_zero.planner.trace import Event, StepTrace, TraceMoment

__all__ = ["Peak", "StepSimulation", "CountedScratch", "simulate_step"]


class CountedScratch:
    """Pool of memory blocks, counted in bytes; `acquire` reuses the smallest that is large enough.

    Args:
        keeps: Whether freed blocks are kept for reuse.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._spare: list[int] = []  # bytes
        self.nbytes = 0  # of all blocks

    def acquire(self, nbytes: int) -> int:
        """Acquires a block of at least `nbytes`, and returns its size."""
        fitting = [block for block in self._spare if block >= nbytes]
        if not fitting:
            self.nbytes += nbytes
            return nbytes
        self._spare.remove(min(fitting))
        return min(fitting)

    def release(self, block: int) -> None:
        """Frees a block of `acquire`."""
        if self._keeps:
            self._spare.append(block)
        else:
            self.nbytes -= block

    def clear(self) -> None:
        """Frees all blocks."""
        self._spare.clear()
        self.nbytes = 0


@dataclass(frozen=True)
class Peak:
    """Peak of one rank's device memory in a step, without the model states.

    Attributes:
        unsharded_bytes: Bytes of unsharded parameters.
        grad_bucket_bytes: Bytes of unsharded gradients and of the receive buffers of reductions.
        activation_bytes: Bytes of activations.
        freed_bytes: Bytes of gradient shards that are counted as model states but are freed at
            the peak, after `zero_grad`.
        num_all_gathers: Number of all-gathers before use in one micro-batch, by bucket.
    """

    unsharded_bytes: int = 0
    grad_bucket_bytes: int = 0
    activation_bytes: int = 0
    freed_bytes: int = 0
    num_all_gathers: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Bytes in addition to the model states, minus those that are freed."""
        needed = self.unsharded_bytes + self.grad_bucket_bytes + self.activation_bytes
        return needed - self.freed_bytes


def simulate_step(
    plan: Plan,
    config: ZeroConfig,
    trace: StepTrace,
    *,
    on_gloo: bool = False,
    has_device_memory: bool = True,
    accumulates: bool = False,
    rank: int = 0,
) -> Peak:
    """Peak of device memory in a step, without the model states.

    Args:
        plan: Plan of the engine.
        config: Settings of the plan.
        trace: Trace of one micro-batch.
        on_gloo: Whether the backend is gloo, which receives into buffers of its own.
        has_device_memory: Whether the device has memory of its own.
        accumulates: Whether gradients are added to those of earlier micro-batches.
        rank: Rank whose shards are counted, where ranks differ.
    """
    simulation = StepSimulation(
        plan,
        config,
        rank,
        on_gloo=on_gloo,
        has_device_memory=has_device_memory,
        accumulates=accumulates,
    )
    for _ in range(3):
        simulation.run(trace.moments)  # records the schedule, as the first steps do
    return simulation.run(trace.moments)


class _LocalControlPlane:
    """Control plane of a single rank: every round returns what the rank sent."""

    rank, size = 0, 1

    def reserve(self, num_bytes: int) -> None:
        pass

    def run_round(
        self, numbers: Sequence[int], mask: bytes, check: RoundCheck | None = None
    ) -> RoundResult:
        return RoundResult(list(numbers), mask)

    def begin_round(
        self, numbers: Sequence[int], mask: bytes, check: RoundCheck
    ) -> Future[RoundResult]:
        future: Future[RoundResult] = Future()
        future.set_result(self.run_round(numbers, mask))
        return future

    def waiting(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def abort_waits(self, error: Exception) -> None:
        raise error

    def peer_failed_error(self, text: str) -> Exception:
        return RuntimeError(text)

    desync_error = peer_failed_error


class _Unit:
    """Buckets of a unit whose parameters are sharded."""

    def __init__(self, plan: UnitPlan, index: int) -> None:
        self.index = index
        self.buckets = [b for b in plan.buckets if b.stage.shards_params]
        self.numel = sum(b.layout.numel for b in self.buckets)
        self.nbytes = sum(b.layout.numel * b.dtype.itemsize for b in self.buckets)
        self.stays_unsharded = index == 0

    def has_all(self, arrived: Collection[str]) -> bool:
        """Whether every parameter has its gradient."""
        return all(
            bucket.is_trainable and all(slot.name in arrived for slot in bucket.layout.slots)
            for bucket in self.buckets
        )


_NO_UNIT = _Unit(UnitPlan(ROOT, ()), 0)  # stands for a module that is not a unit of the plan


class StepSimulation:
    """Memory of one rank during a step. See [Note: Simulated step]."""

    def __init__(
        self,
        plan: Plan,
        config: ZeroConfig,
        rank: int,
        *,
        on_gloo: bool,
        has_device_memory: bool,
        accumulates: bool,
    ) -> None:
        self._plan = plan
        self._buckets = plan.buckets
        self._config = config
        self._rank = rank
        self._on_gloo = on_gloo
        self._has_device_memory = has_device_memory
        self._accumulates = accumulates
        self._list = [_Unit(unit, index) for index, unit in enumerate(plan.units)]
        self._units = {unit.name: own for unit, own in zip(plan.units, self._list, strict=True)}
        self._location_of = {
            slot.name: (self._units[unit.name], bucket, slot.numel)
            for unit in plan.units
            for bucket in unit.buckets
            for slot in bucket.layout.slots
        }
        self._order = CollectiveOrder(
            cast("GlooControlPlane", _LocalControlPlane()),
            self,
            numels=[unit.numel for unit in self._list],
            num_buckets=len(self._buckets),
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
        )
        self._number_of = {bucket.name: number for number, bucket in enumerate(self._buckets)}
        self._reduction_sequence = list(reversed(self._number_of.values()))
        self._begin()

    def _begin(self) -> None:
        self._is_backward = False
        self._prefetched: set[_Unit] = set()  # not used yet
        self._reduced: list[int] = []  # buckets
        self._arrived_buckets: list[int] = []
        self._unsharded: set[_Unit] = set()
        self._unsharded_bytes = 0
        self._pending_backwards: Counter[_Unit] = Counter()
        self._missing: dict[str, set[str]] = {}  # parameters without a gradient yet, by bucket
        self._arrived: set[str] = set()  # parameters with a gradient
        self._open: dict[str, int] = {}  # bytes of unsharded gradients, by bucket
        self._reducing: str | None = None  # bucket
        self._received: list[int] = []  # receive buffers of the reduction
        self._reduced_bytes = 0  # result of the reduction, outside the model states
        self._freed: dict[str, int] = {}  # bytes of zeroed gradient shards, by bucket
        self._freed_bytes = 0  # sum of `_freed`
        self._offloading: list[int] = []  # reduced gradients on their way to CPU memory
        self._scratch = CountedScratch(keeps=not self._has_device_memory)
        self._receive = CountedScratch(keeps=self._on_gloo)
        self._all_gathers: Counter[str] = Counter()
        self._coming: set[str] = set()  # parameters that get a gradient in this step
        self._activation_bytes = 0
        self._peak = Peak()

    def run(self, moments: Sequence[TraceMoment]) -> Peak:
        """Runs one step, and returns its peak."""
        self._begin()
        self._coming = {m.name for m in moments if m.event is Event.GRAD}
        self._order.begin("a forward and its backward", ())
        self._unshard(self._units[ROOT])
        for moment in moments:
            self._activation_bytes = moment.live_bytes
            self._update_peak(moment.high_bytes)
            self._act(moment)
            self._update_peak(self._activation_bytes)
        return dataclasses.replace(self._peak, num_all_gathers=self._all_gathers)

    def _update_peak(self, activation_bytes: int) -> None:
        buckets = self._scratch.nbytes + self._receive.nbytes
        buckets += self._reduced_bytes + sum(self._offloading)
        needed = self._unsharded_bytes + buckets + activation_bytes - self._freed_bytes
        if needed > self._peak.total_bytes:
            self._peak = Peak(self._unsharded_bytes, buckets, activation_bytes, self._freed_bytes)

    def _act(self, moment: TraceMoment) -> None:
        unit = self._units.get(moment.name, _NO_UNIT)
        match moment.event:
            case Event.PRE_FORWARD:
                self._unshard(unit)
                self._pending_backwards[unit] += moment.is_awaited
            case Event.POST_FORWARD:
                if not self._stays_unsharded_after_forward(unit):
                    self._reshard(unit)
            case Event.BEGIN_BACKWARD:
                self._is_backward = True
                self._zero_gradients()
                self._order.begin_backward((), "a backward", self._bucket_sequence())
                self._unshard(self._units[ROOT])
            case Event.PRE_BACKWARD:
                self._unshard(unit)
            case Event.POST_BACKWARD:
                self._pending_backwards[unit] -= 1
                if not unit.stays_unsharded and self._pending_backwards[unit] <= 0:
                    self._reshard(unit)
                    self._prefetch()
            case Event.GRAD:
                self._accumulate_gradient(moment.name)
            case Event.FINALIZE_BACKWARD:
                self._order.finalize_backward(bytes, self._finish_reduction)
                self._order.conclude_backward(is_complete=True)
                sequence = dict.fromkeys([*self._arrived_buckets, *self._reduced])
                self._reduction_sequence = list(sequence)
                self._finish_reduction()
                self._scratch.clear()
                self._receive.clear()
                self._open.clear()
                self._offloading.clear()
                self._unsharded.clear()
                self._unsharded_bytes = 0

    # ---------------------------------------------------------------- units

    def _bucket_sequence(self) -> list[int]:
        """Buckets that get a gradient, in the order of their gradients in the step before."""
        return [
            number
            for number in self._reduction_sequence
            if any(slot.name in self._coming for slot in self._buckets[number].layout.slots)
        ]

    def _unshard(self, unit: _Unit) -> None:
        if unit.buckets:
            self._order.mark_used(unit.index, may_repeat=False)
            while unit not in self._unsharded:
                self._order.request_unshard(unit.index, is_backward=self._is_backward)
            self._prefetched.discard(unit)
            self._prefetch()

    def issue_unshard(self, unit: int, *, is_kept: bool) -> None:
        """See `Issuer`."""
        one = self._list[unit]
        self._all_gathers.update(bucket.name for bucket in one.buckets)
        if is_kept and one not in self._unsharded:
            self._unsharded.add(one)
            self._unsharded_bytes += one.nbytes
        if is_kept:
            self._prefetched.add(one)

    def _reshard(self, unit: _Unit) -> None:
        if unit in self._unsharded:
            self._unsharded.remove(unit)
            self._unsharded_bytes -= unit.nbytes

    def issue_reduction(self, bucket: int) -> None:
        """See `Issuer`."""
        self._finish_reduction()
        self._reduced.append(bucket)
        self._reduce(self._buckets[bucket])

    def begin_pass(self) -> None:
        """See `Issuer`."""
        self._order.begin("a forward and its backward", ())

    def _prefetch(self) -> None:
        prefetched_numel = sum(unit.numel for unit in self._prefetched)
        prefetch(self._order, self._list, self._unsharded, self._config, prefetched_numel)

    def _stays_unsharded_after_forward(self, unit: _Unit) -> bool:
        if unit.stays_unsharded or self._is_backward or self._config.reshard_after_forward is False:
            return True
        return unit is not _NO_UNIT and self._order.is_last_of_forward(unit.index)

    # ---------------------------------------------------------------- gradients

    def _accumulate_gradient(self, name: str) -> None:
        unit, bucket, numel = self._location_of[name]
        if self._reducing == bucket.name:
            self._finish_reduction()
        self._arrived.add(name)
        if bucket.stage.has_shard(State.GRAD) and bucket.name not in self._open:
            nbytes = bucket.layout.numel * bucket.dtype.itemsize
            self._open[bucket.name] = self._scratch.acquire(nbytes)
        self._update_peak(self._activation_bytes)
        self._activation_bytes -= numel * bucket.dtype.itemsize  # copied to the bucket and freed
        if bucket.name not in self._missing:
            names = {slot.name for slot in bucket.layout.slots}
            self._missing[bucket.name] = names & self._coming
        missing = self._missing[bucket.name]
        missing.discard(name)
        if missing:
            return
        is_pending = self._pending_backwards[unit] or unit.stays_unsharded
        if not is_pending and unit.has_all(self._arrived):
            self._reshard(unit)
        self._arrived_buckets.append(self._number_of[bucket.name])
        self._order.mark_ready(self._number_of[bucket.name])

    def _zero_gradients(self) -> None:
        """Frees gradient shards, as the Trainer does between forward and backward."""
        for bucket in self._buckets:
            dtype, stage = self._plan.grad_dtype(bucket), bucket.stage
            # Otherwise the shard is a part of the unsharded gradient.
            is_separate = stage.has_shard(State.GRAD) or dtype != bucket.dtype
            is_shard = bucket.is_trainable and stage.has_shard(State.OPTIM) and is_separate
            is_offloaded = bucket.tiers.grad.is_offloaded(has_device_memory=self._has_device_memory)
            if is_shard and not is_offloaded and not self._accumulates:
                numel = len(bucket.layout.shard(self._rank))
                self._freed[bucket.name] = numel * dtype.itemsize
        self._freed_bytes = sum(self._freed.values())

    def _reduce(self, bucket: BucketPlan) -> None:
        size, grad_itemsize = self._plan.world_size, self._plan.grad_dtype(bucket).itemsize
        shard = len(bucket.layout.shard(self._rank))
        self._reducing = bucket.name
        self._freed_bytes -= self._freed.pop(bucket.name, 0)
        if not bucket.stage.has_shard(State.OPTIM):
            sent = grad_itemsize
        else:
            sent = bucket.dtype.itemsize
            is_offloaded = bucket.tiers.grad.is_offloaded(has_device_memory=self._has_device_memory)
            if is_offloaded or self._accumulates:
                self._reduced_bytes = shard * grad_itemsize
        if self._on_gloo:
            self._received = [self._receive.acquire(shard * sent) for _ in range(size - 1)]
        elif sent != grad_itemsize:
            # NCCL sums in the dtype of the result.
            self._received = [self._receive.acquire(bucket.layout.numel * grad_itemsize)]
        self._update_peak(self._activation_bytes)
        if not self._config.overlap_comm:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        if self._reducing is None:
            return
        name, self._reducing = self._reducing, None
        if name in self._open:
            self._scratch.release(self._open.pop(name))
        for block in self._received:
            self._receive.release(block)
        self._received = []
        if self._reduced_bytes and self._has_device_memory:
            offloading = [*self._offloading, self._reduced_bytes]
            self._offloading = offloading[-MAX_GRADS_IN_FLIGHT:]
        self._reduced_bytes = 0
