"""The callback `Fingerprints`: writes a run down so that another run can be compared with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.pytorch import STEP_OUTPUT, DDPStrategy, SingleDeviceStrategy
from lightning_zero.checkpoint.storage import is_remote
from lightning_zero.core.bucket import Bucket
from lightning_zero.strategy.strategy import ZeroStrategy
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["FILE_NAME", "Fingerprints"]

FILE_NAME = "fingerprints.jsonl"

_CHUNK_NUMEL = 2**18  # elements that are mixed in one call
# Odd factors of MurmurHash3's 64-bit finalizer (Appleby, 2011) and of Knuth's generator, signed.
_FACTORS = (-49064778989728563, -4265267296055464877, 6364136223846793005)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Sum of squares, sum, and digest of some elements of a tensor; those of all are their sums.
_Parts: TypeAlias = tuple[float, float, int]


class Fingerprints(pl.Callback):
    """Writes one line of JSON per step and parameter, for `lightning-zero compare`.

    A line has the norm and the sum (float64) of a parameter, and a digest: 64 bits of all elements
    and their positions. Values that are equal have equal digests, whatever the strategy, stage,
    number of ranks or tier. Parameters are written before the first step (step 0) and after a step,
    in float32 where the optimizer steps float32 main parameters of float32 parameters; gradients,
    averaged over the ranks, before clipping. Rank 0 writes `fingerprints.jsonl`.

    Each such step reads all parameters once. Collective: every rank.

    Args:
        every_n_steps: Interval of written steps, in optimizer steps.
        max_steps: Last step that is written. None: all.
        gradients: Also write gradients.
        dirpath: Directory of the file. None: that of the first logger, or the Trainer's
            `default_root_dir`; if that is remote, the working directory.

    Raises:
        TypeError: An argument has a wrong type; or, before training, the strategy is not a
            `ZeroStrategy`, DDP, or of one device.
        ValueError: A number of steps is out of range.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        *,
        max_steps: int | None = None,
        gradients: bool = False,
        dirpath: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("max_steps", max_steps)):
            if value is None and name == "max_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not isinstance(gradients, bool):
            raise TypeError(f"gradients must be True or False, got {gradients!r}.")
        self.every_n_steps = every_n_steps
        self.max_steps = max_steps
        self.has_gradients = gradients
        self.dirpath = None if dirpath is None else Path(dirpath)
        self._file: BinaryIO | None = None  # of rank 0, in fit
        self._last_step = 0  # `global_step` after the last batch

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        known = (ZeroStrategy, DDPStrategy, SingleDeviceStrategy)
        if not isinstance(trainer.strategy, known):
            raise TypeError(
                "Fingerprints reads parameters of ZeroStrategy, DDPStrategy and strategies of one "
                f"device, got {type(trainer.strategy).__name__}; choose one of them, or leave the "
                "callback out."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = self.dirpath or trainer.log_dir or trainer.default_root_dir
        path = Path("." if is_remote(folder) else folder, FILE_NAME)
        self._last_step = trainer.global_step
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A resumed run continues the file; `compare` takes the last line of a step.
            self._file = path.open("ab" if trainer.global_step else "wb")
        if not trainer.global_step:
            self._write("parameter", 0, _parameters(trainer, pl_module), trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        step = trainer.global_step + 1
        if self.has_gradients and self._writes(step, step - 1):
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._write("gradient", step, _gradients(trainer, pl_module, stepped), trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step, last_step = trainer.global_step, self._last_step
        self._last_step = step
        if self._writes(step, last_step):
            self._write("parameter", step, _parameters(trainer, pl_module), trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _writes(self, step: int, last_step: int) -> bool:
        """Whether `step` is written; several optimizers may have stepped since `last_step`."""
        is_due = step // self.every_n_steps > last_step // self.every_n_steps
        return is_due and (self.max_steps is None or step <= self.max_steps)

    def _write(
        self, kind: str, step: int, own: Iterator[tuple[str, _Parts]], trainer: pl.Trainer
    ) -> None:
        """Adds up the parts of all ranks; rank 0 writes the lines. Collective."""
        by_rank = [dict(own)]
        if isinstance(trainer.strategy, ZeroStrategy):
            by_rank = trainer.strategy.engine.comm.control.gather_objects(by_rank[0])
        if self._file is None:
            return
        lines = []
        for name in dict.fromkeys(name for parts in by_rank for name in parts):
            squares, sums, digests = zip(*(p[name] for p in by_rank if name in p), strict=True)
            line = {
                "step": step,
                "kind": kind,
                "name": name,
                "norm": sum(squares) ** 0.5,
                "sum": sum(sums),
                "digest": f"{sum(digests) % 2**64:016x}",
            }
            lines.append(json.dumps(line) + "\n")
        # In one call: a process that is killed leaves no half of a line.
        self._file.write("".join(lines).encode())
        self._file.flush()


def _parameters(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[str, _Parts]]:
    """Parts of the parameters that this rank holds, by name. Local."""
    if isinstance(trainer.strategy, ZeroStrategy):
        for bucket in trainer.strategy.engine.buckets:
            views = bucket.masters.shard_views()
            if _is_counted(bucket):
                for index, slot in enumerate(bucket.plan.layout.slots):
                    values = _read(views[index]).to(bucket.orig_dtypes[index])
                    yield slot.name, _parts(values, bucket.shards.owned(index).start)
    elif trainer.is_global_zero:
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                yield name, _parts(parameter, 0)


def _gradients(
    trainer: pl.Trainer, module: pl.LightningModule, stepped: set[int]
) -> Iterator[tuple[str, _Parts]]:
    """Parts of the mean gradients of the parameters with an id in `stepped`. Local."""
    if isinstance(trainer.strategy, ZeroStrategy):
        for bucket in trainer.strategy.engine.buckets:
            for index, slot in enumerate(bucket.plan.layout.slots):
                if id(bucket.parameters[index]) in stepped:
                    grad = bucket.grads.fetch(index)
                    if grad is not None and _is_counted(bucket):
                        yield slot.name, _parts(_read(grad), bucket.shards.owned(index).start)
    elif trainer.is_global_zero:
        for name, parameter in module.named_parameters():
            if id(parameter) in stepped and parameter.grad is not None:
                yield name, _parts(parameter.grad, 0)


def _is_counted(bucket: Bucket) -> bool:
    """Whether this rank's elements count: those of replicas are the same."""
    mesh = bucket.comm.mesh
    return mesh.rank == 0 if bucket.shards.replicates_optim else mesh.replica_rank == 0


def _read(values: Tensor) -> Tensor:
    return values.read() if isinstance(values, LazyTensor) else values


def _parts(values: Tensor, start: int) -> _Parts:
    """Parts of `values`, elements of a tensor from its element `start` on.

    -0.0 counts as 0.0, and every NaN as the same.
    """
    squares, total, digest = 0.0, 0.0, 0
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for chunk in values.detach().reshape(-1).split(_CHUNK_NUMEL):
            same = (chunk + 0.0).masked_fill_(chunk.isnan(), torch.nan)
            wide = same.double()
            squares += float(wide.square().sum())
            total += float(wide.sum())
            bits = same.view(_INTEGERS[same.element_size()]).to(torch.int64)
            index = torch.arange(start, start + len(bits), device=bits.device)
            mixed = bits ^ (index + 1) * _FACTORS[2]
            for factor in _FACTORS[:2]:
                mixed = (mixed ^ mixed >> 33) * factor
            digest += int((mixed ^ mixed >> 33).sum())
            start += len(bits)
    return squares, total, digest
