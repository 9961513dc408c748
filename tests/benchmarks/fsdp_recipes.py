"""Trains the models of three examples with FSDP on two CPU ranks, and prints what happens.

    torchrun --nproc-per-node 2 tests/benchmarks/fsdp_recipes.py

`fsdp2` is Lightning's ModelParallelStrategy with `fully_shard` on every encoder layer and around
them, and `fsdp1` is Lightning's FSDPStrategy; a subclass, because Lightning refuses its own class
without CUDA. A wait of 30 s ends the last program.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import multimodal
import muon
import self_supervised

TIMEOUT = timedelta(seconds=30)


class FSDP1(FSDPStrategy):
    """Lightning's strategy; Lightning checks for CUDA only where it is this very class."""


def shard(module: nn.Module, layers: nn.ModuleList, mesh: object) -> None:
    """FSDP2 on each layer, and around them."""
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


class SelfDistilled(self_supervised.SelfDistilled):
    """The model of the example, for FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for backbone in (self.student, self.teacher):
            shard(backbone, backbone.encoder.layers, mesh)
        fully_shard(self.predictor, mesh=mesh)


class Resharding(SelfDistilled):
    """Shards the teacher again, as it has no backward in which FSDP2 would."""

    def on_train_batch_end(self, *_: object) -> None:
        self.teacher.reshard()
        super().on_train_batch_end()


class Answerer(multimodal.Answerer):
    """The model of the example, for FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        shard(self.vision, self.vision.encoder.layers, mesh)
        shard(self.text, self.text.layers, mesh)
        for module in (self.words, self.head):
            fully_shard(module, mesh=mesh)


def fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        timeout=TIMEOUT,
    )


def distil(name: str) -> str:
    """Two forwards and an EMA teacher."""
    model, strategy = {
        "ddp": (self_supervised.SelfDistilled, lambda: "ddp"),
        "fsdp1": (
            self_supervised.SelfDistilled,
            lambda: FSDP1(
                auto_wrap_policy={nn.TransformerEncoderLayer}, process_group_backend="gloo"
            ),
        ),
        "fsdp2": (SelfDistilled, fsdp2),
        "fsdp2-reshard": (Resharding, fsdp2),
    }[name]
    args = argparse.Namespace(devices=2, epochs=1, batch_size=64)
    pl.seed_everything(0, verbose=False)
    pictures = torch.stack([x for x, _ in self_supervised.Shapes(0, 512, size=32)])
    trainer = self_supervised.train(model(), strategy(), pictures, args)
    return f"loss {trainer.callback_metrics['loss']:.6f}"


def answer() -> str:
    """A vision tower that only some ranks run."""
    pl.seed_everything(0, verbose=False)
    trainer = multimodal.train(Answerer(steps=20, batch_size=8), fsdp2(), devices=2)
    return f"loss {trainer.callback_metrics['loss']:.6f}"


def orthogonalize() -> str:
    """Muon and AdamW, compared with one process."""
    steps, alone, full = 10, muon.build(), muon.build()
    model = muon.build()
    shard(model, model.blocks, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = muon.optimizers(model)
    for step in range(steps):
        for i in range(muon.MICRO_BATCHES):
            model.set_requires_gradient_sync(i == muon.MICRO_BATCHES - 1)
            loss = muon.loss_of(model, step, i, dist.get_rank())
            (loss / muon.MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), muon.MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    muon.train_alone(alone, steps, range(dist.get_world_size()))
    for name, parameter in model.named_parameters():
        full.get_parameter(name).data = parameter.full_tensor()
    return f"differs from one process by {muon.difference(full, alone):.1e}"


def show(name: str, program: Callable[[], str]) -> None:
    """Prints the result of a program, or its exception, on every rank."""
    start = time.monotonic()
    try:
        result = program()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        result = f"{type(error).__name__}: {lines[0][:300]}"
    print(
        f"{name}, rank {dist.get_rank()}: {result} [{time.monotonic() - start:.0f} s]", flush=True
    )


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, lightning {lightning.__version__}")
    show("two forwards, ddp", lambda: distil("ddp"))
    show("two forwards, fsdp2", lambda: distil("fsdp2"))
    show("two forwards, fsdp2 with teacher.reshard()", lambda: distil("fsdp2-reshard"))
    show("Muon, fsdp2", orthogonalize)
    show("two forwards, fsdp1", lambda: distil("fsdp1"))
    show("vision tower, fsdp2", answer)


if __name__ == "__main__":
    main()
