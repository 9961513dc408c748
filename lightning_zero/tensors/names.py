"""Names in checkpoints: those that a module has without torch.compile.

`torch.compile(module)` makes a module of its own around the one inside, so that names get an
`_orig_mod.` in between. Checkpoints are written without it and read with and without it, so that
compiled and plain modules take each other's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from lightning_zero.layout.names import saved_name

__all__ = ["with_compiled_names", "with_saved_names"]


def with_saved_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict as the same module has it that is not compiled."""
    if not any("_orig_mod." in name for name in state_dict):
        return state_dict
    return _renamed(state_dict, saved_name)


def with_compiled_names(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the names that `module` has, whether it is compiled or what was saved."""
    around = [name for name, m in module.named_modules() if isinstance(m, OptimizedModule)]
    if not around and not any("_orig_mod." in name for name in state_dict):
        return state_dict

    def own_name(name: str) -> str:
        name = saved_name(name)
        for outer in around:  # from the outside in: the names of those inside have it already
            prefix = f"{outer}." if outer else ""
            if name.startswith(prefix):
                name = f"{prefix}_orig_mod.{name[len(prefix) :]}"
        return name

    return _renamed(state_dict, own_name)


def _renamed(state_dict: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    renamed: OrderedDict[str, Any] = OrderedDict((rename(k), v) for k, v in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:  # versions, by the name of a module
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (rename(f"{name}.").removesuffix(".") if name else name, value)
            for name, value in metadata.items()
        )
    return renamed
