"""Logged metrics: of one recorded step, and of the time between two recorded steps.

A logger gets the keys of `is_summary`, or all of them (`ZeroMonitor(detail=True)`). The part of a
key before the slash is a section that a logger can fold.

The keys of a step follow from the plan, so they are the same on every rank and in every step. A key
ends in its unit: `_gib` (1024^3 bytes), `_s` or `_gb_per_s`; a key without one is a count or a
rank.

[Note: Model FLOPs] The FLOPs of a batch are `LightningModule.flops_per_batch`, the attribute that
Lightning's `ThroughputMonitor` reads. Without it they are those of a dense transformer: 6 per token
and parameter, 2 in forward, 2 in backward for the gradient of the input, and 2 for the gradient of
the parameter, which a frozen parameter does not have (Kaplan et al., arXiv:2001.08361, section
2.1). Embeddings are lookups: they count only if they are output weights, too. The FLOPs of
attention scores, 12 * layers * width * context per token (Chowdhery et al., arXiv:2204.02311,
appendix B), are not included, because they cannot be derived from a module. Recomputation by
activation checkpointing is not included either: divided by the peak of the device, the result is
MFU, not HFU.

Alternatives considered: `torch.utils.flop_counter` counts dispatched operations, and so counts
recomputed blocks twice. `ThroughputMonitor` synchronizes the GPU after every batch, and assumes
that all ranks have the batches of rank 0.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero._lightning.fabric import get_available_flops
from lightning_zero._lightning.pytorch import (
    MixedPrecision,
    _extract_batch_size,
    _plugin_to_compute_dtype,
)
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.mesh import Mesh
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import Plan
from lightning_zero.layout.stage import State
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = [
    "SKEW",
    "STRAGGLER",
    "Counts",
    "Sample",
    "Speed",
    "StepMeans",
    "Throughput",
    "allocated_and_peak_bytes",
    "flops_per_token",
    "is_summary",
    "recorded_kinds",
    "make_metrics",
    "num_tokens",
    "aggregate_ranks",
    "peak_flops",
]

SKEW = "zero_straggler/skew_s"
STRAGGLER = "zero_straggler/rank"
_GIB = 1024**3
_AGREE_EXPOSED = "zero_comm/agree_exposed_s"
_WAIT_FOR_RANKS = "zero_wait/for_others_s"
_STATES = {State.PARAM: "param", State.GRAD: "grad", State.OPTIM: "optim"}
_SUMMARY = re.compile(
    r"zero_(time/step_s(/max)?|wait/total_s(/mean)?|memory/peak_gib(/max)?|grad_norm/total"
    r"|straggler/.*|throughput/.*)"
)
_COMPUTE = {Kind.FORWARD: "forward_s", Kind.BACKWARD: "backward_s", Kind.STEP: "optimizer_s"}
_MOVES = (Kind.TO_DEVICE, Kind.TO_CPU, Kind.READ, Kind.WRITE)


def allocated_and_peak_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes allocated by tensors on a CUDA device, or resident memory of this process; and peak.

    The peak is that since the start of the process, or since its last reset.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux: only the peak is known
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        return peak, peak
    kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024


@dataclass(frozen=True)
class Sample:
    """Measurements of one step on one rank."""

    recording: Recording
    memory: MemoryReport  # with gradients, before the optimizer step
    allocated_bytes: int  # see `allocated_and_peak_bytes`
    peak_bytes: int


Metric = Callable[[Sample], float]


def make_metrics(
    plan: Plan, kinds: Iterable[Kind], *, overlaps_step: bool = False
) -> dict[str, Metric]:
    """Metrics of a step, by key; `overlaps_step`: optimizer steps may run during forward."""
    metrics: dict[str, Metric] = {}
    tiers = _tiers(plan)
    for tier in tiers:
        for state, name in _STATES.items():
            metrics[f"zero_memory/{tier.value}_{name}_gib"] = partial(_state_gib, tier, state)
    has_files = Tier.NVME in tiers
    if has_files:
        metrics["zero_memory/buffers_gib"] = lambda s: s.memory.buffer_bytes / _GIB
    metrics["zero_memory/allocated_gib"] = lambda s: s.allocated_bytes / _GIB
    metrics["zero_memory/peak_gib"] = lambda s: s.peak_bytes / _GIB
    metrics["zero_time/step_s"] = lambda s: s.recording.seconds
    for kind, name in _COMPUTE.items():
        metrics[f"zero_time/{name}"] = partial(_in_flight_s, kind)
    if overlaps_step:
        metrics["zero_time/optimizer_overlapped_s"] = lambda s: s.recording.overlapped_s(Kind.STEP)
        metrics["zero_time/optimizer_exposed_s"] = lambda s: s.recording.exposed_s(Kind.STEP)
    for kind in kinds:
        metrics |= _kind_metrics(kind)
    if any(bucket.stage.shards_params for bucket in plan.buckets):
        metrics["zero_prefetch/hits"] = lambda s: s.recording.hits
        metrics["zero_prefetch/misses"] = lambda s: s.recording.misses
    if any(bucket.tiers.param is Tier.NVME for bucket in plan.buckets):
        metrics["zero_prefetch/read_hits"] = lambda s: s.recording.read_hits
        metrics["zero_prefetch/read_misses"] = lambda s: s.recording.read_misses
    if has_files:
        metrics["zero_nvme/read_total_gib"] = lambda s: s.memory.nvme_read_bytes / _GIB
        metrics["zero_nvme/written_total_gib"] = lambda s: s.memory.nvme_written_bytes / _GIB
    metrics["zero_wait/total_s"] = lambda s: s.recording.waited_s
    metrics[_WAIT_FOR_RANKS] = lambda s: s.recording.waited_for_others_s
    return metrics


def recorded_kinds(plan: Plan, mesh: Mesh, *, has_device_memory: bool) -> list[Kind]:
    """Kinds of collectives and transfers in a step.

    Args:
        plan: Plan of the engine.
        mesh: Device mesh.
        has_device_memory: Whether the device has memory of its own.
    """
    tiers = _tiers(plan)
    sharded = [bucket for bucket in plan.buckets if bucket.stage.has_shard(State.OPTIM)]
    has_owners = any(bucket.layout.has_tensor_owners for bucket in sharded)
    is_used = {
        Kind.ALL_GATHER: mesh.num_shards > 1 and bool(sharded),
        Kind.REDUCE_SCATTER: mesh.num_shards > 1 and bool(sharded),
        Kind.ALL_TO_ALL: mesh.num_shards > 1 and has_owners,
        Kind.ALL_REDUCE: mesh.world_size > 1,  # at least of a norm
        Kind.AGREE: mesh.world_size > 1,
        Kind.TO_DEVICE: has_device_memory and len(tiers) > 1,
        Kind.TO_CPU: has_device_memory and len(tiers) > 1,
        Kind.READ: Tier.NVME in tiers,
        Kind.WRITE: Tier.NVME in tiers,
    }
    return [kind for kind, used in is_used.items() if used]


def _tiers(plan: Plan) -> list[Tier]:
    """Tiers of the model states; NVMe implies CPU, which some optimizers need for their states."""
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


def _kind_metrics(kind: Kind) -> dict[str, Metric]:
    group = "tier" if kind in _MOVES else "comm"
    key = f"zero_{group}/{kind.value}"
    exposed: dict[str, Metric] = {f"{key}_exposed_s": lambda s: s.recording.exposed_s(kind)}
    if kind is Kind.AGREE:  # a few bytes, always exposed
        return exposed
    return {
        f"{key}_s": partial(_in_flight_s, kind),
        f"{key}_overlapped_s": lambda s: s.recording.overlapped_s(kind),
        **exposed,
        f"{key}_gib": lambda s: s.recording.nbytes(kind) / _GIB,
        f"{key}_gb_per_s": lambda s: s.recording.gb_per_s(kind),
    }


def aggregate_ranks(
    keys: Iterable[str], by_rank: Sequence[Sequence[float]], *, has_spread: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Aggregates the metrics of a step over ranks.

    With several ranks each key is logged as `/mean` and `/max`, and skew and straggler are added.
    With one rank the keys are logged as they are.

    Args:
        keys: Keys of `make_metrics`.
        by_rank: Values by rank and key.
        has_spread: Whether to log `/min` and `/max_rank` (the rank with the maximum), too.

    Returns:
        The metrics to log, and the mean over ranks of each key. For control-plane rounds the
        minimum replaces the mean: it is their duration; longer waits are skew.
    """
    columns = dict(zip(keys, zip(*by_rank, strict=True), strict=True))
    means = {key: fmean(values) for key, values in columns.items()}
    if len(by_rank) == 1:
        return dict(means), means
    logged: dict[str, float] = {}
    for key, values in columns.items():
        logged[f"{key}/mean"] = means[key]
        logged[f"{key}/max"] = max(values)
        if has_spread:
            logged[f"{key}/min"] = min(values)
            logged[f"{key}/max_rank"] = values.index(max(values))
    waited = columns[_WAIT_FOR_RANKS]
    least = min(waited)  # the straggler waits least
    skew = (sum(waited) - len(waited) * least) / (len(waited) - 1)
    straggler = {STRAGGLER: waited.index(least), SKEW: skew}
    if _AGREE_EXPOSED in columns:
        means[_AGREE_EXPOSED] = min(columns[_AGREE_EXPOSED])
    return logged | straggler, means | straggler


