"""Imported once by the fork server of `ranks.py`; every rank is a fork of that process.

Imports only: a process which ran autograd or made threads must not be forked.
"""

import faulthandler  # noqa: F401
import importlib

for name in (
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.utils.checkpoint",
    "lightning.pytorch",
):
    importlib.import_module(name)
