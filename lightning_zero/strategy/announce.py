"""One line at set-up: the stage, the ranks, and the memory of the model states on each rank."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zero.engine.counting import full_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.engine.expected import expected_bytes
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import byte_unit
from lightning_zero.layout.stage import State
from lightning_zero.optim.state_sizes import OptimizerStates, StateSpec

__all__ = ["announce"]

_TIER_NAMES = {
    Tier.DEVICE: "on its device",
    Tier.CPU: "in CPU memory",
    Tier.NVME: "in files",
}


def announce(engine: Engine, *, num_micro_batches: int = 1) -> None:
    """Logs, on rank 0, the stage and the memory of the rank that has most. Local.

    The memory is computed from the engine's plan, because optimizers make their states in the first
    step. States that one step of an optimizer on a small tensor does not show are not counted.

    Args:
        engine: Engine that has just been made.
        num_micro_batches: Number of micro-batches in an optimizer step.
    """
    if engine.comm.rank == 0:
        rank_zero_info(_line(engine, num_micro_batches))


def _line(engine: Engine, num_micro_batches: int) -> str:
    optimizers = list(engine.optimizers)
    ranks = expected_bytes(
        engine.plan,
        parameters_by_name(engine.module),
        optimizers,
        has_device_memory=engine.device.type != "cpu",
        accumulates=num_micro_batches > 1,
        fallback=StateSpec(),
    )
    states = tuple(State) if optimizers else (State.PARAM,)
    by_tier = ranks.by_rank[ranks.largest]
    held = {tier: sum(by_state[state] for state in states) for tier, by_state in by_tier.items()}
    held = {tier: nbytes for tier, nbytes in held.items() if nbytes}
    with_ddp = _bytes_with_ddp(engine)
    unit, size = byte_unit(max((with_ddp, *held.values())))
    amounts = {tier: f"{nbytes / size:.1f}" for tier, nbytes in held.items()}
    parts = [f"{text} {_TIER_NAMES[tier]}" for tier, text in amounts.items() if text != "0.0"]
    places = f" ({', '.join(parts)})" if set(held) != {Tier.DEVICE} else ""
    most = "at most " if len(ranks.by_rank) > 1 else ""
    kind = "model states" if optimizers else "parameters"
    saved = f" instead of {with_ddp / size:.1f} with DDP" if engine.config.states.shards else ""
    return (
        f"zero{engine.config.stage}: {_pieces(engine)}, {_ranks(engine)}, {most}"
        f"{sum(held.values()) / size:.1f} {unit} of {kind} per rank{places}{saved}"
    )


def _bytes_with_ddp(engine: Engine) -> int:
    """Bytes of model states that every rank would hold with DistributedDataParallel.

    With gradients; without optimizers, parameters alone.
    """
    optimizers = list(engine.optimizers)
    states, nbytes = OptimizerStates(optimizers, StateSpec()), 0
    for bucket in engine.buckets:
        nbytes += full_bytes(bucket) * (2 if bucket.plan.is_trainable and optimizers else 1)
        slots = zip(bucket.plan.layout.slots, bucket.parameters, bucket.orig_dtypes, strict=True)
        for slot, parameter, dtype in slots:
            nbytes += states.of(parameter, dtype, slot.shape).full_bytes(slot.shape)
    return nbytes


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
