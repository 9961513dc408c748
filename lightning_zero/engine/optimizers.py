"""The optimizers of one engine: examined, attached to its buckets, and given back at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.consistency import ComparedFields, compare
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.reducer import Reducer
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.engine.consistency import describe_optimizer
from lightning_zero.engine.counting import cpu_param_bytes, full_bytes
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.stage import State
from lightning_zero.optim.clone import parameters_of
from lightning_zero.optim.probe import CannotShardError, ProbeResult, StepKind, probe
from lightning_zero.optim.state import shard_initial_state, unshard_optimizer_state
from lightning_zero.optim.state_view import raw_states
from lightning_zero.optim.step import OptimizerStep, check_full_tensors
from lightning_zero.tensors.composite import map_tensors, plain_tensors
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size
from lightning_zero.tiers.storage import Storage

__all__ = ["AttachedOptimizers", "as_optimizers", "check_and_probe"]


def as_optimizers(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """What a user gave as optimizers, one or several; a TypeError for anything else."""
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizers must be a torch.optim.Optimizer or a list of them, got "
                f"{type(optimizer).__name__}; pass Engine(module, optimizers=[optimizer])."
            )
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{type(optimizer).__name__} has no param_groups, so it cannot be stepped on parts "
                "of parameters; give the optimizer that it wraps, if it does."
            )
    return optimizers


def check_and_probe(
    optimizer: Optimizer, *, module: nn.Module, config: ZeroConfig, device: torch.device
) -> ProbeResult:
    """Finds out how `optimizer` can step the shards of `module`.

    Raises:
        ValueError: It holds foreign parameters, or cannot be sharded.
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
    if config.assume_elementwise:
        return ProbeResult(StepKind.AT_ONCE, is_elementwise=True)
    is_sharded = config.states.has_shard(State.OPTIM)
    as_ever = ProbeResult(StepKind.AT_ONCE, is_elementwise=False)
    try:
        found = probe(optimizer, device)
        if device.type != "cpu" and config.offload_optimizer is not None:
            found &= probe(optimizer, torch.device("cpu"))  # steps there, too
    except CannotShardError:
        if is_sharded:
            raise
        return as_ever
    return found if is_sharded or found.is_elementwise else as_ever


