"""Names of the strategies, and their registration with Lightning's Trainer and Fabric.

[Note: Light import] Lightning takes seconds to import, and neither the command `lightning-zero`,
`--help` of a Hydra project nor a training loop with an `Engine` needs it. So the names are
registered at once only if Lightning is imported already; otherwise they are when Python looks for
the module of Lightning that looks names up. `_Hook` on `sys.meta_path` is called for each import;
it finds no module itself. What is registered is a function that imports a `ZeroStrategy` when a
Trainer or Fabric asks for it.

Alternatives considered: importing Lightning here is simpler, but every command and every loop would
wait for it, and with two distributions for both. Lightning has no entry point for strategies.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from lightning_zero._lightning import Distribution, use

__all__ = ["register", "register_when_imported"]

# For each module of Lightning that looks strategies up: the module and name of its registry, the
# distribution, and the module of our class for it.
_REGISTRIES = {
    module: (f"{package}.strategies", name, distribution, of_strategy)
    for distribution in Distribution
    for module, package, name, of_strategy in (
        (
            f"{distribution.pytorch}.trainer.connectors.accelerator_connector",
            distribution.pytorch,
            "StrategyRegistry",
            "lightning_zero.strategy.strategy",
        ),
        (
            f"{distribution.fabric}.connector",
            distribution.fabric,
            "STRATEGY_REGISTRY",
            "lightning_zero.fabric.strategy",
        ),
    )
}
# Names with `_offload` have the meaning of Lightning's names for DeepSpeed.
_SETTINGS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "zero3_offload_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
}


def make_strategy(distribution: Distribution, module: str, **settings: Any) -> Any:
    """Returns the `ZeroStrategy` of `module`, which is imported only now, for `distribution`.

    Raises:
        RuntimeError: This process uses the other distribution.
    """
    use(distribution)
    return importlib.import_module(module).ZeroStrategy(**settings)


def register(module: str) -> None:
    """Registers all names in the registry in which `module` of Lightning looks. Idempotent."""
    source, attribute, distribution, of_strategy = _REGISTRIES[module]
    registry = getattr(importlib.import_module(source), attribute, None)
    if registry is None:  # the import of Lightning must not fail because of us
        warnings.warn(f"{source} has no {attribute}, so it has no zero1 to zero3.", stacklevel=2)
        return
    for name, settings in _SETTINGS.items():
        for suffix, start_method in (("", "popen"), ("_notebook", "fork")):
            description = f"ZeRO {settings}, processes started by {start_method}"
            registry.register(
                name + suffix,
                partial(make_strategy, distribution, of_strategy),
                description,
                override=True,
                start_method=start_method,
                **settings,
            )


class _Hook(MetaPathFinder):
    """Registers the names before Lightning's module that looks them up is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname in _REGISTRIES:
            register(fullname)


_HOOK = _Hook()


def register_when_imported() -> None:
    """Registers all names now, or once Lightning is imported. See [Note: Light import]."""
    for module in _REGISTRIES:
        if module in sys.modules:
            register(module)
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)
