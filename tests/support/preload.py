"""Imported once by the fork server of `ranks.py`; every rank is a fork of that process.

Imports only: a process which ran autograd or made threads must not be forked. Our own package is
among them: its import takes a rank longer than most of the tests do.
"""

import faulthandler  # noqa: F401
import gc
import importlib
import sys

for name in (
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
):
    importlib.import_module(name)

LOADED = frozenset(sys.modules)  # by these
importlib.import_module("omegaconf")  # Lightning imports it when it saves a checkpoint

# A rank neither walks what it has from here nor, by walking it, gets copies of its pages.
gc.collect()
gc.freeze()
