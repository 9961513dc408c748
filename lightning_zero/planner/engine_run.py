"""Bytes of a training step, counted by the engine itself while it trains on shapes alone.

[Note: Planned engine] The engine of training runs on a copy of the module, with copies of the
optimizers: one rank of a fake process group, with storages that are never written (shapes_only.py).
Its schedule and its buffers are those of training; only collectives and files move nothing. The
step that is measured has the schedule and the buffers of all later ones: optimizer states exist
after one step; the schedule of stage 3 and the buffers of files need two micro-batches.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.comm.fake import fake_world
from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.names import parameters_by_name, saved_name
from lightning_zero.layout.offload import OffloadConfig, Tier
from lightning_zero.layout.stage import State
from lightning_zero.layout.units import find_blocks
from lightning_zero.optim.clone import parameters_of
from lightning_zero.optim.dynamic8 import in_one_piece
from lightning_zero.planner.counts import BucketCounts, Counts, Peak, Windows
from lightning_zero.planner.planned_engine import copies_on_cpu, planned_engine
from lightning_zero.planner.shapes_only import Results, ShapesOnly

__all__ = ["EngineRuns", "RankOfGroup", "RepeatedBlocks", "find_repeated_blocks"]

_CPU = torch.device("cpu")


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

    @cached_property
    def _blocks(self) -> RepeatedBlocks | None:
        return find_repeated_blocks(self.module)

    def _run_few(self, config: ZeroConfig, of: RankOfGroup) -> Counts | None:
        """Bytes from a run of a few blocks; None: they do not stand for all."""
        blocks = self._blocks
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
                stack.enter_context(in_one_piece())
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
            for _ in range(self._num_steps_before(config)):
                self._accumulate(engine, step, meter)
                engine.step()
            gc.collect()  # cycles that hold tensors of the construction
            meter.watch(engine.buckets)
            copies = (lambda name: 1) if few is None else few.num_copies
            count = BucketCounts(engine, copies, self.num_micro_batches, self.averages)
            if few is not None:
                few.install(module, meter)
            windows = Windows(engine.recorder)
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

    def _num_steps_before(self, config: ZeroConfig) -> int:
        """Number of steps before the one that is measured. See [Note: Planned engine]."""
        has_files = any(o is not None and o.device in ("nvme", "auto") for o in config.offloads)
        needs_two = config.states.shards_params or has_files
        return 2 if needs_two and self.num_micro_batches == 1 else 1

    def _accumulate(
        self,
        engine: Engine,
        step: Callable[[nn.Module], Tensor],
        meter: _Meter,
        windows: Windows | None = None,
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
        most = self._most.get(self._part)
        if self._buckets and (most is None or live_bytes > most.total):
            total = live_bytes - sum(map(_freed_bytes, self._buckets))
            if most is None or total > most.total:
                self._most[self._part] = self._measure(total)

    def now(self) -> _Bytes:
        """Bytes of this moment."""
        torch.empty(0)  # an operator, after which `look` is called
        return self._measure(self._live - sum(map(_freed_bytes, self._buckets)))

    def _measure(self, total: int) -> _Bytes:
        unsharded = sum(
            bucket.params.unsharded.allocated_bytes
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
    if bucket.params.unsharded.is_allocated:
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
        first, second, third = self._live
        return second - first, second - first == third - second

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
