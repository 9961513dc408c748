"""A bucket at run time: its parameters, their states, and what `parameter.data` points at.

[Note: Tensors of a bucket] A *slot* is one parameter of the bucket, in layout order; *own elements*
are those of this rank's shard: all if optimizer states are replicated (stage 0). The optimizer
steps them or, with tensor owners (layout/flat.py), the full tensors of this rank.

- Original parameter: the `nn.Parameter` of the module. The object stays; its class and `.data`
  change (tensors/guarded.py).
- Unsharded parameters (`Bucket.unsharded_params`): flat buffer in the parameter dtype with an n-D
  view for each slot, with which forward and backward compute; the output of the all-gather. If
  parameters are sharded (stage 3), it holds memory only while they are unsharded.
- Parameter shard (`Shards.param_shard`): own elements, 1-D. A slice of the unsharded parameters or,
  if parameters are sharded, the all-gather input (`Shards.all_gather_input`), which is a tensor of
  its own, on its tier: in the parameter dtype, or the master, of which a cast is sent.
- Master, or main parameter (`Shards.master`): own elements, 1-D, master dtype; the optimizer steps
  it. It is float32 if parameters are narrower, else the parameter shard itself.
- Unreadable data: what `.data` points at while the parameter is sharded or in flight, for C++ that
  calls no guard: the full shape without values (`unreadable` in tensors/freed.py).
- Unsharded gradients: flat buffer of this rank's gradients with an n-D view for each slot; the
  input of the reduce-scatter or all-reduce. `LocalGrads.buffer`, in stages
  2 and 3 a temporary of the collective.
- Main gradient (`MainGrad.tensor`): the mean over ranks, own elements, 1-D, reduce dtype. The
  optimizer steps the master with it.
- Optimizer states: 1-D, own elements, master dtype or codes, or a number for each block of them
  (`OptimStates.layouts`), or those of full tensors; in files on NVMe (`OptimStates.stores`),
  otherwise in the optimizer.

[Note: Phases of a bucket]

    phase        parameter.data                         class
    SHARDED      unreadable                             guarded  idle if params are sharded
    UNSHARDING   unreadable                             guarded
    UNSHARDED    n-D view of the unsharded parameters   plain    in use; idle otherwise

A bucket is idle between its uses.

[Note: Stepped by stand-ins] The optimizer steps stand-ins of the parameters (optim/clone.py):
slices of the master or, with tensor owners, full tensors. `begin_step` marks the parameters as in
flight, `end_step` issues the all-gather of their new values. A worker thread may step between the
two; every use of the bucket waits for it.

The buckets of an average (engine/shadow.py) are used by `gathered` and checkpoints like others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm.backends import Source
from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.core.gradients import Gradients
from lightning_zero.core.main_grad import MainGrad
from lightning_zero.core.masters import Masters
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import OverlappedStep, StepWorker
from lightning_zero.core.wrapping import full_precision_copy, unwrap_parameters, wrap_parameters
from lightning_zero.core.writes import UserWrites
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.freed import unreadable
from lightning_zero.tensors.guarded import guard, set_plain_data
from lightning_zero.tensors.live import LiveTensors
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tiers.grad_offload import GradQueue, OffloadedGrad

__all__ = ["Bucket", "BucketResources", "Phase"]

# Active transforms of torch.func, the innermost last; None if there are none.
_active_transforms: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack


class Phase(Enum):
    """Tensors that the parameters of a bucket point at. See [Note: Phases of a bucket]."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


@dataclass(frozen=True)
class BucketResources:
    """Objects that the buckets of one engine share."""

    comm: Communicator
    queue: GradQueue  # of gradient transfers to CPU memory and files
    worker: StepWorker  # the thread that may step buckets
    live: LiveTensors  # sharded tensors of the engine that are alive


