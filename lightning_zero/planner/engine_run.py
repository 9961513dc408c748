"""Bytes of a training step, counted by the engine itself while it trains on shapes alone.

[Note: Planned engine] The engine of training runs on a copy of the module, with copies of the
optimizers: one rank of a fake process group, with storages that are never written (shapes_only.py).
Its schedule and its buffers are those of training; only collectives and files move nothing. The
third step is measured, because the schedule has been recorded then.

[Note: A device on the CPU] All tensors are on the CPU. To count those of a device with memory of
its own, storage and communicator behave as on such a device: offloaded shards are copied to mapped
memory, which is not counted. Three numbers cannot be counted so, and are computed from the buckets
of the run: bytes copied between the device and CPU memory, which are one memory here; bytes that a
step on the CPU reads and writes; and buffers of copies, which only a CUDA device has.

[Note: Four blocks] The time of a run grows with the number of blocks. If all blocks of a container
have the same class and equal parameters, a few stand for all. Between two blocks in the middle of
forward, memory grows by the activations of one; if it does not grow by the same for the next block,
all are run. What backward has not reached yet is larger by that much for each missing block, less
the gradients of the block that have been zeroed. So the peak of a step is the largest of four:
before the third block; from there to the end of forward; in backward down to the last block but
one that still prefetches; and after that. Model states and traffic of a block in the middle count
once more for each missing one. That is exact where a block has buckets of its own (stage 3). A
bucket with parameters of several blocks counts by its elements, which neglects its padding.

[Note: Unknown inputs] Without the inputs of the module, the forward of each unit is replaced by one
that sums its parameters: units are used once each, in the order of registration, and there are no
activations.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.comm.fake import fake_world
from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.counting import count_held
from lightning_zero.engine.engine import Engine
from lightning_zero.engine.expected import Tiers
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.names import parameters_by_name, saved_name
from lightning_zero.layout.offload import (
    MAX_GRADS_IN_FLIGHT,
    NUM_UPLOAD_BLOCKS,
    UPLOAD_BLOCK_BYTES,
    OffloadConfig,
    Tier,
    padded_bytes,
)
from lightning_zero.layout.stage import State
from lightning_zero.layout.units import find_blocks
from lightning_zero.optim.clone import parameters_of
from lightning_zero.optim.state_view import raw_states
from lightning_zero.planner.planned_engine import copies_on_cpu, planned_engine
from lightning_zero.planner.shapes_only import Results, ShapesOnly
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.tensors.composite import plain_tensors

__all__ = ["Counts", "EngineRuns", "Peak", "RankOfGroup", "RepeatedBlocks", "find_repeated_blocks"]

_CPU = torch.device("cpu")
_NUM_STEPS = 3
_SENT = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


@dataclass(frozen=True)
class Peak:
    """Peak of one rank's device memory in forward and backward, without the model states.

    Attributes:
        unsharded_bytes: Bytes of unsharded parameters of stage 3.
        grad_bucket_bytes: Bytes of unsharded gradients.
        activation_bytes: Bytes of activations and of all other tensors.
        freed_bytes: Bytes of gradients that are counted as model states but are freed at the peak,
            after `zero_grad`.
    """

    unsharded_bytes: int = 0
    grad_bucket_bytes: int = 0
    activation_bytes: int = 0
    freed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes in addition to the model states, minus those that are freed."""
        needed = self.unsharded_bytes + self.grad_bucket_bytes + self.activation_bytes
        return needed - self.freed_bytes


