"""The optimizers of one engine: probed, attached to its buckets, and unwrapped at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.consistency import compare
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.coordinator import StepCoordinator
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.engine.consistency import describe_optimizer
from lightning_zero.engine.counting import cpu_param_bytes, full_bytes
from lightning_zero.health.together import failing_together
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State
from lightning_zero.optim.clone import parameters_of
from lightning_zero.optim.known import known_elementwise
from lightning_zero.optim.probe import (
    CannotShardError,
    CannotStepError,
    ProbeResult,
    StepKind,
    is_assumed_elementwise,
    probe,
    probe_assumed,
)
from lightning_zero.optim.state import shard_initial_state, unshard_optimizer_state
from lightning_zero.optim.state_view import raw_states
from lightning_zero.optim.step import (
    OptimizerStep,
    check_blocks,
    check_full_tensors,
    check_own_methods,
)
from lightning_zero.tensors.composite import map_tensors, plain_tensors
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size
from lightning_zero.tiers.storage import Storage

__all__ = ["AttachedOptimizers", "as_optimizers", "check_and_probe"]

_HOOKS = "_optimizer_step_pre_hooks"  # an attribute that torch's constructor makes


def as_optimizers(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Returns the user's optimizer or optimizers as a list.

    Raises:
        TypeError: It is something else.
        ValueError: `step` of an optimizer has been replaced; see `check_own_methods`.
    """
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizers must be a torch.optim.Optimizer or a list of them, got "
                f"{type(optimizer).__name__}; pass Engine(module, optimizers=[optimizer])."
            )
        # A wrapper may not call torch's constructor, which makes both.
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, _HOOKS)):
            raise TypeError(
                f"{type(optimizer).__name__} has no param_groups, or no hooks of torch's "
                "constructor, so it cannot step shards of parameters; if it wraps another "
                "optimizer, pass that one, else call super().__init__(params, defaults) in its "
                "constructor."
            )
        check_own_methods(optimizer)
    return optimizers


def check_and_probe(
    optimizer: Optimizer, *, module: nn.Module, config: ZeroConfig, device: torch.device
) -> ProbeResult:
    """Checks the parameters of `optimizer` and probes how it can step the shards of `module`.

    Raises:
        ValueError: The optimizer holds parameters of another module, or cannot be sharded.
    """
    own = set(module.parameters())
    for parameter in parameters_of(optimizer):
        if parameter not in own:
            raise ValueError(
                f"{type(optimizer).__name__} holds a parameter of shape "
                f"{tuple(parameter.shape)} that is not one of "
                f"{type(module).__name__}; build the optimizer from the parameters of "
                "the module that is trained."
            )
    if is_assumed_elementwise(optimizer, config):
        return probe_assumed(optimizer, config, device)
    is_sharded = config.states.has_shard(State.OPTIM)
    unsharded = ProbeResult(StepKind.AT_ONCE, is_elementwise=False)
    try:
        found = probe(optimizer, device)
        if device.type != "cpu" and config.offload_optimizer is not None:
            found &= probe(optimizer, torch.device("cpu"))  # it steps there, too
    except CannotStepError:
        raise
    except CannotShardError:
        if is_sharded:
            raise
        return unsharded
    return found if is_sharded or found.is_elementwise else unsharded


