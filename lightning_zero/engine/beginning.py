"""How an engine begins: its arguments are checked, compared between the ranks, and planned with.

Then its storage is opened, and its parameters are wrapped.

A rank whose arguments cannot be used takes part in the comparison, so that no rank waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.backends import queue_warnings
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.consistency import compare
from lightning_zero.comm.control import GlooControlPlane
from lightning_zero.construction.materialize import check_can_materialize, materialize
from lightning_zero.core.bucket import Bucket, BucketResources
from lightning_zero.core.recompute import find_checkpointed
from lightning_zero.core.unit import Unit
from lightning_zero.engine.consistency import (
    describe_config,
    describe_module,
    describe_optimizer,
    describe_software,
)
from lightning_zero.engine.optimizers import as_optimizers, check_and_probe
from lightning_zero.health.together import failing_together
from lightning_zero.health.world import has_world
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Budgets
from lightning_zero.layout.plan import Plan, check_has_parameters, make_plan, nvme_bytes
from lightning_zero.optim.blocks import state_blocks
from lightning_zero.optim.clone import parameters_of
from lightning_zero.optim.probe import ProbeResult
from lightning_zero.tensors.guarded import has_placement
from lightning_zero.tensors.lazy import values_reader
from lightning_zero.tensors.meta import clear_pending_values, pending_values
from lightning_zero.tensors.ties import alias_texts, check_memory
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size
from lightning_zero.tiers.storage import Storage
from lightning_zero.tiers.threads import set_step_threads

__all__ = [
    "Arguments",
    "EngineParts",
    "average_gradients",
    "held_error",
    "open_storage",
    "open_together",
    "plan_together",
    "wrap_parameters",
]


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine that the planner replaces by others, which move no data."""

    communicator: type[Communicator] = Communicator
    storage: type[Storage] = Storage
    probe: Callable[..., ProbeResult] = check_and_probe


@dataclass(frozen=True)
class Arguments:
    """Arguments of an engine that this rank has checked.

    Attributes:
        device: Device to compute on.
        probed: The optimizers, with their probe results.
        checkpointed_modules: Names of modules with activation checkpointing.
        warned: Warnings for the user.
        descriptions: What must be the same on every rank, as texts.
    """

    device: torch.device
    probed: list[tuple[Optimizer, ProbeResult]]
    checkpointed_modules: list[str]
    warned: list[str]
    descriptions: dict[str, dict[str, str]]


def open_together(
    module: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    config: ZeroConfig,
    *,
    device: torch.device | None,
    open_comm: Callable[..., Communicator],
    look: Callable[..., ProbeResult],
) -> tuple[Communicator, Arguments]:
    """Opens the groups of an engine if all ranks were given the same arguments. Collective.

    `look`: the probe of an optimizer.
    """
    group_size = config.group_size(local_world_size=local_world_size())
    given: Arguments | None = None
    failure: Exception | None = None
    try:
        given = _check(module, optimizers, config, device, look)
    except Exception as error:
        if not has_world():
            raise
        failure = error

    def check(control: GlooControlPlane) -> None:
        with failing_together("begin", gather=control.gather_objects):
            if failure is not None:
                raise failure
        assert given is not None
        group_description = {"number of ranks": str(group_size)}  # also for "node"
        compare(control, given.descriptions | {"sharding_group_size": group_description})

    comm = open_comm(
        torch.device("cpu") if given is None else given.device,
        group_size=group_size,
        separates_gathers=config.separates_gathers,
        check=check,
    )
    assert given is not None, "else there is a failure, which `check` has raised"
    for text in given.warned if comm.rank == 0 else ():
        warnings.warn(text, stacklevel=3)
    return comm, given


def _check(
    module: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    config: ZeroConfig,
    device: torch.device | None,
    look: Callable[..., ProbeResult],
) -> Arguments:
    """Checks the arguments of an engine. Local."""
    opts = as_optimizers(optimizers)
    check_memory(module)
    warned = alias_texts(module)
    device = _find_device(module, device)
    if opts and not isinstance(config.assume_elementwise, bool):
        classes = sorted({type(optimizer).__name__ for optimizer in opts})
        if unknown := sorted({*config.assume_elementwise} - {*classes}):
            warned.append(
                f"assume_elementwise names {', '.join(unknown)}, but the optimizers are of "
                f"{', '.join(classes)}; that has no effect."
            )
    warned += queue_warnings(device) if config.separates_gathers else []
    warned += set_step_threads(device) if config.offload_optimizer is not None else []
    check_can_materialize(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "expected a module with hooks, got a scripted or traced one; put it into an nn.Module "
            "and give that to the engine."
        )
    _check_can_be_held(parameters_by_name(module))
    look = partial(look, module=module, config=config, device=device)
    probed = [(optimizer, look(optimizer)) for optimizer in opts]
    names = {parameter: name for name, parameter in parameters_by_name(module).items()}
    descriptions = {"the installed versions": describe_software()} | describe_module(module, config)
    for number, (optimizer, found) in enumerate(probed):
        descriptions |= describe_optimizer(number, optimizer, found, names)
    descriptions["ZeroConfig"] = describe_config(config)
    checkpointed = find_checkpointed(module, config.checkpointed_modules)
    return Arguments(device, probed, checkpointed, warned, descriptions)