class AttachedOptimizers(Sequence[Optimizer]):
    """Those that step this rank's slices, in the order in which they were attached.

    Args:
        buckets: Of the engine, in layout order.
        reducer: Knows what a step must wait for, and what is needed first after it.
        storage: Of the engine, as is the following.
        comm: Compares optimizers between ranks.
        worker: Steps beside the next forward; None: nothing does.
        examine: What an optimizer looks at, and whether it may be attached.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        reducer: Reducer,
        storage: Storage,
        comm: Communicator,
        *,
        worker: StepWorker | None,
        examine: Callable[[Optimizer], ProbeResult],
    ) -> None:
        self._buckets = buckets
        self._reducer = reducer
        self._storage = storage
        self._comm = comm
        self._worker = worker
        self._examine = examine
        self._steps: list[OptimizerStep] = []
        self._warned: list[Optimizer] = []  # that their states do not go to files
        self._lacks_states = False

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Any) -> Any:
        return [step.optimizer for step in self._steps][index]

    # ---------------------------------------------------------------- the beginning

    def attach(self, optimizer: Optimizer) -> None:
        """As `take`, for one that the engine was made without: see `Engine.attach`. Collective."""
        found: ProbeResult | None = None
        facts: ComparedFields = {}
        failure: Exception | None = None
        try:
            found = self._examine(optimizer)
            check_full_tensors(optimizer, found)
            names = {
                parameter: slot.name
                for bucket in self._buckets
                for parameter, slot in zip(bucket.parameters, bucket.plan.layout.slots, strict=True)
            }
            facts = describe_optimizer(len(self), optimizer, found, names)
        except Exception as error:
            failure = error
        compare(self._comm.control, facts, failure)
        assert found is not None, "else there is a failure, which `compare` has raised"
        self.take(optimizer, found)

    def take(self, optimizer: Optimizer, found: ProbeResult) -> None:
        """Makes `optimizer`, of which `found` is known, step this rank's slices from now on."""
        kind = found.kind
        is_overlapped = kind is StepKind.BY_BUCKET or self._worker is None
        if not is_overlapped and self._comm.rank == 0:
            warnings.warn(
                f"overlap_step has no effect on {type(optimizer).__name__}: it can only step all "
                "parameters in one call.",
                stacklevel=2,
            )
        shard_initial_state(optimizer)
        members = set(parameters_of(optimizer))
        for bucket in self._buckets:
            if bucket.plan.tiers.optim is Tier.NVME and not members.isdisjoint(bucket.parameters):
                self._keep_states_in_files(bucket, optimizer, kind)
        self._steps.append(
            OptimizerStep(
                optimizer,
                found,
                probe=self._examine,
                reducer=self._reducer,
                storage=self._storage,
                worker=self._worker,
            )
        )

    def _keep_states_in_files(self, bucket: Bucket, optimizer: Optimizer, kind: StepKind) -> None:
        is_whole = bucket.plan.layout.has_tensor_owners
        bucket.shards.keeps_states_in_files = kind is StepKind.BY_BUCKET and not is_whole
        if bucket.shards.keeps_states_in_files or self._comm.rank or optimizer in self._warned:
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

    # ---------------------------------------------------------------- a step

    def read_ahead(self) -> None:
        """Before the last backward of a step: begins to read states that rest in files."""
        if len(self._steps) == 1:
            self._steps[0].read_ahead()

    def step(self) -> None:
        """Steps all of them. Collective."""
        for optimizer in self:
            optimizer.step()

    def reset(self) -> None:
        """After an exception, which may have come in the middle of a step."""
        for step in self._steps:
            step.reset()

    # ---------------------------------------------------------------- the end

    def find_failure(self) -> RuntimeError | None:
        """Why a step that nobody has waited for yet has failed. The worker must be drained."""
        failure: RuntimeError | None = None
        for bucket in self._buckets:
            try:
                bucket.wait_for_step()
            except RuntimeError as error:
                failure = failure or error
        return failure

    def detach(self) -> None:
        """The optimizers step by themselves again."""
        for step in self._steps:
            step.detach()

    def unwrap(self, device: torch.device | None, *, keep_shards: bool) -> None:
        """Leaves the optimizers states on `device`. Collective.

        Args:
            device: Where they are to be; None: they are dropped.
            keep_shards: This rank's part only. What would fill more than half of the memory,
                with the whole module, is dropped instead.
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

        With the whole module, which comes to `device` next.
        """
        nbytes = sum(
            store.nbytes
            for bucket in self._buckets
            for store in bucket.shards.state_stores.values()
        )
        states = [list(raw_states(optimizer).values()) for optimizer in self]
        on_gpu = (tensor for tensor in plain_tensors(states) if tensor.is_cuda)
        nbytes += sum(t.untyped_storage().nbytes() for t in on_gpu)
        if nbytes and device.type == "cpu":
            nbytes += sum(full_bytes(bucket) - cpu_param_bytes(bucket) for bucket in self._buckets)
        room = available_memory_bytes() // (2 * local_world_size())
        return bool(self._comm.control.min_ints([room - nbytes])[0] >= 0)

    def check_has_states(self) -> None:
        """After `unwrap`: a RuntimeError if states were too large to keep."""
        if self._lacks_states:
            raise RuntimeError(
                "the optimizer states rested on NVMe or a GPU, were too large for CPU memory "
                "beside the module, and were dropped when training ended; save a checkpoint before "
                "fit returns, as ModelCheckpoint does, or save the weights only."
            )


def _read_to(device: torch.device, value: Tensor) -> Tensor:
    return (value.read() if isinstance(value, LazyTensor) else value).to(device)  # its file goes
