"""One line at set-up: the stage, the ranks, and the memory of the model states on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import byte_unit
from lightning_zero.layout.stage import State
from lightning_zero.planner import MemoryEstimator, data_parallel_bytes
from lightning_zero.planner.optimizers import StateSpec

__all__ = ["announce", "states_with_ddp"]

_TIER_NAMES = {
    Tier.DEVICE: "on its device",
    Tier.CPU: "in CPU memory",
    Tier.NVME: "in files",
}


def states_with_ddp(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Bytes that every rank would hold with DistributedDataParallel. Local; before the engine.

    Model states, with gradients; without optimizers, parameters alone.
    """
    named = parameters_by_name(module)
    if optimizers:
        return data_parallel_bytes(named, optimizers)
    return sum(parameter.numel() * parameter.dtype.itemsize for parameter in named.values())


def announce(engine: Engine, with_ddp: int, *, num_micro_batches: int = 1) -> None:
    """Logs, on rank 0, the stage and the memory of the rank that has most. Local.

    The memory is computed, because optimizers make their states in the first step. States that a
    probe of the optimizer does not show are not counted.

    Args:
        engine: Engine that has just been made.
        with_ddp: Bytes from `states_with_ddp`.
        num_micro_batches: Number of micro-batches in an optimizer step.
    """
    if engine.comm.rank == 0:
        rank_zero_info(_line(engine, with_ddp, num_micro_batches))


def _line(engine: Engine, with_ddp: int, num_micro_batches: int) -> str:
    config, plan = engine.config, engine.plan
    optimizers = list(engine.optimizers)
    estimator = MemoryEstimator(
        plan,
        engine.module,
        optimizers,
        offloads=config.offloads,
        has_device_memory=engine.device.type != "cpu",
        accumulates=num_micro_batches > 1,
        fallback=StateSpec(),
    )
    ranks = estimator.ranks()
    states = tuple(State) if optimizers else (State.PARAM,)
    by_tier = ranks.by_rank[ranks.largest].tiers
    held = {tier: sum(by_state[state] for state in states) for tier, by_state in by_tier.items()}
    held = {tier: nbytes for tier, nbytes in held.items() if nbytes}
    unit, size = byte_unit(max((with_ddp, *held.values())))
    amounts = {tier: f"{nbytes / size:.1f}" for tier, nbytes in held.items()}
    parts = [f"{text} {_TIER_NAMES[tier]}" for tier, text in amounts.items() if text != "0.0"]
    places = f" ({', '.join(parts)})" if set(held) != {Tier.DEVICE} else ""
    most = "at most " if len(ranks.by_rank) > 1 else ""
    kind = "model states" if optimizers else "parameters"
    saved = f" instead of {with_ddp / size:.1f} with DDP" if config.states.shards else ""
    return (
        f"zero{config.stage}: {_pieces(engine)}, {_ranks(engine)}, {most}"
        f"{sum(held.values()) / size:.1f} {unit} of {kind} per rank{places}{saved}"
    )


def _pieces(engine: Engine) -> str:
    """Units where parameters are sharded; otherwise there is one unit, and buckets count."""
    if engine.config.states.shards_params:
        return _count(len(engine.plan.units), "unit")
    return _count(len(engine.buckets), "bucket")


def _ranks(engine: Engine) -> str:
    mesh = engine.comm.mesh
    text = _count(mesh.world_size, "rank")
    return text if mesh.num_replicas == 1 else f"{text} in groups of {mesh.num_shards}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
