"""The most that live storages take in a step, seen from hooks and from copies of gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero import Engine
from tests.engine.test_memory import Sampler

__all__ = ["peak_of_last_step"]


class _LateSampler(Sampler):
    """Measures when it is switched on: in a step that is like all later ones."""

    is_looking = False

    def take(self, *_: object) -> None:
        if self.is_looking:
            super().take()


class _CopySampler(TorchDispatchMode):
    """Looks when a gradient is copied: it and the buffer that it goes to are there at once."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sampler.take()
        return func(*args, **(kwargs or {}))


def peak_of_last_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    step: Callable[[nn.Module], Tensor],
    num_steps: int = 3,
) -> int:
    """Trains, and returns the bytes of all live storages at the most of the last step.

    Objects of before are best set aside by `gc.freeze()`: every look walks all others.

    Args:
        engine: Holds a module.
        optimizer: Attached to it.
        step: Given the module, computes the loss.
        num_steps: In the first there are no optimizer states yet, and no order of use.
    """
    sampler = _LateSampler(engine.module, optimizer)
    for number in range(num_steps):
        is_last = number == num_steps - 1
        if is_last:
            gc.collect()
            sampler.is_looking = True
        # What autograd keeps is seen by the walk only where Python has kept it.
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = step(engine.module)
            engine.zero_grad()  # where the Trainer does so
            with _CopySampler(sampler) if is_last else nullcontext():
                engine.backward(loss)
        engine.step()
        del loss
    return sampler.peak
