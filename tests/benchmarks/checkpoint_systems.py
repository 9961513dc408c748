"""The ways to save and to load that the benchmark of checkpoints compares."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

import lightning_zero
from lightning_zero.checkpoint import full_state_dict, load_module, load_optimizer, open_checkpoint
from lightning_zero.checkpoint.source import raise_damage_on_any_rank
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.optim.state import optimizer_state_dict
from lightning_zero.strategy.saving import Saving

__all__ = ["SYSTEMS", "System"]

_BLOCK_BYTES = 4 * 1024**2
_ADAMW = {"lr": 3e-4, "fused": True}
Step = Callable[[], None]


class System(Protocol):
    """One way to save a model and the moments of Adam. Collective: every rank calls everything."""

    def __init__(self, model: nn.Module, nbytes: int) -> None:
        """Wraps `model`, whose weights and moments have `nbytes` in all."""

    def save(self, path: Path) -> None:
        """Returns when all is on the disk."""

    def load(self, path: Path) -> None:
        """Returns when weights and moments are in place."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Disk:
    """The disk alone: as many bytes, from memory, by rank 0, in 4 MiB, past the page cache."""

    def __init__(self, model: nn.Module, nbytes: int) -> None:
        self.block = mmap.mmap(-1, _BLOCK_BYTES)  # page-aligned
        self.block.write(os.urandom(_BLOCK_BYTES))
        self.num_blocks = -(-nbytes // _BLOCK_BYTES)

    def save(self, path: Path) -> None:
        if dist.get_rank() == 0:
            file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT)
            for _ in range(self.num_blocks):
                os.write(file, self.block)
            os.fsync(file)
            os.close(file)

    def load(self, path: Path) -> None:
        if dist.get_rank() == 0:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            while os.readv(file, [self.block]):
                pass
            os.close(file)


class DiskBuffered(Disk):
    """The same through the page cache, synced."""

    def save(self, path: Path) -> None:
        if dist.get_rank() == 0:
            with open(path, "wb", buffering=0) as file:
                for _ in range(self.num_blocks):
                    file.write(self.block)
                os.fsync(file)

    def load(self, path: Path) -> None:
        if dist.get_rank() == 0:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(self.block):
                    pass


class Torch:
    """`torch.save` and `torch.load` of a full model on rank 0: no all-gather, no shards."""

    def __init__(self, model: nn.Module, nbytes: int) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), **_ADAMW)
        _step(self.model, self.optimizer.step)

    def save(self, path: Path) -> None:
        if dist.get_rank() == 0:
            content = {
                "state_dict": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(content, path)
            _sync(path)

    def load(self, path: Path) -> None:
        if dist.get_rank() == 0:
            content = torch.load(path, weights_only=True)
            self.model.load_state_dict(content["state_dict"])
            self.optimizer.load_state_dict(content["optimizer"])


class FSDP2:
    """`torch.distributed.checkpoint` of a model under `fully_shard`."""

    def __init__(self, model: nn.Module, nbytes: int) -> None:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = AdamW(model.parameters(), **_ADAMW)
        _step(self.model, self.optimizer.step)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class _Ours:
    def __init__(self, model: nn.Module, nbytes: int) -> None:
        self.optimizer = AdamW(model.parameters(), **_ADAMW)
        config = lightning_zero.ZeroConfig(stage=3)
        self.engine = lightning_zero.Engine(model, optimizers=[self.optimizer], config=config)
        self.step()

    def step(self) -> None:
        ids = torch.arange(64).view(1, 64)
        self.engine.backward(self.engine.module(ids).square().mean())
        self.engine.step()
        self.engine.zero_grad()

    def load(self, path: Path) -> None:
        comm = self.engine.comm
        raise_damage_on_any_rank(path, comm.rank, comm.size, comm.control.gather_objects)
        opened = open_checkpoint(path)
        load_module(self.engine.module, opened["state_dict"])
        load_optimizer(self.engine, self.optimizer, opened["optimizer_states"][0])


class Full(_Ours):
    """Our full checkpoint: gathered bucket by bucket to rank 0, which writes one file."""

    def save(self, path: Path) -> None:
        engine, is_first = self.engine, self.engine.comm.rank == 0
        state = full_state_dict(engine)
        buckets = engine.buckets
        moments = optimizer_state_dict(self.optimizer, buckets, is_recipient=is_first)
        if is_first:
            write_torch_file({"state_dict": state, "optimizer_states": [moments]}, path)


class Sharded(_Ours):
    """Our sharded checkpoint: every rank writes its own part and hashes it while writing."""

    is_async = False

    def __init__(self, model: nn.Module, nbytes: int) -> None:
        super().__init__(model, nbytes)
        self.saving = Saving("sharded", is_async=self.is_async)

    def begin(self, path: Path) -> None:
        """Saves; asynchronously, returns when training may go on."""
        state = self.saving.state_dict(self.engine, self.engine.module, is_closed=False)
        moments = self.saving.optimizer_state(self.optimizer, self.engine)
        self.saving.save({"state_dict": state, "optimizer_states": [moments]}, path, self.engine)

    def save(self, path: Path) -> None:
        self.begin(path)
        self.saving.finish()


class ShardedAsync(Sharded):
    """The same while training goes on."""

    is_async = True


def _step(model: nn.Module, step: Step) -> None:
    model(torch.arange(64).view(1, 64)).square().mean().backward()
    step()
    for parameter in model.parameters():
        parameter.grad = None


SYSTEMS: dict[str, type[System]] = {
    "disk-direct": Disk,
    "disk-buffered": DiskBuffered,
    "torch": Torch,
    "fsdp2-dcp": FSDP2,
    "zero3-full": Full,
    "zero3-sharded": Sharded,
}
