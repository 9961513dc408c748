"""The engine without other ranks and without files, and copies of what it trains.

Engines here are for a fake process group, under `ShapesOnly`. See [Note: A device on the CPU] in
engine_run.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero.comm.fake import FakeCommunicator, FakeDeviceCommunicator
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.optim.clone import copy_of
from lightning_zero.record.recorder import Recorder
from lightning_zero.tiers.nvme import NvmeFile, NvmeStore, Transfer
from lightning_zero.tiers.storage import Storage

__all__ = ["CpuEngine", "DeviceEngine", "copies_on_cpu"]

_CPU = torch.device("cpu")


def copies_on_cpu(
    module: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """Copies of a module, on the CPU, and of the optimizers of its parameters."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memory = torch.zeros(parameter.shape, dtype=parameter.dtype, device=_CPU)
        memo[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
        vars(memo[id(parameter)]).update(vars(parameter))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=_CPU)
    copied = []
    for optimizer in optimizers:
        groups = [
            {**group, "params": [memo[id(p)] for p in group["params"] if id(p) in memo]}
            for group in optimizer.param_groups
        ]
        one = copy_of(optimizer, [group for group in groups if group["params"]])
        for key, state in optimizer.state.items():  # of the constructor, as Adagrad's
            if id(key) in memo:
                one.state[memo[id(key)]] = tree_map_only(Tensor, _zeros_like, state)
        if one.param_groups:
            copied.append(one)
    return copy.deepcopy(module, memo), copied


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=_CPU)


class _NoFile(NvmeFile):
    """A file whose transfers are done at once and move nothing."""

    def __init__(self, store: NvmeStore, nbytes: int, name: str) -> None:
        self.nbytes, self.name, self._store = nbytes, name, store

    def cancel(self) -> None:
        pass

    def _begin(
        self, offset: int, tensor: Tensor, after: Sequence[Transfer], *, is_write: bool
    ) -> Transfer:
        stop, recorder = offset + tensor.nbytes, self._store.recorder
        new = Transfer(self.name, recorder, is_write=is_write, start=offset, stop=stop)
        new.begin([], SimpleQueue())
        return new


class _NoFiles(NvmeStore):
    """A store without files and threads."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.bytes_read = self.bytes_written = 0

    def create(self, name: str, nbytes: int) -> NvmeFile:
        return _NoFile(self, nbytes, name)

    def close(self) -> None:
        pass


class _CpuStorage(Storage):
    """Storage without files."""

    def check_free_space(self, param_bytes: int, optim_bytes: int, *, num_ranks: int) -> None:
        pass

    def _store(self, config: OffloadConfig) -> NvmeStore:
        return self._stores.setdefault(config.folder, _NoFiles(self.recorder))


class _DeviceStorage(_CpuStorage):
    """Storage beside a device. See [Note: A device on the CPU]."""

    def __init__(self, device: torch.device, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.has_device_memory = True


class CpuEngine(Engine):
    """Engine of a module that computes on the CPU."""

    _communicator_class = FakeCommunicator
    _storage_class = _CpuStorage


class DeviceEngine(Engine):
    """Engine of a module that computes on a device with memory of its own."""

    _communicator_class = FakeDeviceCommunicator
    _storage_class = _DeviceStorage
