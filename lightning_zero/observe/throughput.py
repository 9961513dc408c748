"""How fast a fit is: samples, tokens and floating point operations per second.

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.data import _extract_batch_size
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["Counts", "Speed", "Throughput", "flops_per_token", "num_tokens", "peak_flops"]


class Counts(NamedTuple):
    """What a rank has trained; NaN: not known.

    Attributes:
        steps: Batches with an optimizer step.
        batches: All.
        samples: In them.
        tokens: In them.
        flops: See [Note: Model FLOPs].
        seconds: For all of these.
    """

    steps: float = 0.0
    batches: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Counts) -> Counts:
        """The sum of each."""
        return Counts(*map(float.__add__, self, other))

    def minus(self, other: Counts) -> Counts:
        """The difference of each."""
        return Counts(*map(float.__sub__, self, other))


class Throughput:
    """Counts batches and the time for them, without evaluation. Local, and no wait for a device.

    Loading of data counts; what comes between an evaluation and the batch after it does not.

    Args:
        module: What is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._flops_per_token = flops_per_token(module)
        self._total = self._until_lap = Counts()
        self._first: Counts | None = None  # the first step; None until it is over
        self._since: float | None = None  # None: the clock stands

    @property
    def is_warm(self) -> bool:
        """The first step is over."""
        return self._first is not None

    @property
    def warm(self) -> Counts:
        """All but the first step."""
        return Counts() if self._first is None else self._total.minus(self._first)

    def before_batch(self) -> None:
        """Lets the clock run."""
        if self._since is None:
            self._since = time.perf_counter()

    def after_batch(self, batch: Any, *, has_stepped: bool) -> None:
        """Counts a batch.

        Raises:
            ValueError: The module's `flops_per_batch` is no number, or below 0.
        """
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
        counts = (has_stepped, 1, _num_samples(batch), tokens, flops)
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


def _num_samples(batch: Any) -> float:
    """As Lightning counts, without its warning where tensors differ: the first one tells."""
    size = next(_extract_batch_size(batch), None)
    return math.nan if size is None else size


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

    Args:
        module: Whole or sharded: its parameters tell the shape of the whole. Weights of 4 bits
            count by what they stand for.
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
    """Of all ranks together, without evaluation; NaN: unknown.

    Attributes:
        num_steps: That were timed.
        steps_per_s: Batches with an optimizer step.
        batches_per_s: Of one rank.
        samples_per_s: Of all ranks.
        tokens_per_s: Of all ranks.
        tflops_per_device: 10^12 operations per second: see [Note: Model FLOPs].
        mfu: Model FLOPs utilization, the share of the device's peak; 1 is all of it.
    """

    num_steps: int
    steps_per_s: float
    batches_per_s: float
    samples_per_s: float
    tokens_per_s: float
    tflops_per_device: float
    mfu: float

    @classmethod
    def of(cls, everyone: Sequence[Sequence[float]], peak: float = math.nan) -> Speed:
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
