"""The most device memory of a step: the schedule replayed on a trace, with bytes for tensors.

[Note: Replayed] `StepSimulation` does as `Schedule`, `Unit` and `Gradients` in a step that follows others
like it, by the order that decides there too: units are gathered before their use and ahead of it,
buckets of gradients fill up, travel and go. Beside what rests there are at each moment whole units,
whole gradient buckets, what a reduction receives, and activations. On the CPU, memory of gradient
buckets is kept for the next one until backward ends (`CountedScratch`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import MAX_GRADS_IN_FLIGHT
from lightning_zero.layout.order import CollectiveOrder, prefetch
from lightning_zero.layout.plan import BucketPlan, Plan, UnitPlan
from lightning_zero.layout.rounds import RoundCheck, RoundResult
from lightning_zero.layout.stage import State
from lightning_zero.layout.units import ROOT
from lightning_zero.planner.trace import Event, StepTrace, TraceMoment

__all__ = ["Peak", "StepSimulation", "CountedScratch", "simulate_step"]


class CountedScratch:
    """Memory in pieces; on the CPU kept for the next use, the smallest piece that is enough."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._spare: list[int] = []  # bytes
        self.nbytes = 0  # of all pieces

    def take(self, nbytes: int) -> int:
        """A piece of at least so many bytes: its size."""
        fitting = [piece for piece in self._spare if piece >= nbytes]
        if not fitting:
            self.nbytes += nbytes
            return nbytes
        self._spare.remove(min(fitting))
        return min(fitting)

    def give(self, piece: int) -> None:
        """Returns a piece that `take` gave."""
        if self._keeps:
            self._spare.append(piece)
        else:
            self.nbytes -= piece

    def clear(self) -> None:
        """Frees all pieces."""
        self._spare.clear()
        self.nbytes = 0


