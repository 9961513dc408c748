"""Reductions of one backward: which buckets are reduced, and the mean in `.grad` at its end.

core/order.py decides in which order. If all ranks expect gradients for a bucket, it is reduced as
soon as it has its last gradient. The others are reduced at the end, when the ranks have exchanged
which parameters have gradients on any rank.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.gradients import GradState
from lightning_zero.core.guard import NonfiniteGuard
from lightning_zero.core.order import CollectiveOrder
from lightning_zero.layout.config import ZeroConfig

__all__ = ["Reducer"]

_MAX_TRAINABLE_SETS = 1000  # sets of trainable parameters that are remembered
Trainable = tuple[bool, ...]  # `requires_grad` of every parameter, in layout order


class Reducer:
    """Reduces the gradients of one engine, from the first gradient of a backward to the mean.

    Attributes:
        ends_step: Whether the next backward, or the one in progress, is of the last micro-batch.
            A forward sets it, and its backward again.
        guard: Looks at gradients before they are reduced.
        has_stepped: Whether an optimizer has stepped since the last backward.
        is_mid_step: Whether the last backward ended no step, and `complete_means` was not called
            since: gradients may be local.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: CollectiveOrder,
        comm: Communicator,
        config: ZeroConfig,
        guard: NonfiniteGuard,
    ) -> None:
        self._buckets = list(buckets)  # in layout order
        self._order = order
        self._comm = comm
        self._reduces_every_backward = config.states.reduces_every_backward
        self._state_offload = buckets[0].shards.storage.state_offload
        self.guard = guard
        self._has_nonfinite = False  # on any rank, in this backward
        self._is_in_backward = False  # this rank's own: the order may follow a pass of others
        self._trainable: Trainable = ()  # in this backward
        self.ends_step = True
        self._sequence = _Sequence(self._buckets, comm)
        self._reduced: set[Bucket] = set()  # in this backward, or before this rank began it
        # Slots with gradients, by bucket, in the last backward with the same trainable parameters:
        # a GAN has two sets of them.
        self._touched: dict[Trainable, dict[Bucket, list[bool]]] = {}
        self._in_flight = _InFlight(config.overlap_comm)
        self.has_stepped = False
        self.is_mid_step = False
        self._has_left_any = False  # gradients, after the last backward

    def step_order(self) -> Sequence[Bucket]:
        """The order in which the next forward needs the buckets, the same on every rank.

        It is the reverse of the order in which backward completes them.
        """
        return list(reversed(self._sequence.buckets))

    @property
    def reduces(self) -> bool:
        """Whether the backward ends in reductions."""
        return self.ends_step or self._reduces_every_backward

    @property
    def has_unstepped_gradients(self) -> bool:
        """Whether a backward that has ended left gradients, which no optimizer has stepped."""
        with torch._C.DisableTorchFunctionSubclass():
            parameters = [p for bucket in self._buckets for p in bucket.parameters]
            is_any_left = any(p.grad is not None for p in parameters)
        return self._has_left_any and not self.has_stepped and is_any_left

    def trainable(self) -> Trainable:
        """`requires_grad` of every parameter, in layout order."""
        with torch._C.DisableTorchFunctionSubclass():  # guarded parameters would be slow
            return tuple([p.requires_grad for bucket in self._buckets for p in bucket.parameters])

    # ---------------------------------------------------------------- one backward

    def begin_backward(self, trainable: Trainable) -> None:
        """Detaches reduced gradients from `.grad`. Local."""
        self._is_in_backward = True
        self._sequence.begin_backward()
        self._trainable = trainable
        touched = self._touched.get(trainable, {})
        outlives_backward = not self.reduces
        for bucket in self._buckets:
            bucket.wait_for_step()
            bucket.grads.prepare(outlives_backward=outlives_backward, expected=touched.get(bucket))
        self.guard.begin(is_new_step=self.has_stepped or not self._continues_step())
        self.has_stepped = False

    def _continues_step(self) -> bool:
        """Whether gradients of the last backward are left, as far as this rank knows.

        Where a step is to be skipped, gradients that are zero count as zeroed.
        """
        grads = [bucket.grads for bucket in self._buckets]
        if self.guard.skips_step:
            return not all(gradients.is_zero() for gradients in grads)
        is_any_left = any(gradients.is_any_left for gradients in grads)
        return is_any_left or (self.is_mid_step and not self._has_left_any)

    def drop_gradients(self) -> None:
        """Sets `.grad` of every parameter to None. Local."""
        for bucket in self._buckets:
            bucket.grads.param_grads.drop()

    def set_ends_step(self, ends_step: bool) -> None:
        """Notes whether the next backward is of the last micro-batch. Local."""
        self.ends_step = ends_step

    def eager(self, trainable: Trainable) -> list[int]:
        """Numbers of the buckets that every rank reduces during backward, in this order."""
        touched = self._touched.get(trainable)
        return [self._sequence.numbers[b] for b in self._sequence.buckets if _is_eager(b, touched)]

    def mark_ready(self, bucket: Bucket) -> None:
        """Marks `bucket` as complete: it is reduced in its turn in the collective order."""
        number = self._sequence.complete(bucket)
        if self.reduces:
            self._order.mark_ready(number)

    def finalize_backward(self) -> None:
        """Completes the means, or shows the former means beside local gradients. Collective."""
        if self.reduces:
            if len(self._touched) > _MAX_TRAINABLE_SETS:  # each step trains another set
                self._touched.clear()
            self._touched[self._trainable] = self._reduce_remaining()
        else:
            self.guard.look_at_local()
            for bucket in self._buckets:
                bucket.grads.end_backward()  # no reduction in this micro-batch
        self._is_in_backward = False
        self._reduced = set()
        self.is_mid_step = not self.ends_step
        self._has_left_any = any(bucket.grads.is_any_left for bucket in self._buckets)
        self._comm.free_scratch()

    # ---------------------------------------------------------------- one bucket

    def issue_reduction(self, number: int) -> None:
        """Issues the reduction of a bucket with the available gradients. Called by the order.

        Collective.
        """
        bucket = self._buckets[number]
        if self._is_in_backward:
            self._reduce(bucket, is_looked_at=False)
        else:
            with torch.inference_mode(False):  # an evaluation may issue the rest of a pass
                self._in_flight.end_earlier()
                bucket.grads.reduce_zeros()
            self._in_flight.add(bucket)
            self._reduced.add(bucket)

    def _reduce(self, bucket: Bucket, *, is_looked_at: bool) -> None:
        self._in_flight.end_earlier()
        local = bucket.grads.local_grads()
        if not is_looked_at:
            self.guard.look(bucket, local)
        bucket.grads.reduce(local)
        self._in_flight.add(bucket)
        self._reduced.add(bucket)

    # ---------------------------------------------------------------- end of backward, and step

    def _own_flags(self) -> bytes:
        """This rank's flags for the round at the end of a backward."""
        self.guard.look_at_local()  # at those that are reduced after this round
        buckets = self._buckets
        return _Flags(
            [
                bucket in self._reduced and GradState.LOCAL in bucket.grads.states
                for bucket in buckets
            ],
            [bucket.grads.touched for bucket in buckets],
            self.guard.flags(ends_step=self.ends_step),
        ).pack()

    def _exchange_flags(self) -> _Flags:
        """Ends the backward with a round, and returns the flags of any rank. Collective."""
        packed = self._order.finalize_backward(self._own_flags, self._in_flight.end_group_reduction)
        flags = _Flags.unpack(packed, [len(bucket.parameters) for bucket in self._buckets])
        self._has_nonfinite = self.guard.receive_flags(flags.guard_flags)
        return flags

    def _reduce_remaining(self) -> dict[Bucket, list[bool]]:
        """Agrees on the slots that have a gradient on any rank, and reduces the remaining buckets.

        Collective.
        """
        flags = self._exchange_flags()
        is_late = dict(zip(self._buckets, flags.is_late, strict=True))
        touched = dict(zip(self._buckets, flags.is_touched, strict=True))
        sequence = self._sequence.buckets
        remaining = [b for b in sequence if b not in self._reduced and any(touched[b])]
        remaining += [bucket for bucket in sequence if is_late[bucket]]
        is_next = not self.ends_step or self._sequence.agree()
        self._order.conclude_backward(is_complete=is_next and not remaining)
        for bucket in remaining:
            self._reduce(bucket, is_looked_at=True)  # in `_own_flags`
        self._in_flight.finish()
        for bucket in self._buckets:
            bucket.grads.publish(touched[bucket])
        return touched

    def report_nonfinite(self) -> None:
        """Reports non-finite gradients, if any rank has found one in this backward. Collective."""
        has_nonfinite, self._has_nonfinite = self._has_nonfinite, False
        if has_nonfinite:
            self.guard.report()

    def before_step(self) -> None:
        """Before an optimizer's step: completes the means. Collective.

        Raises:
            RuntimeError: A state is offloaded, or a context has installed views of parameters.
        """
        self._state_offload.check()
        if any(bucket.params.has_views_installed for bucket in self._buckets):
            raise RuntimeError(
                "an optimizer steps inside `with lightning_zero.gathered(..., writeback=True):`, "
                "whose end would overwrite the new values; step after it."
            )
        self.complete_means()
        # Other ranks may still all-gather the parameters that the step changes.
        self._order.close_pass("a step of the optimizer")
        self._order.note("a step of the optimizer")
        self.has_stepped = True

    def note_stepped(self, parameters: Container[nn.Parameter]) -> None:
        """Notes which parameters an optimizer steps; if ranks differ, they get an error. Local.

        Without the error, some would wait for the all-gathers after the step of others.
        """
        flags = bytes([p in parameters for bucket in self._buckets for p in bucket.parameters])
        self._order.note(f"a step of {flags.hex()}")

    def complete_means(self) -> None:
        """Does what the last backward of a step does, if there was none: reduces. Collective."""
        if not self.is_mid_step:
            return
        self.ends_step = True
        if not self._reduces_every_backward:
            for bucket in self._buckets:
                # so that zeroed gradients are not reduced
                bucket.grads.prepare(outlives_backward=False)
            self._reduced = set()
            self._reduce_remaining()
            self._comm.free_scratch()
        elif self.guard.decides:
            self._exchange_flags()
            self._order.conclude_backward(is_complete=True)
        self.is_mid_step = False
        self.report_nonfinite()


