"""The numbers that are logged: of one recorded step, and of the time between two of them.

Those of a step follow from the plan, so they are the same on every rank and in every step. The last
part of a key has the unit: `_gib` (1024^3 bytes), `_s`, `_gib_per_s`; what has none is a count or a
rank.

[Note: Model FLOPs] A batch has those that `LightningModule.flops_per_batch` says, the attribute
that Lightning's `ThroughputMonitor` reads. Without it a token has those of a dense transformer: 6
for each parameter, 2 in forward, 2 in backward for the gradient of the input, and 2 for that of the
parameter, which a frozen one does not have (Kaplan et al., arXiv:2001.08361, section 2.1).
Embeddings are looked up: they count only where they are output weights too. Not in it is what it
costs a token to attend to others, 12 * layers * width * context (Chowdhery et al.,
arXiv:2204.02311, appendix B), for a module does not tell its shape. What activation checkpointing
computes again is not in it either: the quotient with the device's peak is MFU, not HFU.

Alternatives considered: `torch.utils.flop_counter` counts what is dispatched, and so a block twice
that runs again in backward. `ThroughputMonitor` waits for the GPU after every batch, and takes the
batches of rank 0 for those of all.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.data import _extract_batch_size
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.mesh import Mesh
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import Plan
from lightning_zero.layout.stage import State
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = [
    "SKEW",
    "Counts",
    "Sample",
    "Speed",
    "Throughput",
    "allocated_and_peak_bytes",
    "flops_per_token",
    "recorded_kinds",
    "make_metrics",
    "num_tokens",
    "aggregate_ranks",
    "peak_flops",
]

SKEW = "zero/straggler/skew_s"
_GIB = 1024**3
_AGREEMENT = "zero/comm/agree_exposed_s"
_FOR_OTHERS = "zero/wait/for_others_s"
_STATES = {State.PARAM: "param", State.GRAD: "grad", State.OPTIM: "optim"}
_COMPUTE = {Kind.FORWARD: "forward_s", Kind.BACKWARD: "backward_s", Kind.STEP: "optimizer_s"}
_MOVES = (Kind.TO_DEVICE, Kind.TO_CPU, Kind.READ, Kind.WRITE)


def allocated_and_peak_bytes(device: torch.device) -> tuple[int, int]:
    """On CUDA the bytes in tensors there; else what of this process is resident.

    The peak is that since the process began, or since somebody has reset it.
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


@dataclass(frozen=True)
class Sample:
    """What one rank has measured of one step."""

    recording: Recording
    memory: MemoryReport  # with gradients, before the optimizer stepped
    allocated_bytes: int  # as `allocated_and_peak_bytes` says
    peak_bytes: int


Metric = Callable[[Sample], float]


def make_metrics(
    plan: Plan, kinds: Iterable[Kind], *, overlaps_step: bool = False
) -> dict[str, Metric]:
    """What every rank measures, by key; `overlaps_step`: a forward may wait for the last step."""
    metrics: dict[str, Metric] = {}
    tiers = _tiers(plan)
    for tier in tiers:
        for state, name in _STATES.items():
            metrics[f"zero/memory/{tier.value}_{name}_gib"] = partial(_state_gib, tier, state)
    has_files = Tier.NVME in tiers
    if has_files:
        metrics["zero/memory/buffers_gib"] = lambda s: s.memory.buffer_bytes / _GIB
    metrics["zero/memory/allocated_gib"] = lambda s: s.allocated_bytes / _GIB
    metrics["zero/memory/peak_gib"] = lambda s: s.peak_bytes / _GIB
    metrics["zero/time/step_s"] = lambda s: s.recording.seconds
    for kind, name in _COMPUTE.items():
        metrics[f"zero/time/{name}"] = partial(_in_flight_s, kind)
    if overlaps_step:
        metrics["zero/time/optimizer_hidden_s"] = lambda s: s.recording.hidden_s(Kind.STEP)
        metrics["zero/time/optimizer_exposed_s"] = lambda s: s.recording.exposed_s(Kind.STEP)
    for kind in kinds:
        metrics |= _of_kind(kind)
    if any(bucket.stage.shards_params for bucket in plan.buckets):
        metrics["zero/prefetch/hits"] = lambda s: s.recording.hits
        metrics["zero/prefetch/misses"] = lambda s: s.recording.misses
    if any(bucket.tiers.param is Tier.NVME for bucket in plan.buckets):
        metrics["zero/prefetch/read_hits"] = lambda s: s.recording.read_hits
        metrics["zero/prefetch/read_misses"] = lambda s: s.recording.read_misses
    if has_files:
        metrics["zero/nvme/read_total_gib"] = lambda s: s.memory.nvme_read_bytes / _GIB
        metrics["zero/nvme/written_total_gib"] = lambda s: s.memory.nvme_written_bytes / _GIB
    metrics["zero/wait/total_s"] = lambda s: s.recording.waited_s
    metrics[_FOR_OTHERS] = lambda s: s.recording.waited_for_others_s
    return metrics