class AttachedOptimizers(Sequence[Optimizer]):
    """Optimizers that step this rank's shards, in the order in which they were attached.

    Args:
        buckets: Buckets of the engine, in layout order.
        coordinator: Coordinator of the engine, whose reductions a step waits for.
        storage: Storage of the engine's shards.
        comm: Communicator that compares optimizers between ranks.
        worker: Thread that steps buckets during the next forward. None: no step is overlapped.
        check_and_probe: Function that checks an optimizer and probes it.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        coordinator: StepCoordinator,
        storage: Storage,
        comm: Communicator,
        *,
        worker: StepWorker | None,
        check_and_probe: Callable[[Optimizer], ProbeResult],
    ) -> None:
        self._buckets = buckets
        self._coordinator = coordinator
        self._storage = storage
        self._comm = comm
        self._worker = worker
        self._check_and_probe = check_and_probe
        self._steps: list[OptimizerStep] = []
        self._warned: list[Optimizer] = []  # whose states stay in memory instead of on NVMe
        self._lacks_states = False

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Any) -> Any:
        return [step.optimizer for step in self._steps][index]

    # ---------------------------------------------------------------- attaching

    def attach(self, optimizer: Optimizer) -> None:
        """Checks, compares and adds an optimizer: see `Engine.attach`. Collective."""
        with failing_together("begin", gather=self._comm.control.gather_objects):
            check_own_methods(optimizer)
            found = self._check_and_probe(optimizer)
            check_full_tensors(optimizer, found)
            check_blocks(optimizer)
            names = {
                parameter: slot.name
                for bucket in self._buckets
                for parameter, slot in zip(bucket.parameters, bucket.plan.layout.slots, strict=True)
            }
            description = describe_optimizer(len(self), optimizer, found, names)
        compare(self._comm.control, description)
        self.add(optimizer, found)

    def add(self, optimizer: Optimizer, found: ProbeResult) -> None:
        """Makes `optimizer`, with probe result `found`, step this rank's shards from now on."""
        kind = found.kind
        members = set(parameters_of(optimizer))
        if self._comm.rank == 0 and not found.is_elementwise:
            own = [b for b in self._buckets if not members.isdisjoint(b.parameters)]
            _explain_owners(optimizer, own)
        why_not = ""
        if kind is not StepKind.BY_BUCKET:
            why_not = "it can only step all parameters in one call"
        elif any(
            bucket.params.are_sharded and bucket.shards.full_tensors is not None
            for bucket in self._buckets
            if not members.isdisjoint(bucket.parameters)
        ):
            why_not = "it steps full tensors, which ranks send each other before the next forward"
        if why_not and self._worker is not None and self._comm.rank == 0:
            name = type(optimizer).__name__
            warnings.warn(f"overlap_step has no effect on {name}: {why_not}.", stacklevel=2)
        shard_initial_state(optimizer)
        for bucket in self._buckets:
            if bucket.plan.tiers.optim is Tier.NVME and not members.isdisjoint(bucket.parameters):
                self._keep_states_in_files(bucket, optimizer, kind)
        self._steps.append(
            OptimizerStep(
                optimizer,
                found,
                probe=self._check_and_probe,
                coordinator=self._coordinator,
                storage=self._storage,
                worker=self._worker,
            )
        )

    def _keep_states_in_files(self, bucket: Bucket, optimizer: Optimizer, kind: StepKind) -> None:
        has_tensor_owners = bucket.plan.layout.has_tensor_owners
        is_kept = kind is StepKind.BY_BUCKET and not has_tensor_owners
        bucket.shards.states.keep_in_files(is_kept)
        if is_kept or self._comm.rank or optimizer in self._warned:
            return
        self._warned.append(optimizer)
        reason = "can only step all parameters in one call"
        if has_tensor_owners and kind is StepKind.BY_BUCKET:
            reason = "steps full tensors"
        warnings.warn(
            f"{type(optimizer).__name__} {reason}: its states stay in CPU memory instead of on "
            "NVMe, and each step reads all main parameters at once.",
            stacklevel=2,
        )

    # ---------------------------------------------------------------- a step

    def read_ahead(self) -> None:
        """Begins to read states from NVMe, before the last backward of a step."""
        if len(self._steps) == 1:
            self._steps[0].read_ahead()

    def step(self) -> None:
        """Steps all optimizers. Collective."""
        for optimizer in self:
            optimizer.step()

    # ---------------------------------------------------------------- closing

    def find_failure(self) -> RuntimeError | None:
        """Returns the error of an overlapped step, if one failed. The worker must be drained."""
        failure: RuntimeError | None = None
        for bucket in self._buckets:
            try:
                bucket.wait_for_step()
            except RuntimeError as error:
                failure = failure or error
        return failure

    def detach(self) -> None:
        """Restores the optimizers' own `step`."""
        for step in self._steps:
            step.detach()

    def unwrap(self, device: torch.device | None, *, keep_shards: bool) -> None:
        """Leaves the optimizers their states on `device`. Collective.

        Args:
            device: Device for the states. None: drops them.
            keep_shards: Keep this rank's shards only. States that would fill more than half of the
                CPU memory, with the full module, are dropped instead.
        """
        self._lacks_states = device is None or (keep_shards and not self._fit_in_memory(device))
        for optimizer in self:
            if self._lacks_states or device is None:
                raw_states(optimizer).clear()
            elif keep_shards:
                states = raw_states(optimizer)
                for parameter, state in states.items():
                    states[parameter] = map_tensors(partial(_read_to, device), state)
            else:
                unshard_optimizer_state(optimizer, self._buckets, device)

    def _fit_in_memory(self, device: torch.device) -> bool:
        """Whether states on NVMe and on a GPU fill at most half of the CPU memory. Collective.

        Counts the full module, too, which is unwrapped on `device` next.
        """
        nbytes = sum(
            store.nbytes
            for bucket in self._buckets
            for store in bucket.shards.states.stores.values()
        )
        states = [list(raw_states(optimizer).values()) for optimizer in self]
        on_gpu = (tensor for tensor in plain_tensors(states) if tensor.is_cuda)
        nbytes += sum(t.untyped_storage().nbytes() for t in on_gpu)
        if nbytes and device.type == "cpu":
            nbytes += sum(full_bytes(bucket) - cpu_param_bytes(bucket) for bucket in self._buckets)
        budget = available_memory_bytes() // (2 * local_world_size())
        return bool(self._comm.control.min_ints([budget - nbytes])[0] >= 0)

    def check_has_states(self) -> None:
        """Raises a RuntimeError after `unwrap` if states were too large to keep."""
        if self._lacks_states:
            raise RuntimeError(
                "the optimizer states were dropped when training ended: they were stored on NVMe "
                "or a GPU and did not fit into CPU memory with the module; save a checkpoint "
                "before fit returns, as ModelCheckpoint does, or save the weights only."
            )


def _explain_owners(optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
    """One line on why an optimizer of a class that is not known steps full tensors."""
    is_divided = any(bucket.shards.full_tensors is not None for bucket in buckets)
    if is_divided and known_elementwise(type(optimizer)) is None:
        name = type(optimizer).__name__
        warnings.warn(
            f"{name} is not known to be elementwise, so ranks exchange full tensors to step them, "
            "which is exact. If each element depends on itself alone, assume_elementwise="
            f'["{name}"] saves this traffic.',
            stacklevel=2,
        )


def _read_to(device: torch.device, value: Tensor) -> Tensor:
    tensor = value.read() if isinstance(value, LazyTensor) else value  # reading deletes the file
    return tensor.to(device)
