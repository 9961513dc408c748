"""The engine without other ranks and without files, and copies of what it trains.

Engines here are for a fake process group, under `ShapesOnly`. See [Note: A device on the CPU] in
engine_run.py.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.fake import FakeCommunicator, FakeDeviceCommunicator
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.optim.clone import parameters_of
from lightning_zero.optim.probe import ProbeResult, StepKind
from lightning_zero.record.recorder import Recorder
from lightning_zero.tiers.nvme import NvmeFile, NvmeStore, Transfer
from lightning_zero.tiers.storage import Storage

__all__ = ["CpuEngine", "DeviceEngine", "copies_on_cpu"]

_CPU = torch.device("cpu")


def copies_on_cpu(
    module: nn.Module, optimizers: Sequence[Optimizer], full_optimizers: Collection[int]
) -> tuple[nn.Module, list[Optimizer]]:
    """Copies a module, on the CPU; plain SGD takes the place of each optimizer.

    Args:
        module: The module.
        optimizers: Optimizers, also of parameters that are not in the module.
        full_optimizers: Indices of those that step full tensors.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memory = torch.zeros(parameter.shape, dtype=parameter.dtype, device=_CPU)
        memo[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
        vars(memo[id(parameter)]).update(vars(parameter))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=_CPU)
    copied: list[Optimizer] = []
    for index, optimizer in enumerate(optimizers):
        parameters = [memo[id(p)] for p in parameters_of(optimizer) if id(p) in memo]
        if parameters:
            kind = _FullSGD if index in full_optimizers else torch.optim.SGD
            copied.append(kind(parameters, lr=0.1))
    return copy.deepcopy(module, memo), copied


class _FullSGD(torch.optim.SGD):
    """Plain SGD in the place of an optimizer that steps full tensors."""


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


def _known_kind(optimizer: Optimizer, **_: Any) -> ProbeResult:
    return ProbeResult(StepKind.AT_ONCE, is_elementwise=not isinstance(optimizer, _FullSGD))


class CpuEngine(Engine):
    """Engine of a module that computes on the CPU."""

    _communicator_class = FakeCommunicator
    _storage_class = _CpuStorage
    _check_and_probe = staticmethod(_known_kind)


class DeviceEngine(Engine):
    """Engine of a module that computes on a device with memory of its own."""

    _communicator_class = FakeDeviceCommunicator
    _storage_class = _DeviceStorage
    _check_and_probe = staticmethod(_known_kind)
