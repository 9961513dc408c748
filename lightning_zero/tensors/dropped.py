"""Parameters that nobody holds after training: whole on every rank, they would not fit.

They are on the meta device and guarded: whoever uses one is told how to get its values. Loading a
checkpoint into their module makes them ordinary parameters on the meta device again, of which each
rank then reads its own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_zero.tensors.awaited import awaited_values
from lightning_zero.tensors.from_meta import give_memory
from lightning_zero.tensors.guarded import Placement, guard, set_placement, unguard

__all__ = [
    "check_none_left_out",
    "expecting_values",
    "forget_left_out",
    "is_left_out",
    "leave_out",
]

_ATTRIBUTE = "_zero_left_out"


class _LeftOut:
    """Has the place of the bucket that held a parameter; whatever is asked of it is an error."""

    device = torch.device("meta")

    def __init__(self, name: str) -> None:
        self._name = name

    def look_at_rest(self, index: int) -> Tensor:
        """`parameter.data`."""
        self.refuse()

    def settle(self) -> None:
        """`parameter.data` is about to be set."""
        self.refuse()

    @property
    def lockstep(self) -> Any:
        """What `gathered` asks for first."""
        self.refuse()

    def refuse(self, _: str = "") -> NoReturn:
        """Raises what users of the parameter are told."""
        raise RuntimeError(_text(self._name))


def leave_out(parameter: nn.Parameter, name: str, dtype: torch.dtype, shape: torch.Size) -> None:
    """Frees the values of a parameter that no bucket holds any more; the object stays."""
    try:
        give_memory(parameter, name, torch.empty(shape, dtype=dtype, device="meta"))
    except RuntimeError:  # a graph still refers to it: then it cannot be loaded into
        parameter.data = torch.empty(0, dtype=dtype)
    parameter.__dict__[_ATTRIBUTE] = name, shape
    _guard(parameter)


def is_left_out(parameter: nn.Parameter) -> bool:
    """Whether it has no values since the end of a run."""
    return _ATTRIBUTE in parameter.__dict__


def _guard(parameter: nn.Parameter) -> None:
    name, shape = parameter.__dict__[_ATTRIBUTE]
    owner = _LeftOut(name)
    placement = Placement(
        name=name,
        shape=shape,
        dtype=parameter.dtype,
        own_class=type(parameter),
        bucket=owner,
        index=0,
        make_whole=owner.refuse,
    )
    set_placement(parameter, placement)
    guard(parameter)


@contextmanager
def expecting_values(module: nn.Module) -> Iterator[None]:
    """Around loading into `module`: what was left out may get values that it awaits."""
    left_out = [parameter for parameter in module.parameters() if is_left_out(parameter)]
    for parameter in left_out:
        unguard(parameter)
        set_placement(parameter, None)
    try:
        yield
    finally:
        for parameter in left_out:
            if awaited_values(parameter) is None:
                _guard(parameter)


def check_none_left_out(module: nn.Module) -> None:
    """Before an engine takes the module over.

    Raises:
        ValueError: A parameter was left out, and nothing is loaded into it.
    """
    for parameter in module.parameters():
        if is_left_out(parameter) and awaited_values(parameter) is None:
            raise ValueError(_text(parameter.__dict__[_ATTRIBUTE][0]))


def forget_left_out(module: nn.Module) -> None:
    """All parameters have values again."""
    for parameter in module.parameters():
        parameter.__dict__.pop(_ATTRIBUTE, None)


def _text(name: str) -> str:
    return (
        f"parameter {name} was left out when training ended: whole on every rank, the module was "
        "too large (whole_after_fit). Load a checkpoint: Model.load_from_checkpoint(path) for a "
        "whole module, ckpt_path=path for fit, validate, test and predict."
    )
