"""One bucket at run time: its parameters, their masters, and what `parameter.data` points at.

    phase       parameter.data                               class
    SHARD       this rank's slice of the master, 1-D         guarded   PARAM sharded, at rest
    GATHERING   the slice, or the view of a buffer in flight guarded
    WHOLE       n-D view of the whole buffer                 plain     in use; at rest elsewhere
    STEP        what this rank steps of the master           plain     while the optimizer steps

What rests on this rank, and the master, which the optimizer steps, are told in shards.py. Where a
shard rests in a file, `parameter.data` is empty at rest. What a rank steps is a 1-D slice, or,
where the layout holds whole tensors, the n-D tensor on its owner; on other ranks nothing, without a
gradient.

[Note: Stepped by stand-ins] A bucket that is stepped by itself never enters STEP: stand-ins of its
parameters do that (bucket_step.py). `begin_step` marks the parameters as in flight, `end_step`
issues the gather of their new values. A worker may do the work between the two; every use of the
bucket waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.buffer import FlatBuffer, widest
from lightning_zero.comm import Communicator, Pending
from lightning_zero.compare import equal
from lightning_zero.grad_home import GradHome, Landing
from lightning_zero.gradient import Gradients
from lightning_zero.guard import Placement, guard, set_placement, unguard
from lightning_zero.offload import Tier
from lightning_zero.piece import piece_of
from lightning_zero.plan import BucketPlan
from lightning_zero.recording import Kind
from lightning_zero.shards import Shards
from lightning_zero.stage import State
from lightning_zero.stored import StoredTensor
from lightning_zero.tiers import Home, InFile
from lightning_zero.worker import Stepping, StepWorker

__all__ = ["Bucket", "Phase"]


class Phase(Enum):
    """What the parameters of a bucket point at; see the table at the top of this file."""

    SHARD = "shard"
    GATHERING = "gathering"
    WHOLE = "whole"
    STEP = "step"


class Bucket:
    """Parameters that travel together, from setup to teardown.

    Attributes:
        plan: Layout, dtypes and stage.
        parameters: The module's own parameter objects, by slot.
        grads: Their gradients.
        phase: Where the parameters are.
        shards: What of it rests on this rank.
        own_dtypes: Dtype of each parameter before this bucket took it over.
        is_shown: The parameters point at another buffer, to be written to.
        pins: Number of outside looks (`gathered`) under way; nothing is freed while positive.
        lockstep: The engine's `Lockstep`, once it is there.
    """

    lockstep: Any

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        landing: Landing,
        worker: StepWorker,
        *,
        grad_dtype: torch.dtype,
        make_whole: Callable[[Bucket, str], None],
        filled: FlatBuffer | None = None,
    ) -> None:
        """Takes `parameters` over; `filled`: some lie in it already. Collective."""
        self.plan = plan
        self.parameters = list(parameters)
        self._comm = comm
        self.phase = Phase.WHOLE
        self.pins = 0
        self.is_shown = False
        self.own_dtypes = [p.dtype for p in parameters]
        self._worker = worker
        self._device = landing.storage.device
        self._grad_home: GradHome | None = None
        if landing.storage.is_elsewhere(plan.tiers.grad):
            numel = len(plan.layout.shard(comm.mesh.shard_rank))
            self._grad_home = GradHome(landing, plan.name, numel, grad_dtype, plan.tiers.grad)
        self.grads = Gradients(
            plan, parameters, comm, grad_dtype, self._grad_home, settle=self.wait_for_step
        )
        self._pending: Pending | None = None
        self._stepping: Stepping | None = None  # a worker steps this bucket
        self._stepped: Tensor | None = None  # the master in memory while in STEP
        self._make_whole = make_whole
        if filled is not None and filled.tensor.dtype == plan.dtype:
            self._whole = filled
        else:
            self._whole = FlatBuffer(plan.layout, plan.dtype, self._device)
        self.shards = Shards(plan, self._whole, landing.storage, comm.mesh.shard_rank)
        self._take_in(filled)

    # ---------------------------------------------------------------- setup and teardown

    def _take_in(self, filled: FlatBuffer | None) -> None:
        """Copies rank 0's values into the flat space and makes the parameters views of it."""
        plan, rank = self.plan, self._comm.mesh.shard_rank
        exact = self._exact_copy(filled)
        self._comm.broadcast_(exact.tensor)
        if exact is not self._whole:
            self._whole.tensor.copy_(exact.tensor)
        self.shards.take_params()
        if self.shards.has_own_master and self._needs_master:
            self.shards.take_master(exact.tensor if self.steps_whole else exact.shard(rank))
        for index, (slot, parameter) in enumerate(
            zip(plan.layout.slots, self.parameters, strict=True)
        ):
            shape = torch.Size(slot.shape)
            own_class = type(parameter)
            placement = Placement(slot.name, shape, plan.dtype, own_class, self, index, self._use)
            set_placement(parameter, placement)
            parameter.data = self._whole.views[index]
            if plan.dtype.is_floating_point:
                parameter.grad_dtype = None  # gradients may be wider than the parameter
        self.release()
        self.shards.mark_written()

    def _exact_copy(self, filled: FlatBuffer | None) -> FlatBuffer:
        """The parameters in their own precision; the whole buffer itself where that suffices."""
        dtype = widest(self.plan.dtype, self.own_dtypes)
        exact = self._whole
        if dtype != self.plan.dtype:
            exact = filled or FlatBuffer(self.plan.layout, dtype, self._device)
        for view, parameter in zip(exact.views, self.parameters, strict=True):
            if (piece := piece_of(parameter)) is not None:
                piece.read_into(view)
            elif view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
        return exact

    def give_back(self, device: torch.device) -> None:
        """Makes every parameter a whole tensor of its own on `device`. Collective.

        Each is in its own dtype.
        """
        self.finish_gather()
        self.grads.drop()
        views = self.exact_views()
        for index, parameter in enumerate(self.parameters):
            value = views[index].to(device, self.own_dtypes[index], copy=True)
            unguard(parameter)
            set_placement(parameter, None)
            if self.plan.dtype.is_floating_point:
                parameter.grad_dtype = self.own_dtypes[index]
            parameter.data = value
        self.shards.param = self.shards.master = None
        self._whole.free()

    # ---------------------------------------------------------------- PARAM

    @property
    def is_gathered_before_use(self) -> bool:
        """PARAM rests as a shard."""
        return self.plan.stage.gathers_before_use

    @property
    def is_whole(self) -> bool:
        """The values of all elements are at hand or on their way."""
        return self.phase in (Phase.GATHERING, Phase.WHOLE)

    def gather(self) -> None:
        """Issues the gather of whole parameters. Collective: also where they are whole already.

        A rank that has them sends its shard again to those that have not, and receives what it has.
        """
        if self.is_whole:
            self.finish_gather()
            self._gather_in_place(self._whole.tensor).wait()
            return
        self.wait_for_step()
        self._whole.allocate()
        self._pending = self._send_shard()
        for parameter in self.parameters:
            guard(parameter)
        self.phase = Phase.GATHERING

    def _send_shard(self) -> Pending:
        """Issues the gather of this rank's shard, from where it rests."""
        source = self.shards.send_params()
        return self._gather_in_place(self._whole.tensor, source)

    def _gather_in_place(self, whole: Tensor, source: Tensor | None = None) -> Pending:
        cuts = self.plan.layout.cuts
        return self._comm.all_gather(whole, self.plan.name, source=source, cuts=cuts)

    @property
    def _sends_from_cpu(self) -> bool:
        """A gather copies to the device from CPU memory, perhaps after it is waited for."""
        is_apart = self.shards.storage.is_apart
        return is_apart and self.plan.tiers.param is Tier.CPU

    def look_at_rest(self, index: int) -> Tensor:
        """What `parameter.data` is of slot `index`: a tensor, or what reads it from its file."""
        self.settle()
        exact = self.shards.exact
        if self.phase is Phase.SHARD and isinstance(exact, InFile):
            own = self.shards.own_range(index)
            return exact.look(own.start, own.stop)
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameters[index].data

    def equals(self, one: Tensor, other: Tensor) -> bool:
        """Whether two parameters, `one` of which is of a bucket, are equal. Collective."""
        self.lockstep.meet_for_collective()
        return equal(one, other, self._comm)

    @property
    def comm(self) -> Communicator:
        """Between the ranks that have a shard of it."""
        return self._comm

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self._device

    def wait_for_all_steps(self) -> None:
        """Waits until a worker has stepped every bucket: its gathers come before any other."""
        self._worker.drain()

    def read_ahead(self) -> bool:
        """Begins to read a shard that rests in a file; whether there was a buffer for it."""
        reader = self.shards.reader
        if reader is None or self.is_whole or self._stepping is not None:
            return True
        return reader.begin()

    def finish_gather(self) -> None:
        """Waits for a gather under way; the parameters are whole and plain."""
        self.wait_for_step()
        if self.phase is not Phase.GATHERING:
            return
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        for parameter, view in zip(self.parameters, self._whole.views, strict=True):
            unguard(parameter)
            parameter.data = view
        self.phase = Phase.WHOLE

    def release(self) -> None:
        """Frees whole parameters where they rest as shards."""
        if not self.is_gathered_before_use or self.phase is Phase.SHARD or self.pins:
            return
        self.finish_gather()
        for parameter, part in zip(self.parameters, self.shards.resting_parts(), strict=True):
            parameter.data = part
            guard(parameter)
        self._whole.free()
        self.phase = Phase.SHARD

    def settle(self) -> None:
        """Waits for a step and the gather after it, so that what is read is at rest. Local."""
        self.wait_for_step()
        if not self.is_gathered_before_use:
            self.finish_gather()

    def cancel_gather(self, *, is_lost: bool) -> None:
        """Forgets a gather whose group is gone.

        Args:
            is_lost: No gather can complete the parameters any more: they stay guarded. Else
                `gather_again` follows, one gather on every rank, whatever each was waiting for.
        """
        if self.phase is not Phase.GATHERING:
            return
        self._pending = None
        if self.is_gathered_before_use:
            self.phase = Phase.WHOLE
            self.pins = 0
            self.release()
        elif not is_lost:
            self.phase = Phase.WHOLE

    def gather_again(self) -> None:
        """Gathers stepped parameters anew after `cancel_gather`. Collective."""
        if self.plan.stage.gathers_after_step:
            self.finish_gather()  # one that `undo_step` has issued
            self.shards.cast_master()
            self._mark_in_flight()
            self.end_step()

    def _use(self, name: str) -> None:
        """The guard's call: somebody applies a torch function to parameter `name`."""
        if self.is_gathered_before_use:
            self._make_whole(self, name)
        else:
            self.finish_gather()

    # ---------------------------------------------------------------- OPTIM

    @property
    def steps_whole(self) -> bool:
        """OPTIM rests whole: every rank steps all elements."""
        return self.shards.steps_whole

    def owned(self, index: int) -> range:
        """Elements of slot `index`, counted from its own first one, that this rank steps."""
        return self.shards.owned(index)

    @property
    def _needs_master(self) -> bool:
        """A master is kept for what is trained, and for what would lose bits without one."""
        is_trained = any(p.requires_grad for p in self.parameters)
        return is_trained or any(d.itemsize > self.plan.dtype.itemsize for d in self.own_dtypes)

    def join_state(self, slices: Sequence[Tensor | None]) -> list[Tensor]:
        """By slot, whole n-D optimizer states from every rank's slices. Collective.

        The inverse of slicing.

        Args:
            slices: By slot, 1-D as `slice_state` made them; None counts as zeros.
        """
        dtype = next((part.dtype for part in slices if part is not None), self.plan.master_dtype)
        layout = self.plan.layout
        numel = layout.numel if self.steps_whole else len(layout.shard(self._comm.mesh.shard_rank))
        joined = torch.zeros(numel, dtype=dtype, device=self._device)
        for target, part in zip(self.shards.cut(joined), slices, strict=True):
            if part is not None:
                target.copy_(part.reshape(-1))
        return self.gather_parts(joined).views

    def _absorb_changes(self) -> None:
        """Takes what somebody has written to whole parameters, or put in their place, into masters.

        `parameter.data = other` is how torch's pruning and others give new values.
        """
        if self.phase is Phase.WHOLE and not self.is_shown:
            for parameter, view in zip(self.parameters, self._whole.views, strict=True):
                data = parameter.data
                if data.data_ptr() != view.data_ptr() and data.shape == view.shape:
                    view.copy_(data)
                    parameter.data = view
        self.shards.absorb_changes()

    # ---------------------------------------------------------------- the step

    def begin_step(self, stepping: Stepping | None = None) -> None:
        """The parameters are in flight until `end_step`. See [Note: Stepped by stand-ins].

        Args:
            stepping: Done when a worker has ended the step; None: the caller ends it.
        """
        self.finish_gather()
        self._absorb_changes()
        self.shards.stop_reading()  # what was read ahead is about to change
        self._comm.wait_for_sent(self._sends_from_cpu)
        if self.is_gathered_before_use:
            self._point_at_rest()
        elif self.plan.stage.gathers_after_step:
            self._mark_in_flight()
        self._stepping = stepping

    def _mark_in_flight(self) -> None:
        for parameter in self.parameters:
            guard(parameter)
        self.phase = Phase.GATHERING

    def end_step(self) -> None:
        """The new values are there; issues their gather where parameters rest whole. Collective."""
        self.shards.mark_written()
        if self.plan.stage.gathers_after_step:
            self._pending = self._gather_in_place(self._whole.tensor)

    def wait_for_step(self) -> None:
        """Waits until a worker has stepped this bucket.

        Raises:
            RuntimeError: The step failed.
        """
        stepping = self._stepping
        if stepping is None:
            return
        with self._comm.recorder.span(Kind.STEP, self.plan.name, is_wait=True):
            error = stepping.exception()  # an interrupt leaves the step to the next who waits
            self._stepping = None
            event = stepping.result() if error is None else None
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        if error is not None:
            raise RuntimeError(f"the optimizer step of {self.plan.name} failed: {error}") from error

    def enter_step(self, *, has_grads: bool = True) -> None:
        """Points parameters at their masters and `.grad` at their reduced gradients, if wanted.

        For optimizers that step all slices in one call: a master that rests in a file is in memory
        until `leave_step`.
        """
        self.finish_gather()
        self._absorb_changes()
        grads: list[Tensor | None] = [None] * len(self.parameters)
        if has_grads:
            grads = self.grads.fetch_all(self.plan.master_dtype)
        self._comm.wait_for_sent(self._sends_from_cpu)
        master = self.shards.stepped()
        self._stepped = master.fetch(0, master.numel)
        parts = self.shards.cut(self._stepped)
        for index, (parameter, part, grad) in enumerate(
            zip(self.parameters, parts, grads, strict=True)
        ):
            parameter.grad = None
            unguard(parameter)
            parameter.data = part.view(self.shards.step_shape(index))
            if grad is not None and self.shards.is_stepped(index):
                grad = grad.read() if isinstance(grad, StoredTensor) else grad
                parameter.grad = grad.to(part.device).view(parameter.data.shape)
        self.phase = Phase.STEP

    def leave_step(self, *, is_changed: bool) -> None:
        """Points everything back, casts changed masters to parameters and issues their gather."""
        for parameter in self.parameters:
            parameter.grad = None
        if is_changed and self._stepped is not None:
            self.shards.store_exact(self._stepped)
        self._stepped = None
        self._point_at_rest()
        self.grads.show()
        if is_changed and self.plan.stage.gathers_after_step:
            self._mark_in_flight()
            self.end_step()

    def _point_at_rest(self) -> None:
        """To where parameters rest: their slice, or the whole buffer."""
        is_shard = self.is_gathered_before_use
        targets = self.shards.resting_parts() if is_shard else self._whole.views
        for parameter, target in zip(self.parameters, targets, strict=True):
            parameter.data = target
            if is_shard:
                guard(parameter)
        if is_shard:
            self._whole.free()  # a forward after the backward may have left it whole
        self.phase = Phase.SHARD if is_shard else Phase.WHOLE

    def undo_step(self) -> None:
        """Back to rest after an optimizer that failed in its step."""
        try:
            self.wait_for_step()
        except RuntimeError as error:
            warnings.warn(f"{error}; its parameters may be stepped in part.", stacklevel=2)
        if self.phase is Phase.STEP:
            self.leave_step(is_changed=True)
        elif self.phase is Phase.GATHERING and self._pending is None:
            self.end_step()

    def owns(self, tensor: Tensor) -> bool:
        """`tensor` is a view of the whole buffer."""
        if tensor.layout is not torch.strided or isinstance(tensor, StoredTensor):
            return False
        storage = self._whole.tensor.untyped_storage()
        return bool(tensor.untyped_storage()._cdata == storage._cdata)

    # ---------------------------------------------------------------- whole masters

    def exact_views(self) -> list[Tensor]:
        """By slot, all elements in full precision, n-D, to be read at once. Collective."""
        self.finish_gather()
        self._absorb_changes()
        is_exact = self.shards.master is None or not self.shards.has_own_master
        if is_exact and self.phase is Phase.WHOLE:
            return self._whole.views
        return self.gather_master().views

    def gather_master(self) -> FlatBuffer:
        """A new buffer with all elements in full precision, on every rank. Collective; waits."""
        return self.gather_parts(self.exact())

    def exact(self) -> Tensor:
        """The elements that this rank steps, in the fullest precision there is: 1-D. Local.

        A view of memory, a copy of a file.
        """
        home = self._exact_home()
        return home.fetch(0, home.numel)

    def _exact_home(self) -> Home:
        self._worker.drain()
        self.finish_gather()
        self._absorb_changes()
        return self.shards.exact

    def exact_parts(self) -> list[Tensor]:
        """By slot, the elements `owned(index)` in full precision: 1-D, to be read before a step.

        Views of memory, or StoredTensors where the shard rests in a file. Local, but for a gather
        under way, which is waited for.
        """
        home = self._exact_home()
        parts = [self.shards.own_range(index) for index in range(len(self.parameters))]
        return [home.look(part.start, part.stop) for part in parts]

    def load(self, read: Callable[[int, range], Tensor | None]) -> None:
        """Takes new values for masters and parameters, each rank its own elements. Collective.

        Args:
            read: Given a slot and the elements `owned` of it, returns those, in any floating dtype,
                or None to leave the slot as it is. The same slots on every rank.
        """
        exact = self.exact()
        with torch.no_grad():
            for index, part in enumerate(self.shards.cut(exact)):
                values = read(index, self.owned(index))
                if values is not None:
                    part.copy_(values.reshape(-1))
            self.store(exact)

    def store(self, exact: Tensor) -> None:
        """Takes what has become of `exact()`; parameters follow, whole ones too. Collective."""
        self._comm.wait_for_sent(self._sends_from_cpu)
        with torch.no_grad():
            self.shards.store_exact(exact)
            self.release()  # ranks may differ in what a forward has left whole
            if self.phase is Phase.WHOLE and not self.steps_whole:
                self._send_shard().wait()

    def gather_parts(self, part: Tensor) -> FlatBuffer:
        """A new buffer from every rank's `part`: 1-D and laid out as the master. Collective."""
        self._worker.drain()  # its gathers and this one must have one order on all ranks
        with torch.no_grad():
            exact = FlatBuffer(self.plan.layout, part.dtype, self._device)
            if self.steps_whole:
                exact.tensor.copy_(part)
            else:
                exact.shard(self._comm.mesh.shard_rank).copy_(part)
                self._gather_in_place(exact.tensor).wait()
        return exact

    def show(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at `views`, by slot, plain, until `hide`."""
        self.finish_gather()
        self.pins += 1
        self.is_shown = True
        for parameter, view in zip(self.parameters, views, strict=True):
            unguard(parameter)
            parameter.data = view

    def show_own(self) -> Tensor:
        """Points the parameters at this rank's elements in full precision, 1-D, until `hide`.

        Returns:
            `exact()`, of which those are parts. Where they are written to, `store` must follow.
        """
        exact = self.exact()
        self._comm.wait_for_sent(self._sends_from_cpu)
        self.show(self.shards.cut(exact))
        return exact

    def hide(self) -> None:
        """Points the parameters back to where they were before `show`."""
        self.pins -= 1
        self.is_shown = False
        is_shard = self.phase is Phase.SHARD
        targets = self.shards.resting_parts() if is_shard else self._whole.views
        for parameter, target in zip(self.parameters, targets, strict=True):
            parameter.data = target
            if is_shard:
                guard(parameter)

    def accept(self, exact: FlatBuffer) -> None:
        """Takes rank 0's values of `exact` into every rank's masters and parameters. Collective."""
        rank = self._comm.mesh.shard_rank
        self._comm.broadcast_(exact.tensor)
        with torch.no_grad():
            own = exact.tensor if self.steps_whole else exact.shard(rank)
            self._comm.wait_for_sent(self._sends_from_cpu)
            self.shards.store_exact(own)
            if self._whole.is_allocated:
                self._whole.tensor.copy_(exact.tensor)
        self.shards.mark_written()

    # ---------------------------------------------------------------- bytes

    def allocated_bytes(self) -> dict[tuple[Tier, State], int]:
        """Bytes held at this moment in parameters, gradients, masters and files, by tier.

        Optimizer states in memory belong to the optimizer and are not counted here.
        """
        held: dict[tuple[Tier, State], int] = {
            (Tier.DEVICE, State.PARAM): self._whole.allocated_bytes,
            (Tier.DEVICE, State.GRAD): self.grads.allocated_bytes,
        }
        for tier, state, home in self.shards.homes():
            held[tier, state] = held.get((tier, state), 0) + home.nbytes
        if self._grad_home is not None:
            key = (self.plan.tiers.grad, State.GRAD)
            held[key] = held.get(key, 0) + self._grad_home.nbytes
        return held

    def data_parallel_bytes(self) -> dict[State, int]:
        """Bytes these parameters need whole on every rank; optimizer state without its moments."""
        numel = self.plan.layout.parameter_numel
        is_trained = any(parameter.requires_grad for parameter in self.parameters)
        params = numel * self.plan.dtype.itemsize
        master = numel * self.plan.master_dtype.itemsize if self.shards.has_own_master else 0
        return {
            State.PARAM: params,
            State.GRAD: params if is_trained else 0,
            State.OPTIM: master if is_trained else 0,
        }