@dataclass(frozen=True)
class Peak:
    """Device memory of one rank beside what rests, at the moment when it is most.

    Attributes:
        unsharded_bytes: Whole parameters of units that rest as shards.
        grad_bucket_bytes: Whole gradients on their way, and what reductions receive.
        activation_bytes: Of the module.
        freed_bytes: Shards of gradients that rest, and have been zeroed at this moment.
        num_all_gathers: By bucket, gathers before use in one micro-batch.
    """

    unsharded_bytes: int = 0
    grad_bucket_bytes: int = 0
    activation_bytes: int = 0
    freed_bytes: int = 0
    num_all_gathers: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Of all, without what has been freed."""
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
    """What a step needs beside what rests.

    Args:
        plan: The engine's.
        config: It was made with.
        trace: Of one micro-batch.
        on_gloo: Ranks talk over gloo on the CPU, which receives into buffers of its own.
        has_device_memory: CPU memory is other memory than the device's.
        accumulates: A mean of earlier micro-batches is added to.
        rank: Whose shards, where they differ.
    """
    run = StepSimulation(
        plan,
        config,
        rank,
        on_gloo=on_gloo,
        has_device_memory=has_device_memory,
        accumulates=accumulates,
    )
    for _ in range(3):
        run.follow(trace.moments)  # learns the order, as the first steps do
    return run.follow(trace.moments)


class _Alone:
    """How one rank speaks with itself."""

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
    """Of the buckets that rest as shards."""

    def __init__(self, plan: UnitPlan, index: int) -> None:
        self.index = index
        self.buckets = [b for b in plan.buckets if b.stage.shards_params]
        self.numel = sum(b.layout.numel for b in self.buckets)
        self.nbytes = sum(b.layout.numel * b.dtype.itemsize for b in self.buckets)
        self.stays_unsharded = index == 0

    def has_all(self, arrived: Collection[str]) -> bool:
        """Every parameter has its gradient."""
        return all(
            bucket.is_trainable and all(slot.name in arrived for slot in bucket.layout.slots)
            for bucket in self.buckets
        )


_NO_UNIT = _Unit(UnitPlan(ROOT, ()), 0)  # a module that is none in this plan


class StepSimulation:
    """One rank in a step. See [Note: Replayed]."""

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
        self._is_apart = has_device_memory
        self._accumulates = accumulates
        self._list = [_Unit(unit, index) for index, unit in enumerate(plan.units)]
        self._units = {unit.name: own for unit, own in zip(plan.units, self._list, strict=True)}
        self._place_of = {
            slot.name: (self._units[unit.name], bucket, slot.numel)
            for unit in plan.units
            for bucket in unit.buckets
            for slot in bucket.layout.slots
        }
        self._order = CollectiveOrder(
            _Alone(),
            self,
            numels=[unit.numel for unit in self._list],
            num_buckets=len(self._buckets),
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
        )
        self._number_of = {bucket.name: number for number, bucket in enumerate(self._buckets)}
        self._sequence = list(reversed(self._number_of.values()))  # of reductions
        self._begin()

    def _begin(self) -> None:
        self._is_backward = False
        self._ahead: set[_Unit] = set()  # not used yet
        self._reduced: list[int] = []
        self._arrived_buckets: list[int] = []
        self._whole: set[_Unit] = set()
        self._gathered_bytes = 0  # of those
        self._awaited: Counter[_Unit] = Counter()
        self._missing: dict[str, set[str]] = {}  # by bucket: gradients still to come
        self._arrived: set[str] = set()  # parameters
        self._open: dict[str, int] = {}  # by bucket: bytes of whole gradients
        self._reducing: str | None = None
        self._received: list[int] = []
        self._out = 0
        self._freed: dict[str, int] = {}  # by bucket: bytes of its zeroed shard of gradients
        self._freed_bytes = 0  # of all
        self._landing: list[int] = []
        self._scratch = CountedScratch(keeps=not self._is_apart)
        self._receive = CountedScratch(keeps=self._on_gloo)
        self._gathers: Counter[str] = Counter()
        self._coming: set[str] = set()  # parameters that get a gradient
        self._activation_bytes = 0
        self._most = Peak()

    def follow(self, moments: Sequence[TraceMoment]) -> Peak:
        """Runs through a step."""
        self._begin()
        self._coming = {m.name for m in moments if m.event is Event.GRAD}
        self._order.begin("a forward and its backward", ())
        self._unshard(self._units[ROOT])
        for moment in moments:
            self._activation_bytes = moment.live_bytes
            self._look(moment.high_bytes)
            self._act(moment)
            self._look(self._activation_bytes)
        return dataclasses.replace(self._most, num_all_gathers=self._gathers)

    def _look(self, activation_bytes: int) -> None:
        buckets = self._scratch.nbytes + self._receive.nbytes + self._out + sum(self._landing)
        needed = self._gathered_bytes + buckets + activation_bytes - self._freed_bytes
        if needed > self._most.total_bytes:
            self._most = Peak(self._gathered_bytes, buckets, activation_bytes, self._freed_bytes)

    def _act(self, moment: TraceMoment) -> None:
        unit = self._units.get(moment.name, _NO_UNIT)
        match moment.event:
            case Event.PRE_FORWARD:
                self._unshard(unit)
                self._awaited[unit] += moment.is_awaited
            case Event.POST_FORWARD:
                if not self._stays_unsharded_after_forward(unit):
                    self._release(unit)
            case Event.BEGIN_BACKWARD:
                self._is_backward = True
                self._zero_gradients()
                self._order.begin_backward((), "a backward", self._eager())
                self._unshard(self._units[ROOT])
            case Event.PRE_BACKWARD:
                self._unshard(unit)
            case Event.POST_BACKWARD:
                self._awaited[unit] -= 1
                if not unit.stays_unsharded and self._awaited[unit] <= 0:
                    self._release(unit)
                    self._prefetch()
            case Event.GRAD:
                self._receive_gradient(moment.name)
            case Event.FINALIZE_BACKWARD:
                self._order.finalize_backward(bytes, self._finish_reduction)
                self._order.conclude_backward(is_complete=True)
                self._sequence = list(dict.fromkeys([*self._arrived_buckets, *self._reduced]))
                self._finish_reduction()
                self._scratch.clear()
                self._receive.clear()
                self._open.clear()
                self._landing.clear()
                self._whole.clear()
                self._gathered_bytes = 0

    # ---------------------------------------------------------------- gathers

    def _eager(self) -> list[int]:
        """Buckets that get a gradient, in the order in which they got it before."""
        return [
            number
            for number in self._sequence
            if any(slot.name in self._coming for slot in self._buckets[number].layout.slots)
        ]

    def _unshard(self, unit: _Unit) -> None:
        if unit.buckets:
            while unit not in self._whole:
                self._order.request_unshard(unit.index, is_backward=self._is_backward)
            self._ahead.discard(unit)
            self._prefetch()

    def issue_unshard(self, unit: int, *, is_kept: bool) -> None:
        """See `Issuer`."""
        one = self._list[unit]
        self._gathers.update(bucket.name for bucket in one.buckets)
        if is_kept and one not in self._whole:
            self._whole.add(one)
            self._gathered_bytes += one.nbytes
        if is_kept:
            self._ahead.add(one)

    def _release(self, unit: _Unit) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self._gathered_bytes -= unit.nbytes

    def issue_reduction(self, bucket: int) -> None:
        """See `Issuer`."""
        self._finish_reduction()
        self._reduced.append(bucket)
        self._reduce(self._buckets[bucket])

    def begin_pass(self) -> None:
        """See `Issuer`."""
        self._order.begin("a forward and its backward", ())

    def _prefetch(self) -> None:
        ahead = sum(unit.numel for unit in self._ahead)
        prefetch(self._order, self._list, self._whole, self._config, ahead)

    def _stays_unsharded_after_forward(self, unit: _Unit) -> bool:
        if unit.stays_unsharded or self._is_backward or self._config.reshard_after_forward is False:
            return True
        return unit is not _NO_UNIT and self._order.is_last_of_forward(unit.index)

    # ---------------------------------------------------------------- gradients

    def _receive_gradient(self, name: str) -> None:
        unit, bucket, numel = self._place_of[name]
        if self._reducing == bucket.name:
            self._finish_reduction()
        self._arrived.add(name)
        if bucket.stage.has_shard(State.GRAD) and bucket.name not in self._open:
            nbytes = bucket.layout.numel * bucket.dtype.itemsize
            self._open[bucket.name] = self._scratch.take(nbytes)
        self._look(self._activation_bytes)
        self._activation_bytes -= numel * bucket.dtype.itemsize  # it has been copied, and is gone
        if bucket.name not in self._missing:
            names = {slot.name for slot in bucket.layout.slots}
            self._missing[bucket.name] = names & self._coming
        missing = self._missing[bucket.name]
        missing.discard(name)
        if missing:
            return
        if not self._awaited[unit] and not unit.stays_unsharded and unit.has_all(self._arrived):
            self._release(unit)
        self._arrived_buckets.append(self._number_of[bucket.name])
        self._order.mark_ready(self._number_of[bucket.name])

    def _zero_gradients(self) -> None:
        """As the Trainer does between forward and backward: shards of gradients are freed."""
        for bucket in self._buckets:
            dtype, stage = self._plan.grad_dtype(bucket), bucket.stage
            is_alone = stage.has_shard(State.GRAD) or dtype != bucket.dtype  # not in the whole
            is_shard = bucket.is_trainable and stage.has_shard(State.OPTIM) and is_alone
            rests_here = not bucket.tiers.grad.is_offloaded(has_device_memory=self._is_apart)
            if is_shard and rests_here and not self._accumulates:
                numel = len(bucket.layout.shard(self._rank))
                self._freed[bucket.name] = numel * dtype.itemsize
        self._freed_bytes = sum(self._freed.values())

    def _reduce(self, bucket: BucketPlan) -> None:
        size, mean = self._plan.world_size, self._plan.grad_dtype(bucket).itemsize
        shard = len(bucket.layout.shard(self._rank))
        self._reducing = bucket.name
        self._freed_bytes -= self._freed.pop(bucket.name, 0)
        if not bucket.stage.has_shard(State.OPTIM):
            sent = mean
        else:
            sent = bucket.dtype.itemsize
            is_landing = bucket.tiers.grad.is_offloaded(has_device_memory=self._is_apart)
            if is_landing or self._accumulates:
                self._out = shard * mean
        if self._on_gloo:
            self._received = [self._receive.take(shard * sent) for _ in range(size - 1)]
        elif sent != mean:
            # NCCL sums in the dtype of the result.
            self._received = [self._receive.take(bucket.layout.numel * mean)]
        self._look(self._activation_bytes)
        if not self._config.overlap_comm:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        if self._reducing is None:
            return
        name, self._reducing = self._reducing, None
        if name in self._open:
            self._scratch.give(self._open.pop(name))
        for memory in self._received:
            self._receive.give(memory)
        self._received = []
        if self._out and self._is_apart:
            self._landing = [*self._landing, self._out][-MAX_GRADS_IN_FLIGHT:]
        self._out = 0
