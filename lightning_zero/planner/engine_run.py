"""Bytes of a training step, counted by the engine itself while it trains on shapes alone.

[Note: Planned engine] The engine of training runs on a copy of the module: one rank of a fake
process group, with storages that are never written (shapes_only.py). Its schedule and its buffers
are those of training; only collectives and files move nothing. The third step is measured, because
the schedule has been recorded then. The optimizers are plain SGD, because states of optimizers are
not part of the peak; only whether they step full tensors matters, which decides on the layout.

[Note: A device on the CPU] All tensors are on the CPU. To count those of a device with memory of
its own, storage and communicator behave as on such a device: offloaded shards are copied to mapped
memory, which is not counted. Device memory is the same whether a shard is offloaded to CPU memory
or to NVMe, so NVMe is replaced by CPU memory.

[Note: Four blocks] The time of a run grows with the number of blocks. If all blocks of a container
have the same class and equal parameters, a few stand for all. Between two blocks in the middle of
forward, memory grows by the activations of one; if it does not grow by the same for the next block,
all are run. What backward has not reached yet is larger by that much for each missing block, less
the gradients of the block that have been zeroed. So the peak of a step is the largest of four:
before the third block; from there to the end of forward; in backward down to the last block but
one that still prefetches; and after that.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.comm.fake import fake_world
from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.units import find_blocks
from lightning_zero.planner.planned_engine import CpuEngine, DeviceEngine, copies_on_cpu
from lightning_zero.planner.shapes_only import Results, ShapesOnly
from lightning_zero.record.spans import Kind

__all__ = ["EngineRuns", "Peak", "RankOfGroup", "RepeatedBlocks", "find_repeated_blocks"]

_CPU = torch.device("cpu")
_NUM_STEPS = 3


@dataclass(frozen=True)
class Peak:
    """Peak of one rank's device memory in forward and backward, without the model states.

    Attributes:
        unsharded_bytes: Bytes of unsharded parameters of stage 3.
        grad_bucket_bytes: Bytes of unsharded gradients.
        activation_bytes: Bytes of activations and of all other tensors.
        freed_bytes: Bytes of gradients that are counted as model states but are freed at the peak,
            after `zero_grad`.
        num_all_gathers: Number of all-gathers before use in one micro-batch, by bucket.
    """

    unsharded_bytes: int = 0
    grad_bucket_bytes: int = 0
    activation_bytes: int = 0
    freed_bytes: int = 0
    num_all_gathers: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Bytes in addition to the model states, minus those that are freed."""
        needed = self.unsharded_bytes + self.grad_bucket_bytes + self.activation_bytes
        return needed - self.freed_bytes


@dataclass(frozen=True)
class RankOfGroup:
    """Rank that is counted, and the other ranks of its shard group.

    Attributes:
        rank: Rank in the group.
        size: Number of ranks.
        has_device_memory: Whether the device has memory of its own.
        grad_bytes: Bytes of gradients between steps on the device, for all blocks.
    """

    rank: int
    size: int
    has_device_memory: bool
    grad_bytes: int