@dataclass(frozen=True)
class Counts:
    """Bytes of one rank, counted in a run.

    Attributes:
        held: Model states after a step, before gradients are zeroed.
        averages: Averages of the weights, by tier.
        nvme_buffer_bytes: CPU memory of the buffers through which files are read and written.
        staging_bytes: CPU memory for other tensors in transfer.
        peak: Peak of the step.
        sent: Bytes sent to other ranks in a step, without those of full tensors to and from their
            owners.
        to_cpu: Bytes copied from the device to CPU memory.
        from_cpu: Bytes copied from CPU memory to the device.
        read: Bytes read from NVMe files.
        written: Bytes written to NVMe files.
        cpu_step: Bytes that optimizer steps on the CPU read and write in CPU memory.
    """

    held: Tiers
    averages: Mapping[Tier, int]
    nvme_buffer_bytes: int
    staging_bytes: int
    peak: Peak
    sent: int
    to_cpu: int
    from_cpu: int
    read: int
    written: int
    cpu_step: int

    @property
    def by_rank(self) -> tuple[Tiers, ...]:
        """`held` of rank 0, for `MemoryByRank`."""
        return (self.held,)

    def with_averages(self, tiers: Tiers) -> Tiers:
        """Adds the averages, which count as optimizer state, to the model states of a rank."""
        found = {tier: dict(states) for tier, states in tiers.items()}
        for tier, nbytes in self.averages.items():
            found.setdefault(tier, dict.fromkeys(State, 0))[State.OPTIM] += nbytes
        return found


@dataclass(frozen=True)
class RankOfGroup:
    """Rank that is counted, and the other ranks of its shard group.

    Attributes:
        rank: Rank in the group.
        size: Number of ranks.
        has_device_memory: Whether the device has memory of its own.
    """

    rank: int
    size: int
    has_device_memory: bool


