"""Imported once by the fork server of `ranks.py`; every rank is a fork of that process.

Imports, and what each rank would otherwise find out again: a process which ran autograd or made
threads must not be forked. Our own package is imported, too: that takes longer than most tests do.
"""

import faulthandler  # noqa: F401
import functools
import gc
import importlib
import sys

for name in (
    "tests.support.metrics",
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.utils.checkpoint",
    "lightning.pytorch",
    "lightning_zero",
    "lightning_zero.callbacks",
    "tests.support.fitting",
    "tests.support.models",
    "tests.support.probes",
):
    importlib.import_module(name)

LOADED = frozenset(sys.modules)  # by these
importlib.import_module("omegaconf")  # Lightning imports it when it saves a checkpoint

# Each Trainer looks for callbacks of all installed packages, which takes as long as a short fit.
registry = importlib.import_module("lightning.fabric.utilities.registry")
registry.entry_points = functools.cache(registry.entry_points)
for framework in ("pytorch", "fabric"):
    registry.entry_points(group=f"lightning.{framework}.callbacks_factory")
sys.modules["tests.support.probes"].remember_probes()

# A rank neither walks what it has from here nor, by walking it, gets copies of its pages.
gc.collect()
gc.freeze()
