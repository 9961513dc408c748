"""One bucket at run time: its parameters, and what `parameter.data` points at.

    phase       parameter.data                               class
    SHARDED       this rank's slice of the master, 1-D         guarded   PARAM sharded, at rest
    UNSHARDING   the slice, or the view of a buffer in flight guarded
    UNSHARDED       n-D view of the whole buffer                 plain     in use; at rest elsewhere
    STEP        what this rank steps of the master           plain     while the optimizer steps

What rests on this rank, and the master, which the optimizer steps, are told in shards.py. Where a
shard rests in a file, `parameter.data` is empty at rest. What a rank steps is a 1-D slice, or,
where the layout holds whole tensors, the n-D tensor on its owner; on other ranks nothing, without a
gradient.

[Note: Stepped by stand-ins] A bucket that is stepped by itself never enters STEP: stand-ins of its
parameters do that (optim/chunks.py). `begin_step` marks the parameters as in flight, `end_step`
issues the gather of their new values. A worker may do the work between the two; every use of the
bucket waits for it.

An average's buckets (engine/shadow.py) are buckets too: `gathered`, `torch.equal` and checkpoints
need not know which of the two they look at.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_zero.comm.backends import Source
from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.core.building import partial_of
from lightning_zero.core.gradients import Gradients
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.core.writes import (
    Fingerprint,
    WriteDetector,
    equal,
    own_elements,
    require_full_shape,
)
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.buffer import FlatBuffer, promoted_dtype, views_of
from lightning_zero.tensors.guarded import (
    BetweenStepsError,
    GuardedParameter,
    Placement,
    attributes_of,
    data_of,
    guard,
    placement_of,
    plain_class_of,
    set_placement,
    set_plain_data,
    unguard,
)
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tensors.meta import drop_parameter
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers.grad_offload import GradQueue, OffloadedGrad
from lightning_zero.tiers.storage import ShardStore

__all__ = ["Bucket", "Masters", "Phase", "bucket_of"]


class Phase(Enum):
    """What the parameters of a bucket point at; see the table at the top of this file."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    STEP = "step"


