"""The engine: a module, its optimizers, and who holds which part of their state.

Usable by itself in a hand-written loop:

    engine = Engine(module, optimizers=[optimizer], config=ZeroConfig(stage=3))
    loss = module(x)
    engine.backward(loss)
    engine.step()
    engine.zero_grad()
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.awaited import awaited_values, forget_awaited
from lightning_zero.bucket import Bucket
from lightning_zero.buffer import FlatBuffer
from lightning_zero.comm import Communicator
from lightning_zero.config import ZeroConfig
from lightning_zero.grad_home import Landing
from lightning_zero.guard import has_placement, placement_of
from lightning_zero.lockstep import Lockstep
from lightning_zero.materialize import check_can_materialize, materialize
from lightning_zero.memory import MemoryReport
from lightning_zero.norm import clip_by_norm, clip_by_value, grad_norms, total_norm
from lightning_zero.offload import Budgets, Tier
from lightning_zero.optim_state import join_optimizer_state, shard_initial_state
from lightning_zero.owned_state import missing_state_bytes
from lightning_zero.piece import piece_of
from lightning_zero.plan import BucketPlan, Plan, make_plan, nvme_bytes, parameters_by_name
from lightning_zero.probe import CannotShardError, Findings, StepKind, probe
from lightning_zero.schedule import Schedule
from lightning_zero.stage import State
from lightning_zero.step import OptimizerStep, check_whole
from lightning_zero.stored import StoredTensor, values_reader
from lightning_zero.tiers import Storage
from lightning_zero.tiers.budget import available_memory_bytes, local_world_size
from lightning_zero.unit import Unit
from lightning_zero.worker import StepWorker

__all__ = ["Engine"]


class Engine:
    """Shards the state of `module` and `optimizers` over all ranks of the default process group.

    Every rank must make it with the same module, and call its methods in the same order. Parameters
    keep their identity: the optimizers are kept as they are, and their `step()` may be called
    directly.

    Args:
        module: On the device where it computes, or on the meta device, to be initialised by its
            modules' `reset_parameters`. Rank 0's values are taken.
        optimizers: Over parameters of `module`; fresh ones or with state. More can be attached
            later.
        config: Stage and sizes; None: stage 3 with defaults.
        device: Where to compute; parameters move there bucket by bucket, so that the device never
            holds the whole model in stage 3. None: where they are.
        timeout: Of collectives; None: the backend's.

    Attributes:
        plan: Units and buckets.
        buckets: The buckets at run time, in layout order.
        schedule: Decides on gathers and reductions.
        lockstep: For loops in which ranks use the module a different number of times.
        recorder: Tells what goes on, one window at a time; off at first.

    Raises:
        ValueError: A module without parameters or on several devices; modules on the meta device
            that cannot initialise themselves; a module that another engine holds; an optimizer over
            foreign parameters, or one that cannot be sharded; groups that do not divide the world.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        config: ZeroConfig | None = None,
        *,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.module = module
        self.config = config or ZeroConfig()
        self.device = _check_devices(module, device)
        check_can_materialize(module)
        findings = [self._examine(optimizer) for optimizer in optimizers]
        self.comm = Communicator(
            self.device,
            timeout=timeout,
            group_size=self.config.group_size(local_world_size=local_world_size()),
        )
        self.recorder = self.comm.recorder
        optimizer_of = {
            parameter: index
            for index, optimizer in enumerate(optimizers)
            for parameter in _parameters_of(optimizer)
        }
        self.plan: Plan = make_plan(
            module,
            self.config,
            world_size=self.comm.mesh.num_shards,
            optimizer_of=optimizer_of,
            whole_tensors=[i for i, found in enumerate(findings) if not found.is_elementwise],
            budgets=self._measure_budgets(),
        )
        self.storage = self._open_storage()
        self._worker = StepWorker(self.device)
        self.buckets: list[Bucket] = []
        self._steps: list[OptimizerStep] = []
        self._warned: list[Optimizer] = []  # that their states do not go to files
        self._syncs = True
        self._is_closed = self._lacks_states = False
        try:
            units = self._build_units()
            self.schedule = Schedule(module, units, self.buckets, self.comm, self.config)
            self.lockstep = Lockstep(self.schedule, self.buckets, self.comm)
            for optimizer, found in zip(optimizers, findings, strict=True):
                self._attach(optimizer, found)
        except BaseException:
            self.comm.abort()  # the others may wait for this rank's next broadcast
            self._worker.close()
            self.storage.close()
            raise

    def _open_storage(self) -> Storage:
        param, optimizer = self.config.offloads
        with self.comm.failing_together():
            storage = Storage(
                self.device,
                rank=self.comm.rank,
                offload_param=param,
                offload_optimizer=optimizer,
                recorder=self.recorder,
            )
            try:
                storage.check_room(*nvme_bytes(self.plan), num_ranks=local_world_size())
            except OSError:
                storage.close()
                raise
            return storage

    def _measure_budgets(self) -> Budgets:
        """What "auto" may use where the configuration does not say; the same on every rank."""
        asked = [config for config in self.config.offloads if config and config.device == "auto"]
        if not asked:
            return Budgets()
        cpu = available_memory_bytes() // (2 * local_world_size())
        free = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else 0
        return Budgets(*self.comm.min_ints([free, cpu]))

    def _build_units(self) -> list[Unit]:
        plans = self.plan.buckets
        landing = Landing(self.storage)
        built: dict[int, Bucket] = {}
        for index, filled in materialize(self.module, plans, self.device, self.comm):
            built[index] = self._build_bucket(plans[index], landing, filled)
            del filled  # it may be whole, and the next one will be
        forget_awaited(self.module)
        self.buckets = [built[index] for index in range(len(plans))]
        rest = iter(self.buckets)
        return [
            Unit(unit_plan, index, [next(rest) for _ in unit_plan.buckets])
            for index, unit_plan in enumerate(self.plan.units)
        ]

    def _build_bucket(
        self, plan: BucketPlan, landing: Landing, filled: FlatBuffer | None
    ) -> Bucket:
        named = parameters_by_name(self.module)
        parameters = [named[slot.name] for slot in plan.layout.slots]
        bucket = Bucket(
            plan,
            parameters,
            self.comm,
            landing,
            self._worker,
            grad_dtype=self.plan.grad_dtype(plan),
            make_whole=self._make_whole,
            filled=filled,
        )
        awaited = {i: v for i, p in enumerate(parameters) if (v := awaited_values(p)) is not None}
        if awaited:
            bucket.load(values_reader(awaited))
        return bucket

    def _make_whole(self, bucket: Bucket, name: str) -> None:
        self.schedule.use_out_of_turn(bucket, name)

    # ---------------------------------------------------------------- optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The attached optimizers."""
        return [step.optimizer for step in self._steps]

    def attach(self, optimizer: Optimizer) -> None:
        """Makes `optimizer` step this rank's slices from now on.

        Raises:
            ValueError: It holds foreign parameters, or cannot be sharded, or needs whole tensors
                where the engine was made without it and has cut them.
        """
        found = self._examine(optimizer)
        check_whole(optimizer, found)
        self._attach(optimizer, found)

    def _attach(self, optimizer: Optimizer, found: Findings) -> None:
        kind = found.kind
        if kind is StepKind.AT_ONCE and self.config.overlap_step and self.comm.rank == 0:
            warnings.warn(
                f"overlap_step has no effect on {type(optimizer).__name__}: it can only step all "
                "parameters in one call.",
                stacklevel=2,
            )
        shard_initial_state(optimizer)
        members = set(_parameters_of(optimizer))
        for bucket in self.buckets:
            if bucket.plan.tiers.optim is Tier.NVME and not members.isdisjoint(bucket.parameters):
                self._keep_states_in_files(bucket, optimizer, kind)
        self._steps.append(
            OptimizerStep(
                optimizer,
                found,
                examine=self._examine,
                before=self.finish_reductions,
                order=self.schedule.step_order,
                storage=self.storage,
                worker=self._worker if self.config.overlap_step else None,
            )
        )

    def _keep_states_in_files(self, bucket: Bucket, optimizer: Optimizer, kind: StepKind) -> None:
        is_whole = bucket.plan.layout.holds_whole_tensors
        bucket.shards.keeps_states_in_files = kind is StepKind.BY_BUCKET and not is_whole
        if bucket.shards.keeps_states_in_files or self.comm.rank or optimizer in self._warned:
            return
        self._warned.append(optimizer)
        reason = "can only step all parameters in one call"
        if is_whole and kind is StepKind.BY_BUCKET:
            reason = "steps whole tensors"
        warnings.warn(
            f"{type(optimizer).__name__} {reason}: its states stay in CPU memory, not on NVMe, and "
            "masters are read for each step at once.",
            stacklevel=2,
        )

    def _examine(self, optimizer: Optimizer) -> Findings:
        own = set(self.module.parameters())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in own:
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not one of "
                        f"{type(self.module).__name__}; build the optimizer from the parameters of "
                        "the module that is trained."
                    )
        if self.config.assume_elementwise:
            return Findings(StepKind.AT_ONCE, is_elementwise=True)
        is_sharded = self.config.states.has_shard(State.OPTIM)
        try:
            found = probe(optimizer, self.device, torch.float32)
            if self.device.type != "cpu" and self.config.offload_optimizer is not None:
                found &= probe(optimizer, torch.device("cpu"), torch.float32)  # steps there, too
        except CannotShardError:
            if is_sharded:
                raise
            found = Findings(StepKind.AT_ONCE, is_elementwise=False)
        if not is_sharded and not found.is_elementwise:
            return Findings(StepKind.AT_ONCE, is_elementwise=False)  # stepped as ever
        return found

    # ---------------------------------------------------------------- the loop

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward(...)`, with gradients averaged over ranks at its end. Collective."""
        with self.backward_context():
            loss.backward(*args, **kwargs)

    def backward_context(self) -> AbstractContextManager[None]:
        """Around a backward that somebody else calls."""
        if self._syncs and len(self._steps) == 1:
            self._steps[0].read_ahead()
        return self.schedule.backward_context(reduces=self._syncs)

    def forward_context(self) -> AbstractContextManager[None]:
        """Around code that uses the module without calling it."""
        return self.schedule.step_context()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro-batches of a step but the last: leaves gradients local where the stage can.

        Stages 2 and 3 reduce every micro-batch, for they keep no whole gradients: to the mean over
        the group where `sharding_group_size` divides the ranks, else over all.
        """
        syncs, self._syncs = self._syncs, False
        self.schedule.is_accumulating = True
        try:
            yield
        finally:
            self._syncs = syncs
            self.schedule.is_accumulating = not syncs

    def finish_reductions(self) -> None:
        """Reduces what micro-batches under `no_sync` left local, or in the group. Collective."""
        self.schedule.reduce_local()

    def step(self) -> None:
        """Steps every attached optimizer. Collective."""
        for step in self._steps:
            step.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of all parameters."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Clips mean gradients to a total norm, as `torch.nn.utils.clip_grad_norm_`. Collective.

        Args:
            max_norm: Largest norm that is left as it is.
            norm_type: p of the p-norm; may be `math.inf`.
            parameters: Only those; None: all of the module.

        Returns:
            The total norm before clipping, 0-dim.
        """
        self.finish_reductions()
        chosen = None if parameters is None else set(parameters)
        return clip_by_norm(
            self.buckets, self.comm, float(max_norm), parameters=chosen, order=float(norm_type)
        )

    def clip_grad_value_(
        self, clip_value: float, *, parameters: Iterable[nn.Parameter] | None = None
    ) -> None:
        """Clamps every element of the mean gradients to [-clip_value, clip_value]. Collective."""
        self.finish_reductions()
        chosen = None if parameters is None else set(parameters)
        clip_by_value(self.buckets, float(clip_value), parameters=chosen)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Total norm of the mean gradients, 0-dim. Collective."""
        self.finish_reductions()
        return total_norm(self.buckets, self.comm, order=float(norm_type))

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Norm of the mean gradients of each bucket, 0-dim, by its name. Collective.

        Buckets without a gradient are left out.
        """
        self.finish_reductions()
        return grad_norms(self.buckets, self.comm, order=float(norm_type))

    # ---------------------------------------------------------------- looks from outside

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds at this moment, counted from the engine's own buffers."""
        self._worker.drain()
        alone = dict.fromkeys(State, 0)
        used = {Tier.DEVICE}
        for plan in self.plan.buckets:
            used |= {plan.tiers.param, plan.tiers.optim, plan.tiers.grad}
        held = {tier: dict.fromkeys(State, 0) for tier in Tier if tier in used}
        for bucket in self.buckets:
            for (tier, state), nbytes in bucket.allocated_bytes().items():
                held[tier][state] += nbytes
            for state, nbytes in bucket.data_parallel_bytes().items():
                alone[state] += nbytes
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                placement = placement_of(parameter)
                is_owned = placement.bucket.shards.holds_whole_tensors
                for value in tree_leaves(state):
                    if not isinstance(value, Tensor):
                        continue
                    if not isinstance(value, StoredTensor):  # those are counted by their bucket
                        tier = placement.bucket.plan.tiers.optim
                        tier = Tier.CPU if tier is Tier.NVME else tier
                        of_tier = held.setdefault(tier, dict.fromkeys(State, 0))
                        of_tier[State.OPTIM] += value.untyped_storage().nbytes()
                    is_slice = value.dim() == 1 or value.shape == placement.shape
                    is_slice &= not is_owned
                    numel = placement.shape.numel() if is_slice else value.numel()
                    alone[State.OPTIM] += numel * value.element_size()
            alone[State.OPTIM] += missing_state_bytes(optimizer, self.buckets)
        tiers = {tier.value: states for tier, states in held.items()}
        return MemoryReport(
            self.comm.rank,
            self.comm.mesh.num_shards,
            tiers,
            alone,
            buffer_bytes=self.storage.buffer_bytes,
            nvme_read_bytes=self.storage.bytes_read,
            nvme_written_bytes=self.storage.bytes_written,
        )

    # ---------------------------------------------------------------- failures and the end

    def reset(self) -> None:
        """Back to rest after an exception; gradients are dropped. Local."""
        self._worker.drain()
        for step in self._steps:
            step.reset()
        self.schedule.reset()

    def rally(self, deadline: timedelta) -> bool:
        """After an exception: brings the ranks together again, at rest and with fresh groups.

        The other ranks learn of the exception at their next agreement, fail too and come here.

        Returns:
            Whether all of them came before the deadline; if not, no collective is possible any
            more.
        """
        self._worker.drain()  # it waits for no rank, and needs the groups that go
        for step in self._steps:
            step.reset()
        self.lockstep.is_in_loop = False
        if not self.comm.rally(deadline):
            return False
        self.schedule.recover()
        return True

    def _failure_of_the_last_step(self) -> RuntimeError | None:
        """Why a step that nobody has waited for yet has failed."""
        self._worker.drain()
        failure: RuntimeError | None = None
        for bucket in self.buckets:
            try:
                bucket.wait_for_step()
            except RuntimeError as error:
                failure = failure or error
        return failure

    def fits_in_memory(self) -> bool:
        """Whether what rests on NVMe would fill at most half of the CPU memory. Collective."""
        nbytes = sum(
            held
            for bucket in self.buckets
            for (tier, _), held in bucket.allocated_bytes().items()
            if tier is Tier.NVME
        )
        room = available_memory_bytes() // (2 * local_world_size())
        return bool(self.comm.min_ints([room - nbytes])[0] >= 0)

    def check_has_states(self) -> None:
        """Whether a closed engine can still tell the optimizer states.

        Raises:
            RuntimeError: They rested on NVMe and were too large to keep.
        """
        if self._lacks_states:
            raise RuntimeError(
                "the optimizer states rested on NVMe, were too large for memory and went with "
                "their files when training ended; save a checkpoint before fit returns, as "
                "ModelCheckpoint does, or save the weights only."
            )

    def abandon(self) -> None:
        """Gives up after a failed rally: no hooks, no groups; parameters say that they are lost."""
        self._is_closed = True
        self._worker.drain()
        for step in self._steps:
            step.detach()
        self.schedule.detach()
        self.schedule.abandon()
        self._worker.close()
        self.storage.close()
        self.comm.close()

    def close(
        self, device: torch.device | None = None, *, keeps_optimizer_shards: bool = False
    ) -> None:
        """Gives everything back: whole tensors, no hooks. Collective. Closing twice is harmless.

        Args:
            device: Where parameters and optimizer states are to be; None: where they are.
            keeps_optimizer_shards: Leave each rank its part of the optimizer states, from which
                `optimizer_state_dict` can still build the whole. Call `comm.close()` when done.
                States on NVMe that would fill more than half of the memory are dropped instead
                (`check_has_states` then raises), for their files go.

        Raises:
            RuntimeError: The last step failed beside the end of training; all is given back then.
        """
        if self._is_closed:
            return
        self._is_closed = True
        device = device or self.device
        failure = self._failure_of_the_last_step()
        for step in self._steps:
            step.detach()
            step.reset()
        self.schedule.detach()
        self.schedule.reset()
        self._lacks_states = keeps_optimizer_shards and not self.fits_in_memory()
        for optimizer in self.optimizers:
            if self._lacks_states:
                optimizer.state.clear()
            elif keeps_optimizer_shards:
                _move_state(optimizer, device)
            else:
                join_optimizer_state(optimizer, self.buckets, device)
        for bucket in self.buckets:
            bucket.give_back(device)
        self._worker.close()
        self.storage.close()
        if not keeps_optimizer_shards:
            self.comm.close()
        if failure is not None:
            raise failure


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, StoredTensor):
                state[key] = value.read().to(device)  # its file goes
            elif isinstance(value, Tensor):
                state[key] = value.to(device)


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_devices(module: nn.Module, device: torch.device | None) -> torch.device:
    """The device to compute on: the one asked for, or the one of all parameters.

    Raises:
        ValueError: There is none, or more than one, or an engine has them already.
    """
    devices: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        if has_placement(parameter) and piece_of(parameter) is None:
            raise ValueError(
                f"parameter {name} is held by another engine; one module trains under one strategy "
                "at a time: call close() on the other engine, or let its fit end, first."
            )
        devices.setdefault(parameter.device, name)
    if not devices:
        raise ValueError(
            f"{type(module).__name__} has no parameters, so there is nothing to shard; build its "
            "layers in __init__, setup() or configure_model()."
        )
    on_meta = devices.pop(torch.device("meta"), None)
    if device is None and not devices:
        raise ValueError(
            f"parameter {on_meta} is on the meta device, like all others; say where to compute: "
            "Engine(..., device=...)."
        )
    if device is None and len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"all parameters must be on one device, got {where}; call module.to(device)."
        )
    device = device or next(iter(devices))
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
