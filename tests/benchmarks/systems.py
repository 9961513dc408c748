"""The systems that the benchmarks compare: all train one model with the same AdamW settings."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import lightning_zero

__all__ = ["ADAMW", "SYSTEMS", "DeepSpeed", "Lap", "LightningZero", "System", "make_available"]

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}

Lap = Callable[[str], None]  # called with the name of the phase that has just ended


class System(Protocol):
    """One way to train a model on all ranks. Collective: every rank calls every method."""

    def build(self, model: nn.Module, param_dtype: torch.dtype) -> None:
        """Wraps `model`, whose parameters are fp32 and equal on all ranks."""

    def step(self, ids: Tensor, targets: Tensor, lap: Lap) -> Tensor:
        """zero_grad, forward, loss, backward, optimizer step; returns this rank's loss."""

    def settle(self) -> None:
        """Waits for what a step left in flight, so that it is not charged to the next system."""

    def close(self) -> None:
        """Frees the model and its memory."""


class Alone:
    """No communication: what every system pays at least. The ranks diverge."""

    def __init__(self, *, is_stepping: bool) -> None:
        self.is_stepping = is_stepping

    def build(self, model: nn.Module, param_dtype: torch.dtype) -> None:
        self.model = model
        self.cast = _autocast(param_dtype)
        self.optimizer = AdamW(model.parameters(), **ADAMW)

    def step(self, ids: Tensor, targets: Tensor, lap: Lap) -> Tensor:
        self.optimizer.zero_grad()
        with self.cast():
            loss = _loss(self.model, ids, targets)
        lap("forward")
        loss.backward()
        lap("backward")
        if self.is_stepping:
            self.optimizer.step()
        lap("update")
        return loss.detach()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        del self.model, self.optimizer


class DDP:
    """DistributedDataParallel, with AdamW on every rank or sharded by ZeroRedundancyOptimizer.

    `has_bucket_views` sets DDP's `gradient_as_bucket_view` and ZeroRedundancyOptimizer's
    `parameters_as_bucket_view`; both are False by default in torch.
    """

    def __init__(self, *, is_sharded: bool, has_bucket_views: bool) -> None:
        self.is_sharded = is_sharded
        self.has_bucket_views = has_bucket_views

    def build(self, model: nn.Module, param_dtype: torch.dtype) -> None:
        self.cast = _autocast(param_dtype)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=self.has_bucket_views)
        self.optimizer = self._build_optimizer()

    def step(self, ids: Tensor, targets: Tensor, lap: Lap) -> Tensor:
        self.optimizer.zero_grad()
        with self.cast():
            loss = _loss(self.model, ids, targets)
        lap("forward")
        loss.backward()
        lap("backward")
        self.optimizer.step()
        lap("update")
        return loss.detach()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        del self.model, self.optimizer

    def _build_optimizer(self) -> torch.optim.Optimizer:
        if not self.is_sharded:
            return AdamW(self.model.parameters(), **ADAMW)
        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=AdamW,
            parameters_as_bucket_view=self.has_bucket_views,
            **ADAMW,
        )


class FSDP2:
    """torch's `fully_shard` on every block and on the root."""

    def __init__(self, *, reshard_after_forward: bool) -> None:
        self.reshard_after_forward = reshard_after_forward

    def build(self, model: nn.Module, param_dtype: torch.dtype) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=None if param_dtype is torch.float32 else param_dtype,
            reduce_dtype=torch.float32,  # the default has changed in torch 2.15
        )
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        shard = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=self.reshard_after_forward,
        )
        for block in model.blocks:
            shard(block)
        self.model: FSDPModule = shard(model)
        self.optimizer = AdamW(model.parameters(), **ADAMW)

    def step(self, ids: Tensor, targets: Tensor, lap: Lap) -> Tensor:
        self.optimizer.zero_grad()
        loss = _loss(self.model, ids, targets)
        lap("forward")
        loss.backward()
        lap("backward")
        self.optimizer.step()
        lap("update")
        return loss.detach()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        del self.model, self.optimizer


