"""The numbers of one recorded step: their keys, their values on a rank, and those over all ranks.

Keys follow from the plan, so they are the same on every rank and in every step. Their last part has
the unit: `_gib` (1024^3 bytes), `_s`, `_gib_per_s`; what has none is a count or a rank.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.mesh import Mesh
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import Plan
from lightning_zero.layout.stage import State
from lightning_zero.record.spans import Kind, Recording

__all__ = [
    "GIB",
    "SKEW",
    "Metric",
    "Sample",
    "allocated_and_peak_bytes",
    "kinds_of",
    "metrics_of",
    "over_ranks",
]


def allocated_and_peak_bytes(device: torch.device) -> tuple[int, int]:
    """On CUDA the bytes in tensors there; else what of this process is resident.

    The peak is that since the process began, or since somebody has reset it.

    Args:
        device: Where the module computes.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux: nobody tells what is resident now
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        return peak, peak
    kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024


GIB = 1024**3
SKEW = "zero/straggler/wait_s"
_AGREEMENT = "zero/comm/agree_exposed_s"
_FOR_OTHERS = "zero/wait/for_others_s"
_STATES = {State.PARAM: "param", State.GRAD: "grad", State.OPTIM: "optim"}
_COMPUTE = {Kind.FORWARD: "forward_s", Kind.BACKWARD: "backward_s", Kind.STEP: "optimizer_s"}


@dataclass(frozen=True)
class Sample:
    """What one rank has measured of one step.

    Attributes:
        recording: The step.
        memory: Model states, with gradients, before the optimizer stepped.
        allocated_bytes: Of this process: CUDA memory in tensors, or on CPU what is resident.
        peak_bytes: The most that this has been since the process began.
    """

    recording: Recording
    memory: MemoryReport
    allocated_bytes: int
    peak_bytes: int


Metric = Callable[[Sample], float]


def metrics_of(
    plan: Plan, mesh: Mesh, *, is_apart: bool, overlaps_step: bool = False
) -> dict[str, Metric]:
    """What every rank measures, by key.

    Args:
        plan: Of the engine.
        mesh: Of any rank.
        is_apart: The compute device has memory of its own.
        overlaps_step: The optimizer steps beside the next forward, which may wait for it.
    """
    metrics: dict[str, Metric] = {}
    tiers = _tiers(plan)
    for tier in tiers:
        for state, name in _STATES.items():
            metrics[f"zero/memory/{tier.value}_{name}_gib"] = partial(_state_gib, tier, state)
    has_files = Tier.NVME in tiers
    if has_files:
        metrics["zero/memory/buffers_gib"] = lambda s: s.memory.buffer_bytes / GIB
    metrics["zero/memory/allocated_gib"] = lambda s: s.allocated_bytes / GIB
    metrics["zero/memory/peak_gib"] = lambda s: s.peak_bytes / GIB
    metrics["zero/time/step_s"] = lambda s: s.recording.seconds
    for kind, name in _COMPUTE.items():
        metrics[f"zero/time/{name}"] = partial(_in_flight_s, kind)
    if overlaps_step:
        metrics["zero/time/optimizer_hidden_s"] = lambda s: s.recording.hidden_s(Kind.STEP)
        metrics["zero/time/optimizer_exposed_s"] = lambda s: s.recording.exposed_s(Kind.STEP)
    for kind in kinds_of(plan, mesh, is_apart=is_apart):
        metrics |= _of_kind(kind)
    if any(bucket.stage.gathers_before_use for bucket in plan.buckets):
        metrics["zero/prefetch/hits"] = lambda s: s.recording.hits
        metrics["zero/prefetch/misses"] = lambda s: s.recording.misses
    if any(bucket.tiers.param is Tier.NVME for bucket in plan.buckets):
        metrics["zero/prefetch/read_hits"] = lambda s: s.recording.read_hits
        metrics["zero/prefetch/read_misses"] = lambda s: s.recording.read_misses
    if has_files:
        metrics["zero/nvme/read_total_gib"] = lambda s: s.memory.nvme_read_bytes / GIB
        metrics["zero/nvme/written_total_gib"] = lambda s: s.memory.nvme_written_bytes / GIB
    metrics["zero/wait/waited_s"] = lambda s: s.recording.waited_s
    metrics[_FOR_OTHERS] = lambda s: s.recording.waited_for_others_s
    return metrics


