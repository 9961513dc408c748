"""Activation checkpointing: which modules keep their inputs only, and run again in backward.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

[Note: A forward under checkpoint] It is the module's own `forward` that torch's checkpoint runs,
not its call: hooks, among them those that gather a unit, run once in forward and are not repeated.
In backward the unit has been gathered for its own gradients before its forward runs again. What a
forward changes beside its output must not change twice: running statistics are put back, and a
cache of keys and values is not given to it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.layout.units import LISTS, find_blocks

__all__ = ["apply_checkpointing", "drop_checkpointing", "find_checkpointed", "outermost"]

_OPTION = "activation_checkpointing"
_HAS_STATISTICS = nn.modules.batchnorm._NormBase
# What transformers gives its layers, and without which they keep no cache.
_WITHOUT_CACHE = {"past_key_values": None, "past_key_value": None, "use_cache": False}


def find_checkpointed(
    module: nn.Module, wanted: bool | Sequence[str | type[nn.Module]]
) -> list[str]:
    """Qualified names of the modules that run again; none inside another.

    Args:
        module: The root.
        wanted: `ZeroConfig.checkpointed_modules`; True: repeated blocks. A list of modules, which has no
            forward of its own, stands for its members.

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
    return outermost([one for name in names for one in _with_forward(module, name)])


def _with_forward(root: nn.Module, name: str) -> Iterator[str]:
    module = root.get_submodule(name)
    if not isinstance(module, LISTS):
        yield name
        return
    for child, _ in module.named_children():
        yield from _with_forward(root, f"{name}.{child}")


def outermost(names: Sequence[str]) -> list[str]:
    """Those of `names` of modules that are inside no other, each once."""
    known = set(names)

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in known for length in range(1, len(parts)))

    return [name for name in dict.fromkeys(names) if not is_inside(name)]


def apply_checkpointing(
    module: nn.Module, names: Collection[str], *, preserve_rng_state: bool = True
) -> Callable[[], None]:
    """Lets the forwards of `names` run again in backward. See [Note: A forward under checkpoint].

    Args:
        module: The root.
        names: Qualified.
        preserve_rng_state: Random numbers, as of dropout, are drawn alike when it runs again.

    Returns:
        Ends it; calling it twice is harmless.
    """
    children = {module.get_submodule(name): None for name in names}
    for child in children:
        if not isinstance(child.__dict__.get("forward"), _Checkpointed):
            child.__dict__["forward"] = _Checkpointed(child, preserve_rng_state)

    def end() -> None:
        for child in children:
            ours = child.__dict__.get("forward")
            if isinstance(ours, _Checkpointed):
                del child.__dict__["forward"]
                if ours.is_users:
                    child.__dict__["forward"] = ours.forward

    return end


def drop_checkpointing(state: dict[str, Any]) -> None:
    """Takes out of a copy of a module's `__dict__` what `apply_checkpointing` has put there."""
    forward = state.get("forward")
    if isinstance(forward, _Checkpointed):
        del state["forward"]
        if forward.is_users:
            state["forward"] = forward.forward


class _Checkpointed:
    """A forward that runs again in backward, in the place of the module's own."""

    def __init__(self, module: nn.Module, preserve_rng_state: bool) -> None:
        self.is_users = "forward" in module.__dict__  # on the module itself, not of its class
        # The module's own, bound. A copy of the module, and a pickled one, have this alone.
        self.forward: Callable[..., Any] = module.forward
        self._preserve_rng_state = preserve_rng_state
        self._statistics = [
            buffer
            for part in module.modules()
            if isinstance(part, _HAS_STATISTICS)
            for buffer in part.buffers(recurse=False)
        ]
        functools.update_wrapper(self, self.forward)  # its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        kwargs |= {name: value for name, value in _WITHOUT_CACHE.items() if name in kwargs}
        more: dict[str, Any] = {"context_fn": self._contexts} if self._statistics else {}
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=self._preserve_rng_state,
            **more,
            **kwargs,
        )

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _unchanged(self._statistics)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        own: Callable[..., Any] = copy.deepcopy(self.forward, memo)
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.forward,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


@contextmanager
def _unchanged(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Puts back what `buffers` were."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)