class Bucket:
    """Parameters that are communicated together, from setup to teardown.

    See [Note: Tensors of a bucket].

    Attributes:
        plan: Layout, stage, dtypes and tiers of the bucket.
        parameters: The module's own parameter objects, by slot.
        comm: Communicator of the ranks that share the bucket.
        device: Device on which the bucket is unsharded.
        shard_specs: Elements of each slot that each rank has, by slot; `shards.owned(index)` are
            this rank's.
        shards_params: Whether parameters are sharded when idle.
        phase: Tensors that the parameters point at.
        is_unsharded: Whether all elements are unsharded, or their all-gather is in flight.
        unsharded_params: Flat buffer; holds memory while the parameters are unsharded.
        shards: Stores of this rank's shards.
        grads: Gradients of the parameters.
        masters: Access to the elements in full precision.
        writes: Writes by the user.
        orig_dtypes: Dtype of each parameter before this bucket wrapped it.
        num_pins: Number of contexts that hold the bucket; it is not freed while positive.
        has_views_installed: Whether the user may write to the views of `install_views`.
        is_saved_for_backward: Whether a graph that backward has not traversed may hold views of
            the unsharded parameters.
    """

    phase: Phase
    is_unsharded: bool
    is_saved_for_backward = False

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        shared: BucketResources,
        *,
        grad_dtype: torch.dtype,
        filled: FlatBuffer | None = None,
        on_unsharded_change: Callable[[bool], None] | None = None,
    ) -> None:
        """Wraps `parameters`. Collective.

        Args:
            plan: Layout, stage, dtypes and tiers of the bucket.
            parameters: The module's parameters, by slot.
            shared: Objects that the buckets of an engine share.
            grad_dtype: Dtype in which gradients are reduced.
            filled: Buffer in which some of the parameters are stored already.
            on_unsharded_change: Called with `is_unsharded` when it changes.
        """
        self.plan = plan
        self.parameters = list(parameters)
        self.orig_dtypes = [parameter.dtype for parameter in parameters]
        self.comm, self._worker = shared.comm, shared.worker
        self.device = shared.queue.storage.device
        self.shards_params = plan.stage.shards_params
        self.phase, self.is_unsharded = Phase.UNSHARDED, True
        self._on_unsharded_change = on_unsharded_change
        if on_unsharded_change is not None:
            on_unsharded_change(True)
        self.num_pins = 0
        self._pending: Pending | None = None  # all-gather in flight
        self.has_views_installed = False
        self._is_aliased = False  # users hold views of the unsharded buffer, which is stepped
        self._make_parts(shared, grad_dtype, filled)
        self._wrap(filled)

    def _make_parts(
        self, shared: BucketResources, dtype: torch.dtype, filled: FlatBuffer | None
    ) -> None:
        """Makes the buffer, shards and gradients (of `dtype`), and the access to values."""
        plan, storage = self.plan, shared.queue.storage
        buffer = filled
        if buffer is None or buffer.tensor.dtype != plan.dtype:
            buffer = FlatBuffer(plan.layout, plan.dtype, self.device)
        self.unsharded_params = buffer
        self.shards = shards = Shards(plan, buffer, storage, self.comm)
        self.shard_specs = [
            ShardSpec(
                slot,
                plan.layout,
                self.comm,
                self._worker.drain,
                shared.live,
                shared.live.add_parameter(),
            )
            for slot in plan.layout.slots
        ]
        offloaded: OffloadedGrad | None = None
        if storage.is_offloaded(plan.tiers.grad):
            numel = len(plan.layout.shard(self.comm.mesh.shard_rank))
            offloaded = OffloadedGrad(shared.queue, plan.name, numel, dtype, plan.tiers.grad)
        self._make_gradients(dtype, offloaded)
        self.writes = UserWrites(self.parameters, self.orig_dtypes, buffer, shards)
        self.masters = Masters(self)
        # `.data` of guarded parameters, by slot.
        shapes = {slot.name: slot.shape for slot in plan.layout.slots}
        self._unreadable = unreadable(shapes, plan.dtype, self.device)

    def _make_gradients(self, dtype: torch.dtype, offloaded: OffloadedGrad | None) -> None:
        """Makes empty gradients for a run."""
        self._overlapped = OverlappedStep(self.plan.name, self.comm.recorder)
        main = MainGrad(self.shards, self.shard_specs, dtype, offloaded, self._overlapped)
        self.grads = Gradients(self.parameters, self.plan, self.comm, main)

    def _wrap(self, filled: FlatBuffer | None) -> None:
        """Copies rank 0's values; points the parameters at the unsharded buffer. Collective."""
        shards, unsharded = self.shards, self.unsharded_params
        values = full_precision_copy(self.plan, self.parameters, unsharded, filled)
        self.comm.broadcast_(values.tensor)
        if values is not unsharded:
            unsharded.tensor.copy_(values.tensor)
        shards.init_stores(shards.own_slice_of(values))
        wrap_parameters(self.plan, self.parameters, unsharded.views)
        self.writes.watch()
        self.reshard()

    # ---------------------------------------------------------------- unshard and reshard

    def _set_phase(self, phase: Phase) -> None:
        self.phase = phase
        is_unsharded = phase in (Phase.UNSHARDING, Phase.UNSHARDED)
        if self._on_unsharded_change is not None and is_unsharded != self.is_unsharded:
            self._on_unsharded_change(is_unsharded)
        self.is_unsharded = is_unsharded

    def read_ahead(self) -> bool:
        """Starts to read a shard from its file; False if there was no buffer for it."""
        reader = self.shards.reader
        if reader is None or self.is_unsharded or self._overlapped.is_running:
            return True
        return reader.begin()

    def check_outside_transform(self) -> None:
        """Raises inside a transform of torch.func that differentiates."""
        transforms = _active_transforms()
        if transforms is None:
            return
        kinds = torch._C._functorch.TransformType
        if any(transform.key() in (kinds.Grad, kinds.Jvp) for transform in transforms):
            raise RuntimeError(
                "a transform of torch.func (grad, vjp, jvp, jacrev or similar) uses parameter "
                f"{self.plan.layout.slots[0].name}, or one of the same bucket, which is sharded; "
                "run the transform inside `with lightning_zero.gathered(module):`."
            )

    def unshard(self) -> None:
        """Issues the all-gather of the parameters. Collective, also if they are unsharded already.

        A rank on which they are unsharded sends its shard again to those on which they are not.
        After a failed step it sends the values that there are, and `wait_for_unshard` raises: other
        ranks wait for the all-gather. Raises inside a differentiating transform of torch.func: its
        functions must not write to memory, and the parameters given to it would be slices.
        """
        if self.is_unsharded:
            self.wait_for_unshard()
            self.all_gather_into(self.unsharded_params.tensor).wait()
            return
        if self._overlapped.is_running:
            self._overlapped.finish()
        self.check_outside_transform()
        self.unsharded_params.allocate()
        self._pending = self.all_gather_params()
        self.mark_in_flight()

    def all_gather_params(self) -> Pending:
        """Issues the all-gather of this rank's shard, from where it is stored."""
        return self.all_gather_into(self.unsharded_params.tensor, self.shards.all_gather_source())

    def all_gather_into(self, buffer: Tensor, source: Source | None = None) -> Pending:
        """Issues an all-gather of `source`, or of this rank's part of `buffer`, into `buffer`."""
        return self.comm.all_gather(buffer, self.plan.name, source=source)

    def mark_in_flight(self) -> None:
        """Guards the parameters until an all-gather, which is issued now or later."""
        if self.phase is not Phase.SHARDED:  # else they are guarded already
            self._hide_values()
        self._set_phase(Phase.UNSHARDING)

    def _hide_values(self) -> None:
        """Guards the parameters, and lets C++ find no values in them."""
        set_plain_data(self.parameters, self._unreadable)
        guard(self.parameters)

    def wait_for_unshard(self) -> None:
        """Waits for an all-gather in flight; the parameters are unsharded and plain."""
        if self._overlapped.is_running:
            self.wait_for_step()
        if self.phase is not Phase.UNSHARDING:
            return
        if self._pending is None:
            raise RuntimeError(
                f"parameter {self.plan.layout.slots[0].name} is used within the step of its "
                "optimizer, which steps copies of the parameters, or after one that was "
                "interrupted; load a checkpoint into a new module."
            )
        self._pending.wait()
        self._pending = None
        set_plain_data(self.parameters, self.unsharded_params.views)
        self._set_phase(Phase.UNSHARDED)
        self.writes.watch()

    def note_graph(self) -> None:
        """A graph may hold views of the unsharded parameters, until `end_graphs`."""
        self.is_saved_for_backward = True

    def end_graphs(self, *, is_retained: bool) -> None:
        """Backward has traversed the graphs, and needs the parameters again only if retained."""
        self.is_saved_for_backward = is_retained

    def reshard(self) -> None:
        """Frees the unsharded parameters, if parameters are sharded when idle. Local.

        Does nothing inside a transform of torch.func, which differentiates without our hooks; the
        end of the step reshards then.
        """
        if not self.shards_params or self.phase is Phase.SHARDED or self.num_pins:
            return
        if _active_transforms() is not None:
            return
        self.wait_for_unshard()
        self.sync_writes()
        self.enter_idle_phase()

    def enter_idle_phase(self) -> None:
        """Hides the values of the parameters, or, if replicated, points at the unsharded buffer."""
        self._set_phase(Phase.SHARDED if self.shards_params else Phase.UNSHARDED)
        self.restore_data_pointers()
        if self.shards_params:
            self.unsharded_params.free()

    def restore_data_pointers(self) -> None:
        """Points the parameters at the tensors of the current phase again."""
        if self.phase is Phase.SHARDED:
            self._hide_values()
        else:
            set_plain_data(self.parameters, self.unsharded_params.views)

    def discard_unsharded(self) -> None:
        """As `reshard`, without syncing writes."""
        if self.shards_params and self.is_unsharded and not self.num_pins:
            self.wait_for_unshard()
            self.enter_idle_phase()

    # ---------------------------------------------------------------- the step

    def begin_step(self, stepping: Callable[[], BaseException | None] | None = None) -> None:
        """Marks the parameters as in flight until `end_step`. See [Note: Stepped by stand-ins].

        `stepping`: waits until a worker has ended the step, see `StepLoop.add`. None: the caller
        ends it.
        """
        self.wait_for_unshard()
        self.sync_writes()
        if self.plan.stage.all_gathers_after_step:
            num_known = len(self.parameters) + self.shards.num_views
            self._is_aliased = self.unsharded_params.num_holders(num_known) > 0
        self.shards.before_write()
        if self.shards_params:
            if self.is_unsharded:
                self.enter_idle_phase()
        elif self.plan.stage.all_gathers_after_step:
            self.mark_in_flight()
        if stepping is not None:
            self._overlapped.begin(stepping)

    def end_step(self) -> None:
        """Ends the step; if parameters are replicated, issues the all-gather of their new values.

        Collective.
        """
        self.shards.count_write()
        if self.plan.stage.all_gathers_after_step:
            self._pending = self.all_gather_into(self.unsharded_params.tensor)

    def sync_aliases(self) -> None:
        """After a step: if users hold views, waits until these have all new values."""
        if self._is_aliased:
            self._is_aliased = False
            self.wait_for_unshard()

    def wait_for_step(self) -> None:
        """Waits until a worker has stepped this bucket; raises if that step failed. Local."""
        self._overlapped.wait()

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
        if not self._overlapped.is_running:
            self.grads.free_zeroed()

    # ---------------------------------------------------------------- use between steps

    def pin(self) -> None:
        """Keeps the bucket unsharded until `unpin`."""
        self.num_pins += 1

    def unpin(self) -> None:
        self.num_pins -= 1

    def install_views(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at `views`, by slot, plain, until `uninstall_views`.

        Not while other views are installed.
        """
        assert not self.has_views_installed
        self.wait_for_unshard()
        self.pin()
        self.has_views_installed = True
        set_plain_data(self.parameters, views)
        self.writes.watch()

    def uninstall_views(self) -> None:
        """Points the parameters at the tensors of their phase again."""
        self.unpin()
        self.has_views_installed = False
        self.restore_data_pointers()
        if self.phase is Phase.UNSHARDED:
            self.writes.watch()

    def leave_device(self) -> None:
        """Guards replicated parameters while tiers/state_offload.py keeps their memory free.

        Sharded parameters are guarded anyway.
        """
        if not self.shards_params:
            self._hide_values()

    def return_to_device(self) -> None:
        """Undoes `leave_device`, once the memory has its values again."""
        if not self.shards_params:
            self.restore_data_pointers()

    # ---------------------------------------------------------------- writes by the user

    def sync_writes(self, *, reads_all: bool = True) -> None:
        """Syncs the user's writes to unsharded parameters, and replaced `.data`, into the masters.

        Torch's pruning, for example, writes by `parameter.data = other`. Not while a context holds
        the bucket: it reports writes, or keeps them, when it ends.

        Args:
            reads_all: Compare all values of replicated parameters, too: some writes have no trace.

        Raises:
            ValueError: Replaced data has another shape or dtype; the parameter then has its own
                again.
        """
        if self.num_pins or self.phase is not Phase.UNSHARDED:
            return
        self.writes.sync(reads_all=reads_all)

    # ---------------------------------------------------------------- runs, and the end

    def begin_run(self) -> Exception | None:
        """Begins a run with the shards as they are, and without gradients. Local.

        After an exception, when the groups of collectives in flight are gone. `publish` follows.

        Returns:
            What has failed, such as data of a wrong shape that the user has set.
        """
        failure: Exception | None = None
        try:
            self._overlapped.wait()
        except RuntimeError as error:
            failure = RuntimeError(f"{error}; some of its parameters may have been stepped.")
        self._pending = None
        if self.phase is Phase.UNSHARDING:
            if self.shards_params:
                self.num_pins = 0
            self.enter_idle_phase()
        self.end_graphs(is_retained=False)
        self.shards.stop_reading()
        self.grads.close()
        self._make_gradients(self.grads.main.dtype, self.grads.main.offloaded)
        return self.try_to_reshard() or failure

    def publish(self) -> None:
        """All-gathers replicated parameters again: their last all-gather may be lost. Collective.

        Some ranks may have waited for it before, and others not.
        """
        if self.plan.stage.all_gathers_after_step:
            self.shards.cast_master()
            self.mark_in_flight()
            self.end_step()

    def try_to_reshard(self) -> Exception | None:
        """As `reshard`, also if the user has set data of a wrong shape; returns the first error."""
        errors: list[Exception] = []
        # data that a reshard refused is dropped, so the next attempt succeeds
        for _ in range(len(self.parameters) + 1):
            try:
                self.reshard()
            except ValueError as error:
                errors.append(error)
                continue
            except Exception as error:
                errors.append(error)
            break
        return errors[0] if errors else None

    def unwrap(self, device: torch.device | None) -> None:
        """Makes every parameter a full tensor of its own, in its original dtype. Collective.

        On `device`; None: without values, see tensors/meta.py.
        """
        self.wait_for_unshard()
        self.grads.close()  # else all ranks would gather `.grad` as a tensor that a user holds
        views = self.masters.full_tensors() if device is not None else []
        unwrap_parameters(self.plan, self.parameters, self.orig_dtypes, views, device)
        self.writes.detach_all()
        self.shards.drop()
        self.unsharded_params.drop()
