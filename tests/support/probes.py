"""Results of probes of optimizers, found once before ranks are forked.

An engine probes its optimizers, which takes each rank a third of a short fit. The result depends on
the class of the optimizer, its settings and the shapes of its parameters only, so ranks take it
from the fork server where that has probed the same. Tests of the probe call it themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.engine import optimizers
from lightning_zero.optim.clone import settings_of
from lightning_zero.optim.probe import ProbeResult
from lightning_zero.optim.probe_run import _kinds_of
from tests.support.loops import build
from tests.support.models import GPTModule, MLPModule

__all__ = ["remember_probes"]

_CLASSES = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


class _Remembered:
    """A probe that is run once for each kind of optimizer."""

    def __init__(self, probe: Callable[[Optimizer, torch.device], ProbeResult]) -> None:
        self._probe = probe
        self._known: dict[str, ProbeResult] = {}

    def __call__(self, optimizer: Optimizer, device: torch.device) -> ProbeResult:
        key = _key_of(optimizer, device)
        if key is None:
            return self._probe(optimizer, device)
        if key not in self._known:
            self._known[key] = self._probe(optimizer, device)
        return self._known[key]


def _key_of(optimizer: Optimizer, device: torch.device) -> str | None:
    """What the result of a probe depends on; None if the optimizer has states or own code."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if type(optimizer) not in _CLASSES or optimizer.state or hooks:
        return None
    seen: set[Any] = set()
    groups = [
        (settings_of(group), [(kind.shape, kind.dtype) for kind in _kinds_of(group, seen)])
        for group in optimizer.param_groups
    ]
    return repr((type(optimizer), device, groups))


def remember_probes() -> None:
    """Lets engines of this process and of its forks take results that are known."""
    optimizers.probe = remembered = _Remembered(optimizers.probe)
    modules = MLPModule(), MLPModule(optimizer="sgd"), GPTModule()
    usual = [module.configure_optimizers() for module in modules] + [build()[1]]
    for optimizer in usual:
        remembered(optimizer, torch.device("cpu"))
