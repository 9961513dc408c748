"""Names of the strategies, and their registration with Lightning's Trainer and Fabric.

[Note: Light import] Lightning takes seconds to import, and neither the command `lightning-zero` nor
a training loop with an `Engine` needs it. So the names are registered at once only if a registry of
Lightning is imported already; otherwise right after it is imported. For this, a finder on
`sys.meta_path`, Python's hook for imports, waits for the module of that registry. It then removes
itself, and changes nothing else. What is registered is a function that imports a `ZeroStrategy`
when a Trainer or Fabric asks for it.

Alternatives considered: importing Lightning here is simpler, but every command and every loop would
wait for it. Lightning has no entry point for strategies.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_zero._lightning import Distribution, use

__all__ = ["register", "register_when_imported"]

# Modules of Lightning with a registry: its name there, the distribution, and the module of our
# class for it.
_REGISTRIES = {
    f"{module}.strategies": (attribute, distribution, of_strategy)
    for distribution in Distribution
    for module, attribute, of_strategy in (
        (distribution.pytorch, "StrategyRegistry", "lightning_zero.strategy.strategy"),
        (distribution.fabric, "STRATEGY_REGISTRY", "lightning_zero.fabric.strategy"),
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


def register(module: ModuleType) -> None:
    """Registers all names in the registry of a module of Lightning. Idempotent."""
    attribute, distribution, of_strategy = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)
    if registry is None:  # the import of Lightning must not fail because of us
        text = f"{module.__name__} has no {attribute}, so it does not know zero1 to zero3."
        warnings.warn(text, stacklevel=2)
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


def register_when_imported() -> None:
    """Registers all names now, or once Lightning is imported. See [Note: Light import]."""
    waited_for = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name in _REGISTRIES:
        if name in sys.modules:
            register(importlib.import_module(name))
        elif name not in waited_for:
            sys.meta_path.insert(0, _Finder(name))


class _Finder(MetaPathFinder):
    """Finds the module `name` as the other finders do, and adds the registration."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    """Loads the module as `loader` does, and then registers the names."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        register(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
