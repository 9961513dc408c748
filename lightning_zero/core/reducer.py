"""Reductions of one backward: what is reduced, and the mean that is shown at its end.

In which order is decided in layout/order.py: as soon as a bucket has its last gradient where the
ranks have agreed on that before, and the rest when they have agreed on what anybody touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.order import CollectiveOrder

__all__ = ["Reducer"]

_MOST_KNOWN = 1000  # ways in which parameters take turns at training
Trainable = tuple[bool, ...]  # `requires_grad` of every parameter, in layout order


class Reducer:
    """The gradients of one engine, from the first of a backward to the mean."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: CollectiveOrder,
        comm: Communicator,
        config: ZeroConfig,
    ) -> None:
        self._buckets = list(buckets)  # in layout order
        self._order = order
        self._comm = comm
        self._config = config
        self._numbers = {bucket: number for number, bucket in enumerate(self._buckets)}
        self._is_open = False  # a backward is under way on this rank
        self._trainable: Trainable = ()  # in this backward
        # The backward that comes, or is under way, is that of the last micro-batch.
        self.ends_step = True
        self._sequence = list(reversed(self._buckets))  # of reductions where there is no plan
        self._is_sequence_agreed = False
        self._arrived: list[Bucket] = []  # order of completion in this backward
        self._reduced: set[Bucket] = set()  # in this backward, also before this rank came to it
        # What the last agreed backward touched, by what was trainable in it (GANs take turns).
        self._touched: dict[Trainable, dict[Bucket, list[bool]]] = {}
        self.under_way: Bucket | None = None  # whose reduction is
        self.has_stepped = False  # an optimizer has, since the last backward
        # The last backward ends no step, and nobody has asked for its means since: they are local,
        # or the group's.
        self.is_mid_step = False

    def step_order(self) -> Sequence[Bucket]:
        """The order in which the next forward needs the buckets, the same on every rank.

        Backward completes them from the end of the forward on.
        """
        return list(reversed(self._sequence))

    @property
    def reduces(self) -> bool:
        """The backward ends in reductions."""
        return self.ends_step or self._config.states.reduces_every_backward

    def trainable(self) -> Trainable:
        """What is trained at this moment."""
        with torch._C.DisableTorchFunctionSubclass():  # guarded ones would take their time
            return tuple([p.requires_grad for bucket in self._buckets for p in bucket.parameters])

    # ---------------------------------------------------------------- one backward

    def begin(self, trainable: Trainable) -> None:
        """Before a backward: what is reduced is out of autograd's sight."""
        self._is_open, self.has_stepped = True, False
        self._arrived = []
        self._trainable = trainable
        touched = self._touched.get(self._trainable, {})
        outlives_backward = not self.reduces
        for bucket in self._buckets:
            bucket.wait_for_step()
            bucket.grads.prepare(outlives_backward=outlives_backward, expected=touched.get(bucket))

    def eager(self, trainable: Trainable) -> list[int]:
        """Buckets that every rank reduces in a backward without a plan, in this order."""
        touched = self._touched.get(trainable)
        return [self._numbers[b] for b in self._sequence if _is_eager(b, touched)]

    def complete(self, bucket: Bucket) -> None:
        """`bucket` has all its gradients: it is reduced, when those before it in the order are."""
        self._arrived.append(bucket)
        if self.reduces:
            self._order.mark_ready(self._numbers[bucket])

    def end(self) -> None:
        """After a backward: means are there, or what is local is shown. Collective."""
        if self.reduces:
            if len(self._touched) > _MOST_KNOWN:  # each step trains something else
                self._touched.clear()
            self._touched[self._trainable] = self._reduce_the_rest(completes=self.ends_step)
        else:
            for bucket in self._buckets:
                bucket.grads.set_param_grads()  # means of earlier backwards, which this one has not touched
        self._is_open = False
        self._reduced = set()
        self.is_mid_step = not self.ends_step
        self._comm.free_scratch()

    def reset(self) -> None:
        """After an exception, when gradients have been dropped. Local."""
        self._comm.free_scratch()
        self._touched.clear()  # perhaps not on all ranks the same
        self.under_way = None
        self._reduced = set()
        self._is_open = self.is_mid_step = False

    def recover(self) -> None:
        """When all ranks have come together again: what they agreed on may not be alike."""
        self._is_sequence_agreed = False
        self._sequence = list(reversed(self._buckets))

    # ---------------------------------------------------------------- one bucket

    def reduce(self, bucket: Bucket) -> None:
        """Issues the reduction of `bucket`, with what there is. Collective."""
        if self._is_open:
            self._reduce(bucket)
        else:
            bucket.grads.reduce_zeros(averages=self.ends_step and self._config.overlap_comm)
            self._reduced.add(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        self.finish()
        bucket.grads.reduce()
        self._reduced.add(bucket)
        self.under_way = bucket
        if not self._config.overlap_comm:
            self.finish()

    def finish(self) -> None:
        """Waits for the reduction under way."""
        if self.under_way is None:
            return
        self.under_way.grads.wait_for_reduction()
        if self.ends_step and self._config.overlap_comm:
            self.under_way.grads.issue_average()
        self.under_way = None

    # ---------------------------------------------------------------- the rest

    def _mask(self) -> bytes:
        """By bucket, what came late and what is this group's; by slot, what was touched."""
        buckets = self._buckets
        late = [bucket in self._reduced and any(bucket.grads.is_local) for bucket in buckets]
        partial = [bucket.grads.is_partial for bucket in buckets]
        own = [t for bucket in buckets for t in bucket.grads.is_touched]
        return bytes([*late, *partial, *own])

    def _reduce_the_rest(self, *, completes: bool) -> dict[Bucket, list[bool]]:
        """Agrees on what anybody touched, by slot, and reduces what has not been. Collective.

        `completes`: average over replicas, too: no further micro-batch will follow.
        """
        buckets = self._buckets
        mask = [bool(flag) for flag in self._order.finalize_backward(self._mask, self.finish)]
        is_late = dict(zip(buckets, mask, strict=False))
        is_partial = dict(zip(buckets, mask[len(buckets) :], strict=False))
        touched: dict[Bucket, list[bool]] = {}
        start = 2 * len(buckets)
        for bucket in buckets:
            stop = start + len(bucket.parameters)
            touched[bucket], start = mask[start:stop], stop
        reduced = set(self._reduced)
        rest = [b for b in self._sequence if b not in reduced and any(touched[b])]
        rest += [bucket for bucket in self._sequence if is_late[bucket]]
        self._order.conclude_backward(is_complete=not rest)
        for bucket in rest:
            self._reduce(bucket)
        self.finish()
        for bucket in self._sequence:
            if completes and (bucket in reduced or is_partial[bucket] or any(touched[bucket])):
                bucket.grads.average()
        for bucket in buckets:
            bucket.grads.publish(touched[bucket])
        self._agree_on_sequence()
        return touched

    def _agree_on_sequence(self) -> None:
        """Fixes the order of reductions once, to that in which rank 0's gradients were complete."""
        if not self._is_sequence_agreed and self.ends_step:
            mine = [self._numbers[bucket] for bucket in dict.fromkeys(self._arrived)]
            first = [self._buckets[index] for index in self._comm.control.broadcast_object(mine)]
            rest = [bucket for bucket in self._sequence if bucket not in first]
            self._sequence = first + rest
            self._is_sequence_agreed = True

    def before_step(self) -> None:
        """Before an optimizer's step: means are there. Collective."""
        self.reduce_local()
        self._order.close_pass("a step of the optimizer")  # others may still gather what it changes
        self._order.note("a step of the optimizer")
        self.has_stepped = True

    def reduce_local(self) -> None:
        """Reduces what earlier backwards left local, before somebody needs the mean. Collective."""
        if not self.is_mid_step:
            return
        if not self._config.states.reduces_every_backward:
            for bucket in self._buckets:
                bucket.grads.prepare(outlives_backward=False)  # what was zeroed is not reduced
            self._reduced = set()
            self.ends_step = True
            self._reduce_the_rest(completes=True)
            self._comm.free_scratch()
        elif self._comm.mesh.num_replicas > 1:
            mask = self._order.finalize_backward(self._mask, self.finish)
            self._order.conclude_backward(is_complete=True)
            for bucket, is_partial in zip(self._buckets, mask[len(self._buckets) :], strict=False):
                if is_partial:
                    bucket.grads.average()
        self.is_mid_step = False


def _is_eager(bucket: Bucket, touched: dict[Bucket, list[bool]] | None) -> bool:
    """Touched in the last such backward; trainable where there was none yet."""
    if touched is None:
        return any(parameter.requires_grad for parameter in bucket.parameters)
    return any(touched[bucket])