class EngineRuns:
    """Runs of one job's step under different settings.

    Args:
        module: Module on any device, also on meta; it is left unchanged.
        optimizers: Optimizers of its parameters.
        step: Function of the module that returns the loss of a micro-batch.
        num_micro_batches: Number of micro-batches in an optimizer step.
        autocast: Dtype of autocast; None: no autocast.
        full_optimizers: Indices of the optimizers that step full tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        step: Callable[[nn.Module], Tensor],
        *,
        num_micro_batches: int = 1,
        autocast: torch.dtype | None = None,
        full_optimizers: Collection[int] = (),
    ) -> None:
        self._module = module
        self._optimizers = optimizers
        self._full_optimizers = full_optimizers
        self._step = step
        self._num_micro_batches = min(num_micro_batches, 2)
        self._autocast = autocast
        self._results: Results = {}
        self._known: dict[tuple[str, RankOfGroup], Peak] = {}

    def peak(self, config: ZeroConfig, of: RankOfGroup) -> Peak:
        """Peak under `config`, whose replicas are ignored.

        Raises:
            ValueError: The step cannot run on shapes alone.
        """
        config = _equal_on_device(config, of).replace(sharding_group_size=None)
        key = repr(config), of
        if key not in self._known:
            self._known[key] = self._run_few(config, of) or self._run(config, of, None)[0]
        return self._known[key]

    def _run_few(self, config: ZeroConfig, of: RankOfGroup) -> Peak | None:
        """Peak from a run of a few blocks; None: they do not stand for all."""
        blocks = find_repeated_blocks(self._module)
        if blocks is None:
            return None
        num_prefetched = 1
        if config.prefetch_bucket_size:
            num_prefetched = math.ceil(config.prefetch_bucket_size / blocks.numel)
        few = _FewBlocks(blocks, num_prefetched)
        if few.num_run >= len(blocks.children):
            return None
        try:
            peak, is_linear = self._run(config, of, few)
        except ValueError:
            return None
        return peak if is_linear else None

    def _run(
        self, config: ZeroConfig, of: RankOfGroup, few: _FewBlocks | None
    ) -> tuple[Peak, bool]:
        """Peak, and whether memory grows by the same for each block."""
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
                f"one step of {type(self._module).__name__} cannot run on shapes alone "
                f"({type(error).__name__}: {text[:300]}); pass inputs of the right "
                "shape, or plan without activations."
            ) from error

    def _train(
        self, config: ZeroConfig, of: RankOfGroup, few: _FewBlocks | None, meter: _Meter
    ) -> tuple[Peak, bool]:
        with nullcontext() if few is None else few.without_others(self._module):
            copies = copies_on_cpu(self._module, self._optimizers, self._full_optimizers)
        module, optimizers = copies
        # Gradients are never computed: they may be NaN.
        config = config.replace(overlap_step=False, on_nonfinite=None)
        kind = DeviceEngine if of.has_device_memory else CpuEngine
        engine = kind(module.train(), optimizers, config, device=_CPU)
        try:
            for _ in range(_NUM_STEPS - 1):
                self._accumulate(engine, meter)
                engine.step()
            gc.collect()  # cycles that hold tensors of the construction
            meter.watch(engine.buckets)
            if few is not None:
                few.install(module, meter)
            engine.recorder.begin(_NUM_STEPS - 1)
            self._accumulate(engine, meter)
            meter.end()
            recording = engine.recorder.end()
        finally:
            engine.close(keep_parameters=False)
        gathers = Counter(
            span.name
            for span in recording.spans
            if span.kind is Kind.ALL_GATHER and not span.is_wait
        )
        # Buckets of one unit may share a name.
        names = Counter(b.plan.name for b in engine.buckets if b.plan.stage.shards_params)
        counts = {
            name: -(-gathers[name] // (count * self._num_micro_batches))
            for name, count in names.items()
        }
        if few is None:
            return meter.peak(Counter(counts)), True
        growth, is_linear = few.growth()
        grads = of.grad_bytes - meter.rest.grads
        return meter.peak(few.of_all(counts), few.num_missing * growth, grads), is_linear

    def _accumulate(self, engine: Engine, meter: _Meter) -> None:
        """Computes the gradients of one step; they are zeroed where the Trainer does so."""
        for number in range(self._num_micro_batches):
            meter.enter(_Part.FIRST_BLOCKS)
            under = torch.autocast("cpu", self._autocast, enabled=self._autocast is not None)
            with under, torch.enable_grad(), engine.forward_context():  # it may be `training_step`
                loss = self._step(engine.module)
            if number == 0:
                engine.zero_grad()
            meter.enter(_Part.BACKWARD)
            is_last = number == self._num_micro_batches - 1
            with nullcontext() if is_last else engine.no_sync():
                engine.backward(loss)
            del loss


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

    def peak(self, num_all_gathers: Counter[str], growth: int = 0, grads: int = 0) -> Peak:
        """Peak of the step, with blocks that have not been run.

        Args:
            num_all_gathers: Number of all-gathers before use, by bucket.
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
            found.append(Peak(most.unsharded, bucket, activations, freed, num_all_gathers))
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

    def of_all(self, counts: Mapping[str, int]) -> Counter[str]:
        """Counts of the buckets of all blocks, from those of the blocks that are run."""
        total, last, found = len(self._blocks.children), self.num_run - 1, Counter[str]()
        for name, count in counts.items():
            index = next((i for i in range(self.num_run) if self._is_in(name, i)), None)
            if index is None:
                found[name] = count
                continue
            rest = name.removeprefix(self._blocks.name(index))
            copies = range(index, index + 1)
            if index == last:
                copies = range(total - 1, total)
            elif index == last - 1:
                copies = range(index, total - 1)
            found.update({f"{self._blocks.name(copy)}{rest}": count for copy in copies})
        return found

    def _is_in(self, bucket: str, index: int) -> bool:
        """Whether a bucket belongs to a block."""
        name = self._blocks.name(index)
        return bucket.startswith(name) and not bucket[len(name) : len(name) + 1].isalnum()


def _equal_on_device(config: ZeroConfig, of: RankOfGroup) -> ZeroConfig:
    """Settings with the same memory on the device. See [Note: A device on the CPU]."""

    def equal(offload: OffloadConfig | None) -> OffloadConfig | None:
        if offload is None or offload.device == "auto":
            return offload
        if of.has_device_memory:
            return OffloadConfig("cpu", ratio=offload.ratio)
        return None if offload.device == "cpu" else offload  # both tiers are the same memory

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
