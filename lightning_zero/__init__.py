"""ZeRO stages 1-3 for PyTorch Lightning, without DeepSpeed.

Importing the package registers the strategies `zero1`, `zero2` and `zero3`, their `_offload`
variants, and each of these with `_notebook` for `Trainer(strategy=...)`; see `_registration`. It
imports neither torch nor Lightning. Each public name is imported at its first use.

Packages, each of which imports only from those above it; the docstring of each lists its modules:

    record        recorded spans and counters
    layout        which bytes are where: stages, settings, flat layouts, plans
    tensors       flat buffers, sharded and guarded tensors
    health        failures of ranks are detected, and end all waits
    comm          collectives, and small messages between the ranks' CPUs
    tiers         shards on the device, in CPU memory and in files
    core          the run time of a step: coordinator, units, buckets
    construction  memory and values for modules on the meta device
    optim         optimizers that step shards
    engine        all of it in one object, without Lightning
    deepspeed     settings and checkpoints of DeepSpeed
    checkpoint    checkpoints in every format
    planner       memory and traffic before a job runs
    launch        processes, SLURM and Hydra
    strategy      the strategy of Lightning's Trainer; begin here, or with `core`
    fabric        the strategy of Lightning's Fabric
    observe       monitor, fingerprints, reports and plots
    check         whether a machine trains as it should
    conf, cli     configuration groups of Hydra; the command `lightning-zero`
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_zero import _registration
from lightning_zero._version import __version__

if TYPE_CHECKING:
    from lightning_zero.activations import offload_activations
    from lightning_zero.checkpoint import (
        full_state_dict,
        load_checkpoint,
        load_weights,
        newest_checkpoint,
        open_checkpoint,
        save_checkpoint,
    )
    from lightning_zero.core.access import before_collective, full_grad, gathered, uneven_calls
    from lightning_zero.core.guard import NonfiniteGradientError, NonfiniteGradientWarning
    from lightning_zero.engine.engine import Engine
    from lightning_zero.layout.config import ZeroConfig
    from lightning_zero.layout.memory import MemoryReport
    from lightning_zero.layout.offload import OffloadConfig
    from lightning_zero.strategy.float8 import Float8Precision
    from lightning_zero.strategy.loading import load_from_checkpoint
    from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = [
    "Engine",
    "Float8Precision",
    "MemoryReport",
    "NonfiniteGradientError",
    "NonfiniteGradientWarning",
    "OffloadConfig",
    "ZeroConfig",
    "ZeroStrategy",
    "__version__",
    "before_collective",
    "full_grad",
    "full_state_dict",
    "gathered",
    "load_checkpoint",
    "load_from_checkpoint",
    "load_weights",
    "newest_checkpoint",
    "offload_activations",
    "open_checkpoint",
    "save_checkpoint",
    "uneven_calls",
]

_MODULES = {
    "activations": ["offload_activations"],
    "checkpoint": [
        "full_state_dict",
        "load_checkpoint",
        "load_weights",
        "newest_checkpoint",
        "open_checkpoint",
        "save_checkpoint",
    ],
    "core.access": ["before_collective", "full_grad", "gathered", "uneven_calls"],
    "core.guard": ["NonfiniteGradientError", "NonfiniteGradientWarning"],
    "engine.engine": ["Engine"],
    "layout.config": ["ZeroConfig"],
    "layout.memory": ["MemoryReport"],
    "layout.offload": ["OffloadConfig"],
    "strategy.float8": ["Float8Precision"],
    "strategy.loading": ["load_from_checkpoint"],
    "strategy.strategy": ["ZeroStrategy"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
# As in `lightning_zero.callbacks`.
_SUBMODULES = {"activations", "callbacks", "fabric", "optim", "planner"}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


_registration.register_when_imported()
