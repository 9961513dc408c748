"""How an engine is put together: the device, the plan, and the buckets that hold the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.alike import compare
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.world import failing_together, has_world
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.building import partial_of
from lightning_zero.core.gathering import Unit
from lightning_zero.core.materialize import check_can_materialize, materialize
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.engine.facts import config_facts, module_facts, optimizer_facts
from lightning_zero.engine.optimizers import as_optimizers, examine, parameters_of
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Budgets
from lightning_zero.layout.plan import BucketPlan, Plan, make_plan, nvme_bytes
from lightning_zero.layout.recompute import find_checkpointed
from lightning_zero.optim.trial import Findings
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.guarded import has_placement
from lightning_zero.tensors.lazy import values_reader
from lightning_zero.tensors.meta import awaited_values, forget_awaited
from lightning_zero.tiers import Storage
from lightning_zero.tiers.grad_offload import GradQueue
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = ["Assembly", "Beginning", "begin_together", "open_storage", "plan_together"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Beginning:
    """What an engine knows before anything is planned: the same on every rank, but for the device.

    Attributes:
        device: To compute on.
        examined: The optimizers with what they look at.
        checkpointed: Names of modules that run again in backward.
        comm: The engine's.
    """

    device: torch.device
    examined: Sequence[tuple[Optimizer, Findings]]
    checkpointed: Sequence[str]
    comm: Communicator


def begin_together(
    module: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    config: ZeroConfig,
    *,
    device: torch.device | None,
    open_comm: Callable[..., Communicator],
) -> Beginning:
    """Looks at what an engine was given, and opens its groups if all ranks were given the same.

    Collective: every rank, also where what it was given cannot be used, so that none waits for it.

    Args:
        module: As in `Engine`, as are the following.
        optimizers: Fresh ones or with state.
        config: Of the engine.
        device: To compute on, if that is decided.
        open_comm: `Communicator`, with what of its arguments does not depend on these.

    Raises:
        ValueError: Something cannot be used, or differs by rank. See `Engine`.
        TypeError: An optimizer that is none.
        RuntimeError: Another rank was given something that cannot be used.
    """
    group_size = config.group_size(local_world_size=local_world_size())
    examined: list[tuple[Optimizer, Findings]] = []
    checkpointed: list[str] = []
    facts: dict[str, dict[str, str]] = {}
    failure: Exception | None = None
    try:
        device = find_device(module, device)
        check_can_materialize(module)
        look = partial(examine, module=module, config=config, device=device)
        examined = [(optimizer, look(optimizer)) for optimizer in as_optimizers(optimizers)]
        checkpointed = find_checkpointed(module, config.runs_again)
        facts = module_facts(module, config)
        names = {parameter: name for name, parameter in parameters_by_name(module).items()}
        for number, (optimizer, found) in enumerate(examined):
            facts |= optimizer_facts(number, optimizer, found, names)
        facts["ZeroConfig"] = config_facts(config)
        facts["sharding_group_size"] = {"number of ranks": str(group_size)}  # also of "node"
    except Exception as error:
        if not has_world():
            raise
        failure = error
    comm = open_comm(
        device or _CPU,
        group_size=group_size,
        compare=partial(compare, facts=facts, failure=failure),
    )
    assert device is not None, "else there is a failure, which `compare` has raised"
    return Beginning(device, examined, checkpointed, comm)


def find_device(module: nn.Module, device: torch.device | None) -> torch.device:
    """The device to compute on: the one asked for, or the one of all parameters.

    Raises:
        ValueError: There is none, or more than one, or an engine has them already.
    """
    devices: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        if has_placement(parameter) and partial_of(parameter) is None:
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


def plan_together(
    module: nn.Module,
    config: ZeroConfig,
    comm: Communicator,
    examined: Sequence[tuple[Optimizer, Findings]],
) -> Plan:
    """The plan; offload "auto" uses the memory of the rank that has least. Collective.

    Args:
        module: To be held.
        config: Of the engine.
        comm: Of the engine.
        examined: Optimizers with what they look at.
    """
    optimizer_of = {
        parameter: index
        for index, (optimizer, _) in enumerate(examined)
        for parameter in parameters_of(optimizer)
    }
    _check_can_be_held(parameters_by_name(module))
    return make_plan(
        module,
        config,
        world_size=comm.mesh.num_shards,
        optimizer_of=optimizer_of,
        whole_tensors=[i for i, (_, found) in enumerate(examined) if not found.is_elementwise],
        budgets=_measure_budgets(config, comm),
    )


def _check_can_be_held(named: Mapping[str, nn.Parameter]) -> None:
    """Before parameters are planned for.

    Raises:
        ValueError: One cannot lie in a flat buffer with others.
    """
    for name, parameter in named.items():
        if parameter.layout is not torch.strided:
            kind = f"layout {parameter.layout}"
        elif parameter.is_floating_point() and parameter.element_size() == 1:
            kind = f"dtype {parameter.dtype}"
        else:
            continue
        raise ValueError(
            f"parameter {name} has {kind}, which has no place among parameters that are sent, cut "
            "and stepped in flat buffers; if it is not trained, make it a buffer: "
            "module.register_buffer(...). Else keep it dense, in at least 16 bits."
        )


def _measure_budgets(config: ZeroConfig, comm: Communicator) -> Budgets:
    """What "auto" may use where the configuration does not say; the same on every rank."""
    if not any(offload and offload.device == "auto" for offload in config.offloads):
        return Budgets()
    cpu = available_memory_bytes() // (2 * local_world_size())
    free = torch.cuda.mem_get_info(comm.device)[0] // 2 if comm.device.type == "cuda" else 0
    return Budgets(*comm.control.min_ints([free, cpu]))


def open_storage(config: ZeroConfig, plan: Plan, comm: Communicator) -> Storage:
    """Where shards rest, with room for those of `plan`. Collective.

    Raises:
        OSError: The disk of any rank has no room.
    """
    param, optimizer = config.offloads
    with failing_together("make room for its shards", comm.control.gather_objects):
        storage = Storage(
            comm.device,
            rank=comm.rank,
            offload_param=param,
            offload_optimizer=optimizer,
            recorder=comm.recorder,
        )
        try:
            storage.check_room(*nvme_bytes(plan), num_ranks=local_world_size())
        except OSError:
            storage.close()
            raise
        return storage


@dataclass(frozen=True)
class Assembly:
    """Makes the buckets of one engine.

    Attributes:
        module: Whose parameters they take over.
        plan: Of units and buckets.
        comm: Of the engine.
        storage: Where shards rest.
        worker: Steps beside the next forward.
        make_whole: Called with a bucket and a name when somebody looks at a parameter at rest.
    """

    module: nn.Module
    plan: Plan
    comm: Communicator
    storage: Storage
    worker: StepWorker
    make_whole: Callable[[Bucket, str], None]

    def buckets(self) -> list[Bucket]:
        """In layout order, with all values there are. Collective."""
        plans = self.plan.buckets
        queue = GradQueue(self.storage)
        built: dict[int, Bucket] = {}
        for index, filled in materialize(self.module, plans, self.comm.device, self.comm):
            built[index] = self._bucket(plans[index], queue, filled)
            del filled  # it may be whole, and the next one will be
        forget_awaited(self.module)
        return [built[index] for index in range(len(plans))]

    def _bucket(self, plan: BucketPlan, queue: GradQueue, filled: FlatBuffer | None) -> Bucket:
        named = parameters_by_name(self.module)
        parameters = [named[slot.name] for slot in plan.layout.slots]
        bucket = Bucket(
            plan,
            parameters,
            self.comm,
            queue,
            self.worker,
            grad_dtype=self.plan.grad_dtype(plan),
            make_whole=self.make_whole,
            filled=filled,
        )
        awaited = {i: v for i, p in enumerate(parameters) if (v := awaited_values(p)) is not None}
        if awaited:
            bucket.masters.load(values_reader(awaited))
        return bucket

    def units(self, buckets: Sequence[Bucket]) -> list[Unit]:
        """`buckets` by the modules that use them."""
        rest = iter(buckets)
        return [
            Unit(unit_plan, index, [next(rest) for _ in unit_plan.buckets])
            for index, unit_plan in enumerate(self.plan.units)
        ]
