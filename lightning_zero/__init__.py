"""ZeRO stages 1-3 for PyTorch Lightning, without DeepSpeed.

Importing the package registers the strategies `zero1`, `zero2` and `zero3`, their `_offload`
variants, and each of these with `_notebook` for `Trainer(strategy=...)`. It also lets
`load_from_checkpoint` open sharded checkpoints. The public names are defined in `_api`, which takes
seconds to import; the command `lightning-zero` imports it only when needed.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_zero._version import __version__


def _is_command() -> bool:
    """Whether this process was started as `lightning-zero`, or `python -m lightning_zero.cli`."""
    program = sys.argv[0] if sys.argv else ""  # "-m" while Python looks for the module
    return Path(program).name == "lightning-zero" or (
        program == "-m" and "lightning_zero.cli" in sys.orig_argv
    )


__all__ = ["__version__"]

if TYPE_CHECKING or not _is_command():
    from lightning_zero import _api
    from lightning_zero._api import *  # noqa: F403

    __all__ += _api.__all__
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("lightning_zero._api"), name)
