"""One bucket at run time: its parameters, their masters, and what `parameter.data` points at.

    phase       parameter.data                               class
    SHARD       this rank's slice of the master, 1-D         guarded   PARAM sharded, at rest
    GATHERING   the slice, or the view of a buffer in flight guarded
    WHOLE       n-D view of the whole buffer                 plain     in use; at rest elsewhere
    STEP        this rank's slice of the master, 1-D         plain     while the optimizer steps

The master is what the optimizer steps: fp32 where parameters are narrower, else the parameters
themselves (in stages 1-2 a slice of the whole buffer, in stage 3 the shard). Shards rest in homes:
in memory, or in files, and then `parameter.data` is empty at rest.

[Note: Stepped by stand-ins] A bucket that is stepped by itself never enters STEP: stand-ins of its
parameters do that (bucket_step.py). `begin_step` marks the parameters as in flight, `end_step`
issues the gather of their new values. A worker may do the work between the two; every use of the
bucket waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_zero.buffer import FlatBuffer, slice_shard
from lightning_zero.comm import Communicator, Pending
from lightning_zero.grad_home import GradHome, Landing
from lightning_zero.gradient import Gradients
from lightning_zero.guard import Placement, guard, set_placement, unguard
from lightning_zero.offload import Tier
from lightning_zero.plan import BucketPlan
from lightning_zero.stage import State
from lightning_zero.state_keys import is_elementwise_state
from lightning_zero.stored import StoredTensor, read_flat
from lightning_zero.tiers import Home, InFile, InMemory, ParamReader, Storage
from lightning_zero.worker import StepWorker
from lightning_zero.written import Fingerprint

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
        own_dtypes: Dtype of each parameter before this bucket took it over.
        is_shown: The parameters point at another buffer, to be written to.
        pins: Number of outside looks (`gathered`) under way; nothing is freed while positive.
    """

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
    ) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        self._comm = comm
        self.phase = Phase.WHOLE
        self.pins = 0
        self.is_shown = False
        self.own_dtypes = [p.dtype for p in parameters]
        self.storage: Storage = landing.storage
        self._worker = worker
        self._grad_home: GradHome | None = None
        if self.storage.is_elsewhere(plan.tiers.grad):
            numel = plan.layout.shard_numel
            self._grad_home = GradHome(landing, plan.name, numel, grad_dtype, plan.tiers.grad)
        self.grads = Gradients(plan, parameters, comm, grad_dtype, self._grad_home)
        self._pending: Pending | None = None
        self._stepping: Future[None] | None = None  # a worker steps this bucket
        self._make_whole = make_whole
        self._device = self.storage.device
        self._whole = FlatBuffer(plan.layout, plan.dtype, self._device)
        self._master: Home | None = None  # 1-D, own part, master dtype
        # 1-D, shard_numel, param dtype: what a gather sends; None where nothing is gathered before
        # use.
        self._param: Home | None = None
        self._stepped: Tensor | None = None  # the master in memory while in STEP
        self._reader: ParamReader | None = None  # of a `_param` in a file
        self._print: Fingerprint | None = None  # of the own part of the whole parameters
        self.state_homes: dict[str, Home] = {}  # optimizer states in files, by key
        self._take_in()

    # ---------------------------------------------------------------- setup and teardown

    def _take_in(self) -> None:
        """Copies rank 0's values into the flat space and makes the parameters views of it."""
        plan, rank = self.plan, self._comm.rank
        exact = self._exact_copy()
        self._comm.broadcast_(exact.tensor)
        if exact is not self._whole:
            self._whole.tensor.copy_(exact.tensor)
        if not self.has_master_of_its_own:
            self._master = InMemory(self.own_whole, Tier.DEVICE)
        elif self._needs_master:
            self._master = self._keep_master(
                exact.tensor if self.steps_whole else exact.shard(rank)
            )
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
        if plan.stage.has_shard(State.PARAM):
            shard = self._whole.shard(rank).clone()
            self._param = self.storage.keep_param(plan.name, shard, plan.tiers.param)
            if not self.has_master_of_its_own:
                self._master = self._param
            if isinstance(self._param, InFile):
                self._reader = ParamReader(self._param, self.storage.param_pool)
            self.release()
        self.mark_written()

    def _keep_master(self, part: Tensor) -> Home:
        values = part.to(self.plan.master_dtype, copy=True)
        return self.storage.keep_master(self.plan.name, values, self.plan.tiers.optim)

    def _exact_copy(self) -> FlatBuffer:
        """The parameters in their own precision; the whole buffer itself where that suffices."""
        widest = self.plan.dtype
        for dtype in self.own_dtypes:
            widest = torch.promote_types(widest, dtype)
        exact = self._whole
        if widest != self.plan.dtype:
            exact = FlatBuffer(self.plan.layout, widest, self._device)
        for view, parameter in zip(exact.views, self.parameters, strict=True):
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
        self._master = self._param = None
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
            self._comm.all_gather(self._whole.tensor, self.plan.name).wait()
            return
        self.wait_for_step()
        self._whole.allocate()
        self._pending = self._send_shard()
        for parameter in self.parameters:
            guard(parameter)
        self.phase = Phase.GATHERING

    def _send_shard(self) -> Pending:
        """Issues the gather of this rank's shard, from where it rests."""
        source = None
        if self._reader is not None:
            self._reader.copy_to(self.own_whole)
        elif isinstance(self._param, InMemory):
            source = self._param.tensor
        return self._comm.all_gather(self._whole.tensor, self.plan.name, source)

    def read_ahead(self) -> bool:
        """Begins to read a shard that rests in a file; whether there was a buffer for it."""
        if self._reader is None or self.is_whole or self._stepping is not None:
            return True
        return self._reader.begin()

    def stop_reading(self) -> None:
        """Gives the buffers of a read ahead back that nobody has used."""
        if self._reader is not None:
            self._reader.cancel()

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
        for parameter, part in zip(self.parameters, self._resting_parts(), strict=True):
            parameter.data = part
            guard(parameter)
        self._whole.free()
        self.phase = Phase.SHARD

    def settle(self) -> None:
        """Waits for a gather after the step, so that what rests whole is whole. Local."""
        if not self.is_gathered_before_use:
            self.finish_gather()

    def cancel_gather(self) -> None:
        """Forgets a gather whose group is gone. Parameters no gather can complete stay guarded."""
        if self.phase is not Phase.GATHERING:
            return
        self._pending = None
        if self.is_gathered_before_use:
            self.phase = Phase.WHOLE
            self.pins = 0
            self.release()

    def gather_again(self) -> None:
        """Gathers stepped parameters anew after `cancel_gather`. Collective."""
        if self.plan.stage.gathers_after_step:
            self.cast_master()
            self._mark_in_flight()
            self.end_step()

    def _use(self, name: str) -> None:
        """The guard's call: somebody applies a torch function to parameter `name`."""
        if self.is_gathered_before_use:
            self._make_whole(self, name)
        else:
            self.finish_gather()

    def _resting_parts(self) -> list[Tensor]:
        """By slot, what a parameter shows of its shard at rest: a 1-D slice, empty for a file."""
        resting = self._master if self._master is not None else self._param
        if isinstance(resting, InMemory):
            return slice_shard(self.plan.layout, resting.tensor, self._comm.rank)
        return [torch.empty(0, dtype=self.plan.master_dtype) for _ in self.parameters]

    # ---------------------------------------------------------------- OPTIM

    @property
    def steps_whole(self) -> bool:
        """OPTIM rests whole: every rank steps all elements."""
        return not self.plan.stage.has_shard(State.OPTIM)

    @property
    def has_master_of_its_own(self) -> bool:
        """The master is another tensor than the parameters, in another dtype."""
        return self.plan.master_dtype != self.plan.dtype

    @property
    def own_whole(self) -> Tensor:
        """The part of the whole buffer that this rank steps: 1-D, a view."""
        return self._whole.tensor if self.steps_whole else self._whole.shard(self._comm.rank)

    @property
    def _needs_master(self) -> bool:
        """A master is kept for what is trained, and for what would lose bits without one."""
        is_trained = any(p.requires_grad for p in self.parameters)
        return is_trained or any(d.itemsize > self.plan.dtype.itemsize for d in self.own_dtypes)

    @property
    def master(self) -> Home:
        """This rank's part of the master; made from the parameters where there is none yet."""
        if self._master is None:
            part = self._param.fetch(0, self._param.numel) if self._param else self.own_whole
            self._master = self._keep_master(part)
        return self._master

    @property
    def param(self) -> Home:
        """What takes the values of this rank's elements after they were stepped."""
        return self._param or InMemory(self.own_whole, Tier.DEVICE)

    def own_range(self, index: int) -> range:
        """Elements of slot `index`, counted within the part that this rank steps."""
        slot = self.plan.layout.slots[index]
        if self.steps_whole:
            return range(slot.start, slot.stop)
        return self.plan.layout.within_shard(slot, self._comm.rank)

    def state_home(self, key: str, dtype: torch.dtype) -> Home:
        """The file of optimizer state `key`, as long as the shard; zeros at first."""
        if key not in self.state_homes:
            name, numel = f"{self.plan.name}.{key}", self.plan.layout.shard_numel
            self.state_homes[key] = self.storage.make_optim(name, numel, dtype)
        return self.state_homes[key]

    def look_at_state(self, index: int, key: str) -> Tensor:
        """Optimizer state `key` of slot `index`, read from its file when it is used: 1-D."""
        own = self.own_range(index)
        return self.state_homes[key].look(own.start, own.stop)

    def adopt_state(self, index: int, state: dict[str, Any]) -> None:
        """Moves states of slot `index` that are in memory, such as loaded ones, to their files."""
        own = self.own_range(index)
        for key, value in state.items():
            if is_elementwise_state(key, value, len(own)) and not isinstance(value, StoredTensor):
                self.state_home(key, value.dtype).store(own.start, value)
                state[key] = self.look_at_state(index, key)

    def owned(self, index: int) -> range:
        """Elements of slot `index`, counted from its own first one, that this rank steps."""
        slot = self.plan.layout.slots[index]
        if self.steps_whole:
            return range(slot.numel)
        return self.plan.layout.owned(slot, self._comm.rank)

    def slice_state(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part of an optimizer state that is shaped like slot `index`, a copy."""
        device = self.storage.step_device(self.plan.tiers.optim)
        if self.steps_whole:
            return whole.to(device, self.plan.master_dtype, copy=True)
        owned = self.owned(index)
        part = read_flat(whole, owned.start, owned.stop)
        return part.to(device, self.plan.master_dtype, copy=True)

    def join_state(self, slices: Sequence[Tensor | None]) -> list[Tensor]:
        """By slot, whole n-D optimizer states from every rank's slices. Collective.

        The inverse of slicing.

        Args:
            slices: By slot, 1-D as `slice_state` made them; None counts as zeros.
        """
        dtype = next((part.dtype for part in slices if part is not None), self.plan.master_dtype)
        numel = self.plan.layout.numel if self.steps_whole else self.plan.layout.shard_numel
        joined = torch.zeros(numel, dtype=dtype, device=self._device)
        for target, part in zip(self._cut(joined), slices, strict=True):
            if part is not None:
                target.copy_(part.reshape(-1))
        return self.gather_parts(joined).views

    def absorb_changes(self) -> None:
        """Takes elements that somebody has written to into the master, where it is another tensor.

        Averaged weights that a callback swaps in, or `p.data.clamp_()`, write to the whole
        parameters, which are the rounded master in every element that nobody has touched.
        """
        if self.is_gathered_before_use or not self.has_master_of_its_own or self._master is None:
            return
        own = self.own_whole
        if self._print is not None and self._print.matches(own):
            return
        master = self._master.fetch(0, own.numel())
        values = own.to(master.device)
        with torch.no_grad():
            is_changed = values != master.to(own.dtype)
            # On a device this look would wait for it, which costs more than writing in any case.
            if master.device.type != "cpu" or is_changed.any():
                torch.where(is_changed, values.to(master.dtype), master, out=master)
                self._master.store(0, master)

    def mark_written(self) -> None:
        """Remembers the whole parameters as they follow from a master that is not beside them."""
        if self.is_gathered_before_use or not self.has_master_of_its_own or self._master is None:
            return
        if self.storage.is_elsewhere(self._master.tier):
            self._print = Fingerprint(self.own_whole)

    # ---------------------------------------------------------------- the step

    def begin_step(self, stepping: Future[None] | None = None) -> None:
        """The parameters are in flight until `end_step`. See [Note: Stepped by stand-ins].

        Args:
            stepping: Done when a worker has ended the step; None: the caller ends it.
        """
        self.finish_gather()
        self.absorb_changes()
        self.stop_reading()  # what was read ahead is about to change
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
        self.mark_written()
        if self.plan.stage.gathers_after_step:
            self._pending = self._comm.all_gather(self._whole.tensor, self.plan.name)

    def wait_for_step(self) -> None:
        """Waits until a worker has stepped this bucket.

        Raises:
            RuntimeError: The step failed.
        """
        if self._stepping is None:
            return
        stepping, self._stepping = self._stepping, None
        try:
            stepping.result()
        except BaseException as error:
            raise RuntimeError(f"the optimizer step of {self.plan.name} failed: {error}") from error

    def enter_step(self, *, has_grads: bool = True) -> None:
        """Points parameters at their masters and `.grad` at their reduced gradients, if wanted.

        For optimizers that step all slices in one call: a master that rests in a file is in memory
        until `leave_step`.
        """
        self.finish_gather()
        self.absorb_changes()
        grads: list[Tensor | None] = [None] * len(self.parameters)
        if has_grads:
            grads = self.grads.fetch_all(self.plan.master_dtype)
        self._stepped = self.master.fetch(0, self.master.numel)
        parts = self._cut(self._stepped)
        for parameter, slot, part, grad in zip(
            self.parameters, self.plan.layout.slots, parts, grads, strict=True
        ):
            parameter.grad = None
            unguard(parameter)
            parameter.data = part.view(slot.shape) if self.steps_whole else part
            if grad is not None:
                grad = grad.read() if isinstance(grad, StoredTensor) else grad
                parameter.grad = grad.to(part.device)
        self.phase = Phase.STEP

    def leave_step(self, *, is_changed: bool) -> None:
        """Points everything back, casts changed masters to parameters and issues their gather."""
        for parameter in self.parameters:
            parameter.grad = None
        if is_changed and self._stepped is not None:
            self.master.store(0, self._stepped)
            self.cast_master()
        self._stepped = None
        self._point_at_rest()
        self.grads.show()
        if is_changed and self.plan.stage.gathers_after_step:
            self._mark_in_flight()
            self.end_step()

    def _point_at_rest(self) -> None:
        """To where parameters rest: their slice, or the whole buffer."""
        is_shard = self.is_gathered_before_use
        targets = self._resting_parts() if is_shard else self._whole.views
        for parameter, target in zip(self.parameters, targets, strict=True):
            parameter.data = target
            if is_shard:
                guard(parameter)
        if is_shard:
            self._whole.free()  # a forward after the backward may have left it whole
        self.phase = Phase.SHARD if is_shard else Phase.WHOLE

    def undo_step(self) -> None:
        """Back to rest after an optimizer that failed in its step."""
        with suppress(RuntimeError):
            self.wait_for_step()
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

    def cast_master(self) -> None:
        """Rounds the master to the parameters' dtype, where it is a tensor of its own."""
        if not self.has_master_of_its_own or self._master is None:
            return
        with record_function(f"zero::cast {self.plan.name}"):
            self.param.store(0, self._master.fetch(0, self._master.numel))
        self.mark_written()

    # ---------------------------------------------------------------- whole masters

    def exact_views(self) -> list[Tensor]:
        """By slot, all elements in full precision, n-D, to be read at once. Collective."""
        self.finish_gather()
        self.absorb_changes()
        is_exact = self._master is None or not self.has_master_of_its_own
        if is_exact and self.phase is Phase.WHOLE:
            return self._whole.views
        return self.gather_master().views

    def gather_master(self) -> FlatBuffer:
        """A new buffer with all elements in full precision, on every rank. Collective; waits."""
        return self.gather_parts(self._exact())

    def _exact(self) -> Tensor:
        """The elements that this rank steps, in the fullest precision there is: 1-D.

        A view of memory, a copy of a file.
        """
        self._worker.drain()
        self.finish_gather()
        self.absorb_changes()
        home = self._master or self._param
        return self.own_whole if home is None else home.fetch(0, home.numel)

    def exact_parts(self) -> list[Tensor]:
        """By slot, the elements `owned(index)` in full precision: 1-D, views, to be read at once.

        Local, but for a gather under way, which is waited for.
        """
        return self._cut(self._exact())

    def _cut(self, part: Tensor) -> list[Tensor]:
        """By slot, 1-D views of a flat tensor of the elements that this rank steps."""
        if not self.steps_whole:
            return slice_shard(self.plan.layout, part, self._comm.rank)
        return [part[slot.start : slot.stop] for slot in self.plan.layout.slots]

    def load(self, read: Callable[[int, range], Tensor | None]) -> None:
        """Takes new values for masters and parameters, each rank its own elements. Collective.

        Args:
            read: Given a slot and the elements `owned` of it, returns those, in any floating dtype,
                or None to leave the slot as it is. The same slots on every rank.
        """
        exact = self._exact()
        with torch.no_grad():
            for index, part in enumerate(self._cut(exact)):
                values = read(index, self.owned(index))
                if values is not None:
                    part.copy_(values.reshape(-1))
            self.stop_reading()
            (self._master or self.param).store(0, exact)
            self.cast_master()
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
                exact.shard(self._comm.rank).copy_(part)
                self._comm.all_gather(exact.tensor, self.plan.name).wait()
        return exact

    def show(self, exact: FlatBuffer) -> None:
        """Points the parameters at `exact`, plain, until `hide`."""
        self.finish_gather()
        self.pins += 1
        self.is_shown = True
        for parameter, view in zip(self.parameters, exact.views, strict=True):
            unguard(parameter)
            parameter.data = view

    def hide(self) -> None:
        """Points the parameters back to where they were before `show`."""
        self.pins -= 1
        self.is_shown = False
        is_shard = self.phase is Phase.SHARD
        targets = self._resting_parts() if is_shard else self._whole.views
        for parameter, target in zip(self.parameters, targets, strict=True):
            parameter.data = target
            if is_shard:
                guard(parameter)

    def accept(self, exact: FlatBuffer) -> None:
        """Takes rank 0's values of `exact` into every rank's masters and parameters. Collective."""
        rank = self._comm.rank
        self._comm.broadcast_(exact.tensor)
        with torch.no_grad():
            own = exact.tensor if self.steps_whole else exact.shard(rank)
            self.stop_reading()
            if self._master is not None:
                self._master.store(0, own)
            if self._param is not None:
                self._param.store(0, own)
            if self._whole.is_allocated:
                self._whole.tensor.copy_(exact.tensor)
        self.mark_written()

    # ---------------------------------------------------------------- bytes

    def allocated_bytes(self) -> dict[tuple[Tier, State], int]:
        """Bytes held at this moment in parameters, gradients and masters, by tier.

        A master that is a tensor of its own counts as optimizer state, as in the ZeRO paper; so do
        optimizer states in files.
        """
        held: dict[tuple[Tier, State], int] = {
            (Tier.DEVICE, State.PARAM): self._whole.allocated_bytes,
            (Tier.DEVICE, State.GRAD): self.grads.allocated_bytes,
        }

        def add(home: Home | GradHome | None, tier: Tier, state: State) -> None:
            if home is not None:
                held[tier, state] = held.get((tier, state), 0) + home.nbytes

        add(self._param, self.plan.tiers.param, State.PARAM)
        add(self._grad_home, self.plan.tiers.grad, State.GRAD)
        if self.has_master_of_its_own:
            add(self._master, self.plan.tiers.optim, State.OPTIM)
        for home in self.state_homes.values():
            add(home, Tier.NVME, State.OPTIM)
        return held

    def data_parallel_bytes(self) -> dict[State, int]:
        """Bytes these parameters need whole on every rank; optimizer state without its moments."""
        numel = self.plan.layout.parameter_numel
        is_trained = any(parameter.requires_grad for parameter in self.parameters)
        params = numel * self.plan.dtype.itemsize
        master = numel * self.plan.master_dtype.itemsize if self.has_master_of_its_own else 0
        return {
            State.PARAM: params,
            State.GRAD: params if is_trained else 0,
            State.OPTIM: master if is_trained else 0,
        }
