"""Gradients of one bucket, between autograd's tensors and the main gradient.

For the tensors, see [Note: Tensors of a bucket] in bucket.py.

[Note: Path of a gradient]

    from               to                operation                      dtype
    autograd           .grad             set, or added                  parameter
    .grad              unsharded buffer  copied; stages 0 and 1         parameter or mean, see below
    buffer, or .grad   reduced shard     reduce-scatter to the mean of  added in that of the mean
                                         the shard group; all-reduce in
                                         stage 0, where the shard is all
    reduced shard      the same          average over replicas, if any  mean
    reduced shard      main gradient     moved, or added; to its tier   mean

by `accumulate`, `reduce`, `end_group_reduction`, `finish_reduction` and `MainGrad.add`; `publish`
sets `.grad` to the mean. The same path is taken for each further gradient, of the next micro-batch
or of a second use in one backward: it is reduced, and added to the mean.

[Note: Local gradients] `parameter.grad` is None before the first backward of a step, and autograd
hands over a tensor of its own. If gradients are sharded, every backward is reduced, and `.grad`
keeps this tensor until then. The reduction copies all of a bucket into a flat tensor of its own: on
a device one foreach copy on the stream of reductions, in the dtype of the mean; on gloo, which
sends it so, in the parameter dtype. (FSDP2 copies on the compute stream, which frees the gradients
earlier.)
Otherwise gradients outlive the backward. The first one is copied into the unsharded buffer, and
`.grad` is set to the view, into which later micro-batches accumulate. (Setting `.grad` in advance
would make the first gradient an addition to zeros: twice the memory traffic.) This buffer has the
parameter dtype as long as each backward is reduced, else the dtype of the mean, so that nothing is
accumulated in 16 bits. In the parameter dtype the mean is a shard of its own. In the dtype of the
mean the buffer is reduced in place, and the mean stays in it. Before the next gradient, if the user
has not zeroed it, it moves to memory of its own, and returns when that gradient is reduced.

Not done: one average over replicas in a step, after the last micro-batch. It would send less
between groups. But until then `.grad` would be the mean of one group, ranks would have to agree
which micro-batch is the last when they issue a reduction, and offloaded means would be read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_zero.comm.backends import Unfilled
from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.core.local_grads import LocalGrads
from lightning_zero.core.main_grad import MainGrad
from lightning_zero.core.param_grads import ParamGrads, graph_error, unfilled
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.layout.stage import State
from lightning_zero.tensors.buffer import FlatBuffer

__all__ = ["GradState", "Gradients"]


class GradState(Enum):
    """Where the newest gradient of one parameter is on this rank."""

    EMPTY = "there is none, or none since it was zeroed"
    LOCAL = "in `.grad`, or in the unsharded buffer: not reduced yet"
    REDUCING = "sent in this backward, at whose end it becomes MEAN"
    MEAN = "in the main gradient, which `.grad` shows after the backward"


@dataclass(frozen=True)
class _Reduction:
    """A reduction in flight."""

    out: Tensor  # the reduced shard
    pending: Pending
    is_averaging: bool = False  # over replicas, after the reduction over the shard group


class Gradients:
    """Gradients of the parameters of one bucket.

    Attributes:
        states: Where the gradient of each slot is. In addition `main` may have the mean of earlier
            gradients.
        local: Unsharded gradients; None if gradients are sharded.
        main: The mean over ranks.
        param_grads: `.grad` of the parameters, as torch has it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        plan: BucketPlan,
        comm: Communicator,
        main: MainGrad,
    ) -> None:
        """Creates the gradients of a bucket, whose mean is `main`; allocates no memory."""
        self._plan, self._comm = plan, comm
        self._parameters = list(parameters)
        self.param_grads = ParamGrads(self._parameters, self._plan.layout.slots)
        self.states = [GradState.EMPTY] * len(self._parameters)
        self.main = main
        self.local: LocalGrads | None = None
        if not self._plan.stage.has_shard(State.GRAD):
            self.local = LocalGrads(self._plan, self._parameters, self._comm.device, self.main)
        self._has_replicas = self._comm.mesh.num_replicas > 1
        self._accepts_reduced = False  # to the mean: between `prepare` and `end_backward`
        self._expected: set[int] = set()  # slots whose gradient has not arrived in this backward
        self._reduction: _Reduction | None = None
        self._reduced_early: list[Tensor] = []  # before this rank began its backward

    # ---------------------------------------------------------------- backward

    def prepare(self, *, outlives_backward: bool, expected: Sequence[bool] | None = None) -> None:
        """Before a backward: drops zeroed gradients, and detaches reduced ones from `.grad`.

        Autograd must not accumulate into reduced gradients. A gradient that the user has set
        becomes the mean. What was reduced before this rank began its backward is added.

        Args:
            outlives_backward: Whether this backward does not reduce.
            expected: Whether a gradient is likely to arrive, by slot; None: if the parameter
                requires one.
        """
        zeroed = []
        for index, grad in enumerate(self.param_grads.read()):
            is_local = self.states[index] is GradState.LOCAL
            if grad is None:
                if is_local and self.local is not None:
                    self.local.zero(index)
                self.states[index] = GradState.EMPTY
                zeroed.append(index)
            elif is_local:
                if self.local is not None and self.local.take(index, grad):
                    zeroed.append(index)  # it replaces the mean, too
            else:
                if not self.main.shows(index, grad):
                    self._copy_user_grad(index, grad)
                self._parameters[index].grad = None
        self.main.forget(zeroed)
        if self.local is not None:
            buffer = self.local.buffer
            is_used = GradState.LOCAL in self.states or (
                buffer is not None and self.main.is_in(buffer)
            )
            self.local.prepare(outlives_backward=outlives_backward, is_empty=not is_used)
        self._accepts_reduced = True
        for reduced in self._reduced_early:
            self.main.add(reduced)
        self._reduced_early.clear()
        if expected is None:
            expected = [parameter.requires_grad for parameter in self._parameters]
        self._expected = {index for index, is_expected in enumerate(expected) if is_expected}

    def accumulate(self, index: int) -> bool:
        """Takes the gradient that autograd has just accumulated in slot `index`.

        Returns whether it was the last gradient that this backward expects.
        """
        grad = self._parameters[index].grad
        if grad is None:
            if self.states[index] is GradState.LOCAL:
                self.states[index] = GradState.EMPTY
            return False  # dropped by a hook of the user's, or frozen since its forward
        if grad.requires_grad:
            raise graph_error(self._plan.layout.slots[index].name)
        if self.local is not None:
            self._make_buffer_writable()
            self.local.take(index, grad)
        self.states[index] = GradState.LOCAL
        if index not in self._expected:
            return False
        self._expected.discard(index)
        return not self._expected

    @property
    def touched(self) -> list[bool]:
        """Whether this rank contributes a gradient to the mean, by slot. In a backward only."""
        return [state in (GradState.LOCAL, GradState.REDUCING) for state in self.states]

    @property
    def has_all(self) -> bool:
        """Whether every trainable parameter has a gradient that this backward reduces."""
        sent = GradState.LOCAL, GradState.REDUCING
        pairs = zip(self._parameters, self.states, strict=True)
        return all(state in sent or not p.requires_grad for p, state in pairs)

    @property
    def is_any_left(self) -> bool:
        """Whether there is a gradient, local or reduced. Local, after `prepare` or `publish`."""
        return any(state is not GradState.EMPTY for state in self.states)

    def is_zero(self) -> bool:
        """Whether no gradient is left, or only zeros. Local, after `prepare`; waits."""
        found = [bool(grad.any()) for grad in self.local_grads().values()]
        if self.main.held:
            self.main.apply_(lambda mean: found.append(bool(mean.any())))
        return not any(found)

    # ---------------------------------------------------------------- reduction

    def local_grads(self) -> dict[int, Tensor]:
        """Gradients of this rank that are not reduced yet, by slot: n-D, detached."""
        grads: Sequence[Tensor | None] = self.param_grads.read()
        if self.local is not None:
            grads = self.local.buffer.views if self.local.buffer is not None else []
        local, states = GradState.LOCAL, self.states
        own = {i: g.detach() for i, g in enumerate(grads) if g is not None and states[i] is local}
        return {i: grad.to_dense() if grad.is_sparse else grad for i, grad in own.items()}

    def reduce(self, local: Mapping[int, Tensor]) -> None:
        """Issues the reduction of `local_grads()`; other slots count as zero. Collective."""
        self.finish_reduction()
        if self.local is None:
            self._issue(unfilled(self._plan, local), self.main.make_shard())
        else:
            self._make_buffer_writable()
            buffer = self.local.open()
            for index, view in enumerate(buffer.views):
                if index not in local:
                    view.zero_()
            self._issue(buffer.tensor, self._out_of(buffer))
        self.param_grads.drop()  # a gradient that arrives later is reduced once more
        for index, state in enumerate(self.states):
            if state is GradState.LOCAL:
                self.states[index] = GradState.REDUCING

    def reduce_zeros(self) -> None:
        """As `reduce`, for ranks that are in a backward before this rank. Collective.

        The result is added when this rank begins its backward: until then the user sees the
        previous mean, and may zero it.
        """
        self.finish_reduction()
        zeros = self.main.make_shard(is_zero=True)
        self._issue(zeros if self.main.is_full else unfilled(self._plan, {}), zeros)

    def _out_of(self, buffer: FlatBuffer) -> Tensor:
        """Where the unsharded buffer is reduced to."""
        if self.main.is_full:
            return buffer.tensor
        if self.main.fits_into(buffer):
            return buffer.shard(self._comm.mesh.shard_rank)
        return self.main.make_shard()

    def _issue(self, source: Tensor | Unfilled, out: Tensor) -> None:
        name = self._plan.name
        if self.main.is_full:
            pending = self._comm.all_reduce(out, name)
        else:
            pending = self._comm.reduce_scatter(source, out, name)
        self._reduction = _Reduction(out, pending)

    def end_group_reduction(self) -> None:
        """Ends the reduction over the shard group; the average over replicas, if any, follows.

        Waits for the former and issues the latter, in the order of reductions. Collective.
        """
        reduction = self._reduction
        if reduction is None or reduction.is_averaging:
            return
        reduction.pending.wait()
        if self._has_replicas:
            pending = self._comm.average_replicas(reduction.out, self._plan.name)
            self._reduction = _Reduction(reduction.out, pending, is_averaging=True)
        else:
            self._reduction = None
            self._add(reduction.out)

    def finish_reduction(self) -> None:
        """Waits for the mean over all ranks, and adds it to the main gradient.

        Where there are replicas, only before the next reduction or after the backward of all ranks:
        in other places the replica that is waited for may wait for an all-gather of this rank.
        """
        if self._reduction is None:
            return
        self.end_group_reduction()
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.pending.wait()
            self._add(reduction.out)

    def _add(self, reduced: Tensor) -> None:
        if not self._accepts_reduced:
            self._reduced_early.append(reduced)
            return
        buffer = None if self.local is None else self.local.buffer
        is_in_buffer = buffer is not None and buffer.aliases(reduced)
        if reduced._base is not None and not is_in_buffer:
            reduced = reduced.clone()  # a part of a buffer that was abandoned
        self.main.add(reduced, is_in_buffer=is_in_buffer)

    def _make_buffer_writable(self) -> None:
        """Before the unsharded buffer is written: it may be in flight, or hold the mean.

        Ranks come here at different times, so no average over replicas is issued or waited for.
        """
        assert self.local is not None
        if not self._has_replicas:
            self.end_group_reduction()
        elif self._reduction is not None and not self._reduction.is_averaging:
            self._reduction.pending.wait()
        buffer = self.local.buffer
        if buffer is None:
            return
        if self._reduction is not None and buffer.aliases(self._reduction.out):
            self.local.abandon()
        elif self.main.tensor is not None:
            self.main.move_out_of(buffer)

    def publish(self, touched: Sequence[bool]) -> None:
        """Ends a backward with the mean of every slot with a gradient on any rank: `touched`."""
        self.main.wait()
        for index, is_touched in enumerate(touched):
            if is_touched:
                self.states[index] = GradState.MEAN
                self.main.held.add(index)
        self.end_backward()

    # ---------------------------------------------------------------- .grad of the parameters

    def end_backward(self) -> None:
        """Ends a backward: sets `.grad` to the means, except where a newer gradient is local.

        Bypasses the guards: parameters that are in flight or being stepped are not waited for.
        """
        self._accepts_reduced = False
        local = GradState.LOCAL
        self._set_grads([i for i in sorted(self.main.held) if self.states[i] is not local])

    def _set_grads(self, slots: Sequence[int]) -> None:
        self.param_grads.set(slots, self.main.views_of(slots))

    def free_zeroed(self) -> None:
        """Drops the mean if `.grad` of every parameter is None. Local; not during a step."""
        if self.main.tensor is None or self._reduction is not None:
            return
        if [grad for grad in self.param_grads.read() if grad is not None]:
            return
        self.states = [GradState.EMPTY] * len(self.states)
        self.main.forget(range(len(self.states)))

    def fetch(self, index: int) -> Tensor | None:
        """The mean gradient with which this rank steps slot `index`, or None.

        Copies a tensor that the user has set as `.grad`. Collective if that is sharded in another
        way.

        Raises:
            RuntimeError: The gradient is local: it has not been reduced yet.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grad = self._parameters[index].grad
        if grad is None:
            return None
        if self.states[index] is GradState.LOCAL:
            name = self._plan.layout.slots[index].name
            raise RuntimeError(
                f"the gradient of {name} has not been reduced: micro-batches under no_sync are "
                "reduced by the next backward outside of it, or by engine.finish_reductions(); run "
                "one of the two first."
            )
        if not self.main.shows(index, grad):
            self._copy_user_grad(index, grad)
            self._set_grads([index])  # clipping `.grad` must change the mean
        return self.main.slices[index]

    def _copy_user_grad(self, index: int, grad: Tensor) -> None:
        self.main.copy_(index, grad)
        self.states[index] = GradState.MEAN

    # ---------------------------------------------------------------- memory, and the end

    def close(self) -> None:
        """Drops all gradients, and the memory and the `.grad` tensors of the mean."""
        self.param_grads.drop()
        self.main.close()

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now on the device."""
        return sum(
            held.allocated_bytes
            if isinstance(held, FlatBuffer)
            else held.untyped_storage().nbytes()
            for held in self.device_memory()
        )

    def device_memory(self) -> Iterator[Tensor | FlatBuffer]:
        """Yields what holds gradients on the device, between backwards."""
        buffer = None if self.local is None else self.local.buffer
        if buffer is not None:
            yield buffer
        yield from self.main.device_memory(buffer)
