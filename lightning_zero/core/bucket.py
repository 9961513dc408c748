"""A bucket at run time: its parameters, their states, and what `parameter.data` points at.

[Note: Tensors of a bucket] Each bucket has the following tensors. A *slot* is one parameter of the
bucket, in layout order; *own elements* are those that this rank steps.

- Original parameter: the `nn.Parameter` of the module. The object stays; its class and `.data`
  change (tensors/guarded.py).
- Unsharded parameters (`Bucket.unsharded_params`): flat buffer in the parameter dtype with an n-D
  view for each slot; the output of the all-gather. Forward and backward compute with the views.
  If parameters are sharded (stage 3), it holds memory only while they are unsharded.
- Parameter shard (`Shards.param_shard`): own elements, 1-D, parameter dtype. A slice of the
  unsharded parameters, or the all-gather input.
- All-gather input (`Shards.all_gather_input`): the parameter shard as a tensor of its own, on its
  tier. Only if parameters are sharded.
- Master, or main parameter (`Shards.master`): own elements, 1-D, master dtype; the optimizer steps
  it. It is float32 if parameters are narrower, else the parameter shard itself.
- Sharded parameter view (`Shards.sharded_views`): what `.data` points at while the parameter is
  sharded: its slice of the master, 1-D; empty if the master is in a file.
- Unsharded gradients (`Gradients.unsharded_grads`): flat buffer of this rank's gradients with an
  n-D view for each slot; the input of the reduce-scatter or all-reduce.
- Main gradient (`Gradients.main_grad`): the mean over ranks, own elements, 1-D, reduce dtype. The
  optimizer steps the master with it.
- Optimizer states: 1-D, own elements, master dtype; in files on NVMe (`Shards.state_stores`),
  otherwise in the optimizer.

If optimizer states are replicated (stage 0), the own elements are all elements. If the layout has
tensor owners, the own elements of a slot are all or none of it.

[Note: Phases of a bucket]

    phase        parameter.data                                class
    SHARDED      sharded parameter view, 1-D                   guarded  idle if params are sharded
    UNSHARDING   view of the shard, or of a buffer in flight   guarded
    UNSHARDED    n-D view of the unsharded parameters          plain    in use; idle otherwise
    STEP         own elements of the master                    plain    while the optimizer steps

A bucket is idle between its uses. In STEP, `.data` is a 1-D slice; with tensor owners it is the n-D
tensor on its owner, and empty and without a gradient on the other ranks.

[Note: Stepped by stand-ins] A bucket that is stepped on its own never enters STEP: stand-ins of its
parameters are stepped instead (optim/chunks.py). `begin_step` marks the parameters as in flight,
`end_step` issues the all-gather of their new values. A worker thread may step between the two;
every use of the bucket waits for it.

The buckets of an average (engine/shadow.py) are buckets, too: `gathered`, `torch.equal` and
checkpoints treat both in the same way.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_zero.comm.backends import Source
from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.core.gradients import Gradients
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.core.writes import (
    WriteDetector,
    own_elements,
    replaced,
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
from lightning_zero.tensors.partial import partial_of
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers.grad_offload import GradQueue, OffloadedGrad
from lightning_zero.tiers.storage import ShardStore

__all__ = ["Bucket", "CommonCalls", "Masters", "Phase", "bucket_of"]


class Phase(Enum):
    """Tensors that the parameters of a bucket point at. See [Note: Phases of a bucket]."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    STEP = "step"


class CommonCalls(Protocol):
    """Calls that all ranks make together; implemented by `core.lockstep.Lockstep`."""

    def barrier(self, name: str) -> object:
        """Waits until all ranks have entered call `name`. Collective."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's picklable object, by rank, on every rank. Collective."""

    def note(self, name: str) -> None:
        """Adds the call `name` of all ranks to their history. Local."""

    def note_write(self, name: str) -> None:
        """As `note`: all ranks write to their shards of parameter `name`. Local."""

    def before_write(self) -> None:
        """Closes an open pass before this rank writes to its shard of a parameter."""

    def check_cpu_memory(self, call: str, num_bytes: int) -> None:
        """Raises on every rank if some rank lacks CPU memory for `call`. Collective."""

    def uneven_step(self) -> AbstractContextManager[None]:
        """Context of one step without gradients, with any number of forwards. Collective."""


