"""Guard against non-finite gradients: finds NaN and infinity before they are reduced.

After a reduction every rank has the NaN of one rank, so its origin is lost. Each rank therefore
looks at its own gradients of a bucket before it sends them.

[Note: When ranks learn of a non-finite gradient] A rank looks at each element: one sum per
parameter on a CPU, one maximum on a device. Only where that is not finite does a CPU
count elements. The round that ends every backward (`CollectiveOrder.finalize_backward`) carries one
byte more, "this rank has found something". If any rank has, all ranks exchange what they found and
their losses, after the reductions of this backward. So a report costs an exchange, and its absence
costs nothing but the look.

A step ends with the step of an optimizer, or when its gradients are zeroed without one, as after
a loss scaler's skip. Gradients may be zeroed on some ranks only, so each rank sends in that round
whether it continues a step: if any does, the step that is to be skipped is still the same.

On a device the host does not wait for the result. It is copied to the CPU while the device works,
and sent in the round of the next backward, so that with "warn" a report is one backward late,
and the last backward has none: a rank that closes may do so alone, after an exception.
"stop" and "skip" must know it before the step: at the end of the last backward of a step the host
waits for the device, as a loss scaler does.

[Note: Skipped steps] A step is skipped before it begins (`OptimizerStep`), also for optimizers that
count their calls. Only gradients are dropped: buffers such as BatchNorm's statistics, learning rate
schedules and random numbers are those after the forward, as when a loss scaler skips a step.
"""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
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
        losses: Loss of the first of their micro-batches, by rank; None: not known to the engine.
        num_more: Non-finite gradients that `found` leaves out.
    """

    step: int
    found: tuple[NonfiniteGradient, ...]
    losses: tuple[float | None, ...]
    num_more: int = 0

    def __str__(self) -> str:
        lines = [f"  {one}" for one in self.found[:_MAX_LINES]]
        if num_more := len(self.found) - len(lines) + self.num_more:
            lines.append(f"  and {num_more} more")
        losses = ", ".join("unknown" if one is None else f"{one:.6g}" for one in self.losses)
        micro_batch = self.found[0].micro_batch
        lines.append(f"  loss of micro-batch {micro_batch}, by rank: {losses}")
        return f"non-finite gradients in step {self.step}, before their reduction:\n" + "\n".join(
            lines
        )


class _Look(NamedTuple):
    """Gradient at which a rank has looked."""

    step: int
    micro_batch: int
    bucket: Bucket
    slot: int


class _Copy(NamedTuple):
    """Results of looks that are on their way from the device."""

    looks: list[_Look]
    maxima: Tensor  # on the CPU, pinned; one element for each look
    copied: Event


class NonfiniteGuard:
    """Looks at this rank's gradients, reports on all ranks, and decides whether a step is skipped.

    Attributes:
        policy: "warn", "stop", "skip"; None: gradients are not looked at.
        last_report: The last report, the same on every rank; None: there was none.
        num_skipped: Steps that were skipped.
        step: Number of the step that the last backward belongs to, from 0, or as set by
            `begin_at`.
        micro_batch: Number of the last backward in its step, from 0; -1: there was none.
        skips_step: Whether the next step of the optimizers is to be skipped.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, config: ZeroConfig) -> None:
        self.policy = config.on_nonfinite
        self.last_report: NonfiniteReport | None = None
        self.num_skipped = 0
        self.skips_step = False
        self._buckets = list(buckets)
        self._comm, self._control = comm, comm.control
        self._max_skips = config.max_skips
        self._num_in_a_row: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by optimizer
        self.step, self.micro_batch = 0, -1
        self._begins_step = False  # since the last round, as far as this rank knows
        self._next_loss: Tensor | float | None = None  # of the backward that begins next
        self._losses: dict[tuple[int, int], Tensor | float | None] = {}  # by step and micro-batch
        self._has_scaler = False
        self._looks: list[_Look] = []  # looked at on a device since the last copy
        self._maxima: list[Tensor] = []  # of these: 1-D, one tensor for each bucket
        self._discarded: list[Tensor] = []  # by `reset`; a side stream may still write to them
        self._copies: list[_Copy] = []
        self._found: list[NonfiniteGradient] = []  # not reported yet
        self._named: set[tuple[int, str]] = set()  # by step: parameters found
        self._listeners: list[Callable[[NonfiniteReport], None]] = []

    def add_listener(self, listener: Callable[[NonfiniteReport], None]) -> None:
        """Calls `listener` with each report, before an error is raised. Local.

        All ranks call theirs, after the backward: a listener may run collectives.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)

    def note_loss(self, loss: Tensor | None, *, has_scaler: bool) -> None:
        """Notes the loss of the next backward. Local.

        `has_scaler`: a loss scaler skips steps with infinite gradients, which only warn then.
        """
        self._next_loss = None if self.policy is None else _value_of(loss)
        self._has_scaler = has_scaler

    def begin_at(self, step: int) -> None:
        """Numbers the first step `step`, before its first backward. The same on every rank."""
        if self.micro_batch < 0:
            self.step = step

    def begin(self, *, is_new_step: bool) -> None:
        """Before a backward. Local.

        `is_new_step`: an optimizer has stepped since the last backward, or no gradient is left.
        """
        if is_new_step and self.micro_batch >= 0:
            self._begins_step = True
            self.step, self.micro_batch = self.step + 1, -1
            # On a device, results of the last step may still follow.
            self._named = {key for key in self._named if key[0] == self.step - 1}
            self._losses = {key: v for key, v in self._losses.items() if key[0] == self.step - 1}
        self.micro_batch += 1
        self._losses[self.step, self.micro_batch] = self._next_loss
        self._next_loss = None

    @property
    def decides(self) -> bool:
        """Whether it must be known before a step if a gradient is not finite."""
        return self.policy in ("stop", "skip") and not self._has_scaler

    def reset(self) -> None:
        """After an exception, when gradients have been dropped. Local."""
        self._discarded += self._maxima
        self._looks, self._maxima, self._copies, self._found = [], [], [], []
        self._named.clear()
        self.skips_step = self._begins_step = False

    # ---------------------------------------------------------------- a look

    def look(
        self, bucket: Bucket, local: Mapping[int, Tensor], *, precedes_reduction: bool
    ) -> None:
        """Looks at `Gradients.local_grads` of `bucket`, which are not reduced yet. Local.

        `precedes_reduction`: they are reduced next, so that a device may look beside compute.
        """
        if self.policy is None:
            return
        grads = {slot: grad for slot, grad in local.items() if grad.numel()}
        if grads and bucket.device.type != "cpu":
            beside = self._comm.before_reduction() if precedes_reduction else nullcontext()
            self._look_later(bucket, grads, beside)
            return
        dtype = bucket.plan.dtype  # in which gloo sends a wider gradient, which may overflow
        for slot, own in grads.items():
            grad = own.to(dtype) if own.dtype.itemsize > dtype.itemsize else own
            if not _is_finite(grad):
                num_nan, num_inf = int(grad.isnan().sum()), int(grad.isinf().sum())
                if num_nan or num_inf:
                    look = _Look(self.step, self.micro_batch, bucket, slot)
                    self._add(look, num_nan, num_inf)

    def look_at_local(self) -> None:
        """Looks at all gradients that this backward has left local. Local."""
        for bucket in self._buckets if self.policy is not None else ():
            if any(bucket.grads.is_local):
                self.look(bucket, bucket.grads.local_grads(), precedes_reduction=False)

    def _look_later(
        self, bucket: Bucket, grads: Mapping[int, Tensor], stream: AbstractContextManager[Any]
    ) -> None:
        """Begins a look on a device, on `stream`, without waiting for it."""
        step, micro_batch = self.step, self.micro_batch
        self._looks += [_Look(step, micro_batch, bucket, slot) for slot in grads]
        maxima = torch.empty(len(grads), dtype=torch.float64, device=bucket.device)
        self._maxima.append(maxima)
        with stream:
            maxima.copy_(torch.stack(torch._foreach_norm(list(grads.values()), torch.inf)))

    def _copy_maxima(self) -> None:
        """Begins to copy the results of looks on a device to the CPU."""
        if not self._maxima:
            return
        self._comm.wait_for_reductions()  # looks run beside them
        self._discarded.clear()
        maxima = torch.cat(self._maxima)
        on_cpu = torch.empty(maxima.shape, dtype=maxima.dtype, pin_memory=True)
        on_cpu.copy_(maxima, non_blocking=True)
        copied = streams.make_event()
        copied.record()
        self._copies.append(_Copy(self._looks, on_cpu, copied))
        self._looks, self._maxima = [], []

    def _receive(self, *, waits: bool) -> None:
        """Takes the results of earlier looks on a device."""
        copies, self._copies = self._copies, []
        for one in copies:
            if waits:
                one.copied.synchronize()
            elif not one.copied.query():
                self._copies.append(one)
                continue
            for look, maximum in zip(one.looks, one.maxima.tolist(), strict=True):
                if maximum != maximum:
                    self._add(look, None, 0)
                elif maximum == torch.inf:
                    self._add(look, 0, None)

    def _add(self, look: _Look, num_nan: int | None, num_inf: int | None) -> None:
        slot = look.bucket.plan.layout.slots[look.slot]
        if (look.step, slot.name) not in self._named:
            self._named.add((look.step, slot.name))
            rank = self._control.rank
            self._found.append(
                NonfiniteGradient(
                    rank,
                    slot.name,
                    look.step,
                    look.micro_batch,
                    num_nan,
                    num_inf,
                    slot.numel,
                )
            )

    # ---------------------------------------------------------------- agreement and report

    def flags(self, *, ends_step: bool) -> list[bool]:
        """What this rank sends in a round: it continues a step; it has found something. Local.

        `ends_step`: a step may follow, so "stop" and "skip" wait for the device.
        """
        return [not self._begins_step, self._has_found(ends_step=ends_step)]

    def receive_flags(self, flags: Sequence[int]) -> bool:
        """Takes what any rank has sent; returns whether any has found something. Local.

        The last step is left unless a rank continues it: no rank may skip a step alone.
        """
        continues_step, has_found = map(bool, flags)
        self._begins_step = False
        if not continues_step:
            self.skips_step = False
        return has_found

    def _has_found(self, *, ends_step: bool) -> bool:
        """Whether this rank has found something that is not reported yet."""
        self._receive(waits=False)  # of backwards before this one
        self._copy_maxima()
        if ends_step and self.decides:
            self._receive(waits=True)
        return bool(self._found)

    def report(self) -> None:
        """Reports what the ranks have found, in the same way on every rank. Collective.

        Raises:
            NonfiniteGradientError: With "stop".
        """
        self._copy_maxima()
        self._receive(waits=True)
        losses = {k: None if loss is None else float(loss) for k, loss in self._losses.items()}
        found, self._found = self._found, []
        num_more = len(found[_MAX_SENT:])
        by_rank = self._control.gather_objects((found[:_MAX_SENT], losses, num_more))
        everything = [one for own, _, _ in by_rank for one in own]
        everything.sort(key=lambda one: (one.step, one.micro_batch, one.rank))
        key = everything[0].step, everything[0].micro_batch
        report = NonfiniteReport(
            key[0],
            tuple(everything),
            tuple(own.get(key) for _, own, _ in by_rank),
            sum(number for _, _, number in by_rank),
        )
        self.last_report = report
        text = str(report)
        if self._has_scaler:
            text += "\nThe loss scaler decides: it skips the step and lowers its scale."
        elif self.policy == "skip":
            self.num_skipped += not self.skips_step
            self.skips_step = True
            text += f"\nThis step is skipped ({self.num_skipped} so far)."
        try:
            for listener in list(self._listeners):
                listener(report)
        finally:
            self._raise_or_warn(text)

    def skips(self, optimizer: object) -> bool:
        """Whether the step of `optimizer` that begins now is skipped. Local.

        Raises:
            NonfiniteGradientError: More than `max_skips` of its steps in a row would be.
        """
        if not self.skips_step:
            self._num_in_a_row.pop(optimizer, None)
            return False
        number = self._num_in_a_row[optimizer] = self._num_in_a_row.get(optimizer, 0) + 1
        if number > self._max_skips:
            raise NonfiniteGradientError(
                f"{self.last_report}\nMore than max_skips={self._max_skips} steps in a row of "
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


def _is_finite(values: Tensor) -> bool:
    """Whether the sum is finite: False for any non-finite element, and if the sum overflows."""
    # 16 bits are summed in 32, but float16 results overflow early.
    dtype = torch.float32 if values.dtype == torch.float16 else None
    return cmath.isfinite(values.sum(dtype=dtype).item())


def _value_of(loss: Tensor | None) -> Tensor | float | None:
    """Value of `loss`; on a device the tensor, for which the host does not wait."""
    if loss is None or loss.numel() != 1 or loss.is_complex():
        return None
    value = loss.detach()
    return float(value) if value.device.type == "cpu" else value