def kinds_of(plan: Plan, mesh: Mesh, *, is_apart: bool) -> list[Kind]:
    """Kinds of collectives and transfers that a step of `plan` has.

    Args:
        plan: Of the engine.
        mesh: Of any rank.
        is_apart: The compute device has memory of its own.
    """
    tiers = _tiers(plan)
    cuts = {bucket.stage.has_shard(State.OPTIM) for bucket in plan.buckets}
    is_used = {
        Kind.GATHER: mesh.num_shards > 1 and True in cuts,
        Kind.REDUCE: mesh.num_shards > 1 and True in cuts,
        Kind.AVERAGE: mesh.world_size > 1,  # of a norm, if of nothing else
        Kind.AGREE: mesh.world_size > 1,
        Kind.TO_DEVICE: is_apart and len(tiers) > 1,
        Kind.TO_CPU: is_apart and len(tiers) > 1,
        Kind.READ: Tier.NVME in tiers,
        Kind.WRITE: Tier.NVME in tiers,
    }
    return [kind for kind, used in is_used.items() if used]


def over_ranks(
    keys: Iterable[str], everyone: Sequence[Sequence[float]], *, has_spread: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """What is logged of a step, and one number for all ranks.

    Of several ranks each key has two: `/mean` and `/max`. Of one rank they stand alone.

    Args:
        keys: Of `metrics_of`.
        everyone: Values by rank and key.
        has_spread: Each has `/min` too, and `/max_rank`, the rank of the greatest.

    Returns:
        The numbers to log; and the mean over ranks of each key, but for agreement: what the rank
        waits that waits least for it is how long it takes, more is skew; and of the straggler.
    """
    columns = dict(zip(keys, zip(*everyone, strict=True), strict=True))
    means = {key: fmean(values) for key, values in columns.items()}
    if len(everyone) == 1:
        return dict(means), means
    logged: dict[str, float] = {}
    for key, values in columns.items():
        logged[f"{key}/mean"] = means[key]
        logged[f"{key}/max"] = max(values)
        if has_spread:
            logged[f"{key}/min"] = min(values)
            logged[f"{key}/max_rank"] = values.index(max(values))
    straggler = _straggler(columns)
    least = {key: min(values) for key, values in columns.items() if key == _AGREEMENT}
    return logged | straggler, means | least | straggler


def _straggler(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The rank that the others wait for waits least itself."""
    waited = columns[_FOR_OTHERS]
    least = min(waited)
    more = sum(waited) - len(waited) * least
    return {
        "zero/straggler/rank": waited.index(least),
        SKEW: more / (len(waited) - 1),
    }


def _tiers(plan: Plan) -> list[Tier]:
    """Where states rest; with files also in CPU memory, for some optimizers have theirs there."""
    used = {Tier.DEVICE}
    for bucket in plan.buckets:
        used |= {bucket.tiers.param, bucket.tiers.grad, bucket.tiers.optim}
    if Tier.NVME in used:
        used.add(Tier.CPU)
    return [tier for tier in Tier if tier in used]


def _state_gib(tier: Tier, state: State, sample: Sample) -> float:
    return sample.memory.tiers.get(tier.value, {}).get(state, 0) / GIB


def _in_flight_s(kind: Kind, sample: Sample) -> float:
    return sample.recording.in_flight_s(kind)


def _of_kind(kind: Kind) -> dict[str, Metric]:
    moves = kind in (Kind.TO_DEVICE, Kind.TO_CPU, Kind.READ, Kind.WRITE)
    key = f"zero/{'tier' if moves else 'comm'}/{kind.value}"
    exposed: dict[str, Metric] = {f"{key}_exposed_s": lambda s: s.recording.exposed_s(kind)}
    if kind is Kind.AGREE:  # a few bytes, for which a rank always waits
        return exposed
    return {
        f"{key}_s": partial(_in_flight_s, kind),
        f"{key}_hidden_s": lambda s: s.recording.hidden_s(kind),
        **exposed,
        f"{key}_gib": lambda s: s.recording.nbytes(kind) / GIB,
        f"{key}_gib_per_s": lambda s: s.recording.gib_per_s(kind),
    }
