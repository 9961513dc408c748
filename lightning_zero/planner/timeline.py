"""The most device memory of a step: the schedule replayed on a trace, with bytes for tensors.

[Note: Replayed] `Replay` takes the decisions of `Schedule`, `Unit` and `Gradients` in a step that
follows others like it: units are gathered before their use and ahead of it, buckets of gradients
fill up, travel and go. Beside what rests there are at each moment whole units, whole gradient
buckets, what a reduction receives, and activations. On the CPU, memory of gradient buckets is kept
for the next one until backward ends (`Scratch`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import MAX_MEANS_ON_THE_WAY
from lightning_zero.layout.plan import BucketPlan, Plan, UnitPlan
from lightning_zero.layout.stage import State
from lightning_zero.planner.trace import Event, Moment, StepTrace

__all__ = ["Peak", "Replay", "Scratch", "replay"]


class Scratch:
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
        gathered_bytes: Whole parameters of units that rest as shards.
        bucket_bytes: Whole gradients on their way, and what reductions receive.
        activation_bytes: Of the module.
        freed_bytes: Shards of gradients that rest, and have been zeroed at this moment.
        num_gathers: By bucket, gathers before use in one micro-batch.
    """

    gathered_bytes: int = 0
    bucket_bytes: int = 0
    activation_bytes: int = 0
    freed_bytes: int = 0
    num_gathers: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Of all, without what has been freed."""
        needed = self.gathered_bytes + self.bucket_bytes + self.activation_bytes
        return needed - self.freed_bytes


def replay(
    plan: Plan,
    config: ZeroConfig,
    trace: StepTrace,
    *,
    on_gloo: bool = False,
    is_apart: bool = True,
    accumulates: bool = False,
    rank: int = 0,
) -> Peak:
    """What a step needs beside what rests.

    Args:
        plan: The engine's.
        config: It was made with.
        trace: Of one micro-batch.
        on_gloo: Ranks talk over gloo on the CPU, which receives into buffers of its own.
        is_apart: CPU memory is other memory than the device's.
        accumulates: A mean of earlier micro-batches is added to.
        rank: Whose shards, where they differ.
    """
    run = Replay(plan, config, rank, on_gloo=on_gloo, is_apart=is_apart, accumulates=accumulates)
    run.follow(trace.moments)  # learns the order, as the first step does
    return run.follow(trace.moments)


class Replay:
    """One rank in a step. See [Note: Replayed]."""

    def __init__(
        self,
        plan: Plan,
        config: ZeroConfig,
        rank: int,
        *,
        on_gloo: bool,
        is_apart: bool,
        accumulates: bool,
    ) -> None:
        self._plan = plan
        self._config = config
        self._rank = rank
        self._on_gloo = on_gloo
        self._is_apart = is_apart
        self._accumulates = accumulates
        self._units = {
            unit.name: [b for b in unit.buckets if b.stage.gathers_before_use]
            for unit in plan.units
        }
        self._bucket_of = {
            s.name: (u, b) for u in plan.units for b in u.buckets for s in b.layout.slots
        }
        self._last: dict[bool, list[str]] = {False: [], True: []}  # by whether it is backward
        self._begin()

    def _begin(self) -> None:
        self._order: dict[bool, list[str]] = {False: [], True: []}
        self._cursor = 0
        self._is_backward = False
        self._whole: set[str] = set()
        self._awaited: Counter[str] = Counter()
        self._missing: dict[str, set[str]] = {}  # by bucket: gradients still to come
        self._arrived: set[str] = set()  # parameters
        self._open: dict[str, int] = {}  # by bucket: bytes of whole gradients
        self._reducing: str | None = None
        self._received: list[int] = []
        self._out = 0
        self._freed: dict[str, int] = {}  # by bucket: bytes of its zeroed shard of gradients
        self._landing: list[int] = []
        self._scratch = Scratch(keeps=not self._is_apart)
        self._receive = Scratch(keeps=self._on_gloo)
        self._gathers: Counter[str] = Counter()
        self._coming: set[str] = set()  # parameters that get a gradient
        self._activation_bytes = 0
        self._most = Peak()

    def follow(self, moments: Sequence[Moment]) -> Peak:
        """Runs through a step."""
        self._begin()
        self._coming = {m.name for m in moments if m.event is Event.GRAD}
        self._unshard("")
        for moment in moments:
            self._activation_bytes = moment.live_bytes
            self._look(moment.high_bytes)
            self._act(moment)
            self._look(self._activation_bytes)
        self._last = self._order
        return dataclasses.replace(self._most, num_gathers=self._gathers)

    def _look(self, activation_bytes: int) -> None:
        gathered = sum(
            bucket.layout.numel * bucket.dtype.itemsize
            for name in self._whole
            for bucket in self._units[name]
        )
        buckets = self._scratch.nbytes + self._receive.nbytes + self._out + sum(self._landing)
        now = Peak(gathered, buckets, activation_bytes, sum(self._freed.values()))
        if now.total_bytes > self._most.total_bytes:
            self._most = now

    def _act(self, moment: Moment) -> None:
        name = moment.name
        match moment.event:
            case Event.FORWARD:
                self._unshard(name)
                self._awaited[name] += moment.is_awaited
            case Event.FORWARD_END:
                if not self._stays(name):
                    self._whole.discard(name)
            case Event.TURN:
                self._is_backward, self._cursor = True, 0
                self._zero_gradients()
                self._unshard("")
            case Event.BACKWARD:
                self._unshard(name)
            case Event.BACKWARD_END:
                self._awaited[name] -= 1
                if name and self._awaited[name] <= 0:
                    self._whole.discard(name)
                    self._prefetch()
            case Event.GRAD:
                self._receive_gradient(name)
            case Event.END:
                self._finish_reduction()
                self._scratch.clear()
                self._receive.clear()
                self._open.clear()
                self._landing.clear()
                self._whole.clear()

    # ---------------------------------------------------------------- gathers

    def _stays(self, name: str) -> bool:
        if not name or self._is_backward or self._config.reshard_after_forward is False:
            return True
        last = self._last[False]
        return bool(last) and self._cursor == len(last)

    def _unshard(self, name: str) -> None:
        if not self._units.get(name):
            return
        self._order[self._is_backward].append(name)
        last = self._last[self._is_backward]
        if name in last[self._cursor :]:
            self._cursor = last.index(name, self._cursor) + 1
        self._gather(name)
        self._prefetch()

    def _gather(self, name: str) -> None:
        if name not in self._whole:
            self._whole.add(name)
            self._gathers.update(bucket.name for bucket in self._units[name])

    def _prefetch(self) -> None:
        budget = self._config.prefetch_bucket_size
        num_whole = sum(bool(name) for name in self._whole)
        if not self._config.overlap_comm or (budget is None and num_whole > 1):
            return
        ahead = 0
        for name in self._last[self._is_backward][self._cursor :]:
            numel = self._numel(name)
            if budget is not None and ahead + numel > budget:
                return
            ahead += numel
            limit = self._config.max_live_parameters
            if name not in self._whole:
                if limit is not None and sum(map(self._numel, self._whole)) + numel > limit:
                    return
                self._gather(name)
            if budget is None:
                return

    def _numel(self, name: str) -> int:
        return sum(bucket.layout.numel for bucket in self._units[name])

    # ---------------------------------------------------------------- gradients

    def _receive_gradient(self, name: str) -> None:
        unit, bucket = self._bucket_of[name]
        if self._reducing == bucket.name:
            self._finish_reduction()
        self._arrived.add(name)
        if bucket.stage.has_shard(State.GRAD) and bucket.name not in self._open:
            nbytes = bucket.layout.numel * bucket.dtype.itemsize
            self._open[bucket.name] = self._scratch.take(nbytes)
        self._look(self._activation_bytes)
        own = next(slot.numel for slot in bucket.layout.slots if slot.name == name)
        self._activation_bytes -= own * bucket.dtype.itemsize  # it has been copied, and is gone
        missing = self._missing.setdefault(
            bucket.name, {slot.name for slot in bucket.layout.slots} & self._coming
        )
        missing.discard(name)
        if missing:
            return
        if not self._awaited[unit.name] and unit.name and self._has_all(unit):
            self._whole.discard(unit.name)
        self._finish_reduction()
        self._reduce(bucket)

    def _zero_gradients(self) -> None:
        """As the Trainer does between forward and backward: shards of gradients are freed."""
        for bucket in self._plan.buckets:
            dtype, stage = self._plan.grad_dtype(bucket), bucket.stage
            is_alone = stage.has_shard(State.GRAD) or dtype != bucket.dtype  # not in the whole
            is_shard = bucket.is_trainable and stage.has_shard(State.OPTIM) and is_alone
            rests_here = not bucket.tiers.grad.is_elsewhere(is_apart=self._is_apart)
            if is_shard and rests_here and not self._accumulates:
                numel = len(bucket.layout.shard(self._rank))
                self._freed[bucket.name] = numel * dtype.itemsize

    def _has_all(self, unit: UnitPlan) -> bool:
        buckets = self._units[unit.name]
        return all(
            bucket.is_trainable and all(s.name in self._arrived for s in bucket.layout.slots)
            for bucket in buckets
        )

    def _reduce(self, bucket: BucketPlan) -> None:
        """Issues the reduction of a bucket."""
        size, mean = self._plan.world_size, self._plan.grad_dtype(bucket).itemsize
        shard = len(bucket.layout.shard(self._rank))
        self._reducing = bucket.name
        self._freed.pop(bucket.name, None)
        if not bucket.stage.has_shard(State.OPTIM):
            sent = mean
        else:
            sent = bucket.dtype.itemsize
            is_landing = bucket.tiers.grad.is_elsewhere(is_apart=self._is_apart)
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
            self._landing = [*self._landing, self._out][-MAX_MEANS_ON_THE_WAY:]
        self._out = 0
