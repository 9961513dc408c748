"""A bucket at run time: its parameters, gradients and states, and its step.

[Note: Tensors of a bucket] A *slot* is one parameter of the bucket, in layout order; *own elements*
are those of this rank's shard: all if optimizer states are replicated (stage 0). The optimizer
steps them or, with tensor owners (layout/flat.py), the full tensors of this rank.

- Original parameter: the `nn.Parameter` of the module. The object stays; its class and `.data`
  change (tensors/guarded.py).
- Unsharded parameters (`Params.unsharded`): flat buffer in the parameter dtype with an n-D view for
  each slot, with which forward and backward compute; the output of the all-gather. If parameters
  are sharded (stage 3), it holds memory only while they are unsharded.
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

[Note: Stepped by stand-ins] The optimizer steps stand-ins of the parameters (optim/clone.py):
slices of the master or, with tensor owners, full tensors. `begin_step` marks the parameters as in
flight, `end_step` issues the all-gather of their new values. A worker thread may step between the
two; every use of the bucket waits for it.

The buckets of an average (engine/shadow.py) are used by `gathered` and checkpoints like others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.gradients import Gradients
from lightning_zero.core.main_grad import MainGrad
from lightning_zero.core.masters import Masters
from lightning_zero.core.params import Params
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import OverlappedStep, StepWorker
from lightning_zero.core.wrapping import full_precision_copy, unwrap_parameters, wrap_parameters
from lightning_zero.core.writes import UserWrites
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.live import LiveTensors
from lightning_zero.tensors.shard_spec import ShardSpec
from lightning_zero.tiers.grad_offload import GradQueue, OffloadedGrad

__all__ = ["Bucket", "BucketResources"]


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
        orig_dtypes: Dtype of each parameter before this bucket wrapped it.
        comm: Communicator of the ranks that share the bucket.
        device: Device on which the bucket is unsharded.
        params: What the parameters point at; unshards and reshards them.
        shards: Stores of this rank's shards.
        shard_specs: Elements of each slot that each rank has, by slot; `shards.owned(index)` are
            this rank's.
        masters: Access to the elements in full precision.
        writes: Writes by the user.
        grads: Gradients of the parameters.
    """

    grads: Gradients
    _is_aliased = False  # users hold views of the unsharded buffer, which is stepped

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
            on_unsharded_change: As for `Params`.
        """
        self.plan, self.comm, self._worker = plan, shared.comm, shared.worker
        self.parameters = list(parameters)
        self.orig_dtypes = [parameter.dtype for parameter in parameters]
        storage = shared.queue.storage
        self.device = storage.device
        unsharded = filled
        if unsharded is None or unsharded.tensor.dtype != plan.dtype:
            unsharded = FlatBuffer(plan.layout, plan.dtype, self.device)
        self.shards = shards = Shards(plan, unsharded, storage, self.comm)
        self.writes = UserWrites(self.parameters, self.orig_dtypes, unsharded, shards)
        self._overlapped = step = OverlappedStep(plan.name, self.comm.recorder)
        self.params = Params(
            self.parameters, unsharded, shards, self.writes, step, on_unsharded_change
        )
        self.masters = Masters(self.params, shards, shared.worker)
        drain, live = shared.worker.drain, shared.live
        self.shard_specs = [
            ShardSpec(slot, plan.layout, self.comm, drain, live, live.add_parameter())
            for slot in plan.layout.slots
        ]
        offloaded: OffloadedGrad | None = None
        if storage.is_offloaded(plan.tiers.grad):
            numel = len(plan.layout.shard(self.comm.mesh.shard_rank))
            offloaded = OffloadedGrad(shared.queue, plan.name, numel, grad_dtype, plan.tiers.grad)
        self._make_gradients(grad_dtype, offloaded)
        self._wrap(filled)

    def _make_gradients(self, dtype: torch.dtype, offloaded: OffloadedGrad | None) -> None:
        """Makes empty gradients for a run."""
        main = MainGrad(self.shards, self.shard_specs, dtype, offloaded, self._overlapped)
        self.grads = Gradients(self.parameters, self.plan, self.comm, main)

    def _wrap(self, filled: FlatBuffer | None) -> None:
        """Copies rank 0's values; points the parameters at the unsharded buffer. Collective."""
        shards, unsharded = self.shards, self.params.unsharded
        values = full_precision_copy(self.plan, self.parameters, unsharded, filled)
        self.comm.broadcast_(values.tensor)
        if values is not unsharded:
            unsharded.tensor.copy_(values.tensor)
        shards.init_stores(shards.own_slice_of(values))
        wrap_parameters(self.plan, self.parameters, unsharded.views)
        self.writes.watch()
        self.params.reshard()

    # ---------------------------------------------------------------- the step

    def begin_step(self, stepping: Callable[[], BaseException | None] | None = None) -> None:
        """Marks the parameters as in flight until `end_step`. See [Note: Stepped by stand-ins].

        `stepping`: waits until a worker has ended the step, see `StepLoop.add`. None: the caller
        ends it.
        """
        params, is_published = self.params, self.plan.stage.all_gathers_after_step
        params.wait_for_unshard()
        params.sync_writes()
        if is_published:
            num_known = len(self.parameters) + self.shards.num_views
            self._is_aliased = params.unsharded.num_holders(num_known) > 0
        self.shards.before_write()
        if is_published:
            params.mark_in_flight()
        elif params.are_sharded and params.is_unsharded:
            params.enter_idle_phase()
        if stepping is not None:
            self._overlapped.begin(stepping)

    def end_step(self) -> None:
        """Ends the step; if parameters are replicated, issues the all-gather of their new values.

        Collective.
        """
        self.shards.count_write()
        if self.plan.stage.all_gathers_after_step:
            self.params.all_gather_update()

    def sync_aliases(self) -> None:
        """After a step: if users hold views, waits until these have all new values."""
        if self._is_aliased:
            self._is_aliased = False
            self.params.wait_for_unshard()

    def wait_for_step(self) -> None:
        """Waits until a worker has stepped this bucket; raises if that step failed. Local."""
        self._overlapped.wait()

    def wait_for_update(self) -> None:
        """Waits for a step in progress and the all-gather after it. Local."""
        self.wait_for_step()
        if not self.params.are_sharded:
            self.params.wait_for_unshard()

    def wait_for_all_steps(self) -> None:
        """Waits until a worker has stepped every bucket: its all-gathers precede all others."""
        self._worker.drain()

    def free_zeroed(self) -> None:
        """Frees the main gradient if the user has zeroed all of it, unless a worker needs it."""
        if not self._overlapped.is_running:
            self.grads.free_zeroed()

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
        self.params.drop_in_flight()
        self.params.keep_for_backward(False)
        self.shards.stop_reading()
        self.grads.close()
        self._make_gradients(self.grads.main.dtype, self.grads.main.offloaded)
        return self.params.try_to_reshard() or failure

    def publish(self) -> None:
        """All-gathers replicated parameters again: their last all-gather may be lost. Collective.

        Some ranks may have waited for it before, and others not.
        """
        if self.plan.stage.all_gathers_after_step:
            self.shards.cast_master()
            self.params.mark_in_flight()
            self.end_step()

    def unwrap(self, device: torch.device | None) -> None:
        """Makes every parameter a full tensor of its own, in its original dtype. Collective.

        On `device`; None: without values, see tensors/meta.py.
        """
        self.params.wait_for_unshard()
        self.grads.close()  # else all ranks would gather `.grad` as a tensor that a user holds
        views = self.masters.full_tensors() if device is not None else []
        unwrap_parameters(self.plan, self.parameters, self.orig_dtypes, views, device)
        self.writes.detach_all()
        self.shards.drop()
        self.params.unsharded.drop()