def recorded_kinds(plan: Plan, mesh: Mesh, *, has_device_memory: bool) -> list[Kind]:
    """Kinds of collectives and transfers that a step has; `has_device_memory`: the device has own memory."""
    tiers = _tiers(plan)
    is_cut = any(bucket.stage.has_shard(State.OPTIM) for bucket in plan.buckets)
    is_used = {
        Kind.ALL_GATHER: mesh.num_shards > 1 and is_cut,
        Kind.REDUCE_SCATTER: mesh.num_shards > 1 and is_cut,
        Kind.ALL_REDUCE: mesh.world_size > 1,  # of a norm, if of nothing else
        Kind.AGREE: mesh.world_size > 1,
        Kind.TO_DEVICE: has_device_memory and len(tiers) > 1,
        Kind.TO_CPU: has_device_memory and len(tiers) > 1,
        Kind.READ: Tier.NVME in tiers,
        Kind.WRITE: Tier.NVME in tiers,
    }
    return [kind for kind, used in is_used.items() if used]


def _tiers(plan: Plan) -> list[Tier]:
    """Where states rest; with files also in CPU memory, for some optimizers have theirs there."""
    used = {Tier.DEVICE}
    for bucket in plan.buckets:
        used |= {bucket.tiers.param, bucket.tiers.grad, bucket.tiers.optim}
    if Tier.NVME in used:
        used.add(Tier.CPU)
    return [tier for tier in Tier if tier in used]


def _state_gib(tier: Tier, state: State, sample: Sample) -> float:
    return sample.memory.tiers.get(tier.value, {}).get(state, 0) / _GIB


def _in_flight_s(kind: Kind, sample: Sample) -> float:
    return sample.recording.in_flight_s(kind)


def _of_kind(kind: Kind) -> dict[str, Metric]:
    key = f"zero/{'tier' if kind in _MOVES else 'comm'}/{kind.value}"
    exposed: dict[str, Metric] = {f"{key}_exposed_s": lambda s: s.recording.exposed_s(kind)}
    if kind is Kind.AGREE:  # a few bytes, for which a rank always waits
        return exposed
    return {
        f"{key}_s": partial(_in_flight_s, kind),
        f"{key}_hidden_s": lambda s: s.recording.hidden_s(kind),
        **exposed,
        f"{key}_gib": lambda s: s.recording.nbytes(kind) / _GIB,
        f"{key}_gib_per_s": lambda s: s.recording.gib_per_s(kind),
    }


