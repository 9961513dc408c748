"""The GRAD state of one bucket: from autograd's tensors to this rank's averaged shard.

[Note: Partial means] A reduction gives each rank its shard of the mean over its group. It is summed
over micro-batches as it is, and averaged over replicas once, with the last of them: sums and means
may change places, and a mean that is complete, which is the same on every replica, stays what it
is. So the links between groups carry one shard for each step, not for each micro-batch, and until
then `.grad` is this group's.

[Note: Gradients are views, the first one is copied] `parameter.grad` is None before the first
backward of a step; autograd then hands over its own tensor, which is copied into the whole flat
buffer (one read, one write), and `.grad` is pointed at the view of the buffer. Later micro-batches
accumulate in place into that view. Pointing `.grad` at the buffer beforehand instead would make the
first gradient an addition into zeros: twice the memory traffic, for the same result.

[Note: Dtypes of gradients] The whole buffer has the parameters' dtype while each backward is
reduced by itself; the sum over ranks is made and kept in `reduce_dtype`. Where whole gradients
outlive a backward (micro-batches under `no_sync`, or a stage that keeps the mean whole), the buffer
has `reduce_dtype` too, so that nothing is accumulated in 16 bits.

[Note: Gradients elsewhere] Where the optimizer shard is not stepped on the device, the mean goes to
an `OffloadedGrad` right after its reduction, while backward goes on; `publish`, at the end of
backward, waits for it. `main_grad` is then what the store shows: a CPU tensor, or one that is read when
it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.core.writes import is_same_memory
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.layout.stage import State
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.guarded import data_of
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers.grad_offload import OffloadedGrad
from lightning_zero.tiers.storage import ShardStore

__all__ = ["Gradients"]


class Gradients:
    """Gradients of the parameters of one bucket.

    Attributes:
        dtype: Of the mean.
        whole: Local gradients, not yet reduced; None until the first backward. Where GRAD is
            sharded it exists from the first gradient of a backward to the end of the reduction.
        shard: The mean over ranks: 1-D, own shard (`numel` where OPTIM is whole), reduce dtype.
            There is one from the first reduction until `.grad` of every parameter is None, as
            `zero_grad` leaves it, and `free_zeroed` looks. A view of `unsharded_grads` where GRAD is whole
            and dtypes agree.
        is_partial: That is this group's so far, see [Note: Partial means]; the same on every rank,
            unless a user has zeroed gradients on some.
        slices: The part of `main_grad` for each slot; n-D views where the mean is whole.
        is_local: By slot: `unsharded_grads` holds a gradient of this parameter.
        is_reduced: By slot: `main_grad` holds the mean gradient of this parameter.
        is_touched: By slot: this rank has contributed since the last reduction.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        dtype: torch.dtype,
        offloaded: OffloadedGrad | None,
        cuts: Sequence[ShardSpec],
        wait_for_step: Callable[[], None],
    ) -> None:
        """Of `parameters`, by slot, as `cuts`; the mean rests in `offloaded`, if not on the device.

        `wait_for_step` waits until a worker has stepped with these gradients.
        """
        self._plan = plan
        self._parameters = list(parameters)
        self._comm = comm
        self.dtype = dtype
        self._offloaded = offloaded
        self._cuts = list(cuts)
        self.wait_for_step = wait_for_step
        self._is_sharded = plan.stage.has_shard(State.GRAD)
        self._is_whole_mean = not plan.stage.has_shard(State.OPTIM)
        self._rank = comm.mesh.shard_rank
        self._parts = plan.layout.parts(self._rank)  # by slot, within this rank's shard
        self._numel = len(plan.layout.shard(self._rank))
        self.unsharded_grads: FlatBuffer | None = None
        self.main_grad: Tensor | None = None
        self.slices: list[Tensor] = []
        self.is_partial = False
        self._has_replicas = comm.mesh.num_replicas > 1
        self._average: Pending | None = None  # over replicas, of `main_grad`, in place
        self.is_local = [False] * len(self._parameters)
        self.is_reduced = [False] * len(self._parameters)
        self.is_touched = [False] * len(self._parameters)
        self._views: list[Tensor] = []  # by slot: what users see as `.grad`
        self._shown_parts: WeakSet[_MeanPart] = WeakSet()  # of a mean that rests elsewhere
        self._shells: dict[int, Tensor] = {}  # by slot: of its size, without memory
        self._expected: set[int] = set()  # slots whose gradient is still to come in this backward
        self._holds_mean = False  # `main_grad` has a value to which a further mean is added
        self._carry: Tensor | None = None  # that value, while `unsharded_grads` is written over it
        self._reduction: tuple[Tensor, Pending] | None = None  # under way, with its result
        # The mean of other ranks, and its average over replicas: see `reduce_zeros`.
        self._of_others: tuple[Tensor, Pending | None] | None = None

    # ---------------------------------------------------------------- backward

    def prepare(self, *, outlives_backward: bool, expected: Sequence[bool] | None = None) -> None:
        """Before a backward: takes what is reduced out of autograd's sight, forgets what is zeroed.

        `expected`, by slot: its gradient is likely to come; None: where it is wanted.
        """
        for index, grad in enumerate(self.param_grads()):
            if grad is None:
                self.is_local[index] = self.is_reduced[index] = False
            elif self.is_local[index]:
                self._keep_local(index, grad)
            else:
                if not self._is_own(index, grad):
                    self._take_over(index, grad)
                self._parameters[index].grad = None
        self._forget_zeroed()
        if self._of_others is not None and self._of_others[1] is None:
            self._take_from_others()
        self.is_touched = list(self.is_local)
        if expected is None:
            expected = [parameter.requires_grad for parameter in self._parameters]
        self._expected = {index for index, is_expected in enumerate(expected) if is_expected}
        if outlives_backward:
            self._widen()

    def zero(self, *, set_to_none: bool) -> None:
        """As `Optimizer.zero_grad`."""
        for parameter, grad in zip(self._parameters, self.param_grads(), strict=True):
            if grad is not None and set_to_none:
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None
            elif grad is not None:
                grad.zero_()

    def free_zeroed(self) -> None:
        """Frees the mean if `.grad` of every parameter is None. Local; not beside a step."""
        rests_alone = self._offloaded is None and not self._is_whole_mean and not self._is_in_place
        if self.main_grad is None or not rests_alone or self._average is not None:
            return
        if [grad for grad in self.param_grads() if grad is not None]:
            return
        self.is_reduced = [False] * len(self._parameters)
        self._forget_zeroed()

    def param_grads(self) -> list[Tensor | None]:
        """`.grad` of every parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # guarded ones would take their time
            return [parameter.grad for parameter in self._parameters]

    def accumulate(self, index: int) -> bool:
        """Takes the gradient that autograd has just accumulated into slot `index`.

        Returns whether it was the last one that this backward can bring.
        """
        parameter = self._parameters[index]
        grad = parameter.grad
        if grad is None:
            return False  # frozen since its forward: autograd has left it out
        is_open = self.unsharded_grads is not None and self._is_sharded and self._reduction is None
        whole = self.unsharded_grads if is_open else self._open()
        assert whole is not None
        view = whole.views[index]
        if grad is not view:
            dense = grad.to_dense() if grad.is_sparse else grad
            if self.is_local[index]:
                view.add_(dense)
            else:
                view.copy_(dense)
            # A parameter that has been released meanwhile cannot show an n-D gradient.
            data = data_of(parameter)
            fits = data.shape == view.shape and data.device == view.device
            parameter.grad = view if fits else None
        self.is_local[index] = self.is_touched[index] = True
        if index not in self._expected:
            return False
        self._expected.discard(index)
        return not self._expected

    # ---------------------------------------------------------------- reduction

    def reduce(self) -> None:
        """Issues the reduction of what is local; slots without a gradient count as zero."""
        whole = self._open()
        for index, is_local in enumerate(self.is_local):
            if not is_local:
                whole.views[index].zero_()
            # A gradient that comes after this one is a new one, in a buffer of its own.
            self._parameters[index].grad = None
            self.is_local[index] = False
        name, flat = self._plan.name, whole.tensor
        if self._is_whole_mean:
            self._reduction = flat, self._comm.all_reduce(flat, name)
            return
        if self._is_in_place:
            out = whole.shard(self._rank)
        elif self.main_grad is None or self._holds_mean or self._offloaded is not None:
            out = torch.empty(self._numel, dtype=self.dtype, device=flat.device)
        else:
            out = self.main_grad
        cuts = self._plan.layout.split_sizes
        self._reduction = out, self._comm.reduce_scatter(flat, out, name, split_sizes=cuts)

    def reduce_zeros(self, *, averages: bool) -> None:
        """Reduces zeros for ranks that are in a backward before this one. Collective; waits.

        What they have is added when this rank comes to its backward, or to its end: until then
        users see and zero what there was. The others may go on to average over replicas.
        """
        layout, name, scratch = self._plan.layout, self._plan.name, self._comm.scratch
        whole = scratch.acquire(layout.numel, self._plan.dtype).zero_()
        out = torch.empty(self._numel, dtype=self.dtype, device=whole.device)
        self._comm.reduce_scatter(whole, out, name, split_sizes=layout.split_sizes).wait()
        scratch.release(whole)
        average = None
        if averages and self._offloaded is None and self._has_replicas:
            if self.is_partial and self.main_grad is not None:
                out.add_(self.main_grad)  # of earlier micro-batches
                self.main_grad.zero_()
                self.is_partial = False
            average = self._comm.average_replicas(out, name)
        self._of_others = (out, average)

    def _take_from_others(self) -> None:
        if self._of_others is None:
            return
        out, average = self._of_others
        self._of_others = None
        is_partial = average is None or self.is_partial
        if average is not None:
            average.wait()
        self._add(out)
        self.is_partial &= is_partial

    def wait_for_reduction(self) -> None:
        """Waits for the reduction, adds it to what was reduced before, frees the whole buffer."""
        if self._reduction is None:
            return
        out, pending = self._reduction
        pending.wait()
        self._finish_average()  # a second reduction in one backward: it is added to a mean at rest
        self._reduction = None
        self._add(out)
        self._close()

    def _add(self, out: Tensor) -> None:
        """Adds a mean to what was reduced before."""
        if self._offloaded is not None:
            self._offloaded.put(out, is_added=self._holds_mean)
            self._adopt(self._offloaded.shard)
        elif self.main_grad is None or self._is_in_place:
            self._adopt(out)
            if self._carry is not None:
                out.add_(self._carry)
                self._carry = None
        elif out is not self.main_grad:
            self.main_grad.add_(out)
        self._holds_mean = True
        self.is_partial = self._has_replicas

    def issue_average(self) -> None:
        """Issues the average over replicas, where it can travel beside backward. Collective."""
        has_begun = self._average is not None or not self._has_replicas
        if not has_begun and self._offloaded is None and self.main_grad is not None:
            self._average = self._comm.average_replicas(self.main_grad, self._plan.name)

    def _finish_average(self) -> None:
        """At the end of backward only: others come late to it."""
        if self._average is not None:
            self._average.wait()
            self._average = None
            self.is_partial = False

    def average(self) -> None:
        """Completes the mean over all ranks. Collective, at the end of backward; waits."""
        if self._of_others is not None and not self.is_partial:
            self._take_from_others()  # the others have averaged it before
            return
        if self._offloaded is not None:
            self._average_offloaded(self._offloaded)
        elif self.main_grad is None:  # zeroed on this rank alone: the others average theirs
            self._adopt(self._zeros())
        self.issue_average()
        self._finish_average()
        self._take_from_others()

    def _average_offloaded(self, offloaded: OffloadedGrad) -> None:
        """Averages a shard over replicas where it rests. Collective; waits."""

        def average(values: Tensor) -> None:
            travelling = values.to(self._comm.device)
            self._comm.average_replicas(travelling, self._plan.name).wait()
            if travelling is not values:
                values.copy_(travelling)

        if self._has_replicas:
            with torch.no_grad():
                offloaded.apply_(average, 0, self._numel)
            self.is_partial = False

    def publish(self, touched: Sequence[bool]) -> None:
        """Shows `.grad` of every parameter that any rank has touched: `touched`, by slot."""
        self._take_from_others()
        if self._offloaded is not None:
            self._offloaded.wait()
        for index, is_touched in enumerate(touched):
            self.is_reduced[index] |= is_touched
        self.is_touched = [False] * len(self._parameters)
        self.set_param_grads()

    @property
    def has_all(self) -> bool:
        """Every trainable parameter has had a gradient in this backward."""
        pairs = zip(self._parameters, self.is_touched, strict=True)
        return all(is_touched or not p.requires_grad for p, is_touched in pairs)

    def set_param_grads(self) -> None:
        """Points `.grad` at the reduced gradients; it stays None where there is none.

        torch compares sizes when `.grad` is set, so the parameter is its slice for that moment.
        Past the guards: values that are still being gathered or stepped are not waited for.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for index, is_reduced in enumerate(self.is_reduced):
                if is_reduced and not self.is_local[index]:
                    self._show(index)

    def restore_param_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Points `.grad` where it was when `grads` were `param_grads`."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, grad in enumerate(grads):
                if grad is not None:
                    self._point(index, grad)

    def _show(self, index: int) -> None:
        # What autograd knows of earlier means is forgotten.
        view = self._views[index]
        if isinstance(view, ShardedTensor):
            view.is_tracked = False
        elif view.requires_grad or not self._is_own(index, view):  # or its data were replaced
            view = self._views[index] = self.slices[index].detach()
        self._point(index, view)

    def _point(self, index: int, grad: Tensor) -> None:
        """Sets `.grad`, whatever `.data` is: torch compares their sizes and devices."""
        parameter = self._parameters[index]
        data = data_of(parameter)
        if data.shape == grad.shape and data.device == grad.device:
            parameter.grad = grad
            return
        shell = self._shells.get(index)
        if shell is None or shell.dtype != data.dtype or shell.device != grad.device:
            one = torch.empty((), dtype=data.dtype, device=grad.device)
            shell = self._shells[index] = one.expand(self._plan.layout.slots[index].shape)
            shell.untyped_storage().resize_(0)
        parameter.data = shell
        parameter.grad = grad
        parameter.data = data

    def assign(self, index: int, grad: Tensor) -> None:
        """`parameter.grad = grad` of slot `index`, which is guarded. Local.

        `grad` has the whole shape: plain, of which this rank takes its elements when it steps, or
        sharded. Ranks should set equal ones.
        """
        slot = self._plan.layout.slots[index]
        if tuple(grad.shape) != slot.shape:
            raise ValueError(
                f"the gradient set on parameter {slot.name} has shape {tuple(grad.shape)}; expected"
                f" the whole shape {slot.shape}, plain or as parameter.grad has it."
            )
        with torch._C.DisableTorchFunctionSubclass():
            self._point(index, grad)

    def fetch(self, index: int) -> Tensor | None:
        """The mean gradient with which this rank steps slot `index`, or None.

        A tensor that a user put in place of `.grad` is taken over. Collective where that is cut at
        other places.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grad = self._parameters[index].grad
        if grad is None:
            self.is_reduced[index] = False
            return None
        if self.is_local[index]:
            name = self._plan.layout.slots[index].name
            raise RuntimeError(
                f"the gradient of {name} is this rank's own so far: micro-batches under no_sync "
                "are reduced by the next backward, or by engine.finish_reductions(); call it first."
            )
        if not self._is_own(index, grad):
            self._take_over(index, grad)
            with torch._C.DisableTorchFunctionSubclass():
                self._show(index)  # clipping changes what is stepped
        return self.slices[index]

    def apply_(
        self, change: Callable[[Tensor], object], indices: Sequence[int] | None = None
    ) -> None:
        """Changes mean gradients elementwise and in place, wherever they rest.

        `indices`: slots that have a gradient; None: all at once, with padding, which must stay
        zero.
        """
        assert self.main_grad is not None
        if self._offloaded is None:
            for part in [self.main_grad] if indices is None else [self.slices[i] for i in indices]:
                change(part)
        else:
            whole = [range(self._numel)]
            for own in whole if indices is None else [self._parts[i] for i in indices]:
                self._offloaded.apply_(change, own.start, own.stop)

    def fetch_all(self, dtype: torch.dtype) -> list[Tensor | None]:
        """`fetch` of every slot, in the master's dtype: narrower means are widened for the step."""
        fetched = [self.fetch(index) for index in range(len(self._parameters))]
        if self.main_grad is None or self.main_grad.dtype == dtype:
            return fetched
        wide = self._cut(self.main_grad.to(dtype))
        return [None if grad is None else part for grad, part in zip(fetched, wide, strict=True)]

    def drop(self) -> None:
        """Forgets everything, after an exception or a teardown; every `.grad` is None."""
        if self._offloaded is not None:
            self._offloaded.drop()
        if self._reduction is not None:
            self._comm.discard(self._reduction[1])
            self.unsharded_grads = None  # others may still write to it
        for average in (self._average, self._of_others and self._of_others[1]):
            if average is not None:
                self._comm.discard(average)
        self._reduction = self._average = self._carry = self._of_others = None
        self._holds_mean = self.is_partial = False
        self._expected = set()
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None
            self.is_local[index] = self.is_reduced[index] = self.is_touched[index] = False
        self._close()

    @property
    def store(self) -> ShardStore | None:
        """Where the mean rests, if not on the device."""
        return None if self._offloaded is None else self._offloaded.store

    @property
    def allocated_bytes(self) -> int:
        """Bytes held at this moment."""
        whole = self.unsharded_grads.allocated_bytes if self.unsharded_grads is not None else 0
        if self.main_grad is None or self._is_in_place or self._offloaded is not None:
            return whole
        return whole + self.main_grad.untyped_storage().nbytes()

    # ---------------------------------------------------------------- inside

    @property
    def _is_in_place(self) -> bool:
        """The mean lands in the whole buffer itself."""
        return (
            not self._is_sharded
            and self._offloaded is None
            and self.unsharded_grads is not None
            and self.unsharded_grads.tensor.dtype == self.dtype
        )

    def _open(self) -> FlatBuffer:
        """The whole buffer, ready to receive; a mean that lies in it is carried aside."""
        self.wait_for_reduction()
        if self.unsharded_grads is None:
            dtype = self.dtype if self._is_whole_mean else self._plan.dtype
            layout, device = self._plan.layout, self._comm.device
            memory = self._comm.scratch.acquire(layout.numel, dtype) if self._is_sharded else None
            self.unsharded_grads = FlatBuffer(layout, dtype, device, memory=memory)
        if self._is_in_place and self._holds_mean:
            assert self.main_grad is not None
            self._carry = self.main_grad
            if self._average is not None:  # it keeps its memory: waiting here might be for ever
                self.unsharded_grads = FlatBuffer(self._plan.layout, self.dtype, self._comm.device)
            else:
                self._carry = self.main_grad.clone()
            self._holds_mean = False
        return self.unsharded_grads

    def _close(self) -> None:
        """Gives the memory of local gradients back, where they do not rest whole."""
        if self._is_sharded and self.unsharded_grads is not None:
            self._comm.scratch.release(self.unsharded_grads.tensor)
            self.unsharded_grads = None

    def _is_own(self, index: int, grad: Tensor) -> bool:
        if not self._views or grad is not self._views[index]:
            return False
        return not self._is_whole_mean or is_same_memory(grad, self.slices[index])

    def _keep_local(self, index: int, grad: Tensor) -> None:
        """`.grad` is the truth: a tensor that a user put there replaces what was accumulated."""
        assert self.unsharded_grads is not None
        view = self.unsharded_grads.views[index]
        if grad is not view:
            view.copy_(grad)
            self._parameters[index].grad = view

    def _forget_zeroed(self) -> None:
        """Takes gradients that a user has zeroed out of the mean to which others are added."""
        if not any(self.is_reduced):
            self._holds_mean = self.is_partial = False
            self._carry = None
            if self._offloaded is None and not self._is_whole_mean:
                self.main_grad, self.slices, self._views = None, [], []
            self._leave_held()
        elif not all(self.is_reduced):
            zeroed = [index for index, is_reduced in enumerate(self.is_reduced) if not is_reduced]
            if self._carry is None:
                self.apply_(Tensor.zero_, zeroed)
            else:
                parts = self._cut(self._carry)
                for index in zeroed:
                    parts[index].zero_()

    def _leave_held(self) -> None:
        """Leaves the memory of gradients that are zeroed to users who hold some of it."""
        if self._offloaded is not None:
            self.main_grad, self.slices, self._views = None, [], []
            for part in list(self._shown_parts):  # those that somebody else holds
                part.keep()
            self._offloaded.drop_if_shared()
        if self.unsharded_grads is None or any(self.is_local):
            return
        is_shown = self.main_grad is not None and self._is_in_place  # in whole tensors, by slot
        num_known = len(self.slices) + len(self._views) if is_shown else 0
        if self.unsharded_grads.num_holders(num_known) > 0:
            self.unsharded_grads = None
            if is_shown:
                self.main_grad, self.slices, self._views = None, [], []

    def _widen(self) -> None:
        """Gives a whole buffer that outlives a backward the dtype in which gradients are summed."""
        if self._is_sharded or self._is_in_place or self.dtype == self._plan.dtype:
            return
        if self.unsharded_grads is not None and self.unsharded_grads.tensor.dtype == self.dtype:
            return
        wide = FlatBuffer(self._plan.layout, self.dtype, self._comm.device)
        if self.unsharded_grads is not None:
            wide.tensor.copy_(self.unsharded_grads.tensor)
        if self.main_grad is not None and self._offloaded is None:
            own = wide.shard(self._rank)
            own.copy_(self.main_grad)
            self._adopt(own)
        self.unsharded_grads = wide
        for index, parameter in enumerate(self._parameters):
            if self.is_local[index]:
                parameter.grad = wide.views[index]

    def _adopt(self, mean: Tensor) -> None:
        if self.main_grad is mean or (
            self._offloaded is None
            and self.main_grad is not None
            and self.main_grad.data_ptr() == mean.data_ptr()
        ):
            return
        self.main_grad = mean
        if self._offloaded is None:
            self.slices = self._cut(mean)
        else:
            self.slices = [self._offloaded.view(part.start, part.stop) for part in self._parts]
        if self._is_whole_mean:
            self._views = [part.detach() for part in self.slices]
        else:
            parts = [_MeanPart(self, index, part) for index, part in enumerate(self.slices)]
            if self._offloaded is not None:
                self._shown_parts.update(parts)
            self._views = [
                ShardedTensor.of(part, cut, "p.grad", part.values)
                for part, cut in zip(parts, self._cuts, strict=True)
            ]

    def _cut(self, mean: Tensor) -> list[Tensor]:
        if not self._is_whole_mean:
            return [mean[part.start : part.stop] for part in self._parts]
        slots = self._plan.layout.slots
        return [mean[slot.start : slot.stop].view(slot.shape) for slot in slots]

    def _zeros(self) -> Tensor:
        numel = self._plan.layout.numel if self._is_whole_mean else self._numel
        return torch.zeros(numel, dtype=self.dtype, device=self._comm.device)

    def _take_over(self, index: int, grad: Tensor) -> None:
        """Copies a gradient that a user has set into the mean."""
        if self.main_grad is None:
            zeros = self._zeros()
            if self._offloaded is not None:
                self._offloaded.put(zeros, is_added=False)
                self._offloaded.wait()
                zeros = self._offloaded.shard
            self._adopt(zeros)
        own = grad
        if not self._is_whole_mean:
            cut = self._cuts[index]
            if isinstance(grad, ShardedTensor) and cut.matches(grad.spec):
                own = grad.local
            else:
                whole = grad.full_tensor() if isinstance(grad, ShardedTensor) else grad
                own = read_flat(whole.to_dense(), cut.owned.start, cut.owned.stop)
        self.apply_(lambda part: part.copy_(own), [index])
        self.is_reduced[index] = self._holds_mean = True


@dataclass(eq=False)
class _MeanPart:
    """This rank's elements of one mean gradient, also when they have been zeroed as `.grad`."""

    grads: Gradients
    index: int
    values: Tensor
    version: int = 0  # nothing that is gathered of it is kept

    def check_memory(self, call: str, num_bytes: int) -> None:
        """Nothing: see `full_grad`."""

    def read(self) -> Tensor:
        return self.values.read() if isinstance(self.values, LazyTensor) else self.values

    def keep(self) -> None:
        """The file that has the values is about to be written to."""
        if isinstance(self.values, LazyTensor):
            self.values = self.values.read()

    def change(self, write: Callable[[Tensor], object]) -> None:
        self.grads.wait_for_step()
        if self.grads.slices and self.grads.slices[self.index] is self.values:
            self.grads.apply_(write, [self.index])
        else:
            write(self.values)
