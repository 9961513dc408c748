"""Guard against non-finite gradients: finds NaN and infinity before they are reduced.

After a reduction every rank has the NaN of one rank, so its origin is lost. Each rank therefore
looks at its own gradients of a bucket before it sends them.

[Note: When ranks learn of a non-finite gradient] A rank looks at each element: one sum per
parameter on a CPU, one maximum on a device. Only where that is not finite does a CPU
count elements. The round that ends every backward (`CollectiveOrder.finalize_backward`) carries one
byte more, "this rank has found something". If any rank has, all ranks exchange what they
found, after the reductions of this backward. So a report costs an exchange, and its absence
costs nothing but the look.

A step ends with the step of an optimizer, or when its gradients are zeroed without one, as after
a loss scaler's skip. Gradients may be zeroed on some ranks only, so each rank sends in that round
whether it continues a step: if any does, all do, and the step that is to be skipped is still the
same. What was found in gradients that have been zeroed since is reported, and skips no step.

On a device the host does not wait for the result. It is copied to the CPU while the device works,
and sent in the round of the next backward, so that with "warn" a report is one backward late. The
last one comes with `finish`, at the end of a Trainer's training; an engine that is closed has no
such end, since a rank may close it alone, after an exception.
"stop" and "skip" must know it before the step: at the end of the last backward of a step the host
waits for the device, as a loss scaler does.

[Note: Skipped steps] A step is skipped before it begins (`OptimizerStep`), also for optimizers that
count their calls. Only gradients are dropped: buffers such as BatchNorm's statistics, learning rate
schedules and random numbers are those after the forward, as when a loss scaler skips a step.
"""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.gradients import GradState
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.record import streams
from lightning_zero.record.streams import Event

__all__ = [
    "NonfiniteGradient",
    "NonfiniteGradientError",
    "NonfiniteGradientWarning",
    "NonfiniteGuard",
    "NonfiniteReport",
]

_MAX_LINES = 8  # parameters that a message names
_LARGE_NUMEL = 2**20  # elements of a gradient for which a call of its own is faster on a device
_MAX_SKIPS = 10  # in a row of one optimizer
_MAX_SENT = 64  # parameters that a rank names; a NaN in the loss makes every gradient one


class NonfiniteGradientError(RuntimeError):
    """A gradient is NaN or infinite, with `on_nonfinite="stop"` or after too many skips."""


class NonfiniteGradientWarning(UserWarning):
    """A gradient is NaN or infinite; see `on_nonfinite`. On rank 0 only."""


@dataclass(frozen=True)
class NonfiniteGradient:
    """Non-finite elements of one rank's gradient of one parameter, before its reduction.

    Attributes:
        rank: Rank whose gradient it is.
        parameter: Name of the parameter.
        step: Number of the step, from 0, or from where a run has resumed.
        micro_batch: Number of the backward in its step, from 0.
        num_nan: Elements that are NaN. None: at least one, not counted on a device.
        num_inf: Elements that are infinite. None: as `num_nan`, unless there are NaNs.
        numel: Elements of the gradient.
    """

    rank: int
    parameter: str
    step: int
    micro_batch: int
    num_nan: int | None
    num_inf: int | None
    numel: int

    def __str__(self) -> str:
        counts = [
            f"{'' if count is None else f'{count} '}{kind}"
            for count, kind in ((self.num_nan, "NaN"), (self.num_inf, "infinity"))
            if count != 0
        ]
        return (
            f"rank {self.rank}, micro-batch {self.micro_batch}: {self.parameter}: "
            f"{' and '.join(counts)} in {self.numel} elements"
        )


@dataclass(frozen=True)
class NonfiniteReport:
    """Non-finite gradients of one backward or of several, the same on every rank.

    Attributes:
        step: Number of the first step, from 0, or from where a run has resumed.
        found: Non-finite gradients, in order; a parameter is listed once per rank and step. At most
            64 of each rank.
        num_more: Non-finite gradients that `found` leaves out.
        is_current: Whether the first of them is of the step of the last backward.
    """

    step: int
    found: tuple[NonfiniteGradient, ...]
    num_more: int
    is_current: bool

    def __str__(self) -> str:
        lines = [f"  {found}" for found in self.found[:_MAX_LINES]]
        if num_more := len(self.found) - len(lines) + self.num_more:
            lines.append(f"  and {num_more} more")
        return f"non-finite gradients in step {self.step}, before their reduction:\n" + "\n".join(
            lines
        )