class Bucket:
    """Parameters that travel together, from setup to teardown.

    Attributes:
        parameters: The module's own parameter objects, by slot.
        shard_specs: By slot, which elements each rank steps.
        shards_params: PARAM rests as a shard.
        is_unsharded: The values of all elements are at hand or on their way.
        watcher: Is told when that changes.
        whole: The whole buffer; holds memory while the parameters are whole.
        offloaded_grad: Where gradients rest that are not on the device.
        orig_dtypes: Dtype of each parameter before this bucket took it over.
        pins: Number of outside looks (`gathered`) under way; nothing is freed while positive.
        is_saved: A graph that a backward has still to walk may hold views of the whole buffer.
        prints: By slot, of whole values that somebody looks at without a right to write; None where
            nobody does, or where the engine has written to them since.
        lockstep: The engine's `Lockstep`, once it is there.
        replicates_optim: OPTIM rests whole: every rank steps all elements.
        owned: Elements of a slot, counted from its own first one, that this rank steps.
    """

    lockstep: Any
    fingerprints: list[Fingerprint] | None = None
    is_saved_for_backward = False
    phase: Phase
    is_unsharded: bool
    on_unsharded_change: Callable[[bool], None] | None = None

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        queue: GradQueue,
        worker: StepWorker,
        *,
        grad_dtype: torch.dtype,
        unshard_out_of_order: Callable[[Bucket, str], None],
        filled: FlatBuffer | None = None,
    ) -> None:
        """Takes `parameters` over; `filled`: some lie in it already. Collective."""
        self.plan = plan
        self.parameters = list(parameters)
        self.comm = comm
        self.shards_params = plan.stage.shards_params
        self._enter(Phase.UNSHARDED)
        self.num_pins = 0
        self.orig_dtypes = [p.dtype for p in parameters]
        self._worker = worker
        self.device = queue.storage.device
        self.offloaded_grad: OffloadedGrad | None = None
        if queue.storage.is_offloaded(plan.tiers.grad):
            numel = len(plan.layout.shard(comm.mesh.shard_rank))
            self.offloaded_grad = OffloadedGrad(
                queue, plan.name, numel, grad_dtype, plan.tiers.grad
            )
        self.shard_specs = [ShardSpec(slot, plan.layout, comm) for slot in plan.layout.slots]
        offloaded, wait = self.offloaded_grad, self.wait_for_step
        self.grads = Gradients(
            plan, parameters, comm, grad_dtype, offloaded, self.shard_specs, wait
        )
        self._pending: Pending | None = None
        # A worker steps this bucket: waits for it, and returns why it has failed.
        self._stepping: Callable[[], BaseException | None] | None = None
        self._detector = WriteDetector(self.parameters)
        self._parts: WeakValueDictionary[int, _RestingPart] = WeakValueDictionary()
        # By slot whose `.data` was assigned since the last pass, what showed the values before.
        self._assigned: dict[int, _RestingPart | None] = {}
        self._is_aliased = False  # others hold views of the whole buffer, which is stepped
        self._warned_names: set[str] = set()  # of parameters whose memory users hold
        self._num_scans = 0  # for them
        self._unshard_out_of_order = unshard_out_of_order
        if filled is not None and filled.tensor.dtype == plan.dtype:
            self.unsharded_params = filled
        else:
            self.unsharded_params = FlatBuffer(plan.layout, plan.dtype, self.device)
        self.shards = Shards(plan, self.unsharded_params, queue.storage, comm.mesh.shard_rank)
        self.replicates_optim, self.owned = self.shards.replicates_optim, self.shards.owned
        self.masters = Masters(self)
        self._wrap(filled)

    # ---------------------------------------------------------------- taken over and given back

    def _wrap(self, filled: FlatBuffer | None) -> None:
        """Copies rank 0's values in; the parameters become views of the whole. Collective."""
        plan, shards = self.plan, self.shards
        exact = self._full_precision_copy(filled)
        self.comm.broadcast_(exact.tensor)
        if exact is not self.unsharded_params:
            self.unsharded_params.tensor.copy_(exact.tensor)
        shards.init_params()
        if plan.begins_with_master:
            shards.init_master(shards.own_slice_of(exact))
        for index, parameter in enumerate(self.parameters):
            slot = plan.layout.slots[index]
            placement = Placement(
                name=slot.name,
                shape=torch.Size(slot.shape),
                dtype=plan.dtype,
                own_class=type(parameter),
                bucket=self,
                index=index,
                ensure_unsharded=self.unshard_on_use,
                set_grad=self.grads.assign,
                on_data_read=self._hand_out,
            )
            set_placement(parameter, placement)
            parameter.data = self.unsharded_params.views[index]
            parameter.__class__ = plain_class_of(placement.own_class)
            if plan.dtype.is_floating_point:
                parameter.grad_dtype = None  # gradients may be wider than the parameter
        self.reshard()
        shards.mark_written()

    def unwrap(self, device: torch.device | None) -> None:
        """Makes every parameter a whole tensor of its own, in its own dtype. Collective.

        On `device`; None: without values, see tensors/meta.py.
        """
        self.wait_for_unshard()
        self.grads.drop()
        views = self.masters.full_tensors() if device is not None else []
        for index, parameter in enumerate(self.parameters):
            slot, dtype = self.plan.layout.slots[index], self.orig_dtypes[index]
            unguard(parameter)
            set_placement(parameter, None)
            if self.plan.dtype.is_floating_point:
                parameter.grad_dtype = dtype
            if device is None:
                drop_parameter(parameter, slot.name, dtype, torch.Size(slot.shape))
            else:
                parameter.data = views[index].to(device, dtype, copy=True)
        self._detach_views()
        self.shards.drop()
        if self.num_holders(num_params=0):
            self.unsharded_params.replace_memory(copies=False)
        self.unsharded_params.free()

    def _full_precision_copy(self, filled: FlatBuffer | None) -> FlatBuffer:
        """The parameters in their own precision; the whole buffer itself where that suffices."""
        dtype = promoted_dtype(self.plan.dtype, self.orig_dtypes)
        exact = self.unsharded_params
        if dtype != self.plan.dtype:
            exact = filled or FlatBuffer(self.plan.layout, dtype, self.device)
        for view, parameter in zip(exact.views, self.parameters, strict=True):
            if (piece := partial_of(parameter)) is not None:
                piece.read_into(view)
            elif view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
        return exact

    # ---------------------------------------------------------------- whole and released

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        is_unsharded = phase in (Phase.UNSHARDING, Phase.UNSHARDED)
        if self.on_unsharded_change is not None and is_unsharded != self.is_unsharded:
            self.on_unsharded_change(is_unsharded)
        self.is_unsharded = is_unsharded

    def unshard(self) -> None:
        """Issues the gather of whole parameters. Collective: also where they are whole already.

        A rank that has them sends its shard again to those that have not, and receives what it has.
        Refused inside a transform of torch.func that differentiates, whose functions must not write
        to memory: also the parameters given to it would be slices.
        """
        if self.is_unsharded:
            self.wait_for_unshard()
            self.all_gather_into(self.unsharded_params.tensor).wait()
            return
        self.wait_for_step()
        self.check_outside_transform()
        self.unsharded_params.allocate()
        self._pending = self.all_gather_params()
        self.mark_in_flight()

    def check_outside_transform(self) -> None:
        """Raises inside a transform of torch.func that differentiates."""
        if _differentiates():
            raise RuntimeError(
                f"a transform of torch.func (grad, vjp, jvp, jacrev and the like) uses parameter "
                f"{self.plan.layout.slots[0].name}, or a module beside it, which rests as a shard; "
                "make the transform inside `with lightning_zero.gathered(module):`."
            )

    def all_gather_params(self) -> Pending:
        """Issues the gather of this rank's shard, from where it rests."""
        return self.all_gather_into(self.unsharded_params.tensor, self.shards.all_gather_source())

    def all_gather_into(self, whole: Tensor, source: Source | None = None) -> Pending:
        """Issues a gather into `unsharded_params`, laid out as the bucket, of `source` or its own part."""
        cuts = self.plan.layout.split_sizes
        return self.comm.all_gather(whole, self.plan.name, source=source, split_sizes=cuts)

    def wait_for_unshard(self) -> None:
        """Waits for a gather under way; the parameters are whole and plain."""
        if self._stepping is not None:
            self.wait_for_step()
        if self.phase is not Phase.UNSHARDING:
            return
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        set_plain_data(self.parameters, self.unsharded_params.views)
        self._enter(Phase.UNSHARDED)
        if self.shards_params:
            self._detector.watch()

    def reshard(self, *, num_holders_before: int | None = None) -> None:
        """Frees whole parameters where they rest as shards.

        `num_holders_before`: of `num_holders` when the user was shown them, who may keep what was taken
        since; None: that is not asked for. Not inside a transform of torch.func, which
        differentiates without our hooks; the end of the step does so.
        """
        if not self.shards_params or self.phase is Phase.SHARDED or self.num_pins:
            return
        if _transforms_under_way() is not None:
            return
        self.wait_for_unshard()
        self.sync_writes()
        self.enter_idle_phase(num_holders_before=num_holders_before)

    def wait_for_update(self) -> None:
        """Waits for a step and the gather after it, so that what is read is at rest. Local."""
        self.wait_for_step()
        if not self.shards_params:
            self.wait_for_unshard()

    def read_ahead(self) -> bool:
        """Begins to read a shard that rests in a file; whether there was a buffer for it."""
        reader = self.shards.reader
        if reader is None or self.is_unsharded or self._stepping is not None:
            return True
        return reader.begin()

    def wait_for_uploads(self) -> None:
        """Before shards are written to, from which gathers may still copy to the device."""
        has_device_memory = self.shards.storage.has_device_memory
        self.comm.wait_for_uploads(has_device_memory and self.plan.tiers.param is Tier.CPU)

    # ---------------------------------------------------------------- where parameters point

    def mark_in_flight(self) -> None:
        """The parameters wait for a gather that is issued, or will be."""
        if self.phase is not Phase.SHARDED:  # else they are guarded
            guard(self.parameters)
        self._enter(Phase.UNSHARDING)

    def point_at_step_parts(self, parts: Sequence[Tensor]) -> None:
        """Points the parameters at what this rank steps: by slot, 1-D. `enter_idle_phase` ends it."""
        for index, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            unguard(parameter)
            parameter.grad = None
            parameter.data = part.view(self.shards.step_shapes[index])
        self._enter(Phase.STEP)

    def enter_idle_phase(self, *, num_holders_before: int | None = None) -> None:
        """Points the parameters at their slices, or at the whole buffer, where they rest."""
        self._enter(Phase.SHARDED if self.shards_params else Phase.UNSHARDED)
        self.restore_data_pointers()
        if self.shards_params and self.unsharded_params.is_allocated:
            # A forward after the backward may have left it whole.
            self._free_unsharded(num_holders_before)

    def _free_unsharded(self, num_holders_before: int | None) -> None:
        """Frees the whole buffer, which no parameter shows. See [Note: Memory that others hold]."""
        num_graphs = (
            (num_holders_before or 0) if self.is_saved_for_backward else 0
        )  # at most, and then at least one
        num_holders = self.num_holders(num_params=0)
        if num_holders > num_graphs and not (
            self.is_saved_for_backward and num_holders_before is None
        ):
            if num_holders_before is None:
                self._warn_of_holders()
            self.unsharded_params.replace_memory(copies=False)
        self.unsharded_params.free()

    def num_holders(self, *, num_params: int) -> int:
        """How many views of the whole buffer users and graphs have; `num_params` parameters do."""
        return self.unsharded_params.num_holders(self.shards.num_views + num_params)

    def _warn_of_holders(self) -> None:
        """Warns of tensors that users keep of whole parameters; what a graph holds is none.

        Twice at most, for it looks at all objects of Python.
        """
        if self._num_scans == 2:
            return
        time.sleep(0.001)  # a thread of gloo lets go of what it has sent a moment after its end
        if not self.num_holders(num_params=0):
            return
        self._num_scans += 1
        own = {id(self.unsharded_params.tensor), *map(id, self.unsharded_params.views)}
        offsets = [
            start for one, start in views_of(self.unsharded_params.tensor) if id(one) not in own
        ]
        held = {
            slot.name
            for slot in self.plan.layout.slots
            if any(slot.start <= start < slot.stop for start in offsets)
        }
        for name in sorted(held - self._warned_names):
            self._warned_names.add(name)
            warnings.warn(
                f"a tensor that shows parameter {name} outlives the step in which it was taken. It "
                "keeps the values of that step, where one of a plain module follows later steps; "
                "keep a copy, parameter.detach().clone(), or take it anew where you read it.",
                stacklevel=2,
            )

    def restore_data_pointers(self) -> None:
        """Points the parameters where `phase` says, after they have pointed elsewhere."""
        is_shard = self.phase is Phase.SHARDED
        set_plain_data(
            self.parameters,
            self.shards.sharded_views() if is_shard else self.unsharded_params.views,
        )
        if is_shard:
            guard(self.parameters)

    def aliases(self, tensor: Tensor) -> bool:
        """`tensor` is a view of the whole buffer."""
        if tensor.layout is not torch.strided or isinstance(tensor, LazyTensor):
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        storage = self.unsharded_params.tensor.untyped_storage()
        return bool(tensor.untyped_storage()._cdata == storage._cdata)

    # ---------------------------------------------------------------- the step

    def begin_step(self, stepping: Callable[[], BaseException | None] | None = None) -> None:
        """The parameters are in flight until `end_step`. See [Note: Stepped by stand-ins].

        `stepping` waits until a worker has ended the step, see `StepLoop.add`; None: the caller
        ends it.
        """
        self.wait_for_unshard()
        self.sync_writes()
        self._note_holders()
        self.fingerprints = None
        self.shards.stop_reading()  # what was read ahead is about to change
        self.wait_for_uploads()
        if self.shards_params:
            self.enter_idle_phase()
        elif self.plan.stage.all_gathers_after_step:
            self.mark_in_flight()
        self._stepping = stepping

    def end_step(self) -> None:
        """The new values are there; issues their gather where parameters rest whole. Collective."""
        self.shards.mark_written()
        if self.plan.stage.all_gathers_after_step:
            self._pending = self.all_gather_into(self.unsharded_params.tensor)

    def _note_holders(self) -> None:
        """Before a step: whether others look at what it changes, and its gather completes."""
        gathers, num_params = self.plan.stage.all_gathers_after_step, len(self.parameters)
        self._is_aliased = gathers and self.num_holders(num_params=num_params) > 0

    def sync_aliases(self) -> None:
        """After a step: what others hold of whole parameters shows the new values, all of them."""
        if self._is_aliased:
            self._is_aliased = False
            self.wait_for_unshard()

    def wait_for_step(self) -> None:
        """Waits until a worker has stepped this bucket; raises if that step failed."""
        if self._stepping is None:
            return
        with self.comm.recorder.span(Kind.STEP, self.plan.name, is_wait=True):
            error = self._stepping()  # an interrupt leaves the step to the next who waits
            self._stepping = None
        if error is not None:
            raise RuntimeError(f"the optimizer step of {self.plan.name} failed: {error}") from error

    def free_zeroed(self) -> None:
        """Frees the mean gradient where a user has zeroed all of it, unless a worker needs it."""
        if self._stepping is None:
            self.grads.free_zeroed()

    def wait_for_all_steps(self) -> None:
        """Waits until a worker has stepped every bucket: its gathers come before any other."""
        self._worker.drain()

    # ---------------------------------------------------------------- what others do to parameters

    def unshard_on_use(self, name: str) -> None:
        """The guard's call: somebody applies a torch function to parameter `name`."""
        if self.shards_params:
            self._unshard_out_of_order(self, name)
        else:
            self.wait_for_unshard()

    def sharded_data(self, index: int) -> Tensor:
        """What `parameter.data` is of slot `index`: sharded as it rests, or the whole. Local.

        A gather that is under way before a use is finished and freed, so that what is written here
        is in the next one; on gloo that waits for its data. The look itself keeps nothing whole.
        """
        self.wait_for_update()
        self.reshard()
        if self.phase is Phase.SHARDED:
            exact = self.shards.master_view(index)
            part = self._parts.get(index)
            if part is None:
                part = self._parts[index] = _RestingPart(self, index)
            return ShardedTensor.of(part, self.shard_specs[index], "p.data", exact)
        return data_of(self.parameters[index])

    def change_sharded_data(self, index: int, write: Callable[[Tensor], object]) -> None:
        """Lets `write` change what `sharded_data` shows of this rank's elements."""
        self.wait_for_update()
        self.reshard()
        if self.phase is not Phase.SHARDED:
            raise RuntimeError(
                f"parameter.data of {self.plan.layout.slots[index].name} was taken while it rested "
                "as a shard, and is whole at this moment; take parameter.data anew."
            )
        self.lockstep.before_write()
        self.wait_for_uploads()
        self.lockstep.note_write(self.plan.layout.slots[index].name)
        self.shards.change(index, write)

    def assign_data(self, index: int, values: Tensor) -> None:
        """`parameter.data = values` of a guarded one, slot `index`. Local.

        `values` have the whole shape, plain or sharded (collective where that is cut at other
        places), or are this rank's elements, 1-D. Any other shape is a ValueError. Tensors that
        were `parameter.data` until now keep their values.
        """
        self.reshard()  # what was gathered before its use is gathered again
        slot, cut = self.plan.layout.slots[index], self.shard_specs[index]
        if isinstance(values, GuardedParameter):
            values = values.data
        given = values
        self._check_dtype(index, values)
        if isinstance(values, ShardedTensor) and tuple(values.shape) == slot.shape:
            if values.is_view_of(self._parts.get(index)):
                return  # its own
            is_own = self.phase is Phase.SHARDED and cut.matches(values.spec)
            values = values.local if is_own else values.full_tensor()
        if self.phase is Phase.UNSHARDING:
            self.wait_for_unshard()
            self.parameters[index].data = values  # taken when it is released
            return
        own = own_elements(values, slot, self.owned(index))
        if self.is_saved_for_backward and self.num_holders(num_params=0):
            raise RuntimeError(
                f"parameter.data of {slot.name} was set between a forward and its backward, which "
                "needs the values that the forward has used. Set it before the forward, or after "
                "the backward; where no backward follows, call the module under torch.no_grad()."
            )
        self.lockstep.before_write()
        self.wait_for_uploads()
        self._note_assigned(index, given)
        self._detach_view(index)
        self.shards.assign(index, own)

    def _check_dtype(self, index: int, values: Tensor) -> None:
        expected = self.orig_dtypes[index]
        if values.dtype not in (self.plan.dtype, self.plan.master_dtype, expected):
            name = self.plan.layout.slots[index].name
            raise ValueError(
                f"the data set on parameter {name} are {values.dtype}; expected {expected}: a "
                "parameter that an engine holds keeps its dtype, so that module.half() and the "
                "like are for a copy: copy.deepcopy(module).half()."
            )

    def _note_assigned(self, index: int, values: Tensor) -> None:
        """Until the next pass; what is put back is none, as far as every rank can see alike."""
        if index not in self._assigned:
            self._assigned[index] = self._parts.get(index)
        elif isinstance(values, ShardedTensor) and values.is_view_of(self._assigned[index]):
            del self._assigned[index]

    def compare_assigned(self) -> None:
        """As `Schedule.compare_assigned`."""
        for index in sorted(self._assigned):  # ranks may have done it in different orders
            self.lockstep.note(f"parameter.data of {self.plan.layout.slots[index].name}")
        self._assigned.clear()

    def _detach_view(self, index: int) -> None:
        """New values come in the place of a slot's: what shows the old ones keeps them."""
        part = self._parts.pop(index, None)
        if part is not None:
            part.leave()

    def _detach_views(self) -> None:
        for index in list(self._parts):
            self._detach_view(index)

    def _hand_out(self, index: int) -> None:
        """Somebody asks for the `.data` of slot `index`, which is plain."""
        if self.phase is Phase.UNSHARDED and not self.masters.has_views_installed:
            self._detector.before_data_read(index)

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """As slot `index` would be without an engine: in its own class and dtype.

        With values of its own; gathered ones for a file are on the CPU. Collective where it rests
        as a shard.
        """
        parameter, dtype = self.parameters[index], self.orig_dtypes[index]
        try:
            if isinstance(parameter, GuardedParameter):
                self.unshard_on_use(self.plan.layout.slots[index].name)
            if tuple(parameter.shape) != self.plan.layout.slots[index].shape:
                dtype = parameter.dtype  # while it is stepped
            values = parameter.detach().to(dtype, copy=True)
        except BetweenStepsError:
            data = self.sharded_data(index)
            assert isinstance(data, ShardedTensor)
            device = torch.device("cpu") if is_for_file else self.device
            values = data.full_view("copy", dtype).plain().to(device)
        return self.make_plain(index, values)

    def make_plain(self, index: int, values: Tensor) -> nn.Parameter:
        """A parameter like slot `index` with these values, which no engine holds. Local."""
        parameter = self.parameters[index]
        own_class = placement_of(parameter).own_class
        plain = Tensor._make_subclass(own_class, values, parameter.requires_grad)
        assert isinstance(plain, nn.Parameter)
        plain.__dict__.update(attributes_of(parameter))
        return plain

    def equals(self, one: Tensor, other: Tensor) -> bool:
        """Whether two parameters, `one` of which is of a bucket, are equal. Collective."""
        self.lockstep.barrier("torch.equal of parameters")
        return equal(one, other, self.comm)

    def sync_writes(self) -> None:
        """Takes what somebody has written to whole parameters, or put in their place, into masters.

        Data of another shape or dtype is a ValueError; the parameter then shows its own again.
        """
        self.detect_writes()
        self.shards.sync_writes()

    def detect_writes(self) -> None:
        """Takes what `sync_writes` does, where it can be seen without a look at values.

        `parameter.data = other` is how torch's pruning and others give new values.
        """
        if self.phase is not Phase.UNSHARDED or self.masters.has_views_installed:
            return
        replaced, error = self._sync_replaced()
        if self.shards_params:
            for index in {*replaced, *self._detector.written()}:
                self.wait_for_uploads()
                if index in replaced:
                    self._detach_view(index)
                own, view = self.owned(index), self.unsharded_params.views[index]
                self.shards.assign(index, view.reshape(-1)[own.start : own.stop])
        if error is not None:
            raise error

    def _sync_replaced(self) -> tuple[list[int], ValueError | None]:
        """Copies what was assigned to `parameter.data` into the whole buffer; which slots.

        Whoever holds a view of the old values keeps them. The parameters show the buffer then, also
        those whose new data is of another shape or dtype, which is an error.
        """
        replaced = self._detector.replaced(self.unsharded_params.views)
        if not replaced:
            return [], None
        values = {index: data_of(self.parameters[index]) for index in replaced}
        if self.num_holders(num_params=len(self.parameters) - len(replaced)):
            old = self.unsharded_params.tensor
            self.unsharded_params.replace_memory(copies=True)
            self.shards.rebind_to_unsharded(old)
        set_plain_data(self.parameters, self.unsharded_params.views)
        taken, error = [], None
        for index, one in values.items():
            try:
                whole = require_full_shape(one, self.plan.layout.slots[index])
                self._check_dtype(index, whole)
            except ValueError as refused:
                error = error or refused
                continue
            self.unsharded_params.views[index].copy_(whole)
            taken.append(index)
        return taken, error

    # ---------------------------------------------------------------- failures

    def discard_unsharded(self) -> None:
        """As `reshard`, without taking what was written to the whole."""
        if self.shards_params and self.is_unsharded and not self.num_pins:
            self.wait_for_unshard()
            self.enter_idle_phase()

    def undo_step(self) -> None:
        """Back to rest after an optimizer that failed in its step."""
        try:
            self.wait_for_step()
        except RuntimeError as error:
            warnings.warn(f"{error}; its parameters may be stepped in part.", stacklevel=2)
        if self.phase is Phase.STEP:
            self.masters.leave_step(is_changed=True)
        elif self.phase is Phase.UNSHARDING and self._pending is None:
            self.end_step()

    def cancel_unshard(self, *, is_lost: bool) -> None:
        """Forgets a gather whose group is gone.

        `is_lost`: no gather can complete the parameters any more, which stay guarded. Else
        `unshard_again` follows: one gather on every rank, whatever each was waiting for.
        """
        if self.phase is not Phase.UNSHARDING:
            return
        self._pending = None
        if self.shards_params:
            self.num_pins = 0
            self.enter_idle_phase()
        elif not is_lost:
            self._enter(Phase.UNSHARDED)

    def unshard_again(self) -> None:
        """Gathers stepped parameters anew after `cancel_unshard`. Collective."""
        if self.plan.stage.all_gathers_after_step:
            self.wait_for_unshard()  # one that `undo_step` has issued
            self.shards.cast_master()
            self.mark_in_flight()
            self.end_step()