def aggregate_ranks(
    keys: Iterable[str], everyone: Sequence[Sequence[float]], *, has_spread: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """What is logged of a step, and one number for all ranks.

    Of several ranks each key has two: `/mean` and `/max`. Of one rank they stand alone.

    Args:
        keys: Of `make_metrics`.
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
    waited = columns[_FOR_OTHERS]
    least = min(waited)  # the rank that the others wait for waits least itself
    skew = (sum(waited) - len(waited) * least) / (len(waited) - 1)
    straggler = {"zero/straggler/rank": waited.index(least), SKEW: skew}
    if _AGREEMENT in columns:
        means[_AGREEMENT] = min(columns[_AGREEMENT])
    return logged | straggler, means | straggler


# ------------------------------------------------------------------------ between two steps


class Counts(NamedTuple):
    """What a rank has trained; NaN: not known."""

    steps: float = 0.0  # batches with an optimizer step
    batches: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0  # see [Note: Model FLOPs]
    seconds: float = 0.0

    def plus(self, other: Counts) -> Counts:
        return Counts(*map(float.__add__, self, other))

    def minus(self, other: Counts) -> Counts:
        return Counts(*map(float.__sub__, self, other))


class Throughput:
    """Counts batches and the time for them, without evaluation. Local, and no wait for a device.

    Loading of data counts; what comes between an evaluation and the batch after it does not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._flops_per_token = flops_per_token(module)
        self._total = self._until_lap = Counts()
        self._first: Counts | None = None  # the first step; None until it is over
        self._since: float | None = None  # None: the clock stands

    @property
    def is_warm(self) -> bool:
        return self._first is not None

    @property
    def warm(self) -> Counts:
        """All but the first step."""
        return Counts() if self._first is None else self._total.minus(self._first)

    def before_batch(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def after_batch(self, batch: Any, *, has_stepped: bool) -> None:
        self._tick()
        tokens = num_tokens(batch)
        flops = getattr(self._module, "flops_per_batch", None)
        if flops is None:
            flops = self._flops_per_token * tokens
        elif not isinstance(flops, Real) or flops < 0:
            raise ValueError(
                f"flops_per_batch of {type(self._module).__name__} must be a number of at least 0, "
                f"an attribute or a property, got {flops!r}."
            )
        # As Lightning counts, without its warning where tensors differ: the first one tells.
        size = next(_extract_batch_size(batch), None)
        counts = (has_stepped, 1, math.nan if size is None else size, tokens, flops)
        self._total = self._total.plus(Counts(*map(float, counts)))
        if has_stepped and self._first is None:
            self._first = self._total

    def pause(self) -> None:
        """Stops the clock until the next batch."""
        self._since = None

    def lap(self) -> Counts:
        """Since the last call, or the beginning; exact where the device has nothing left to do."""
        self._tick()
        counts, self._until_lap = self._total.minus(self._until_lap), self._total
        return counts

    def _tick(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self._total = self._total.plus(Counts(seconds=now - self._since))
            self._since = now


def num_tokens(batch: Any) -> float:
    """Elements of `input_ids`, or else of the first tensor; NaN unless it is integers in 2 dims."""
    if isinstance(batch, Mapping):
        batch = batch["input_ids"] if "input_ids" in batch else list(batch.values())
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None or first.ndim != 2 or first.is_floating_point():
        return math.nan
    return first.numel()


def flops_per_token(module: nn.Module) -> int:
    """Of forward and backward in a dense transformer: see [Note: Model FLOPs]. Local.

    Whole or sharded: parameters tell the shape of the whole. Weights of 4 bits count by what they
    stand for.
    """
    multiplied = {
        parameter
        for part in module.modules()
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        for parameter in part.parameters(recurse=False)
    }
    return sum((6 if p.requires_grad else 4) * _numel(p) for p in multiplied)


def _numel(parameter: nn.Parameter) -> int:
    packed = getattr(parameter, "quant_state", None)  # of bitsandbytes
    return math.prod((parameter if packed is None else packed).shape)


def peak_flops(strategy: ZeroStrategy) -> float:
    """Of the device per second, in the dtype of the computation, as Lightning's table has it.

    NaN where that does not know the device; of a GPU it warns then.
    """
    dtype, precision = strategy.config.param_dtype, strategy.precision_plugin
    if dtype is None or isinstance(precision, MixedPrecision):  # autocast computes in its own
        dtype = _plugin_to_compute_dtype(precision)
    return get_available_flops(strategy.root_device, dtype) or math.nan


@dataclass(frozen=True)
class Speed:
    """Of all ranks together, without evaluation; NaN: unknown."""

    num_steps: int  # that were timed
    steps_per_s: float
    batches_per_s: float  # of one rank; the next two of all
    samples_per_s: float
    tokens_per_s: float
    tflops_per_device: float  # 10^12 operations per second: see [Note: Model FLOPs]
    mfu: float  # model FLOPs utilization, the share of the device's peak

    @classmethod
    def from_counts(cls, everyone: Sequence[Sequence[float]], peak: float = math.nan) -> Speed:
        """From the counts of each rank, and `peak_flops`."""
        counts = [Counts(*rank) for rank in everyone]
        seconds = max(rank.seconds for rank in counts) or math.nan
        flops = sum(rank.flops for rank in counts) / len(counts) / seconds
        return cls(
            int(counts[0].steps),
            counts[0].steps / seconds,
            counts[0].batches / seconds,
            sum(rank.samples for rank in counts) / seconds,
            sum(rank.tokens for rank in counts) / seconds,
            flops / 1e12,
            flops / peak,
        )

    def metrics(self) -> dict[str, float]:
        """What is logged; what is unknown is left out."""
        names = ("samples_per_s", "tokens_per_s", "tflops_per_device", "mfu")
        found = {f"zero/throughput/{name}": getattr(self, name) for name in names}
        return {key: value for key, value in found.items() if not math.isnan(value)}
