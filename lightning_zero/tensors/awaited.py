"""Values that a checkpoint holds for parameters and buffers that have no memory yet.

They are kept on the tensors themselves until the engine takes these over, and each rank then reads
its own part.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["await_values", "awaited_values", "forget_awaited"]

_ATTRIBUTE = "_zero_awaited"


def await_values(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Remembers where parameters and buffers on the meta device will get their values from.

    Args:
        module: Not held by an engine yet.
        values: Whole tensors by qualified name; kept, and read when the engine takes over.
    """
    named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name, value in values.items():
        named[name].__dict__[_ATTRIBUTE] = value


def awaited_values(tensor: Tensor) -> Tensor | None:
    """What `await_values` has kept for `tensor`."""
    value = tensor.__dict__.get(_ATTRIBUTE)
    return value if isinstance(value, Tensor) else None


def forget_awaited(module: nn.Module) -> None:
    """Drops what was kept: it is loaded, or will not be."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.__dict__.pop(_ATTRIBUTE, None)