class EngineRuns:
    """Runs of one job's step under different settings.

    Args:
        module: Module on any device, also on meta; it is left unchanged.
        optimizers: Optimizers of its parameters.
        step: Function of the module that returns the loss of a micro-batch. None: see [Note:
            Unknown inputs].
        num_micro_batches: Number of micro-batches in an optimizer step.
        autocast: Dtype of autocast; None: no autocast.
        full_optimizers: Indices of the optimizers that step full tensors.
        averages: Tier of each average of the weights: CPU, or DEVICE for the tier of the optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        step: Callable[[nn.Module], Tensor] | None = None,
        *,
        num_micro_batches: int = 1,
        autocast: torch.dtype | None = None,
        full_optimizers: Collection[int] = (),
        averages: Sequence[Tier] = (),
    ) -> None:
        self.module = module
        self.averages = averages
        self.optimizers = optimizers
        self.full_optimizers = full_optimizers
        self.num_micro_batches = num_micro_batches
        self._step = step
        self._autocast = autocast
        self._results: Results = {}
        self._known: dict[tuple[str, RankOfGroup], Counts] = {}

    def count(self, config: ZeroConfig, of: RankOfGroup) -> Counts:
        """Bytes under `config`, whose replicas are ignored.

        Raises:
            ValueError: The step cannot run on shapes alone.
        """
        config = config.replace(sharding_group_size=None)
        key = repr(config), of
        if key not in self._known:
            self._known[key] = self._run_few(config, of) or self._run(config, of, None)[0]
        return self._known[key]

    def recomputed_peak(self, config: ZeroConfig, of: RankOfGroup) -> Peak:
        """Peak under `config` with activation checkpointing of the repeated blocks.

        The other bytes are those without it: backward all-gathers a unit once in both cases.

        Raises:
            ValueError: As for `count`.
        """
        config = _equal_on_device(config, of).replace(activation_checkpointing=True)
        return self.count(config, of).peak

    def _run_few(self, config: ZeroConfig, of: RankOfGroup) -> Counts | None:
        """Bytes from a run of a few blocks; None: they do not stand for all."""
        blocks = find_repeated_blocks(self.module)
        if blocks is None:
            return None
        num_prefetched = 1
        if config.prefetch_bucket_size:
            num_prefetched = math.ceil(config.prefetch_bucket_size / blocks.numel)
        few = _FewBlocks(blocks, num_prefetched)
        if few.num_run >= len(blocks.children):
            return None
        try:
            counts, is_linear = self._run(config, of, few)
        except ValueError:
            return None
        return counts if is_linear else None

    def _run(
        self, config: ZeroConfig, of: RankOfGroup, few: _FewBlocks | None
    ) -> tuple[Counts, bool]:
        """Bytes, and whether memory grows by the same for each block."""
        meter = _Meter()
        try:
            with ExitStack() as stack:
                stack.enter_context(fake_world(of.rank, of.size))
                stack.enter_context(torch.random.fork_rng(devices=[]))
                stack.enter_context(warnings.catch_warnings())
                stack.enter_context(_frozen_garbage())
                warnings.simplefilter("ignore")
                stack.enter_context(ShapesOnly(self._results, meter.look))
                return self._train(config, of, few, meter)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ValueError(
                f"one step of {type(self.module).__name__} cannot run on shapes alone "
                f"({type(error).__name__}: {text[:300]}); pass inputs of the right "
                "shape, or plan without activations."
            ) from error

    def _train(
        self, config: ZeroConfig, of: RankOfGroup, few: _FewBlocks | None, meter: _Meter
    ) -> tuple[Counts, bool]:
        with nullcontext() if few is None else few.without_others(self.module):
            module, optimizers = copies_on_cpu(self.module, self.optimizers)
        kind = planned_engine(
            [optimizers[index] for index in self.full_optimizers],
            has_device_memory=of.has_device_memory,
        )
        # Gradients are never computed: they may be NaN.
        config = config.replace(overlap_step=False, on_nonfinite=None)
        members = [optimizer for optimizer in optimizers if parameters_of(optimizer)]
        engine = kind(module.train(), members, config, device=_CPU)
        try:
            step = self._step or _use_units(engine)
            for _ in range(_NUM_STEPS - 1):
                self._accumulate(engine, step, meter)
                engine.step()
            gc.collect()  # cycles that hold tensors of the construction
            meter.watch(engine.buckets)
            count = _BucketCounts(engine, few, self)
            if few is not None:
                few.install(module, meter)
            windows = _Windows(engine.recorder)
            self._accumulate(engine, step, meter, windows)
            meter.end()
            with windows.next():
                engine.step()
        finally:
            engine.close(keep_parameters=False)
        if few is None:
            return count.counts(windows, meter.peak()), True
        growth, is_linear = few.growth()
        grads = count.held[Tier.DEVICE][State.GRAD] - meter.rest.grads
        peak = meter.peak(few.num_missing * growth, grads)
        return count.counts(windows, peak), is_linear

    def _accumulate(
        self,
        engine: Engine,
        step: Callable[[nn.Module], Tensor],
        meter: _Meter,
        windows: _Windows | None = None,
    ) -> None:
        """Computes the gradients of one step; they are zeroed where the Trainer does so.

        Two micro-batches stand for all: the first, which begins with zeroed gradients, and the
        last, which is reduced in every stage.
        """
        num_micro_batches = min(self.num_micro_batches, 2)
        for number in range(num_micro_batches):
            with nullcontext() if windows is None else windows.next():
                meter.enter(_Part.FIRST_BLOCKS)
                under = torch.autocast("cpu", self._autocast, enabled=self._autocast is not None)
                with under, torch.enable_grad(), engine.forward_context():  # `training_step`?
                    loss = step(engine.module)
                if number == 0:
                    engine.zero_grad()
                meter.enter(_Part.BACKWARD)
                is_last = number == num_micro_batches - 1
                with nullcontext() if is_last else engine.no_sync():
                    engine.backward(loss)
                del loss


def _use_units(engine: Engine) -> Callable[[nn.Module], Tensor]:
    """Step that uses each unit once. See [Note: Unknown inputs]."""
    named = parameters_by_name(engine.module)
    modules = {saved_name(name): part for name, part in engine.module.named_modules()}
    units = []
    for unit in engine.plan.units:
        slots = [slot.name for bucket in unit.buckets for slot in bucket.layout.slots]
        own = [named[name] for name in slots if named[name].is_floating_point()]
        units.append((modules[unit.name], own))

    def use(parameters: Sequence[nn.Parameter], total: Tensor) -> Tensor:
        for parameter in parameters:
            total = total + parameter.sum()
        return total

    root, *others = units
    for part, own in others:
        part.forward = partial(use, own)

    def step(module: nn.Module) -> Tensor:
        total = use(root[1], torch.zeros((), requires_grad=True))
        for part, _ in others:
            total = part(total)
        return total

    return step


# ---------------------------------------------------------------- bytes between steps, and moved


class _Windows:
    """Recordings of the micro-batches of a step, and of the optimizer's step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.recordings: list[Recording] = []
        recorder.start()

    @contextmanager
    def next(self) -> Iterator[None]:
        """Context that is recorded."""
        self._recorder.begin(0)
        yield
        self.recordings.append(self._recorder.end())


