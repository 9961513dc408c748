"""Activation checkpointing: which modules keep their inputs only, and run again in backward.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

[Note: A forward under checkpoint] It is the module's own `forward` that torch's checkpoint runs,
not its call: hooks, among them those that gather a unit, run once in forward and are not repeated.
In backward the unit has been gathered for its own gradients before its forward runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.layout.units import ROOT, find_blocks

__all__ = ["checkpointed", "find_checkpointed", "outermost"]

_OPTION = "activation_checkpointing"
_OWN = "_forward_without_checkpointing"


def find_checkpointed(
    module: nn.Module, wanted: bool | Sequence[str | type[nn.Module]]
) -> list[str]:
    """Qualified names of the modules that run again; none inside another.

    Args:
        module: The root.
        wanted: `ZeroConfig.activation_checkpointing`: True: repeated blocks.

    Raises:
        ValueError: There are none, or one of `wanted` matches no module with parameters.
    """
    if wanted is False:
        return []
    names = find_blocks(module, () if wanted is True else wanted, option=_OPTION)
    if not names:
        raise ValueError(
            f"{_OPTION}=True is for repeated blocks, and {type(module).__name__} has none in a "
            f"ModuleList, ModuleDict or Sequential; name classes: {_OPTION}=[Block]."
        )
    return outermost(names)


def outermost(names: Sequence[str]) -> list[str]:
    """Those of `names` of modules that are inside no other."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def checkpointed(
    module: nn.Module, names: Collection[str], *, keeps_rng: bool = True
) -> Callable[[], None]:
    """Lets the forwards of `names` run again in backward. See [Note: A forward under checkpoint].

    Args:
        module: The root.
        names: Qualified.
        keeps_rng: Random numbers, as of dropout, are drawn alike when it runs again.

    Returns:
        Ends it; calling it twice is harmless.
    """
    children = {module.get_submodule(name): None for name in names if name != ROOT}
    for child in children:
        if "forward" in child.__dict__:  # a user's own, in place of the class's
            child.__dict__[_OWN] = child.__dict__["forward"]
        run = _forward if keeps_rng else _forward_without_rng
        child.__dict__["forward"] = MethodType(run, child)  # a copy of the module is its own
    return partial(_end, children)


def _end(children: Iterable[nn.Module]) -> None:
    for child in children:
        ours = child.__dict__.get("forward")
        if isinstance(ours, MethodType) and ours.__func__ in (_forward, _forward_without_rng):
            del child.__dict__["forward"]
            if _OWN in child.__dict__:
                child.__dict__["forward"] = child.__dict__.pop(_OWN)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run(self, True, args, kwargs)


def _forward_without_rng(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run(self, False, args, kwargs)


def _run(module: nn.Module, keeps_rng: bool, args: Any, kwargs: Any) -> Any:
    own = module.__dict__.get(_OWN) or partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return own(*args, **kwargs)
    return checkpoint(own, *args, use_reentrant=False, preserve_rng_state=keeps_rng, **kwargs)