def is_summary(key: str) -> bool:
    """Whether `key` is one of the few that are logged by default."""
    return _SUMMARY.fullmatch(key) is not None


class StepMeans:
    """Means over recorded steps; the same on every rank.

    Attributes:
        num_steps: Number of steps.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._sums: dict[str, float] = {}
        self._stragglers: Counter[int] = Counter()  # steps by the rank that was last

    def add(self, means: Mapping[str, float]) -> None:
        """Adds a step: its means over ranks, of `aggregate_ranks`."""
        self.num_steps += 1
        for key, value in means.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
        if STRAGGLER in means:
            self._stragglers[int(means[STRAGGLER])] += 1

    def by_key(self) -> dict[str, float]:
        """The means; empty without a step."""
        return {key: value / self.num_steps for key, value in self._sums.items()}

    @property
    def straggler(self) -> tuple[int, int] | None:
        """The rank that was last in most steps, and their number; None: one rank, or no step."""
        return next(iter(self._stragglers.most_common(1)), None)


# ------------------------------------------------------------------------ throughput


class Counts(NamedTuple):
    """Amounts that a rank has trained; NaN: unknown."""

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
    """Counts batches and their time, without evaluation. Local; does not synchronize the device.

    Data loading is included; the time from an evaluation to the next batch is not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._flops_per_token = flops_per_token(module)
        self._total = self._until_lap = Counts()
        self._first: Counts | None = None  # the first step; None before its end
        self._since: float | None = None  # None: paused

    @property
    def is_warm(self) -> bool:
        return self._first is not None

    @property
    def warm(self) -> Counts:
        """Counts without those of the first step."""
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
        # As Lightning counts, but without its warning where sizes differ: the first tensor counts.
        size = next(_extract_batch_size(batch), None)
        counts = (has_stepped, 1, math.nan if size is None else size, tokens, flops)
        self._total = self._total.plus(Counts(*map(float, counts)))
        if has_stepped and self._first is None:
            self._first = self._total

    def pause(self) -> None:
        """Pauses the time until the next batch."""
        self._since = None

    def lap(self) -> Counts:
        """Counts since the last call or the start; exact if the device is idle."""
        self._tick()
        counts, self._until_lap = self._total.minus(self._until_lap), self._total
        return counts

    def _tick(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self._total = self._total.plus(Counts(seconds=now - self._since))
            self._since = now


def num_tokens(batch: Any) -> float:
    """Elements of `input_ids`, or of the first tensor; NaN unless it is an integer matrix."""
    if isinstance(batch, Mapping):
        batch = batch["input_ids"] if "input_ids" in batch else list(batch.values())
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None or first.ndim != 2 or first.is_floating_point():
        return math.nan
    return first.numel()


def flops_per_token(module: nn.Module) -> int:
    """FLOPs per token of forward and backward in a dense transformer. Local.

    See [Note: Model FLOPs]. Parameters may be sharded: they have their unsharded shape. 4-bit
    weights count with their unpacked size.
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
    """Peak FLOPs per second of the device in the dtype of computation, from Lightning's table.

    NaN if the device is not in the table; for a GPU Lightning warns then.
    """
    dtype, precision = strategy.config.param_dtype, strategy.precision_plugin
    if dtype is None or isinstance(precision, MixedPrecision):  # autocast has a dtype of its own
        dtype = _plugin_to_compute_dtype(precision)
    return get_available_flops(strategy.root_device, dtype) or math.nan


@dataclass(frozen=True)
class Speed:
    """Throughput of all ranks together, without evaluation; NaN: unknown."""

    num_steps: int  # timed optimizer steps
    steps_per_s: float
    batches_per_s: float  # of one rank; the next two are of all ranks
    samples_per_s: float
    tokens_per_s: float
    tflops_per_device: float  # 10^12 operations per second: see [Note: Model FLOPs]
    mfu: float  # model FLOPs utilization: share of the device's peak

    @classmethod
    def from_counts(cls, by_rank: Sequence[Sequence[float]], peak: float = math.nan) -> Speed:
        """Throughput from the counts of each rank, and `peak_flops`."""
        counts = [Counts(*rank) for rank in by_rank]
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
        """Metrics to log, without unknown ones."""
        names = ("samples_per_s", "tokens_per_s", "tflops_per_device", "mfu")
        values = {f"zero_throughput/{name}": getattr(self, name) for name in names}
        return {key: value for key, value in values.items() if not math.isnan(value)}