class _BucketCounts:
    """Bytes of all buckets, those of blocks that have not been run included.

    Args:
        engine: The engine, between two steps.
        few: Blocks that are run; None: all.
        runs: The job.

    Attributes:
        held: Bytes of the model states.
    """

    def __init__(self, engine: Engine, few: _FewBlocks | None, runs: EngineRuns) -> None:
        self._engine = engine
        self._num_micro_batches = runs.num_micro_batches
        self._times = dict[Bucket, float]()  # number of buckets for which each bucket stands
        by_name: dict[str, list[tuple[int, float]]] = {}  # buckets of one unit may share a name
        for bucket in engine.buckets:
            numels = [(slot.numel, slot.name) for slot in bucket.plan.layout.slots]
            times = sum(n * (few.num_copies(name) if few else 1) for n, name in numels)
            self._times[bucket] = times / sum(n for n, _ in numels)
            nbytes = bucket.plan.layout.numel * bucket.plan.dtype.itemsize
            by_name.setdefault(bucket.plan.name, []).append((nbytes, self._times[bucket]))
        self._times_of_name = {
            name: sum(n * times for n, times in found) / sum(n for n, _ in found)
            for name, found in by_name.items()
        }
        self._num_of_name = {name: len(found) for name, found in by_name.items()}
        tiers = (b.plan.tiers for b in engine.buckets)
        used = {Tier.DEVICE}.union(*((t.param, t.optim, t.grad) for t in tiers))
        held = {tier: dict.fromkeys(State, 0.0) for tier in Tier if tier in used}
        for bucket, counted in zip(
            engine.buckets, count_held(engine.buckets, engine.optimizers), strict=True
        ):
            for (tier, state), nbytes in counted.items():
                held.setdefault(tier, dict.fromkeys(State, 0.0))[state] += (
                    nbytes * self._times[bucket]
                )
        self.held = {tier: {s: round(n) for s, n in by.items()} for tier, by in held.items()}
        self._averages = self._average_bytes(runs.averages)
        self._buffer_bytes = engine.storage.buffer_bytes
        self._cpu_step = sum(self._bytes_of_cpu_step(b) * n for b, n in self._times.items())

    def _average_bytes(self, averages: Sequence[Tier]) -> dict[Tier, int]:
        """Bytes of averages by tier: as the main parameters (`Shadow`), but never on NVMe.

        They are not made here, because the CPU is the device in this run.
        """
        found = dict[Tier, float]()
        has_device_memory = self._engine.storage.has_device_memory
        for bucket, times in self._times.items():
            plan, main = bucket.plan, bucket.shards.master_or_param
            for wanted in averages:
                is_on_device = wanted is Tier.DEVICE or not has_device_memory
                is_on_device &= plan.tiers.optim is Tier.DEVICE
                tier = Tier.DEVICE if is_on_device else Tier.CPU
                is_padded = tier.is_offloaded(has_device_memory=has_device_memory)
                nbytes = main.numel * main.dtype.itemsize
                nbytes = padded_bytes(main.numel, main.dtype) if is_padded else nbytes
                found[tier] = found.get(tier, 0.0) + nbytes * times
        return {tier: round(nbytes) for tier, nbytes in found.items()}

    def _staging_bytes(self) -> int:
        """CPU memory for gradients in transfer or accumulation, and for stepped parameters."""
        if not self._engine.storage.has_device_memory:
            return 0
        plan, accumulates = self._engine.plan, self._num_micro_batches > 1
        grad_bytes = [
            bucket.layout.shard_numel * plan.grad_dtype(bucket).itemsize
            for bucket in plan.buckets
            if bucket.tiers.grad is Tier.NVME or (bucket.tiers.grad is Tier.CPU and accumulates)
        ]
        tiers = [bucket.tiers for bucket in plan.buckets]
        is_uploaded = any(t.optim is not Tier.DEVICE and t.param is Tier.DEVICE for t in tiers)
        upload_bytes = NUM_UPLOAD_BLOCKS * UPLOAD_BLOCK_BYTES if is_uploaded else 0
        return MAX_GRADS_IN_FLIGHT * max(grad_bytes, default=0) + upload_bytes

    def _bytes_of_cpu_step(self, bucket: Bucket) -> int:
        """Bytes that a step reads and writes: gradient; twice main parameters and states."""
        if bucket.plan.tiers.optim is Tier.DEVICE or not bucket.plan.is_trainable:
            return 0
        numel = bucket.plan.layout.shard_numel
        states = 0
        for optimizer in self._engine.optimizers:
            raw = raw_states(optimizer)
            for parameter in bucket.parameters:
                states += sum(t.nbytes for t in plain_tensors(raw.get(parameter, {})) if t.dim())
        grad = self._engine.plan.grad_dtype(bucket.plan).itemsize
        return numel * (grad + 2 * bucket.plan.master_dtype.itemsize) + 2 * states

    def counts(self, windows: _Windows, peak: Peak) -> Counts:
        """The bytes, after the run."""
        moved, gathers = dict.fromkeys(Kind, 0.0), Counter[str]()
        for recording, times in zip(windows.recordings, self._repeats(), strict=True):
            for span in recording.spans:
                if span.is_wait or span.start_s < 0:
                    continue
                moved[span.kind] += span.nbytes * times * self._times_of(span.name)
                if span.kind is Kind.ALL_GATHER and recording is not windows.recordings[-1]:
                    gathers[span.name] += times
        to_cpu, from_cpu = self._copies(gathers)
        return Counts(
            self.held,
            self._averages,
            self._buffer_bytes,
            self._staging_bytes(),
            peak,
            round(sum(moved[kind] for kind in _SENT)),
            to_cpu,
            from_cpu,
            round(moved[Kind.READ]),
            round(moved[Kind.WRITE]),
            round(self._cpu_step),
        )

    def _repeats(self) -> list[int]:
        """Number of micro-batches for which each recorded one stands; 1 for the step.

        Those in the middle are as the last one if it adds to the mean of those before, else as the
        first one, which is not reduced.
        """
        others = max(self._num_micro_batches - 1, 1)
        if self._num_micro_batches == 1:
            return [1, 1]
        adds = self._engine.config.states.reduces_every_backward
        return [1, others, 1] if adds else [others, 1, 1]

    def _times_of(self, name: str) -> float:
        """Number of buckets for which the bucket `name` stands, or that of the file `name`."""
        if name not in self._times_of_name:
            names = [bucket for bucket in self._times_of_name if name.startswith(f"{bucket}.")]
            name = max(names, key=len, default="")
        return self._times_of_name.get(name, 1.0)

    def _copies(self, gathers: Mapping[str, int]) -> tuple[int, int]:
        """Bytes copied to and from CPU memory. See [Note: A device on the CPU].

        An all-gather copies a shard from CPU memory, and a reduction copies the mean there. A step
        reads and writes main parameters where they are stored. Parameters beside them are cast on
        the CPU, before or after they are copied.

        Args:
            gathers: Number of all-gathers before use in a step, by bucket.
        """
        to_cpu = from_cpu = 0.0
        for bucket, times in self._times.items():
            plan, numel = bucket.plan, bucket.plan.layout.shard_numel
            param, master = numel * plan.dtype.itemsize, numel * plan.master_dtype.itemsize
            steps_on_cpu, param_on_cpu = (
                tier is not Tier.DEVICE for tier in (plan.tiers.optim, plan.tiers.param)
            )
            if param_on_cpu and plan.stage.has_shard(State.PARAM):
                from_cpu += times * param * gathers[plan.name] / self._num_of_name[plan.name]
            if not plan.is_trainable:
                continue
            if steps_on_cpu:
                reductions = self._num_micro_batches if plan.stage.reduces_every_backward else 1
                grad = numel * self._engine.plan.grad_dtype(plan).itemsize
                to_cpu += times * reductions * grad
            if steps_on_cpu is not param_on_cpu:
                if steps_on_cpu or not plan.master.is_separate:
                    from_cpu += times * (param if plan.master.is_separate else master)
                if param_on_cpu or not plan.master.is_separate:
                    to_cpu += times * master
        return round(to_cpu), round(from_cpu)