def average_gradients(module: nn.Module, comm: Communicator) -> None:
    """Averages gradients from before the engine, as DDP does with its first backward. Collective.

    A parameter without a gradient on this rank counts as zero if another rank has one. Gradients of
    frozen parameters stay as they are.
    """
    named = {n: p for n, p in parameters_by_name(module).items() if p.requires_grad}
    own = bytes(parameter.grad is not None for parameter in named.values())
    everyone = comm.control.gather_objects(own)
    has_any = map(any, zip(*everyone, strict=True))
    for (name, parameter), is_any in zip(named.items(), has_any, strict=True):
        if is_any:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dense = grad.detach().to_dense() if grad.is_sparse else grad.detach().clone()
            mean = comm.mean_(dense.contiguous(), f"the gradient of {name} from before the engine")
            parameter.grad = mean.to(parameter.device)  # the module is not on the device yet


def held_error(name: str) -> ValueError:
    """The error for a module of which another engine holds parameter `name`."""
    return ValueError(
        f"parameter {name} is held by another engine; one module trains under one strategy at a "
        "time: call close() on the other engine, or let its fit end, first. If the other engine "
        "could not be made, build a new module."
    )


def _find_device(module: nn.Module, device: torch.device | None) -> torch.device:
    """The device to compute on: the one asked for, or the one of all parameters."""
    devices: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        if has_placement(parameter):
            raise held_error(name)
        devices.setdefault(parameter.device, name)
    check_has_parameters(module)
    on_meta = devices.pop(torch.device("meta"), None)
    if device is None and not devices:
        raise ValueError(
            f"parameter {on_meta} is on the meta device, like all others; set the device to "
            "compute on: Engine(..., device=...)."
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


def _check_can_be_held(named: Mapping[str, nn.Parameter]) -> None:
    """Raises a ValueError for a parameter that cannot be part of a flat buffer."""
    for name, parameter in named.items():
        if parameter.layout is not torch.strided:
            kind = f"layout {parameter.layout}"
        elif parameter.is_floating_point() and parameter.element_size() == 1:
            kind = f"dtype {parameter.dtype}"
        else:
            continue
        raise ValueError(
            f"parameter {name} has {kind}, which flat buffers do not support; if it is not "
            "trained, make it a buffer: module.register_buffer(...). Else keep it dense, in at "
            "least 16 bits."
        )


def plan_together(
    module: nn.Module,
    config: ZeroConfig,
    comm: Communicator,
    probed: Sequence[tuple[Optimizer, ProbeResult]],
) -> Plan:
    """Makes the plan; offload "auto" uses the least free memory of any rank. Collective."""
    optimizer_of = {
        parameter: index
        for index, (optimizer, _) in enumerate(probed)
        for parameter in parameters_of(optimizer)
    }
    return make_plan(
        module,
        config,
        world_size=comm.mesh.num_shards,
        optimizer_of=optimizer_of,
        full_optimizers=[i for i, (_, found) in enumerate(probed) if not found.is_elementwise],
        state_blocks=state_blocks([optimizer for optimizer, _ in probed]),
        budgets=_measure_budgets(config, comm),
    )


def _measure_budgets(config: ZeroConfig, comm: Communicator) -> Budgets:
    """Memory that offload "auto" may use where the configuration sets none. Collective.

    The same on every rank.
    """
    if not any(offload and offload.device == "auto" for offload in config.offloads):
        return Budgets()
    cpu = available_memory_bytes() // (2 * local_world_size())
    free = torch.cuda.mem_get_info(comm.device)[0] // 2 if comm.device.type == "cuda" else 0
    return Budgets(*comm.control.min_ints([free, cpu]))


def open_storage(
    storage_class: type[Storage], config: ZeroConfig, plan: Plan, comm: Communicator
) -> Storage:
    """Opens the storage of shards; an OSError if the disk of any rank is too small. Collective."""
    param, optimizer = config.offloads
    with failing_together("allocate its shards", gather=comm.control.gather_objects):
        storage = storage_class(
            comm.device,
            rank=comm.rank,
            offload_param=param,
            offload_optimizer=optimizer,
            recorder=comm.recorder,
        )
        try:
            storage.check_free_space(*nvme_bytes(plan), num_ranks=local_world_size())
        except OSError:
            storage.close()
            raise
        return storage


def wrap_parameters(
    module: nn.Module, plan: Plan, shared: BucketResources
) -> tuple[list[Unit], list[Bucket]]:
    """Wraps the parameters, with their values, in units and buckets in layout order. Collective."""
    unsharded: set[Unit] = set()
    units = [Unit(unit, index, unsharded) for index, unit in enumerate(plan.units)]
    unit_of = [unit for unit in units for _ in plan.units[unit.index].buckets]
    built: dict[int, Bucket] = {}
    named = parameters_by_name(module)
    for index, filled in materialize(module, plan.buckets, shared.comm.device, shared.comm):
        bucket_plan, unit = plan.buckets[index], unit_of[index]
        parameters = [named[slot.name] for slot in bucket_plan.layout.slots]
        built[index] = Bucket(
            bucket_plan,
            parameters,
            shared,
            grad_dtype=plan.grad_dtype(bucket_plan),
            filled=filled,
            on_unsharded_change=unit.count_bucket if bucket_plan.stage.shards_params else None,
        )
        del filled  # it may be unsharded; the next one would need as much memory again
        awaited = {i: v for i, p in enumerate(parameters) if (v := pending_values(p)) is not None}
        if awaited:
            built[index].masters.load(values_reader(awaited))
    clear_pending_values(module)
    buckets = [built[index] for index in range(len(plan.buckets))]
    for unit, bucket in zip(unit_of, buckets, strict=True):
        unit.add(bucket)
    return units, buckets
