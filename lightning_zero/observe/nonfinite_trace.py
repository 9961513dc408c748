"""The callback `NonfiniteTrace`: finds the module in which a NaN or an infinity begins.

[Note: A traced micro-batch] When the guard of the engine (core/guard.py) reports a gradient, all
ranks compute the forward of that micro-batch again, with the same random numbers, and look at the
inputs and outputs of each module. If all of them are finite, they also compute the gradients of the
outputs, from the last module to the first. No gradient of a parameter is computed, so those of the
step stay as they are; buffers are restored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_zero.core.guard import NonfiniteGradientError, NonfiniteReport
from lightning_zero.observe.replica import arguments_of_step
from lightning_zero.observe.report import zero_strategy
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["NonfiniteTrace"]


@dataclass(frozen=True)
class _MicroBatch:
    """What is needed to compute a micro-batch again."""

    batch: Any
    batch_idx: int
    rng: dict[str, Any]


class _Looks:
    """What the hooks of one forward have seen.

    Attributes:
        first: The first module with finite inputs and a non-finite output, as text.
        outputs: Outputs of modules without children, with the module's name, in order.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.outputs: list[tuple[str, Tensor]] = []

    def look(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook of module `part`, whose name is `name`."""
        outputs = _tensors(output)
        if not any(True for _ in part.children()):
            self.outputs += [(name, one) for one in outputs if one.requires_grad]
        if self.first is not None or all(map(_is_finite, outputs)):
            return
        title = f"{name} ({type(part).__name__})"
        if not all(map(_is_finite, _tensors((args, kwargs)))):
            self.first = f"{title} got a non-finite input, which no module before it returned"
            return
        bad = [key for key, p in part.named_parameters() if not _is_finite(p)]
        self.first = f"{title} turns finite inputs into a non-finite output"
        if bad:
            self.first = f"{title} has a non-finite parameter: {bad[0]}"


class NonfiniteTrace(pl.Callback):
    """Names the first module that turns finite values into non-finite ones.

    It acts on the first reports of `on_nonfinite`. The micro-batch is computed again on all ranks,
    with a look at every module. Each rank with a non-finite gradient writes a file with the batch,
    the states of the random generators and the step. `on_nonfinite="stop"` ends the run afterwards.
    On a GPU it needs "stop" or "skip", because warnings come one backward late.

    A reference to each batch of a step is kept until the next step. In stage 3, parameters that the
    trace of a backward has used stay unsharded in the steps that follow.

    Collective: every rank, after a report.

    Args:
        dirpath: Directory of the files. None: `nonfinite` in the first logger's directory, or in
            the Trainer's `default_root_dir`.
        max_traces: Number of reports that are traced.

    Attributes:
        found: One text for each trace, the same on every rank.

    Raises:
        TypeError: The strategy is not a `ZeroStrategy`.
        ValueError: `max_traces` is not a positive number; or, when training begins, `on_nonfinite`
            is None or the module optimizes manually.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, *, max_traces: int = 1
    ) -> None:
        if isinstance(max_traces, bool) or not isinstance(max_traces, int) or max_traces < 1:
            raise ValueError(f"max_traces must be a number from 1 on, got {max_traces!r}.")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.max_traces = max_traces
        self.found: list[str] = []
        self._report: NonfiniteReport | None = None  # not traced yet
        self._kept: list[_MicroBatch] = []  # of this step
        self._step = -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = zero_strategy(trainer, self)
        if strategy.config.on_nonfinite is None:
            raise ValueError(
                "NonfiniteTrace acts on reports of non-finite gradients, and on_nonfinite=None "
                'switches them off; use on_nonfinite="warn", "stop" or "skip".'
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "NonfiniteTrace calls training_step again, which would step the optimizers in "
                "manual optimization; remove it."
            )
        self._report, self._kept = None, []
        guard = strategy.engine.guard

        def note(report: NonfiniteReport) -> None:
            # On a GPU, a warning is one backward late, when the batch is gone.
            is_known = report.step == guard.step
            if is_known and len(self.found) < self.max_traces and self._report is None:
                self._report = report

        guard.add_listener(note)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if len(self.found) >= self.max_traces:
            self._kept = []
            return
        if trainer.global_step != self._step:
            self._step, self._kept = trainer.global_step, []
        self._kept.append(_MicroBatch(batch, batch_idx, _collect_rng_states()))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trace_reported(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        strategy = zero_strategy(trainer, self)
        is_reported = self._report is not None and isinstance(exception, NonfiniteGradientError)
        if is_reported and strategy._enter_collective("the trace of a non-finite gradient"):
            self._trace_reported(trainer, pl_module)

    # ---------------------------------------------------------------- a trace

    def _trace_reported(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        report, self._report = self._report, None
        if report is None or not self._kept:
            return
        strategy = zero_strategy(trainer, self)
        number = report.found[0].micro_batch
        if number >= len(self._kept):
            return  # several backwards of one batch: their inputs are not known
        kept = self._kept[number]
        text = _find_origin(strategy, pl_module, kept)
        rank = strategy.engine.comm.rank
        is_reported = any(one.rank == rank for one in report.found)
        path = self._write(trainer, report, kept, rank) if is_reported else None
        own = None if path is None else f"rank {rank}: {text}; saved to {path}"
        lines = strategy.engine.comm.control.gather_objects(own)
        shown = "\n  ".join(line for line in lines if line is not None)
        self.found.append(f"trace of micro-batch {number} in step {self._step}:\n  {shown}")
        rank_zero_warn(self.found[-1])

    def _write(
        self, trainer: pl.Trainer, report: NonfiniteReport, kept: _MicroBatch, rank: int
    ) -> Path:
        folder = self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "nonfinite"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step{self._step}_rank{rank}.pt"
        content = {
            "batch": kept.batch,
            "batch_idx": kept.batch_idx,
            "rng": kept.rng,
            "global_step": self._step,
            "rank": rank,
            "report": str(report),
        }
        torch.save(content, path)
        return path.absolute()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._kept, self._report = [], None


def _find_origin(strategy: ZeroStrategy, module: pl.LightningModule, kept: _MicroBatch) -> str:
    """Computes a micro-batch again and describes where it becomes non-finite. Collective."""
    with isolate_rng(), _restoring_buffers(module), _without_logging(module), torch.enable_grad():
        _set_rng_states(kept.rng)
        with _looking(module) as looks:
            output = strategy.training_step(*arguments_of_step(module, kept.batch, kept.batch_idx))
        loss = output["loss"] if isinstance(output, Mapping) else output
        # Every rank computes the gradients: they unshard parameters together.
        origin = _first_in_backward(loss, looks)
    if looks.first is not None:
        return looks.first
    if isinstance(loss, Tensor) and not _is_finite(loss):
        return "all modules have finite outputs, but the loss computed from them is not finite"
    return origin


@contextmanager
def _looking(module: nn.Module) -> Iterator[_Looks]:
    """Context in which hooks look at inputs and outputs of all modules."""
    looks = _Looks()
    handles = []
    for name, part in module.named_modules():
        if part is not module:
            handles.append(part.register_forward_hook(partial(looks.look, name), with_kwargs=True))
    try:
        yield looks
    finally:
        for handle in handles:
            handle.remove()


def _first_in_backward(loss: Any, looks: _Looks) -> str:
    """Describes the first module in backward whose gradients are non-finite."""
    if not isinstance(loss, Tensor) or not loss.requires_grad or not looks.outputs:
        return "its origin is not known"
    outputs = [output for _, output in looks.outputs]
    grads = torch.autograd.grad(loss, outputs, allow_unused=True)
    after = "the loss"
    for (name, _), grad in reversed(list(zip(looks.outputs, grads, strict=True))):
        if grad is not None and not _is_finite(grad):
            return f"the forward is finite; the backward of {after} makes it non-finite"
        after = name
    return (
        "the forward and the gradients of all outputs are finite; the gradient of the named "
        "parameter itself is not"
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.detach().isfinite().all())


@contextmanager
def _restoring_buffers(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


@contextmanager
def _without_logging(module: pl.LightningModule) -> Iterator[None]:
    """Context in which `self.log` does nothing: the micro-batch has been logged already."""
    own = vars(module)
    names = [name for name in ("log", "log_dict") if name not in own]
    own.update(dict.fromkeys(names, _ignore))
    try:
        yield
    finally:
        for name in names:
            del own[name]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Replaces `log`."""