# ---------------------------------------------------------------- bytes in a step


class _Part(IntEnum):
    """Part of a step; see [Note: Four blocks]."""

    FIRST_BLOCKS = 0
    FORWARD = 1
    BACKWARD = 2
    LAST_BLOCKS = 3


@dataclass(frozen=True)
class _Bytes:
    """Bytes of one moment: all, of unsharded parameters of stage 3, and of gradients."""

    total: int = 0
    unsharded: int = 0
    grads: int = 0


class _Meter:
    """Bytes of a rank at each moment, and the most in each part of a step.

    Attributes:
        rest: Bytes between steps, with gradients.
    """

    def __init__(self) -> None:
        self.rest = _Bytes()
        self._live = 0
        self._buckets: list[Bucket] = []
        self._part = _Part.FIRST_BLOCKS
        self._most: dict[_Part, _Bytes] = {}
        self._zeroed = 0  # bytes of gradients that are freed when backward begins

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Begins to measure, between two steps."""
        self._buckets = list(buckets)
        self.rest = self.now()

    def end(self) -> None:
        """Ends the measurement."""
        self._buckets = []

    def enter(self, part: _Part) -> None:
        """Begins a part; the next micro-batch may enter it once more."""
        if part is _Part.BACKWARD and self._buckets:
            self._zeroed = self.rest.grads - self.now().grads
        self._part = part

    def look(self, live_bytes: int) -> None:
        """Takes the bytes of all storages at this moment."""
        self._live = live_bytes
        if self._buckets:
            most = self._most.get(self._part)
            total = live_bytes - sum(map(_freed_bytes, self._buckets))
            if most is None or total > most.total:
                self._most[self._part] = self._measure(total)

    def now(self) -> _Bytes:
        """Bytes of this moment."""
        torch.empty(0)  # an operator, after which `look` is called
        return self._measure(self._live - sum(map(_freed_bytes, self._buckets)))

    def _measure(self, total: int) -> _Bytes:
        unsharded = sum(
            bucket.unsharded_params.allocated_bytes
            for bucket in self._buckets
            if bucket.plan.stage.shards_params
        )
        return _Bytes(total, unsharded, sum(b.grads.allocated_bytes for b in self._buckets))

    def peak(self, growth: int = 0, grads: int = 0) -> Peak:
        """Peak of the step, with blocks that have not been run.

        Args:
            growth: Bytes of activations of the blocks that have not been run.
            grads: Bytes of their gradients between steps.
        """
        zeroed = round(grads * self._zeroed / self.rest.grads) if self.rest.grads else 0
        found = []
        for part, most in self._most.items():
            total, own = most.total - self.rest.total, most.grads - self.rest.grads
            if part in (_Part.FORWARD, _Part.BACKWARD):
                total += growth
            if part is _Part.BACKWARD:
                total, own = total - zeroed, own - zeroed
            bucket, freed = max(own, 0), max(-own, 0)
            activations = total - most.unsharded - bucket + freed
            found.append(Peak(most.unsharded, bucket, activations, freed))
        return max(found, key=lambda peak: peak.total_bytes)


def _freed_bytes(bucket: Bucket) -> int:
    """Bytes of the flat buffer of parameters, whose storage exists, if its memory is freed."""
    if bucket.unsharded_params.is_allocated:
        return 0
    return bucket.plan.layout.numel * bucket.plan.dtype.itemsize


# ---------------------------------------------------------------- repeated blocks

_MIN_BLOCKS = 8  # with fewer, all are run


@dataclass(frozen=True)
class RepeatedBlocks:
    """Equal blocks of one container.

    Attributes:
        container: Qualified name of the container.
        children: Names of the blocks in the container, in order.
        numel: Number of elements of one block.
    """

    container: str
    children: tuple[str, ...]
    numel: int

    def name(self, index: int) -> str:
        """Qualified name of a block."""
        child = self.children[index]
        return f"{self.container}.{child}" if self.container else child


def find_repeated_blocks(module: nn.Module) -> RepeatedBlocks | None:
    """First container with at least `_MIN_BLOCKS` blocks, which are all equal; None: no such."""
    known = set(find_blocks(module))
    for name, container in module.named_modules():
        children = dict(container.named_children())
        prefix = f"{name}." if name else ""
        if len(children) < _MIN_BLOCKS or not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        if not all(f"{prefix}{child}" in known for child in children):
            continue
        if len({_signature(child) for child in children.values()}) == 1:
            first = next(iter(children.values()))
            return RepeatedBlocks(name, tuple(children), sum(p.numel() for p in first.parameters()))
    return None


def _signature(module: nn.Module) -> tuple[object, ...]:
    parameters = [
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    ]
    return type(module), tuple(parameters)


class _FewBlocks:
    """The first blocks, which stand for all. See [Note: Four blocks].

    Args:
        blocks: All blocks.
        num_prefetched: Number of blocks that are prefetched at once.

    Attributes:
        num_run: Number of blocks that are run.
        num_missing: Number of the others.
    """

    def __init__(self, blocks: RepeatedBlocks, num_prefetched: int) -> None:
        self.num_run = num_prefetched + 3
        self.num_missing = len(blocks.children) - self.num_run
        self._blocks = blocks
        self._last = num_prefetched  # backward below this block prefetches fewer
        self._live = [0, 0, 0]  # when blocks 1, 2 and 3 begin

    @contextmanager
    def without_others(self, module: nn.Module) -> Iterator[None]:
        """Context in which the other blocks are not in the module."""
        container = module.get_submodule(self._blocks.container)
        saved = dict(container._modules)
        try:
            for name in self._blocks.children[self.num_run :]:
                del container._modules[name]
            yield
        finally:
            container._modules.clear()
            container._modules.update(saved)

    def install(self, module: nn.Module, meter: _Meter) -> None:
        """Makes the blocks of the module divide the step into parts."""

        def before(index: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self._live[index - 1] = meter.now().total
                if index == 2:
                    meter.enter(_Part.FORWARD)

            return hook

        def after(child: nn.Module, args: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: meter.enter(_Part.LAST_BLOCKS))

        for index in (1, 2, 3):
            child = module.get_submodule(self._blocks.name(index))
            child.register_forward_pre_hook(before(index), prepend=True)
        module.get_submodule(self._blocks.name(self._last)).register_forward_hook(after)

    def growth(self) -> tuple[int, bool]:
        """Bytes by which memory grows in a block's forward; whether two blocks agree on that."""
        one, two, three = self._live
        return two - one, two - one == three - two

    def num_copies(self, parameter: str) -> int:
        """Number of parameters of all blocks for which one of the blocks that are run stands."""
        is_in_middle = parameter.startswith(f"{self._blocks.name(self.num_run - 2)}.")
        return 1 + self.num_missing if is_in_middle else 1


def _equal_on_device(config: ZeroConfig, of: RankOfGroup) -> ZeroConfig:
    """Settings with the same peak: on the device it is equal if shards are in CPU memory or files.

    On the CPU a file is not equal to memory, but memory is equal to the device.
    """

    def equal(offload: OffloadConfig | None) -> OffloadConfig | None:
        if offload is None or offload.device == "auto":
            return offload
        if of.has_device_memory:
            return OffloadConfig("cpu", ratio=offload.ratio)
        return None if offload.device == "cpu" else offload

    param, optimizer = config.offloads
    return config.replace(offload_param=equal(param), offload_optimizer=equal(optimizer))


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Context in which the garbage collector walks only objects that are made in it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