class Bucket:
    """Parameters that are communicated together, from setup to teardown.

    See [Note: Tensors of a bucket].

    Attributes:
        plan: Layout, stage, dtypes and tiers of the bucket.
        parameters: The module's own parameter objects, by slot.
        comm: Communicator of the ranks that share the bucket.
        device: Device on which the bucket is unsharded.
        shard_specs: Elements of each slot that each rank steps, by slot.
        shards_params: Whether parameters are sharded when idle.
        phase: Tensors that the parameters point at.
        is_unsharded: Whether all elements are unsharded, or their all-gather is in flight.
        on_unsharded_change: Called with `is_unsharded` when it changes.
        unsharded_params: Flat buffer; holds memory while the parameters are unsharded.
        shards: Stores of this rank's shards.
        grads: Gradients of the parameters.
        masters: Access to the elements in full precision.
        offloaded_grad: Store of the main gradient, if it is not on the device.
        orig_dtypes: Dtype of each parameter before this bucket wrapped it.
        num_pins: Number of `gathered` contexts that hold the bucket; it is not freed while
            positive.
        is_saved_for_backward: Whether a graph that backward has not traversed may hold views of
            the unsharded parameters.
        replicates_optim: Whether optimizer states are replicated: every rank steps all elements.
        owned: Function that returns a slot's elements that this rank steps; see `Shards.owned`.
    """

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
        lockstep: Callable[[], CommonCalls],
        filled: FlatBuffer | None = None,
    ) -> None:
        """Wraps `parameters`. Collective.

        Args:
            plan: Layout, stage, dtypes and tiers of the bucket.
            parameters: The module's parameters, by slot.
            comm: Communicator of the ranks that share the bucket.
            queue: Queue of gradient transfers to CPU memory and files.
            worker: Thread that may step the bucket.
            grad_dtype: Dtype in which gradients are reduced.
            unshard_out_of_order: Called with this bucket and a parameter's name before a use
                outside of the unit's forward.
            lockstep: Returns the engine's `Lockstep`, once the engine is complete.
            filled: Buffer in which some of the parameters are stored already.
        """
        self.plan = plan
        self.parameters = list(parameters)
        self.comm = comm
        self.shards_params = plan.stage.shards_params
        self._set_phase(Phase.UNSHARDED)
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
        self.shard_specs = [
            ShardSpec(slot, plan.layout, comm, worker.drain) for slot in plan.layout.slots
        ]
        offloaded, wait = self.offloaded_grad, self.wait_for_step
        self.grads = Gradients(
            plan, parameters, comm, grad_dtype, offloaded, self.shard_specs, wait
        )
        self._pending: Pending | None = None
        # While a worker steps this bucket: waits for the step and returns its exception.
        self._stepping: Callable[[], BaseException | None] | None = None
        self._detector = WriteDetector(lambda: self.parameters)
        self._param_shards: WeakValueDictionary[int, _ParamShard] = WeakValueDictionary()
        # Slots whose `.data` was assigned since the last pass, with the former `.data`.
        self._assigned: dict[int, _ParamShard | None] = {}
        self._is_aliased = False  # users hold views of the unsharded buffer, which is stepped
        self._warned_names: set[str] = set()  # parameters whose memory users hold
        self._num_scans = 0  # searches for such parameters
        self._unshard_out_of_order = unshard_out_of_order
        self._lockstep = lockstep
        if filled is not None and filled.tensor.dtype == plan.dtype:
            self.unsharded_params = filled
        else:
            self.unsharded_params = FlatBuffer(plan.layout, plan.dtype, self.device)
        self.shards = Shards(plan, self.unsharded_params, queue.storage, comm.mesh.shard_rank)
        self.replicates_optim, self.owned = self.shards.replicates_optim, self.shards.owned
        self.masters = Masters(self)
        self._wrap(filled)

    @property
    def lockstep(self) -> CommonCalls:
        """The engine's `Lockstep`."""
        return self._lockstep()

    # ---------------------------------------------------------------- wrap and unwrap

    def _wrap(self, filled: FlatBuffer | None) -> None:
        """Copies rank 0's values; points the parameters at the unsharded buffer. Collective."""
        plan, shards = self.plan, self.shards
        values = self._full_precision_copy(filled)
        self.comm.broadcast_(values.tensor)
        if values is not self.unsharded_params:
            self.unsharded_params.tensor.copy_(values.tensor)
        shards.init_params()
        if plan.begins_with_master:
            shards.init_master(shards.own_slice_of(values))
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
                on_data_read=self._before_data_read,
            )
            set_placement(parameter, placement)
            parameter.data = self.unsharded_params.views[index]
            parameter.__class__ = plain_class_of(placement.own_class)
            if plan.dtype.is_floating_point:
                parameter.grad_dtype = None  # gradients may be wider than the parameter
        self.reshard()
        shards.mark_written()

    def _full_precision_copy(self, filled: FlatBuffer | None) -> FlatBuffer:
        """The parameters in their own precision; the unsharded buffer itself if it suffices."""
        dtype = promoted_dtype(self.plan.dtype, self.orig_dtypes)
        copied = self.unsharded_params
        if dtype != self.plan.dtype:
            copied = filled or FlatBuffer(self.plan.layout, dtype, self.device)
        for view, parameter in zip(copied.views, self.parameters, strict=True):
            partial = partial_of(parameter)
            if partial is not None:
                partial.read_into(view)
            elif view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
        return copied

    def unwrap(self, device: torch.device | None) -> None:
        """Makes every parameter a full tensor of its own, in its original dtype. Collective.

        On `device`; None: without values, see tensors/meta.py.
        """
        self.wait_for_unshard()
        self.grads.reset()
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
        self.shards.keep_own_slice()
        if self.num_holders(num_params=0):
            self.unsharded_params.replace_memory(copies=False)
        self.unsharded_params.free()

    # ---------------------------------------------------------------- unshard and reshard

    def _set_phase(self, phase: Phase) -> None:
        self.phase = phase
        is_unsharded = phase in (Phase.UNSHARDING, Phase.UNSHARDED)
        if self.on_unsharded_change is not None and is_unsharded != self.is_unsharded:
            self.on_unsharded_change(is_unsharded)
        self.is_unsharded = is_unsharded

    def read_ahead(self) -> bool:
        """Starts to read a shard from its file; False if there was no buffer for it."""
        reader = self.shards.reader
        if reader is None or self.is_unsharded or self._stepping is not None:
            return True
        return reader.begin()

    def unshard(self) -> None:
        """Issues the all-gather of the parameters. Collective, also if they are unsharded already.

        A rank on which they are unsharded sends its shard again to those on which they are not.
        Raises inside a differentiating transform of torch.func: its functions must not write to
        memory, and the parameters given to it would be slices.
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
                "a transform of torch.func (grad, vjp, jvp, jacrev or similar) uses parameter "
                f"{self.plan.layout.slots[0].name}, or one of the same bucket, which is sharded; "
                "run the transform inside `with lightning_zero.gathered(module):`."
            )

    def all_gather_params(self) -> Pending:
        """Issues the all-gather of this rank's shard, from where it is stored."""
        return self.all_gather_into(self.unsharded_params.tensor, self.shards.all_gather_source())

    def all_gather_into(self, buffer: Tensor, source: Source | None = None) -> Pending:
        """Issues an all-gather of `source`, or of this rank's part of `buffer`, into `buffer`."""
        split_sizes = self.plan.layout.split_sizes
        return self.comm.all_gather(buffer, self.plan.name, source=source, split_sizes=split_sizes)

    def mark_in_flight(self) -> None:
        """Guards the parameters until an all-gather, which is issued now or later."""
        if self.phase is not Phase.SHARDED:  # else they are guarded already
            guard(self.parameters)
        self._set_phase(Phase.UNSHARDING)

    def wait_for_unshard(self) -> None:
        """Waits for an all-gather in flight; the parameters are unsharded and plain."""
        if self._stepping is not None:
            self.wait_for_step()
        if self.phase is not Phase.UNSHARDING:
            return
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        set_plain_data(self.parameters, self.unsharded_params.views)
        self._set_phase(Phase.UNSHARDED)
        if self.shards_params:
            self._detector.watch()

    def reshard(self, *, num_holders_before: int | None = None) -> None:
        """Frees the unsharded parameters, if parameters are sharded when idle. Local.

        Does nothing inside a transform of torch.func, which differentiates without our hooks; the
        end of the step reshards then.

        Args:
            num_holders_before: `num_holders` when the user was given the parameters: the user may
                keep views that were taken since. None: no views are expected.
        """
        if not self.shards_params or self.phase is Phase.SHARDED or self.num_pins:
            return
        if _active_transforms() is not None:
            return
        self.wait_for_unshard()
        self.sync_writes()
        self.enter_idle_phase(num_holders_before=num_holders_before)

    def discard_unsharded(self) -> None:
        """As `reshard`, without syncing writes."""
        if self.shards_params and self.is_unsharded and not self.num_pins:
            self.wait_for_unshard()
            self.enter_idle_phase()

    def enter_idle_phase(self, *, num_holders_before: int | None = None) -> None:
        """Points the parameters at their sharded views, or, if replicated, at the unsharded buffer.

        `num_holders_before`: as for `reshard`.
        """
        self._set_phase(Phase.SHARDED if self.shards_params else Phase.UNSHARDED)
        self.restore_data_pointers()
        if self.shards_params and self.unsharded_params.is_allocated:
            self._free_unsharded(num_holders_before)

    def restore_data_pointers(self) -> None:
        """Points the parameters at the tensors of the current phase again."""
        is_shard = self.phase is Phase.SHARDED
        set_plain_data(
            self.parameters,
            self.shards.sharded_views() if is_shard else self.unsharded_params.views,
        )
        if is_shard:
            guard(self.parameters)

    def _free_unsharded(self, num_holders_before: int | None) -> None:
        """Frees the unsharded buffer, which no parameter points at.

        See [Note: Memory that others hold] in tensors/buffer.py.
        """
        # Graphs hold no more views than there were before.
        num_graphs = 0
        if self.is_saved_for_backward and num_holders_before is not None:
            num_graphs = num_holders_before
        num_holders = self.num_holders(num_params=0)
        may_be_graphs = self.is_saved_for_backward and num_holders_before is None
        if num_holders > num_graphs and not may_be_graphs:
            if num_holders_before is None:
                self._warn_of_holders()
            self.unsharded_params.replace_memory(copies=False)
        self.unsharded_params.free()

    def num_holders(self, *, num_params: int) -> int:
        """Number of views of the unsharded buffer, without those of `num_params` parameters."""
        return self.unsharded_params.num_holders(self.shards.num_views + num_params)

    def _warn_of_holders(self) -> None:
        """Warns about views of unsharded parameters that users keep, except those in graphs.

        Warns at most twice, because it searches all Python objects.
        """
        if self._num_scans == 2:
            return
        time.sleep(0.001)  # a gloo thread releases sent tensors shortly after the end
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
                f"a view of parameter {name} outlives the step in which it was taken. It keeps the "
                "values of that step, while a view of a plain module's parameter follows later "
                "steps. Keep a copy, parameter.detach().clone(), or take a new view before each "
                "use.",
                stacklevel=2,
            )

    def aliases(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of the unsharded buffer."""
        if tensor.layout is not torch.strided or isinstance(tensor, LazyTensor):
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        storage = self.unsharded_params.tensor.untyped_storage()
        return bool(tensor.untyped_storage()._cdata == storage._cdata)

    # ---------------------------------------------------------------- the step

    def begin_step(self, stepping: Callable[[], BaseException | None] | None = None) -> None:
        """Marks the parameters as in flight until `end_step`. See [Note: Stepped by stand-ins].

        `stepping`: waits until a worker has ended the step, see `StepLoop.add`. None: the caller
        ends it.
        """
        self.wait_for_unshard()
        self.sync_writes()
        self._check_aliases()
        self.shards.stop_reading()  # its file is about to change
        self.wait_for_uploads()
        if self.shards_params:
            self.enter_idle_phase()
        elif self.plan.stage.all_gathers_after_step:
            self.mark_in_flight()
        self._stepping = stepping

    def _check_aliases(self) -> None:
        """Before a step: records whether users hold views that its all-gather will change."""
        all_gathers, num_params = self.plan.stage.all_gathers_after_step, len(self.parameters)
        self._is_aliased = all_gathers and self.num_holders(num_params=num_params) > 0

    def wait_for_uploads(self) -> None:
        """Before a write to shards: waits for all-gathers that still copy them to the device."""
        has_device_memory = self.shards.storage.has_device_memory
        self.comm.wait_for_uploads(has_device_memory and self.plan.tiers.param is Tier.CPU)

    def point_at_step_parts(self, parts: Sequence[Tensor]) -> None:
        """Points the parameters at `parts`, 1-D by slot, for a step; `enter_idle_phase` ends it."""
        for index, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            unguard(parameter)
            parameter.grad = None
            parameter.data = part.view(self.shards.step_shapes[index])
        self._set_phase(Phase.STEP)

    def end_step(self) -> None:
        """Ends the step; if parameters are replicated, issues the all-gather of their new values.

        Collective.
        """
        self.shards.mark_written()
        if self.plan.stage.all_gathers_after_step:
            self._pending = self.all_gather_into(self.unsharded_params.tensor)

    def sync_aliases(self) -> None:
        """After a step: if users hold views, waits until these have all new values."""
        if self._is_aliased:
            self._is_aliased = False
            self.wait_for_unshard()

    def wait_for_step(self) -> None:
        """Waits until a worker has stepped this bucket; raises if that step failed."""
        if self._stepping is None:
            return
        with self.comm.recorder.span(Kind.STEP, self.plan.name, is_wait=True):
            error = self._stepping()  # after an interrupt, the next call waits for the step
            self._stepping = None
        if error is not None:
            raise RuntimeError(f"the optimizer step of {self.plan.name} failed: {error}") from error

    def wait_for_update(self) -> None:
        """Waits for a step in progress and the all-gather after it. Local."""
        self.wait_for_step()
        if not self.shards_params:
            self.wait_for_unshard()

    def wait_for_all_steps(self) -> None:
        """Waits until a worker has stepped every bucket: its all-gathers precede all others."""
        self._worker.drain()

    def free_zeroed(self) -> None:
        """Frees the main gradient if the user has zeroed all of it, unless a worker needs it."""
        if self._stepping is None:
            self.grads.free_zeroed()

    # ---------------------------------------------------------------- use by the user

    def unshard_on_use(self, name: str) -> None:
        """Guard of the parameters: a torch function is applied to parameter `name`."""
        if self.shards_params:
            self._unshard_out_of_order(self, name)
        else:
            self.wait_for_unshard()

    def _before_data_read(self, index: int) -> None:
        """Called before the `.data` of slot `index` is returned while it is plain."""
        is_watched = self.shards_params and self.phase is Phase.UNSHARDED
        if is_watched and not self.masters.has_views_installed:
            self._detector.watch_values(index)  # writes to `.data` will have no version

    def sharded_data(self, index: int) -> Tensor:
        """`parameter.data` of slot `index`: sharded, or the unsharded tensor if replicated. Local.

        An all-gather in flight for a later use is finished and freed, so that the next one sends
        what is written here; on gloo this waits for its data. Nothing is unsharded by this call.
        """
        self.wait_for_update()
        self.reshard()
        if self.phase is Phase.SHARDED:
            values = self.shards.master_view(index)
            shard = self._param_shards.get(index)
            if shard is None:
                shard = self._param_shards[index] = _ParamShard(self, index)
            return ShardedTensor.of(shard, self.shard_specs[index], "p.data", values)
        return data_of(self.parameters[index])

    def change_sharded_data(self, index: int, write: Callable[[Tensor], object]) -> None:
        """Lets `write` change this rank's elements of `sharded_data` in place."""
        self.wait_for_update()
        self.reshard()
        if self.phase is not Phase.SHARDED:
            raise RuntimeError(
                f"parameter.data of {self.plan.layout.slots[index].name} was read while it was "
                "sharded, and the parameter is unsharded now; read parameter.data again."
            )
        self.lockstep.before_write()
        self.wait_for_uploads()
        self.lockstep.note_write(self.plan.layout.slots[index].name)
        self.shards.change(index, write)

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """A copy of slot `index` as it would be without an engine: its own class, dtype and memory.

        For a file, full tensors of sharded parameters are on the CPU. Collective if the parameter
        is sharded.
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

    # ---------------------------------------------------------------- writes by the user

    def assign_data(self, index: int, values: Tensor) -> None:
        """Implements `parameter.data = values` of slot `index` while it is guarded. Local.

        Tensors that were `parameter.data` until now keep their values.

        Args:
            index: The slot.
            values: Tensor of the full shape, plain or sharded (collective if it is sharded in
                another way), or this rank's elements, 1-D.

        Raises:
            ValueError: `values` have another shape or dtype.
            RuntimeError: The parameter is needed by a backward.
        """
        self.reshard()  # a prefetched parameter is unsharded again
        slot, spec = self.plan.layout.slots[index], self.shard_specs[index]
        if isinstance(values, GuardedParameter):
            values = values.data
        given = values
        self._check_dtype(index, values)
        if isinstance(values, ShardedTensor) and tuple(values.shape) == slot.shape:
            if values.is_view_of(self._param_shards.get(index)):
                return  # unchanged
            is_own = self.phase is Phase.SHARDED and spec.matches(values.spec)
            values = values.local if is_own else values.full_tensor()
        if self.phase is Phase.UNSHARDING:
            self.wait_for_unshard()
            self.parameters[index].data = values  # synced by `reshard`
            return
        own = own_elements(values, slot, self.owned(index))
        if self.is_saved_for_backward and self.num_holders(num_params=0):
            raise RuntimeError(
                f"parameter.data of {slot.name} was set between a forward and its backward, which "
                "needs the values that the forward used. Set it before the forward or after the "
                "backward; if no backward follows, call the module under torch.no_grad()."
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
                f"the data set on parameter {name} has dtype {values.dtype}; expected {expected}. "
                "A parameter keeps its dtype while an engine holds it; convert a copy instead: "
                "copy.deepcopy(module).half()."
            )

    def _note_assigned(self, index: int, values: Tensor) -> None:
        """Notes an assignment to `.data` until the next pass.

        Assigning the former `.data` again removes the note, if every rank can see that it is the
        same.
        """
        if index not in self._assigned:
            self._assigned[index] = self._param_shards.get(index)
        elif isinstance(values, ShardedTensor) and values.is_view_of(self._assigned[index]):
            del self._assigned[index]

    def compare_assigned(self) -> None:
        """As `Schedule.compare_assigned`."""
        for index in sorted(self._assigned):  # ranks may have assigned them in different orders
            self.lockstep.note(f"parameter.data of {self.plan.layout.slots[index].name}")
        self._assigned.clear()

    def _detach_view(self, index: int) -> None:
        """Before slot `index` gets new values: its former `.data` keeps the old ones."""
        shard = self._param_shards.pop(index, None)
        if shard is not None:
            shard.detach()

    def _detach_views(self) -> None:
        for index in list(self._param_shards):
            self._detach_view(index)

    def sync_writes(self) -> None:
        """Syncs the user's writes to unsharded parameters, and replaced `.data`, into the masters.

        Raises:
            ValueError: Replaced data has another shape or dtype; the parameter then has its own
                again.
        """
        self.detect_writes()
        self.shards.sync_writes()

    def detect_writes(self) -> None:
        """As `sync_writes`, but only writes that are detected without reading values.

        Torch's pruning, for example, writes by `parameter.data = other`.
        """
        if self.phase is not Phase.UNSHARDED or self.masters.has_views_installed:
            return
        assigned, error = self._sync_replaced()
        if self.shards_params:
            for index in {*assigned, *self._detector.written()}:
                self.wait_for_uploads()
                if index in assigned:
                    self._detach_view(index)
                own, view = self.owned(index), self.unsharded_params.views[index]
                self.shards.assign(index, view.reshape(-1)[own.start : own.stop])
        if error is not None:
            raise error

    def _sync_replaced(self) -> tuple[list[int], ValueError | None]:
        """Copies replaced `.data` into the unsharded buffer; returns its slots and the first error.

        Tensors that are views of the old values keep them. All parameters point at the buffer then,
        including those with data of another shape or dtype, which is the error.
        """
        slots = replaced(self.parameters, self.unsharded_params.views)
        if not slots:
            return [], None
        values = {index: data_of(self.parameters[index]) for index in slots}
        if self.num_holders(num_params=len(self.parameters) - len(slots)):
            old = self.unsharded_params.tensor
            self.unsharded_params.replace_memory(copies=True)
            self.shards.rebind_to_unsharded(old)
        set_plain_data(self.parameters, self.unsharded_params.views)
        synced, error = [], None
        for index, data in values.items():
            try:
                full = require_full_shape(data, self.plan.layout.slots[index])
                self._check_dtype(index, full)
            except ValueError as refused:
                error = error or refused
                continue
            self.unsharded_params.views[index].copy_(full)
            synced.append(index)
        return synced, error

    # ---------------------------------------------------------------- failures

    def reset(self, *, has_regrouped: bool) -> list[Exception]:
        """Drops collectives, steps, reads and gradients of a failed pass, and reshards. Local.

        Args:
            has_regrouped: Whether collectives in flight never end, because their groups are gone;
                `unshard_again` follows.

        Returns:
            What has failed; the rest is done nevertheless.
        """
        errors: list[Exception] = []

        def attempt(act: Callable[[], object]) -> Exception | None:
            try:
                act()
            except Exception as error:
                errors.append(error)
                return error
            return None

        if has_regrouped and self._discard_unshard() and not self.shards_params:
            self._set_phase(Phase.UNSHARDED)
        attempt(partial(self._leave_failed_step, all_gathers=not has_regrouped))
        attempt(self.shards.stop_reading)
        attempt(self.grads.reset)
        # data that a reshard refused is dropped, so the next attempt succeeds
        for _ in range(len(self.parameters) + 1):
            if not isinstance(attempt(self.reshard), ValueError):
                break
        return errors

    def _leave_failed_step(self, *, all_gathers: bool) -> None:
        """Returns to the idle phase after an optimizer failed in its step.

        `all_gathers`: whether this issues the all-gather of changed replicated parameters.
        """
        try:
            self.wait_for_step()
        except RuntimeError as error:
            warnings.warn(f"{error}; some of its parameters may have been stepped.", stacklevel=2)
        if self.phase is Phase.STEP:
            self.masters.leave_step(is_changed=True, all_gathers=all_gathers)
        elif self.phase is Phase.UNSHARDING and self._pending is None:
            self.end_step()

    def _discard_unshard(self) -> bool:
        """Discards an all-gather whose group is gone; returns whether there was one."""
        if self.phase is not Phase.UNSHARDING:
            return False
        self._pending = None
        if self.shards_params:
            self.num_pins = 0
            self.enter_idle_phase()
        return True

    def unshard_again(self) -> None:
        """All-gathers stepped parameters again, in whichever state each rank was. Collective."""
        if self.plan.stage.all_gathers_after_step:
            self.shards.cast_master()
            self.mark_in_flight()
            self.end_step()

    def mark_lost(self) -> None:
        """Other ranks are lost: parameters that are not unsharded stay guarded. Local."""
        self._discard_unshard()
        self.grads.reset()


# Active transforms of torch.func, the innermost last; None if there are none.
_active_transforms: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack


def _differentiates() -> bool:
    kinds = torch._C._functorch.TransformType
    return any(one.key() in (kinds.Grad, kinds.Jvp) for one in _active_transforms() or ())


class _ParamShard:
    """This rank's elements of one sharded parameter; a copy after the parameter got new values.

    Implements `LocalShard` of tensors/shard_spec.py.
    """

    def __init__(self, bucket: Bucket, index: int) -> None:
        self._bucket = bucket
        self._index = index
        self._old_values: Tensor | None = None  # 1-D; None until the parameter gets new values

    def read(self) -> Tensor:
        if self._old_values is not None:
            return self._old_values
        self._bucket.wait_for_update()
        return self._bucket.shards.values(self._index).detach()

    def change(self, write: Callable[[Tensor], object]) -> None:
        if self._old_values is not None:
            write(self._old_values)
        else:
            self._bucket.change_sharded_data(self._index, write)

    def detach(self) -> None:
        """Keeps a copy of the present values."""
        self._old_values = self.read().clone()

    @property
    def version(self) -> int:
        if self._old_values is not None:
            return self._old_values._version
        self._bucket.wait_for_step()  # a worker may increment the counters
        shards = self._bucket.shards
        return shards.num_writes + shards.num_slot_writes[self._index]

    def check_memory(self, call: str, num_bytes: int) -> None:
        if self._bucket.device.type == "cpu":
            self._bucket.lockstep.check_cpu_memory(call, num_bytes)


class Masters:
    """The elements of one bucket in full precision: own or all of them.

    If there is no master, they are the parameters themselves.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.has_views_installed = False  # the user may write to the views of `install_views`
        self._bucket = bucket
        self._shards = bucket.shards
        self._stepped: Tensor | None = None  # 1-D, own elements, master dtype; inside a step
        # `.grad` of all parameters, inside a step without gradients.
        self._saved_grads: list[Tensor | None] | None = None

    # ---------------------------------------------------------------- this rank's elements

    def fetch(self) -> Tensor:
        """The elements that this rank steps: 1-D, a view of memory or a copy of a file. Local."""
        store = self._store()
        return store.fetch(0, store.numel)

    def shard_views(self) -> list[Tensor]:
        """Own elements in full precision, by slot: 1-D, to be read before the next step.

        Views of memory, or LazyTensors if the shard is in a file. Local, but waits for an
        all-gather in flight.
        """
        store = self._store()
        return [store.view(own.start, own.stop) for own in self._shards.own_ranges]

    def _store(self) -> ShardStore:
        self._bucket.wait_for_all_steps()
        self._bucket.wait_for_unshard()
        self._bucket.sync_writes()
        return self._shards.master_or_param

    def load(self, read: Callable[[int, range], Tensor | None]) -> None:
        """Writes new values to masters and parameters, each rank its own elements. Collective.

        `read`, called with a slot and its elements `owned`, returns their values in any floating
        dtype, or None to leave the slot as it is. Every rank must load the same slots.
        """
        shard = self.fetch()
        with torch.no_grad():
            for index, part in enumerate(self._shards.split_by_slot(shard)):
                values = read(index, self._bucket.owned(index))
                if values is not None:
                    part.copy_(values.reshape(-1))
            self.store(shard)

    def store(self, shard: Tensor) -> None:
        """Writes the tensor of `fetch()` back to masters and parameters. Collective."""
        bucket = self._bucket
        bucket.wait_for_uploads()
        with torch.no_grad():
            self._shards.store_master(shard)
            bucket.reshard()  # ranks may differ in what a forward has left unsharded
            if bucket.is_unsharded and not bucket.replicates_optim:
                bucket.all_gather_params().wait()

    # ---------------------------------------------------------------- all elements

    def full_tensors(self) -> list[Tensor]:
        """All elements of each slot in full precision, n-D, to be read at once. Collective."""
        bucket = self._bucket
        bucket.wait_for_unshard()
        bucket.sync_writes()
        if self._shards.own_master is None and bucket.is_unsharded:
            return bucket.unsharded_params.views
        return self.all_gather().views

    def all_gather(self) -> FlatBuffer:
        """All elements in full precision in a new buffer, on every rank. Collective; waits."""
        return self.all_gather_values(self.fetch())

    def all_gather_values(self, part: Tensor) -> FlatBuffer:
        """A new buffer with every rank's `part`: 1-D, laid out as the master. Collective."""
        bucket, layout = self._bucket, self._bucket.plan.layout
        bucket.wait_for_all_steps()  # their all-gathers come first on all ranks
        with torch.no_grad():
            if bucket.replicates_optim:
                memory = part.to(bucket.device, copy=True)
            else:
                name = bucket.plan.name
                memory = bucket.comm.all_gather_shards(part, name, layout.split_sizes)
            return FlatBuffer(layout, part.dtype, bucket.device, memory=memory)

    def all_gather_state(self, slices: Sequence[Tensor | None]) -> list[Tensor]:
        """Full n-D optimizer states, by slot, from every rank's slices. Collective.

        `slices`: by slot, 1-D as `Shards.slice_state` makes them; None counts as zeros.
        """
        bucket = self._bucket
        dtype = next((part.dtype for part in slices if part is not None), bucket.plan.master_dtype)
        joined = torch.zeros(self._shards.master_or_param.numel, dtype=dtype, device=bucket.device)
        for target, part in zip(self._shards.split_by_slot(joined), slices, strict=True):
            if part is not None:
                target.copy_(part.reshape(-1))
        return self.all_gather_values(joined).views

    def broadcast_from(self, values: FlatBuffer, from_rank: int = 0) -> None:
        """Copies `values` of `from_rank` to all masters and parameters. Collective."""
        bucket = self._bucket
        bucket.comm.broadcast_(values.tensor, from_rank)
        with torch.no_grad():
            bucket.wait_for_uploads()
            self._shards.store_master(self._shards.own_slice_of(values))
            if bucket.unsharded_params.is_allocated:
                bucket.unsharded_params.tensor.copy_(values.tensor)
        self._shards.mark_written()

    # ---------------------------------------------------------------- views for the user

    def install_views(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at `views`, by slot, plain, until `uninstall_views`."""
        self._bucket.wait_for_unshard()
        self._bucket.num_pins += 1
        self.has_views_installed = True
        set_plain_data(self._bucket.parameters, views)

    def install_own_views(self) -> Tensor:
        """Points the parameters at slices of `fetch()`, until `uninstall_views`; returns `fetch()`.

        If they are written, `store` must follow.
        """
        shard = self.fetch()
        self._bucket.wait_for_uploads()
        self.install_views(self._shards.split_by_slot(shard))
        return shard

    def uninstall_views(self) -> None:
        """Points the parameters where they pointed before `install_views`."""
        self._bucket.num_pins -= 1
        self.has_views_installed = False
        self._bucket.restore_data_pointers()

    # ---------------------------------------------------------------- a step of all slots at once

    def enter_step(self, *, has_grads: bool = True) -> None:
        """Points parameters at their masters, and `.grad` at the main gradients.

        For optimizers that step all slices in one call. A master that is in a file is read into
        memory until `leave_step`. Without `has_grads`, `.grad` is None until then.
        """
        bucket = self._bucket
        bucket.wait_for_unshard()
        bucket.sync_writes()
        bucket._check_aliases()
        grads: list[Tensor | None] = [None] * len(bucket.parameters)
        self._saved_grads = None if has_grads else bucket.grads.param_grads()
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

    def leave_step(self, *, is_changed: bool, all_gathers: bool = True) -> None:
        """Restores `.data` and `.grad`; casts changed masters and all-gathers them. Collective.

        Without `all_gathers`, replicated parameters keep the values of this rank only.
        """
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
        hidden, self._saved_grads = self._saved_grads, None
        if hidden is None:
            bucket.grads.set_param_grads()
        else:
            bucket.grads.restore_param_grads(hidden)
        if is_changed and all_gathers and bucket.plan.stage.all_gathers_after_step:
            bucket.mark_in_flight()
            bucket.end_step()


def bucket_of(placement: Placement) -> Bucket:
    """The bucket of an engine, or of an average, that holds a parameter."""
    return cast("Bucket", placement.bucket)