# The transforms of torch.func, the innermost last; None: none.
_transforms_under_way: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack


def _differentiates() -> bool:
    kinds = torch._C._functorch.TransformType
    return any(one.key() in (kinds.Grad, kinds.Jvp) for one in _transforms_under_way() or ())


class _RestingPart:
    """This rank's elements of one parameter that rests as a shard, or that were so once."""

    def __init__(self, bucket: Bucket, index: int) -> None:
        self._bucket = bucket
        self._index = index
        self._kept: Tensor | None = None  # 1-D; what they were when others took their place

    def read(self) -> Tensor:
        if self._kept is not None:
            return self._kept
        self._bucket.wait_for_update()
        return self._bucket.shards.values(self._index).detach()

    def change(self, write: Callable[[Tensor], object]) -> None:
        if self._kept is not None:
            write(self._kept)
        else:
            self._bucket.change_sharded_data(self._index, write)

    def leave(self) -> None:
        """Keeps a copy of what it shows."""
        self._kept = self.read().clone()

    @property
    def version(self) -> int:
        if self._kept is not None:
            return self._kept._version
        self._bucket.wait_for_step()  # it counts in a worker
        shards = self._bucket.shards
        return shards.num_writes + shards.num_slot_writes[self._index]

    def check_memory(self, call: str, num_bytes: int) -> None:
        if self._bucket.device.type == "cpu":
            self._bucket.lockstep.check_cpu_memory(call, num_bytes)