class LightningZero:
    """This package's engine, without Lightning; `settings` are further ones of `ZeroConfig`."""

    def __init__(self, *, stage: int, settings: Mapping[str, Any] | None = None) -> None:
        self.stage = stage
        self.settings = settings or {}

    def build(self, model: nn.Module, param_dtype: torch.dtype) -> None:
        config = lightning_zero.ZeroConfig(
            stage=self.stage,
            param_dtype=None if param_dtype is torch.float32 else param_dtype,
            **self.settings,
        )
        self.model = model
        optimizer = AdamW(model.parameters(), **ADAMW)
        self.engine = lightning_zero.Engine(model, optimizers=[optimizer], config=config)
        self.all_gathers_after_step = config.states.all_gathers_after_step

    def step(self, ids: Tensor, targets: Tensor, lap: Lap) -> Tensor:
        self.engine.zero_grad()
        loss = _loss(self.model, ids, targets)
        lap("forward")
        self.engine.backward(loss)
        lap("backward")
        self.engine.step()
        lap("update")
        return loss.detach()

    def settle(self) -> None:
        if self.settings.get("overlap_step"):
            self.engine.memory_report()  # waits for the steps
        if self.all_gathers_after_step:  # `gathered` would look at the values, too
            for bucket in self.engine.buckets:
                bucket.wait_for_update()

    def close(self) -> None:
        self.engine.close()
        del self.model, self.engine


class DeepSpeed:
    """DeepSpeed's engine around torch's AdamW, or its own for offloaded states.

    `settings` are further ones of its zero_optimization section.
    """

    def __init__(self, *, stage: int, settings: Mapping[str, Any] | None = None) -> None:
        self.stage = stage
        self.settings = settings or {}

    def build(self, model: nn.Module, param_dtype: torch.dtype) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        import deepspeed

        deepspeed.logger.setLevel("ERROR")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": param_dtype is torch.bfloat16},
            "zero_optimization": {"stage": self.stage, **self.settings},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        if "offload_optimizer" in self.settings:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            ours = {key: value for key, value in ADAMW.items() if key != "fused"}
            optimizer = DeepSpeedCPUAdam(model.parameters(), **ours)
        else:
            optimizer = AdamW(model.parameters(), **ADAMW)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, ids: Tensor, targets: Tensor, lap: Lap) -> Tensor:
        loss = _loss(self.engine, ids, targets)
        lap("forward")
        self.engine.backward(loss)
        lap("backward")
        self.engine.step()  # zeroes the gradients, too
        lap("update")
        return loss.detach()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.engine.destroy()
        del self.engine


def _loss(model: Callable[[Tensor], Tensor], ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def _autocast(dtype: torch.dtype) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    if dtype is torch.float32:
        return contextlib.nullcontext
    return partial(torch.autocast, "cpu", dtype)


def _system_makers() -> dict[str, Callable[[], System] | str]:
    """How to make each system by name, or why it cannot be made."""
    makers: dict[str, Callable[[], System] | str] = {
        "compute": partial(Alone, is_stepping=False),
        "alone": partial(Alone, is_stepping=True),
        "ddp": partial(DDP, is_sharded=False, has_bucket_views=False),
        "ddp-views": partial(DDP, is_sharded=False, has_bucket_views=True),
        "torch-zero1": partial(DDP, is_sharded=True, has_bucket_views=False),
        "torch-zero1-views": partial(DDP, is_sharded=True, has_bucket_views=True),
        "fsdp2": partial(FSDP2, reshard_after_forward=True),
        "fsdp2-keep": partial(FSDP2, reshard_after_forward=False),
    }
    has_engine = hasattr(lightning_zero, "Engine")
    for stage in (0, 1, 2, 3):
        ours = partial(LightningZero, stage=stage)
        makers[f"zero{stage}"] = ours if has_engine else "not available"
        unguarded = partial(ours, settings={"on_nonfinite": None})
        makers[f"zero{stage}-unguarded"] = unguarded if has_engine else "not available"
    for stage in (1, 2, 3):
        theirs = partial(DeepSpeed, stage=stage)
        makers[f"deepspeed{stage}"] = make_available("deepspeed", theirs)
    return makers


def make_available(package: str, maker: Callable[[], System]) -> Callable[[], System] | str:
    """`maker`, or why it cannot be called."""
    return maker if importlib.util.find_spec(package) is not None else "not installed"


SYSTEMS = _system_makers()