@dataclass
class _Backward:
    """Number of a backward: as this rank counts until its round, then as all ranks have agreed."""

    step: int
    micro_batch: int  # in its step

    @property
    def following(self) -> _Backward:
        """The next micro-batch of the same step."""
        return _Backward(self.step, self.micro_batch + 1)

    def renumber(self, agreed: _Backward) -> None:
        """Takes the number on which all ranks have agreed."""
        self.step, self.micro_batch = agreed.step, agreed.micro_batch


class _Look(NamedTuple):
    """Gradient at which a rank has looked."""

    backward: _Backward
    bucket: Bucket
    slot: int


class _Found(NamedTuple):
    """Gradient that is not finite, and how many of its elements; None: not counted."""

    look: _Look
    num_nan: int | None
    num_inf: int | None


class _Copy(NamedTuple):
    """Results of looks that are on their way from the device."""

    looks: list[_Look]
    maxima: Tensor  # on the CPU, pinned; one element for each look
    copied: Event


class _OwnReport(NamedTuple):
    """What one rank has found."""

    found: list[NonfiniteGradient]
    num_more: int
    step: int  # of the last backward


class NonfiniteGuard:
    """Looks at this rank's gradients, reports on all ranks, and decides whether a step is skipped.

    Attributes:
        policy: "warn", "stop", "skip"; None: gradients are not looked at.
        last_report: The last report, the same on every rank; None: there was none.
        num_skipped: Steps that were skipped.
        skips_step: Whether the next step of the optimizers is to be skipped.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, config: ZeroConfig) -> None:
        self.policy = config.on_nonfinite
        self.last_report: NonfiniteReport | None = None
        self.num_skipped = 0
        self._buckets = list(buckets)
        self._comm, self._control = comm, comm.control
        self._num_in_a_row: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by optimizer
        self._backward = _Backward(-1, -1)  # the last one
        # Its numbers if it continues the last step on which all ranks have agreed.
        self._if_continued = self._backward
        self._has_scaler = False
        self.begin_run()

    def begin_run(self) -> None:
        """Drops the looks at gradients that an exception has dropped; the counts stay. Local."""
        self.skips_step = False
        self._if_continued = self._backward
        # Backwards since the last round, and their numbers if they continue that step.
        self._not_agreed: list[tuple[_Backward, _Backward]] = []
        self._looks: list[_Look] = []  # looked at on a device since the last copy
        self._maxima: list[Tensor] = []  # of these: 0-dim, made on the stream of reductions
        self._copies: list[_Copy] = []
        self._found: list[_Found] = []  # not reported yet
        self._reported: set[tuple[int, str]] = set()  # of this rank: steps, and their parameters

    def use_scaler(self, has_scaler: bool) -> None:
        """Whether a loss scaler skips steps with infinite gradients, which only warn then."""
        self._has_scaler = has_scaler

    def begin_at(self, step: int) -> None:
        """Numbers the next step `step`, where a run resumes. Local, before its backward."""
        self._backward = self._if_continued = _Backward(step - 1, -1)
        self._reported.clear()

    def begin(self, *, is_new_step: bool) -> None:
        """Before a backward. Local.

        `is_new_step`: an optimizer has stepped since the last backward, or no gradient is left.
        """
        self._if_continued = self._if_continued.following
        if is_new_step or self._backward.micro_batch < 0:
            self._backward = _Backward(self._backward.step + 1, 0)
        else:
            self._backward = self._backward.following
        self._not_agreed.append((self._backward, self._if_continued))

    @property
    def decides(self) -> bool:
        """Whether it must be known before a step if a gradient is not finite."""
        return self.policy in ("stop", "skip") and not self._has_scaler

    # ---------------------------------------------------------------- a look

    def look(self, bucket: Bucket, local: Mapping[int, Tensor]) -> None:
        """Looks at `Gradients.local_grads` of `bucket`, which are reduced next. Local.

        A device looks beside compute.
        """
        if self.policy is None:
            return
        grads = {slot: grad for slot, grad in local.items() if grad.numel()}
        if grads and bucket.device.type != "cpu":
            self._looks += [self._look_of(bucket, slot) for slot in grads]
            with self._comm.before_reduction():
                self._maxima += _maxima(list(grads.values()))
            return
        dtype = bucket.plan.dtype  # in which gloo sends a wider gradient, which may overflow
        for slot, own in grads.items():
            grad = own.to(dtype) if own.dtype.itemsize > dtype.itemsize else own
            # The sum is not finite if an element is not, and if it overflows, as float16 soon does.
            sum_dtype = torch.float32 if grad.dtype == torch.float16 else None
            if not cmath.isfinite(grad.sum(dtype=sum_dtype).item()):
                num_nan, num_inf = int(grad.isnan().sum()), int(grad.isinf().sum())
                if num_nan or num_inf:
                    self._found.append(_Found(self._look_of(bucket, slot), num_nan, num_inf))

    def look_at_local(self) -> None:
        """Looks at all gradients that this backward has left local. Local."""
        for bucket in self._buckets if self.policy is not None else ():
            if GradState.LOCAL in bucket.grads.states:
                self.look(bucket, bucket.grads.local_grads())
        if self._maxima:
            self._comm.wait_for_reductions()  # the next backward may write to these gradients

    def _copy_maxima(self) -> None:
        """Begins to copy the results of looks on a device to the CPU."""
        if not self._maxima:
            return
        copied = streams.make_event()
        with self._comm.before_reduction():
            maxima = torch.stack(self._maxima)
            on_cpu = torch.empty(maxima.shape, dtype=maxima.dtype, pin_memory=True)
            on_cpu.copy_(maxima, non_blocking=True)
            copied.record()
        self._copies.append(_Copy(self._looks, on_cpu, copied))
        self._looks, self._maxima = [], []

    def _receive(self, *, waits: bool) -> None:
        """Takes the results of earlier looks on a device."""
        copies, self._copies = self._copies, []
        for transfer in copies:
            if waits:
                transfer.copied.synchronize()
            elif not transfer.copied.query():
                self._copies.append(transfer)
                continue
            for look, maximum in zip(transfer.looks, transfer.maxima.tolist(), strict=True):
                if maximum != maximum:
                    self._found.append(_Found(look, None, 0))
                elif maximum == torch.inf:
                    self._found.append(_Found(look, 0, None))

    def _look_of(self, bucket: Bucket, slot: int) -> _Look:
        return _Look(self._backward, bucket, slot)

    # ---------------------------------------------------------------- agreement and report

    def flags(self, *, ends_step: bool) -> list[bool]:
        """What this rank sends in a round: it continues a step; it has found something. Local.

        `ends_step`: a step may follow, so "stop" and "skip" wait for the device.
        """
        continues_step = self._backward.step == self._if_continued.step
        return [continues_step, self._has_found(ends_step=ends_step)]

    def receive_flags(self, flags: Sequence[int]) -> bool:
        """Takes what any rank has sent; returns whether any has found something. Local.

        The last step is left unless a rank continues it: no rank may skip a step alone.
        """
        continues_step, has_found = map(bool, flags)
        if continues_step:  # what was found since the last round is of that step, too
            for backward, continued in self._not_agreed:
                backward.renumber(continued)
        else:
            self.skips_step = False
            step = self._backward.step
            self._reported = {key for key in self._reported if key[0] >= step - 1}
        self._not_agreed.clear()
        self._if_continued = self._backward
        return has_found

    def _has_found(self, *, ends_step: bool) -> bool:
        """Whether this rank has found something that is not reported yet."""
        self._receive(waits=False)  # of backwards before this one
        self._copy_maxima()
        if ends_step and self.decides:
            self._receive(waits=True)
        if not self._new():
            self._found.clear()  # all of it was reported in an earlier micro-batch of this step
        return bool(self._found)

    def _new(self) -> list[NonfiniteGradient]:
        """What this rank has found and not reported yet; a parameter once per step."""
        new: dict[tuple[int, str], NonfiniteGradient] = {}
        for gradient in map(self._describe, self._found):
            key = gradient.step, gradient.parameter
            if key not in self._reported:
                new.setdefault(key, gradient)
        return list(new.values())

    def report(self, *, is_over: bool = False) -> None:
        """Reports what the ranks have found, in the same way on every rank. Collective.

        `is_over`: no step will follow.

        Raises:
            NonfiniteGradientError: With "stop".
        """
        self._copy_maxima()
        self._receive(waits=True)
        found, self._found = self._new(), []
        self._reported |= {(gradient.step, gradient.parameter) for gradient in found}
        own = _OwnReport(found[:_MAX_SENT], len(found[_MAX_SENT:]), self._backward.step + is_over)
        by_rank: list[_OwnReport] = self._control.gather_objects(own)
        gradients = [gradient for report in by_rank for gradient in report.found]
        if not gradients:
            return  # found again, in the continued step for which they were reported
        gradients.sort(key=lambda found: (found.step, found.micro_batch, found.rank))
        are_current = [found.step == by_rank[found.rank].step for found in gradients]
        report = NonfiniteReport(
            gradients[0].step,
            tuple(gradients),
            sum(report.num_more for report in by_rank),
            are_current[0],
        )
        self.last_report = report
        text = str(report)
        if self._has_scaler:
            text += "\nThe loss scaler decides: it skips the step and lowers its scale."
        elif self.policy == "skip" and not any(are_current):
            text += "\nNo step is skipped: none will use them."
        elif self.policy == "skip":
            self.num_skipped += not self.skips_step
            self.skips_step = True
            text += f"\nThis step is skipped ({self.num_skipped} so far)."
        self._raise_or_warn(text)

    def finish(self) -> None:
        """Reports what is not reported yet, as the last backward on a device. Collective.

        At the end of training, when no backward will follow. May raise as `report` does.
        """
        if self.policy is None:
            return
        self._copy_maxima()
        self._receive(waits=True)
        if any(self._control.gather_objects(bool(self._new()))):
            self.report(is_over=True)

    def _describe(self, found: _Found) -> NonfiniteGradient:
        look = found.look
        slot = look.bucket.plan.layout.slots[look.slot]
        return NonfiniteGradient(
            self._control.rank,
            slot.name,
            look.backward.step,
            look.backward.micro_batch,
            found.num_nan,
            found.num_inf,
            slot.numel,
        )

    def skips(self, optimizer: object) -> bool:
        """Whether the step of `optimizer` that begins now is skipped. Local.

        Raises:
            NonfiniteGradientError: More than 10 of its steps in a row would be.
        """
        if not self.skips_step:
            self._num_in_a_row.pop(optimizer, None)
            return False
        number = self._num_in_a_row[optimizer] = self._num_in_a_row.get(optimizer, 0) + 1
        if number > _MAX_SKIPS:
            raise NonfiniteGradientError(
                f"{self.last_report}\nMore than {_MAX_SKIPS} steps in a row of "
                f"{type(optimizer).__name__} had non-finite gradients: training does not recover. "
                "Its parameters and states are those before the first of them."
            )
        return True

    def _raise_or_warn(self, text: str) -> None:
        if self.policy == "stop" and not self._has_scaler:
            raise NonfiniteGradientError(
                f"{text}\nParameters and optimizer states are those before this step. "
                'on_nonfinite="skip" leaves such steps out, "warn" takes them.'
            )
        if self._control.rank == 0:
            warnings.warn(text, NonfiniteGradientWarning, stacklevel=2)


def _maxima(grads: Sequence[Tensor]) -> list[Tensor]:
    """Maximum of the absolute values of each tensor: 0-dim, NaN if it has a NaN.

    The call for many tensors reads large ones at half of the memory's speed. Results have one dtype
    where they can, so that one call stacks those of many buckets.
    """
    is_narrow = all(grad.is_floating_point() and grad.itemsize <= 4 for grad in grads)
    dtype = torch.float32 if is_narrow else None
    small = [grad for grad in grads if grad.numel() < _LARGE_NUMEL]
    of_small = iter(torch._foreach_norm(small, torch.inf, dtype) if small else ())
    return [
        next(of_small)
        if grad.numel() < _LARGE_NUMEL
        else torch.linalg.vector_norm(grad, torch.inf, dtype=dtype)
        for grad in grads
    ]