class Masters:
    """All elements of one bucket in full precision, this rank's or whole.

    Where there is no master, these are the parameters themselves.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.has_views_installed = (
            False  # the parameters point at what `install_views` was given, to be written to
        )
        self._bucket = bucket
        self._shards = bucket.shards
        self._stepped: Tensor | None = None  # 1-D, own part, master dtype; inside a step
        self._hidden: list[Tensor | None] | None = None  # `.grad` of all, inside a step without

    # ---------------------------------------------------------------- this rank's elements

    def fetch(self) -> Tensor:
        """The elements that this rank steps: 1-D, a view of memory or a copy of a file. Local."""
        store = self._store()
        return store.fetch(0, store.numel)

    def shard_views(self) -> list[Tensor]:
        """By slot, the elements `owned(index)` in full precision: 1-D, to be read before a step.

        Views of memory, or LazyTensors where the shard rests in a file. Local, but for a gather
        under way, which is waited for.
        """
        store = self._store()
        return [store.view(part.start, part.stop) for part in self._shards.own_ranges]

    def _store(self) -> ShardStore:
        self._bucket.wait_for_all_steps()
        self._bucket.wait_for_unshard()
        self._bucket.sync_writes()
        return self._shards.master_or_param

    def load(self, read: Callable[[int, range], Tensor | None]) -> None:
        """Takes new values for masters and parameters, each rank its own elements. Collective.

        `read`, given a slot and the elements `owned` of it, returns those, in any floating dtype,
        or None to leave the slot as it is. The same slots on every rank.
        """
        exact = self.fetch()
        with torch.no_grad():
            for index, part in enumerate(self._shards.split_by_slot(exact)):
                values = read(index, self._bucket.owned(index))
                if values is not None:
                    part.copy_(values.reshape(-1))
            self.store(exact)

    def store(self, exact: Tensor) -> None:
        """Takes what has become of `fetch()`; parameters follow, whole ones too. Collective."""
        bucket = self._bucket
        bucket.wait_for_uploads()
        bucket.fingerprints = None
        with torch.no_grad():
            self._shards.store_master(exact)
            bucket.reshard()  # ranks may differ in what a forward has left whole
            if bucket.is_unsharded and not bucket.replicates_optim:
                bucket.all_gather_params().wait()

    # ---------------------------------------------------------------- whole

    def full_tensors(self) -> list[Tensor]:
        """By slot, all elements in full precision, n-D, to be read at once. Collective."""
        bucket = self._bucket
        bucket.wait_for_unshard()
        bucket.sync_writes()
        if self._shards.own_master is None and bucket.is_unsharded:
            return bucket.unsharded_params.views
        return self.all_gather().views

    def all_gather(self) -> FlatBuffer:
        """A new buffer with all elements in full precision, on every rank. Collective; waits."""
        return self.all_gather_values(self.fetch())

    def all_gather_values(self, part: Tensor) -> FlatBuffer:
        """A new buffer from every rank's `part`: 1-D and laid out as the master. Collective."""
        bucket = self._bucket
        bucket.wait_for_all_steps()  # their gathers and this one must have one order on all ranks
        with torch.no_grad():
            exact = FlatBuffer(bucket.plan.layout, part.dtype, bucket.device)
            self._shards.own_slice_of(exact).copy_(part)
            if not bucket.replicates_optim:
                bucket.all_gather_into(exact.tensor).wait()
        return exact

    def all_gather_state(self, slices: Sequence[Tensor | None]) -> list[Tensor]:
        """By slot, whole n-D optimizer states from every rank's slices. Collective.

        Those are 1-D as `slice_state` made them, by slot; None counts as zeros.
        """
        bucket = self._bucket
        dtype = next((part.dtype for part in slices if part is not None), bucket.plan.master_dtype)
        joined = torch.zeros(self._shards.master_or_param.numel, dtype=dtype, device=bucket.device)
        for target, part in zip(self._shards.split_by_slot(joined), slices, strict=True):
            if part is not None:
                target.copy_(part.reshape(-1))
        return self.all_gather_values(joined).views

    def broadcast_from(self, exact: FlatBuffer, from_rank: int = 0) -> None:
        """Takes one rank's values of `exact` into all masters and parameters. Collective."""
        bucket = self._bucket
        bucket.fingerprints = None
        bucket.comm.broadcast_(exact.tensor, from_rank)
        with torch.no_grad():
            bucket.wait_for_uploads()
            self._shards.store_master(self._shards.own_slice_of(exact))
            if bucket.unsharded_params.is_allocated:
                bucket.unsharded_params.tensor.copy_(exact.tensor)
        self._shards.mark_written()

    # ---------------------------------------------------------------- shown

    def install_views(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at `views`, by slot, plain, until `uninstall_views`."""
        self._bucket.wait_for_unshard()
        self._bucket.num_pins += 1
        self.has_views_installed = True
        set_plain_data(self._bucket.parameters, views)

    def install_own_views(self) -> Tensor:
        """Points the parameters at parts of `fetch()`, by slot, until `uninstall_views`; returns it.

        Where they are written to, `store` must follow.
        """
        exact = self.fetch()
        self._bucket.wait_for_uploads()
        self.install_views(self._shards.split_by_slot(exact))
        return exact

    def uninstall_views(self) -> None:
        self._bucket.num_pins -= 1
        self.has_views_installed = False
        self._bucket.restore_data_pointers()

    # ---------------------------------------------------------------- stepped all at once

    def enter_step(self, *, has_grads: bool = True) -> None:
        """Points parameters at their masters and `.grad` at their reduced gradients, if wanted.

        Else it is None, and what it was again after `leave_step`. For optimizers that step all
        slices in one call: a master that rests in a file is in memory until then.
        """
        bucket = self._bucket
        bucket.wait_for_unshard()
        bucket.sync_writes()
        bucket._note_holders()
        bucket.fingerprints = None
        grads: list[Tensor | None] = [None] * len(bucket.parameters)
        self._hidden = None if has_grads else bucket.grads.param_grads()
        if has_grads:
            grads = bucket.grads.fetch_all(bucket.plan.master_dtype)
        bucket.wait_for_uploads()
        master = self._shards.ensure_master()
        self._stepped = master.fetch(0, master.numel)
        bucket.point_at_step_parts(self._shards.split_by_slot(self._stepped))
        for index, (parameter, grad) in enumerate(zip(bucket.parameters, grads, strict=True)):
            if grad is not None and self._shards.is_stepped[index]:
                grad = grad.read() if isinstance(grad, LazyTensor) else grad
                parameter.grad = grad.to(self._stepped.device).view(parameter.data.shape)

    def leave_step(self, *, is_changed: bool) -> None:
        """Points everything back, casts changed masters to parameters and issues their gather."""
        bucket = self._bucket
        for parameter in bucket.parameters:
            parameter.grad = None
        if is_changed and self._stepped is not None:
            parts = self._shards.split_by_slot(self._stepped)
            for parameter, part in zip(bucket.parameters, parts, strict=True):
                if parameter.data_ptr() != part.data_ptr():  # `p.data = p.data - update`
                    part.copy_(parameter.data.reshape(-1))
            self._shards.store_master(self._stepped)
        self._stepped = None
        bucket.enter_idle_phase()
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            bucket.grads.set_param_grads()
        else:
            bucket.grads.restore_param_grads(hidden)
        if is_changed and bucket.plan.stage.all_gathers_after_step:
            bucket.mark_in_flight()
            bucket.end_step()


def bucket_of(placement: Placement) -> Bucket:
    """Where an engine, or an average, holds a parameter."""
    return cast("Bucket", placement.bucket)
