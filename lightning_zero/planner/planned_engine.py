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
from lightning_zero.engine.beginning import EngineParts
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.optim.clone import copy_of, settings_of
from lightning_zero.optim.probe import ProbeResult, StepKind
from lightning_zero.record.recorder import Recorder
from lightning_zero.tiers.memory import make_buffers
from lightning_zero.tiers.nvme import NvmeFile, NvmeStore, Transfer
from lightning_zero.tiers.storage import Storage

__all__ = ["copies_on_cpu", "planned_engine"]

_CPU = torch.device("cpu")
_BUFFER_BYTES = 2**30  # a step in fewer chunks moves the same bytes; the memory is not written


def copies_on_cpu(
    module: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """Copies a module, on the CPU, and optimizers, for the parameters of the copy.

    Args:
        module: The module.
        optimizers: Optimizers, also of parameters that are not in the module.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memory = torch.zeros(parameter.shape, dtype=parameter.dtype, device=_CPU)
        memo[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
        vars(memo[id(parameter)]).update(vars(parameter))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=_CPU)
    copied: list[Optimizer] = []
    for optimizer in optimizers:
        groups = [
            {
                **settings_of(group),
                "params": [memo[id(p)] for p in group["params"] if id(p) in memo],
            }
            for group in optimizer.param_groups
        ]
        copied.append(copy_of(optimizer, groups))
    return copy.deepcopy(module, memo), copied


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

    @property
    def step_buffer_bytes(self) -> int:
        return max(super().step_buffer_bytes, _BUFFER_BYTES)

    def _buffers(self, config: OffloadConfig) -> list[Tensor]:
        self.buffer_bytes += config.total_buffer_bytes
        size = max(config.buffer_size_bytes, _BUFFER_BYTES)
        return make_buffers(config.buffer_count, size, pin=False)

    def _store(self, config: OffloadConfig) -> NvmeStore:
        return self._stores.setdefault(config.folder, _NoFiles(self.recorder))


class _DeviceStorage(_CpuStorage):
    """Storage beside a device. See [Note: A device on the CPU]."""

    def __init__(self, device: torch.device, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.has_device_memory = True


def planned_engine(full: Collection[Optimizer], *, has_device_memory: bool) -> type[Engine]:
    """Class of the engine of a module that computes on the CPU, or on a device with memory.

    `full`: optimizers that step full tensors.
    """
    stepped_full = set(map(id, full))

    def known(optimizer: Optimizer, **_: Any) -> ProbeResult:
        return ProbeResult(StepKind.BY_BUCKET, is_elementwise=id(optimizer) not in stepped_full)

    if has_device_memory:
        parts = EngineParts(FakeDeviceCommunicator, _DeviceStorage, known)
    else:
        parts = EngineParts(FakeCommunicator, _CpuStorage, known)

    class Planned(Engine):
        _parts = parts

    return Planned
