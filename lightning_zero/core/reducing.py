"""Reductions of one backward: which bucket is reduced when, in one order on every rank.

The *eager* buckets, those that the last such backward touched on some rank, as soon as their last
gradient is there; the rest when ranks have agreed on what anybody touched. See [Note: Same order on
every rank] in schedule.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.gathering import Gathering, Trainable, Trained
from lightning_zero.layout.config import ZeroConfig

__all__ = ["Reducing"]


class Reducing:
    """The gradients of one engine, from the first of a backward to the mean.

    Args:
        buckets: In layout order.
        gathering: Goes on while a reduction is waited for.
        trained: What is trainable in it.
        comm: Agrees on what was touched.
        config: Of the engine.

    Attributes:
        under_way: The bucket whose reduction is under way.
        is_mid_step: The last backward ends no step, and nobody has asked for its means since.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gathering: Gathering,
        trained: Trained,
        comm: Communicator,
        config: ZeroConfig,
    ) -> None:
        self._buckets = list(buckets)
        self._gathering = gathering
        self._trained = trained
        self._comm = comm
        self._config = config
        self._reduces = True  # this backward ends in reductions
        self._ends_step = True  # no further micro-batch will follow
        self._order = list(reversed(self._buckets))
        self._is_order_agreed = False
        self._arrived: list[Bucket] = []  # order of completion in this backward
        self._eager: list[Bucket] = []  # reduced by every rank in this backward, in this order
        self._num_eager = 0  # of them already reduced
        # What the last agreed backward touched, by what was trainable in it (GANs take turns).
        self._touched: dict[Trainable, dict[Bucket, list[bool]]] = {}
        self.under_way: Bucket | None = None
        self._is_tail = False  # every rank has ended its backward: all issue the same from here on
        self._has_local = False  # the last backward left gradients local
        self._has_partial = False  # or reduced within the group only
        self.is_mid_step = False

    def step_order(self) -> Sequence[Bucket]:
        """The order in which the next forward needs the buckets, the same on every rank.

        Backward completes them from the end of the forward on.
        """
        return list(reversed(self._order))

    # ---------------------------------------------------------------- one backward

    def begin(self, *, ends_step: bool) -> None:
        """Before a backward: gradients have a place."""
        self._ends_step = ends_step
        self._reduces = ends_step or self._config.states.reduces_every_backward
        self._arrived = []
        self._num_eager = 0
        self._is_tail = False
        self._gathering.finish_passing()
        self._trained.look()
        if self._reduces:
            # Where nothing is gathered, a backward has no rounds.
            self._trained.compare(None if self._gathering.is_needed else self._gathering.done)
        touched = self._touched.get(self._trained.flags)
        self._eager = [b for b in self._order if self._reduces and _is_eager(b, touched)]
        for bucket in self._buckets:
            bucket.wait_for_step()
            expected = touched.get(bucket) if touched is not None else None
            bucket.grads.prepare(outlives_backward=not self._reduces, expected=expected)

    def complete(self, bucket: Bucket) -> None:
        """`bucket` has all its gradients: it is reduced, when those before it in the order are."""
        self._arrived.append(bucket)
        while self._num_eager < len(self._eager):
            following = self._eager[self._num_eager]
            if following not in self._arrived:
                return
            self._num_eager += 1
            self._reduce(following)

    def end(self) -> None:
        """After a backward: means are there, or what is local is shown. Collective."""
        for bucket in self._eager[self._num_eager :]:
            self._reduce(bucket)
        self._num_eager = len(self._eager)
        self._trained.finish()
        if self._reduces or self._gathering.is_needed:
            self._gathering.meet(self._gathering.done)
        self._trained.stop()
        self._is_tail = True
        if self._reduces:
            touched = self._reduce_the_rest(completes=self._ends_step)
            self._touched[self._trained.flags] = touched  # the flags have been compared
        else:
            for bucket in self._buckets:
                bucket.grads.show()  # means of earlier backwards, which this one has not touched
        self.is_mid_step = not self._ends_step
        self._has_local = not self._reduces
        has_replicas = self._comm.mesh.num_replicas > 1
        self._has_partial = has_replicas and self._reduces and not self._ends_step
        self._comm.free_scratch()

    def reset(self) -> None:
        """After an exception, when gradients have been dropped. Local."""
        self._comm.free_scratch()
        self._trained.stop()
        self.under_way = None
        self.is_mid_step = self._has_local = self._has_partial = False

    # ---------------------------------------------------------------- one bucket

    def _reduce(self, bucket: Bucket) -> None:
        self._trained.finish()
        self._gathering.meet_once()
        self.finish()
        bucket.grads.reduce()
        self._gathering.num_issued += 1
        self.under_way = bucket
        if not self._config.overlap_comm:
            self.finish()

    def finish(self) -> None:
        """Waits for the reduction under way."""
        if self.under_way is None:
            return
        if self._gathering.is_needed and not self._is_tail:
            self._gathering.wait_until_issued()
        self.under_way.grads.finish()
        if self._ends_step and self._config.overlap_comm:
            self.under_way.grads.begin_average()
        self.under_way = None

    # ---------------------------------------------------------------- the rest

    def _reduce_the_rest(self, *, completes: bool) -> dict[Bucket, list[bool]]:
        """Agrees on what anybody touched and reduces what has not been, in the fixed order.

        Args:
            completes: Average over replicas, too: no further micro-batch will follow.

        Returns:
            What anybody touched, by slot.
        """
        buckets = self._buckets
        reduced = set(self._eager[: self._num_eager])
        late = [bucket in reduced and any(bucket.grads.is_local) for bucket in buckets]
        partial = [bucket.grads.replicas.is_partial for bucket in buckets]
        own = [t for bucket in buckets for t in bucket.grads.is_touched]
        mask = self._comm.control.union([*late, *partial, *own])
        is_late = dict(zip(buckets, mask, strict=False))
        is_partial = dict(zip(buckets, mask[len(buckets) :], strict=False))
        touched: dict[Bucket, list[bool]] = {}
        start = 2 * len(buckets)
        for bucket in buckets:
            stop = start + len(bucket.parameters)
            touched[bucket], start = mask[start:stop], stop
        for bucket in self._order:
            if bucket not in reduced and any(touched[bucket]):
                self._reduce(bucket)
        for bucket in self._order:
            if is_late[bucket]:
                self._reduce(bucket)
        self.finish()
        for bucket in self._order:
            if completes and (bucket in reduced or is_partial[bucket] or any(touched[bucket])):
                bucket.grads.average()
        for bucket in buckets:
            bucket.grads.publish(touched[bucket])
        self._agree_on_order()
        return touched

    def _agree_on_order(self) -> None:
        """Fixes the order of reductions once, to that in which rank 0's gradients were complete."""
        if not self._is_order_agreed and self._ends_step:
            self._is_order_agreed = True
            mine = [self._buckets.index(bucket) for bucket in self._arrived]
            first = [self._buckets[index] for index in self._comm.control.broadcast_object(mine)]
            rest = [bucket for bucket in self._order if bucket not in first]
            self._order = first + rest

    def before_step(self) -> None:
        """Before an optimizer's step: means are there. Collective."""
        self.reduce_local()
        self._gathering.pass_by("a step of the optimizer")

    def reduce_local(self) -> None:
        """Reduces what earlier backwards left local, before somebody needs the mean. Collective."""
        gathering = self._gathering
        if self._has_local:
            gathering.meet(gathering.done)
            for bucket in self._buckets:
                bucket.grads.prepare(outlives_backward=False)  # what was zeroed is not reduced
            self._eager, self._num_eager = [], 0
            self._reduce_the_rest(completes=True)
            self._comm.free_scratch()
        elif self._has_partial:
            gathering.meet(gathering.done)
            partial = self._comm.control.union([b.grads.replicas.is_partial for b in self._buckets])
            for bucket, is_partial in zip(self._buckets, partial, strict=True):
                if is_partial:
                    bucket.grads.average()
        self.is_mid_step = self._has_local = self._has_partial = False


def _is_eager(bucket: Bucket, touched: dict[Bucket, list[bool]] | None) -> bool:
    """Touched in the last such backward; trainable where there was none yet."""
    if touched is None:
        return any(parameter.requires_grad for parameter in bucket.parameters)
    return any(touched[bucket])
