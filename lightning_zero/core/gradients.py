"""Gradients of one bucket: from autograd's tensors to this rank's main gradient.

For the tensors, see [Note: Tensors of a bucket] in bucket.py.

[Note: Partial means] A reduction gives each rank its shard of the mean over its shard group. These
means are summed over micro-batches, and the sum is averaged over replicas once, after the last
micro-batch. Sum and mean commute, and averaging an already averaged gradient is a no-op. So the
links between groups carry one shard per step, not one per micro-batch, and until then `.grad` is
the mean of this shard group only.

[Note: Local gradients] `parameter.grad` is None before the first backward of a step, and autograd
hands over a tensor of its own. If gradients are sharded, every backward is reduced, and `.grad`
keeps this tensor until then. The reduction writes all of a bucket into a flat buffer where that is
sent: on a device one foreach copy on the stream of reductions, in the dtype of the sum. (FSDP2
copies on the compute stream, which frees the gradients earlier.)
Otherwise gradients outlive the backward. The first one is copied into the unsharded buffer, and
`.grad` is set to the view, into which later micro-batches accumulate. (Setting `.grad` in advance
would make the first gradient an addition to zeros: twice the memory traffic.) This buffer has the
parameter dtype if it is reduced before the next backward, else `reduce_dtype`, so that nothing is
accumulated in 16 bits.

[Note: Offloaded gradients] If the optimizer does not step on the device, the mean is copied to an
`OffloadedGrad` right after its reduction, while backward continues; `publish`, at the end of
backward, waits for it. `main_grad` is then the view of that store: a CPU tensor, or one that is
read from its file when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Pending
from lightning_zero.core.param_grads import GradShard, ParamGrads, graph_error, unfilled
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import OverlappedStep
from lightning_zero.core.writes import is_same_memory
from lightning_zero.layout.stage import State
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.lazy import read_flat
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers.grad_offload import OffloadedGrad
from lightning_zero.tiers.storage import ShardStore

__all__ = ["Gradients"]


class Gradients:
    """Gradients of the parameters of one bucket.

    Attributes:
        dtype: Dtype of the mean.
        unsharded_grads: Flat buffer of local gradients; None if gradients are sharded, and until
            the first backward. See [Note: Local gradients].
        main_grad: Mean over ranks: 1-D, own elements (all if optimizer states are replicated),
            reduce dtype. It exists from the first reduction until `free_zeroed` finds `.grad` of
            every parameter to be None. A view of `unsharded_grads` if gradients are not sharded and
            the dtypes agree.
        is_partial: Whether `main_grad` is the mean of this shard group only, see [Note: Partial
            means]. The same on every rank, unless the user has zeroed gradients on some.
        slices: Elements of `main_grad` of each slot, 1-D; n-D views if optimizer states are
            replicated.
        is_local: Whether this rank has a gradient of the parameter that is not reduced, by slot.
        is_reduced: Whether `main_grad` holds the mean gradient of the parameter, by slot.
        is_touched: Whether this rank has contributed a gradient since the last reduction, by slot.
        param_grads: `.grad` of the parameters, as torch has it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shards: Shards,
        shard_specs: Sequence[ShardSpec],
        dtype: torch.dtype,
        offloaded: OffloadedGrad | None,
        overlapped: OverlappedStep,
    ) -> None:
        """Creates the gradients of a bucket; allocates no memory.

        Args:
            parameters: The parameters, by slot.
            shards: Shards of the bucket, with its plan.
            shard_specs: Elements of each slot that each rank steps, by slot.
            dtype: Dtype of the mean.
            offloaded: Store of the mean; None if it is on the device.
            overlapped: Step of a worker with these gradients.
        """
        self._plan, self._parameters = shards.plan, list(parameters)
        self.param_grads = ParamGrads(self._parameters, self._plan.layout.slots)
        self._comm = comm = shards.comm
        self.dtype = dtype
        self._offloaded = offloaded
        self._shard_specs = list(shard_specs)
        self._overlapped = overlapped
        self._is_sharded = self._plan.stage.has_shard(State.GRAD)
        self._replicates_mean = shards.replicates_optim
        self._rank = comm.mesh.shard_rank
        self._own = shards.layout
        self.unsharded_grads: FlatBuffer | None = None
        self.main_grad: Tensor | None = None
        self.slices: list[Tensor] = []
        self.is_partial = False
        self._has_replicas = comm.mesh.num_replicas > 1
        self._average: Pending | None = None  # over replicas, of `main_grad`, in place
        self.is_local = [False] * len(self._parameters)
        self.is_reduced = [False] * len(self._parameters)
        self.is_touched = [False] * len(self._parameters)
        self._views: list[Tensor] = []  # by slot: `.grad` of the parameter
        self._grad_shards: WeakSet[GradShard] = WeakSet()  # those of an offloaded mean
        self._expected: set[int] = set()  # slots whose gradient has not arrived in this backward
        self._holds_mean = False  # further means are added to `main_grad`
        self._carried_mean: Tensor | None = None  # while `unsharded_grads` overwrites it
        self._reduction: tuple[Tensor, Pending] | None = None  # in flight, with its result
        # Mean of the other ranks, with its average over replicas. See `reduce_zeros`.
        self._zeros_reduction: tuple[Tensor, Pending | None] | None = None

    # ---------------------------------------------------------------- backward

    def prepare(self, *, outlives_backward: bool, expected: Sequence[bool] | None = None) -> None:
        """Before a backward: detaches reduced gradients from `.grad` and drops zeroed ones.

        Autograd must not accumulate into reduced gradients.

        `expected`: whether a gradient is likely to arrive, by slot; None: if the parameter requires
        one.
        """
        for index, grad in enumerate(self.param_grads.read()):
            if grad is None:
                self.is_local[index] = self.is_reduced[index] = False
            elif self.is_local[index]:
                self._keep_local(index, grad)
            else:
                if not self._is_own_view(index, grad):
                    self._copy_user_grad(index, grad)
                self._parameters[index].grad = None
        self._drop_zeroed()
        if self._zeros_reduction is not None and self._zeros_reduction[1] is None:
            self._add_zeros_reduction()
        self.is_touched = list(self.is_local)
        if expected is None:
            expected = [parameter.requires_grad for parameter in self._parameters]
        self._expected = {index for index, is_expected in enumerate(expected) if is_expected}
        if outlives_backward:
            self._upcast()

    def accumulate(self, index: int) -> bool:
        """Takes the gradient that autograd has just accumulated in slot `index`.

        Returns whether it was the last gradient that this backward expects.
        """
        parameter = self._parameters[index]
        grad = parameter.grad
        if grad is None:
            return False  # frozen since its forward, so autograd skips it
        if grad.requires_grad:
            raise graph_error(self._plan.layout.slots[index].name)
        if not self._is_sharded:
            self._take(index, grad)
        self.is_local[index] = self.is_touched[index] = True
        if index not in self._expected:
            return False
        self._expected.discard(index)
        return not self._expected

    def _take(self, index: int, grad: Tensor) -> None:
        """Moves `grad` into the unsharded buffer, whose view becomes `.grad`."""
        view = self._open_buffer().views[index]
        if grad is not view:
            dense = grad.to_dense() if grad.is_sparse else grad
            view.add_(dense) if self.is_local[index] else view.copy_(dense)
            self._parameters[index].grad = view

    @property
    def has_all(self) -> bool:
        """Whether every trainable parameter has had a gradient in this backward."""
        pairs = zip(self._parameters, self.is_touched, strict=True)
        return all(is_touched or not p.requires_grad for p, is_touched in pairs)

    def is_zero(self) -> bool:
        """Whether no gradient is left, or only zeros. Local, after `prepare`; waits."""
        found = [bool(grad.any()) for grad in self.local_grads().values()]
        if any(self.is_reduced):
            self.apply_(lambda mean: found.append(bool(mean.any())))
        return not any(found)

    # ---------------------------------------------------------------- reduction

    def local_grads(self) -> dict[int, Tensor]:
        """Gradients of this rank that are not reduced yet, by slot: n-D, detached."""
        if self._is_sharded:
            grads: Sequence[Tensor | None] = self.param_grads.read()
        else:
            grads = self.unsharded_grads.views if self.unsharded_grads is not None else []
        own = {i: g.detach() for i, g in enumerate(grads) if g is not None and self.is_local[i]}
        return {i: grad.to_dense() if grad.is_sparse else grad for i, grad in own.items()}

    def reduce(self, local: Mapping[int, Tensor]) -> None:
        """Issues the reduction of `local_grads()`; other slots count as zero. Collective."""
        self.wait_for_reduction()
        buffer = None if self._is_sharded else self._open_buffer()
        self.param_grads.drop()  # a gradient that arrives later is reduced once more
        self.is_local = [False] * len(self._parameters)
        name = self._plan.name
        if buffer is not None:
            for index, view in enumerate(buffer.views):
                if index not in local:
                    view.zero_()
            if self._replicates_mean:
                flat = buffer.tensor
                self._reduction = flat, self._comm.all_reduce(flat, name)
                return
        if buffer is not None and self._is_in_place:
            out = buffer.shard(self._rank)
        elif self.main_grad is None or self._holds_mean or self._offloaded is not None:
            out = torch.empty(self._own.numel, dtype=self.dtype, device=self._comm.device)
        else:
            out = self.main_grad
        source = unfilled(self._plan, local) if buffer is None else buffer.tensor
        self._reduction = out, self._comm.reduce_scatter(source, out, name)

    def reduce_zeros(self, *, averages: bool) -> None:
        """Reduces zeros for ranks that are in a backward before this rank. Collective; waits.

        The result is added when this rank begins or ends its backward; until then the user sees and
        zeroes the previous mean. The other ranks may then average over replicas.
        """
        name, out = self._plan.name, self._zeros()
        if self._replicates_mean:
            self._comm.all_reduce(out, name).wait()
        else:
            self._comm.reduce_scatter(unfilled(self._plan, {}), out, name).wait()
        average = None
        if averages and self._offloaded is None and self._has_replicas:
            if self.is_partial and self.main_grad is not None:
                out.add_(self.main_grad)  # of earlier micro-batches
                self.main_grad.zero_()
                self.is_partial = False
            average = self._comm.average_replicas(out, name)
        self._zeros_reduction = (out, average)

    def wait_for_reduction(self) -> None:
        """Waits for the reduction, and adds it to the mean."""
        if self._reduction is None:
            return
        out, pending = self._reduction
        pending.wait()
        self._finish_average()  # a second reduction is added to the averaged mean
        self._reduction = None
        self._add(out)

    def _add(self, out: Tensor) -> None:
        """Adds a reduced gradient to the mean."""
        if self._offloaded is not None:
            self._offloaded.put(out, is_added=self._holds_mean)
            self._set_main_grad(self._offloaded.shard)
        elif self.main_grad is None or self._is_in_place:
            self._set_main_grad(out)
            if self._carried_mean is not None:
                out.add_(self._carried_mean)
                self._carried_mean = None
        elif out is not self.main_grad:
            self.main_grad.add_(out)
        self._holds_mean = True
        self.is_partial = self._has_replicas

    def issue_average(self) -> None:
        """Issues the average over replicas, if it can overlap with backward. Collective."""
        is_issued = self._average is not None or not self._has_replicas
        if not is_issued and self._offloaded is None and self.main_grad is not None:
            self._average = self._comm.average_replicas(self.main_grad, self._plan.name)

    def average(self) -> None:
        """Completes the mean over all ranks. Collective, at the end of backward; waits."""
        if self._zeros_reduction is not None and not self.is_partial:
            self._add_zeros_reduction()  # the other ranks have averaged it
            return
        if self._offloaded is not None:
            self._average_offloaded(self._offloaded)
        elif self.main_grad is None:  # zeroed on this rank only: the others average theirs
            self._set_main_grad(self._zeros())
        self.issue_average()
        self._finish_average()
        self._add_zeros_reduction()

    def _average_offloaded(self, offloaded: OffloadedGrad) -> None:
        """Averages an offloaded shard over replicas, on its tier. Collective; waits."""

        def average(values: Tensor) -> None:
            on_device = values.to(self._comm.device)
            self._comm.average_replicas(on_device, self._plan.name).wait()
            if on_device is not values:
                values.copy_(on_device)

        if self._has_replicas:
            with torch.no_grad():
                offloaded.apply_(average, 0, self._own.numel)
            self.is_partial = False

    def _finish_average(self) -> None:
        """Waits for the average over replicas. At the end of backward only: ranks may be late."""
        if self._average is not None:
            self._average.wait()
            self._average = None
            self.is_partial = False

    def _add_zeros_reduction(self) -> None:
        """Adds the result of `reduce_zeros` to the mean."""
        if self._zeros_reduction is None:
            return
        out, average = self._zeros_reduction
        self._zeros_reduction = None
        is_partial = average is None or self.is_partial
        if average is not None:
            average.wait()
        self._add(out)
        self.is_partial &= is_partial

    def publish(self, touched: Sequence[bool]) -> None:
        """Sets `.grad` of every parameter with a gradient on any rank: `touched`, by slot."""
        self._add_zeros_reduction()
        if self._offloaded is not None:
            self._offloaded.wait()
        for index, is_touched in enumerate(touched):
            self.is_reduced[index] |= is_touched
        self.is_touched = [False] * len(self._parameters)
        self.set_param_grads()

    # ---------------------------------------------------------------- .grad of the parameters

    def set_param_grads(self) -> None:
        """Sets `.grad` to the reduced gradients; it stays None where there are none.

        Bypasses the guards: parameters that are in flight or being stepped are not waited for.
        """
        pairs = enumerate(zip(self.is_reduced, self.is_local, strict=True))
        self._set_param_grads([i for i, (is_reduced, is_local) in pairs if is_reduced > is_local])

    def _set_param_grads(self, slots: Sequence[int]) -> None:
        if self._replicates_mean:
            for index in slots:  # the mean must have no autograd history of earlier steps
                view = self._views[index]
                if view.requires_grad or not is_same_memory(view, self.slices[index]):
                    self._views[index] = self.slices[index].detach()
        self.param_grads.set(slots, [self._views[index] for index in slots])

    def free_zeroed(self) -> None:
        """Frees the mean if `.grad` of every parameter is None. Local; not during a step."""
        is_kept = self._offloaded is not None or self._replicates_mean or self._is_in_place
        if self.main_grad is None or is_kept or self._average is not None:
            return
        if [grad for grad in self.param_grads.read() if grad is not None]:
            return
        self.is_reduced = [False] * len(self._parameters)
        self._drop_zeroed()

    # ---------------------------------------------------------------- the mean

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
            self.is_reduced[index] = False
            return None
        if self.is_local[index]:
            name = self._plan.layout.slots[index].name
            raise RuntimeError(
                f"the gradient of {name} has not been reduced: micro-batches under no_sync are "
                "reduced by the next backward outside of it, or by engine.finish_reductions(); run "
                "one of the two first."
            )
        if not self._is_own_view(index, grad):
            self._copy_user_grad(index, grad)
            self._set_param_grads([index])  # clipping `.grad` must change the mean
        return self.slices[index]

    def mean(self) -> Tensor:
        """The main gradient, 1-D, own elements; a LazyTensor of a file, zeros without one."""
        return self._zeros() if self.main_grad is None else self.main_grad

    def apply_(
        self, change: Callable[[Tensor], object], indices: Sequence[int] | None = None
    ) -> None:
        """Changes mean gradients elementwise and in place, on their tier.

        `indices`: slots that have a gradient; None: all at once, with padding, which must stay
        zero.
        """
        assert self.main_grad is not None
        if self._offloaded is None:
            parts = [self.main_grad]
            if indices is not None:
                parts = [self.slices[index] for index in indices]
            for part in parts:
                change(part)
        else:
            ranges = [range(self._own.numel)]
            if indices is not None:
                ranges = [self._own.ranges[index] for index in indices]
            for own in ranges:
                self._offloaded.apply_(change, own.start, own.stop)

    def close(self) -> None:
        """Drops all gradients, and the memory and the `.grad` tensors of the mean."""
        if self._offloaded is not None:
            self._offloaded.cancel()
        self.param_grads.drop()
        self._drop_main_grad()

    @property
    def store(self) -> ShardStore | None:
        """Store of the mean; None if it is on the device."""
        return None if self._offloaded is None else self._offloaded.store

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now."""
        num_bytes = self.unsharded_grads.allocated_bytes if self.unsharded_grads is not None else 0
        if self.main_grad is None or self._is_in_place or self._offloaded is not None:
            return num_bytes
        return num_bytes + self.main_grad.untyped_storage().nbytes()

    def device_memory(self) -> Iterator[Tensor | FlatBuffer]:
        """Yields what holds gradients on the device, between backwards."""
        if self.unsharded_grads is not None:
            yield self.unsharded_grads
        if self.main_grad is not None and self._offloaded is None and not self._is_in_place:
            yield self.main_grad

    # ---------------------------------------------------------------- buffers

    @property
    def _is_in_place(self) -> bool:
        """Whether the mean is a view of the unsharded buffer."""
        return (
            not self._is_sharded
            and self._offloaded is None
            and self.unsharded_grads is not None
            and self.unsharded_grads.tensor.dtype == self.dtype
        )

    def _open_buffer(self) -> FlatBuffer:
        """Returns the unsharded buffer, ready for gradients; moves a mean in it to other memory."""
        self.wait_for_reduction()
        if self.unsharded_grads is None:
            dtype = self.dtype if self._replicates_mean else self._plan.dtype
            self.unsharded_grads = FlatBuffer(self._plan.layout, dtype, self._comm.device)
        if self._is_in_place and self._holds_mean:
            assert self.main_grad is not None
            self._carried_mean = self.main_grad
            if self._average is not None:  # waiting for it here might hang, so it keeps its memory
                self.unsharded_grads = FlatBuffer(self._plan.layout, self.dtype, self._comm.device)
            else:
                self._carried_mean = self.main_grad.clone()
            self._holds_mean = False
        return self.unsharded_grads

    def _upcast(self) -> None:
        """Casts an unsharded buffer that outlives a backward to the dtype of the mean."""
        if self._is_sharded or self._is_in_place or self.dtype == self._plan.dtype:
            return
        if self.unsharded_grads is not None and self.unsharded_grads.tensor.dtype == self.dtype:
            return
        upcast = FlatBuffer(self._plan.layout, self.dtype, self._comm.device)
        if self.unsharded_grads is not None:
            upcast.tensor.copy_(self.unsharded_grads.tensor)
        if self.main_grad is not None and self._offloaded is None:
            own = upcast.shard(self._rank)
            own.copy_(self.main_grad)
            self._set_main_grad(own)
        self.unsharded_grads = upcast
        for index, parameter in enumerate(self._parameters):
            if self.is_local[index]:
                parameter.grad = upcast.views[index]

    def _zeros(self) -> Tensor:
        return torch.zeros(self._own.numel, dtype=self.dtype, device=self._comm.device)

    def _set_main_grad(self, mean: Tensor) -> None:
        """Makes `mean` the main gradient, with its slices and views."""
        if self.main_grad is mean or (
            self._offloaded is None
            and self.main_grad is not None
            and self.main_grad.data_ptr() == mean.data_ptr()
        ):
            return
        self.main_grad = mean
        if self._offloaded is None:
            self.slices = self._split_by_slot(mean)
        else:
            self.slices = [self._offloaded.view(part.start, part.stop) for part in self._own.ranges]
        if self._replicates_mean:
            self._views = [part.detach() for part in self.slices]
        else:
            parts = [
                GradShard(self, self._overlapped, index, part)
                for index, part in enumerate(self.slices)
            ]
            if self._offloaded is not None:
                self._grad_shards.update(parts)
            self._views = [
                ShardedTensor.of(part, spec, "p.grad", part.values)
                for part, spec in zip(parts, self._shard_specs, strict=True)
            ]

    def _drop_main_grad(self) -> None:
        self.main_grad, self.slices, self._views = None, [], []

    def _split_by_slot(self, mean: Tensor) -> list[Tensor]:
        """Splits a mean into its slices, by slot."""
        slices = self._own.split(mean)
        if not self._replicates_mean:
            return slices
        return [part.view(shape) for part, shape in zip(slices, self._own.shapes, strict=True)]

    def _is_own_view(self, index: int, grad: Tensor) -> bool:
        if not self._views or grad is not self._views[index]:
            return False
        return not self._replicates_mean or is_same_memory(grad, self.slices[index])

    def _keep_local(self, index: int, grad: Tensor) -> None:
        """Copies a tensor that the user has set as `.grad` over the accumulated gradient."""
        if self.unsharded_grads is None:
            return
        view = self.unsharded_grads.views[index]
        if grad is not view:
            view.copy_(grad)
            self._parameters[index].grad = view

    def _copy_user_grad(self, index: int, grad: Tensor) -> None:
        """Copies a gradient that the user has set into the mean."""
        if self.main_grad is None:
            zeros = self._zeros()
            if self._offloaded is not None:
                self._offloaded.put(zeros, is_added=False)
                self._offloaded.wait()
                zeros = self._offloaded.shard
            self._set_main_grad(zeros)
        own = grad
        if not self._replicates_mean:
            spec = self._shard_specs[index]
            if isinstance(grad, ShardedTensor) and spec.matches(grad.spec):
                own = grad.local
            else:
                full = grad.full_tensor() if isinstance(grad, ShardedTensor) else grad
                own = read_flat(full.to_dense(), spec.owned.start, spec.owned.stop)
        self.apply_(lambda part: part.copy_(own), [index])
        self.is_reduced[index] = self._holds_mean = True

    def _drop_zeroed(self) -> None:
        """Drops gradients that the user has zeroed from the mean to which others are added."""
        if not any(self.is_reduced):
            self._holds_mean = self.is_partial = False
            self._carried_mean = None
            if self._offloaded is None and not self._replicates_mean:
                self._drop_main_grad()
            self._leave_held_memory()
        elif not all(self.is_reduced):
            zeroed = [index for index, is_reduced in enumerate(self.is_reduced) if not is_reduced]
            if self._carried_mean is None:
                self.apply_(Tensor.zero_, zeroed)
            else:
                parts = self._split_by_slot(self._carried_mean)
                for index in zeroed:
                    parts[index].zero_()

    def _leave_held_memory(self) -> None:
        """Leaves the memory of zeroed gradients to users who hold views of it."""
        if self._offloaded is not None:
            self._drop_main_grad()
            for shard in list(self._grad_shards):  # only shards that the user holds are left
                shard.detach()
            self._offloaded.drop_if_shared()
        if self.unsharded_grads is None or any(self.is_local):
            return
        holds_mean = self.main_grad is not None and self._is_in_place
        num_known = len(self.slices) + len(self._views) if holds_mean else 0
        if self.unsharded_grads.num_holders(num_known) > 0:
            self.unsharded_grads = None
            if holds_mean:
                self._drop_main_grad()