class _InFlight:
    """Reductions in flight: the last one, and the average over replicas of the one before.

    So of sharded gradients at most two unsharded flat tensors exist.
    """

    def __init__(self, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._buckets: list[Bucket] = []

    def add(self, bucket: Bucket) -> None:
        """Adds a bucket whose reduction was issued after `end_earlier`."""
        if bucket in self._buckets:  # a late gradient: its reduction before has ended
            self._buckets.remove(bucket)
        self._buckets.append(bucket)
        if not self._overlaps:
            self.finish()

    def end_earlier(self) -> None:
        """Before a reduction: the last one ends but for its average, those before end."""
        self.end_group_reduction()
        while len(self._buckets) > 1:
            self._buckets.pop(0).grads.finish_reduction()

    def end_group_reduction(self) -> None:
        """Ends the last reduction but for its average over replicas."""
        if self._buckets:
            self._buckets[-1].grads.end_group_reduction()

    def finish(self) -> None:
        """Waits for all. In a place that all ranks reach: an average waits for other replicas."""
        for bucket in self._buckets:
            bucket.grads.finish_reduction()
        self._buckets.clear()


class _Sequence:
    """The order of reductions without a recorded schedule, the same on every rank.

    Attributes:
        buckets: The buckets in this order: that in which rank 0 first completed them.
        numbers: Numbers of the buckets, in layout order.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator) -> None:
        self.buckets = list(reversed(buckets))
        self.numbers = {bucket: number for number, bucket in enumerate(buckets)}
        self._comm = comm
        self._is_agreed = False
        self._completed: dict[int, None] = {}  # numbers, in this backward, in this order

    def begin_backward(self) -> None:
        """Forgets what was completed before."""
        self._completed.clear()

    def complete(self, bucket: Bucket) -> int:
        """Notes that `bucket` has its last gradient; returns its number."""
        number = self.numbers[bucket]
        self._completed[number] = None
        return number

    def agree(self) -> bool:
        """Fixes the order once: rank 0's order of completion. Collective.

        Returns whether it has not changed.
        """
        if self._is_agreed:
            return True
        former, by_number = self.buckets, list(self.numbers)
        numbers = self._comm.control.broadcast_object(list(self._completed))
        first = [by_number[number] for number in numbers]
        self.buckets = first + [bucket for bucket in former if bucket not in first]
        self._is_agreed = True
        return self.buckets == former


@dataclass(frozen=True)
class _Flags:
    """What ranks exchange at the end of a backward; after the round, of any rank.

    Attributes:
        is_late: By bucket: gradients have come after its reduction.
        is_touched: By bucket and slot: there is a gradient.
        guard_flags: Two flags of `NonfiniteGuard`.
    """

    is_late: Sequence[bool]
    is_touched: Sequence[list[bool]]
    guard_flags: Sequence[bool]

    def pack(self) -> bytes:
        """One byte per flag, in the order of the attributes."""
        touched = [flag for slots in self.is_touched for flag in slots]
        return bytes([*self.is_late, *touched, *self.guard_flags])

    @classmethod
    def unpack(cls, packed: bytes, num_slots: Sequence[int]) -> _Flags:
        """The flags at the beginning of `packed`, which rounds pad; `num_slots`: of each bucket."""
        flags = iter([bool(flag) for flag in packed])
        late = list(islice(flags, len(num_slots)))
        touched = [list(islice(flags, num)) for num in num_slots]
        return cls(late, touched, list(islice(flags, 2)))


def _is_eager(bucket: Bucket, touched: dict[Bucket, list[bool]] | None) -> bool:
    """Whether `bucket` had gradients in the last backward with the same trainable parameters.

    Without such a backward: whether it is trainable.
    """
    if touched is None:
        return any(parameter.requires_grad for parameter in bucket.parameters)
    return any(touched[bucket])
