"""Activation checkpointing: modules that save only their inputs and run again in backward.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

[Note: A forward under checkpoint] torch's checkpoint runs the module's own `forward`, not its call.
So hooks, such as those that unshard a unit, run once in forward and are not repeated. In backward
the unit is unsharded for its own gradients before its forward runs again. Side effects of a forward
must not happen twice: running statistics are restored, and the forward gets no cache of keys and
values.

[Note: Saved outputs] A selective forward saves the outputs of attention and of every second matrix
product, which take most of the time, and computes the rest again. These outputs are memory of their
own, no views of parameters, so units are freed as usual. The choice is that of torchtitan.

[Note: Compiled checkpoints] torch.compile puts both runs into one graph, and calls `context_fn`,
which must be a function and no method, to trace them. A graph updates running statistics once, so
they are not restored. Where a block breaks its graph, both runs are eager, with the same function.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_zero.layout.config import SELECTIVE
from lightning_zero.layout.units import LISTS, find_blocks

__all__ = ["apply_checkpointing", "drop_checkpointing", "find_checkpointed", "outermost"]

_OPTION = "activation_checkpointing"
_HAS_STATISTICS = nn.modules.batchnorm._NormBase
_MATMULS = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm")  # the last: float8
    if hasattr(torch.ops.aten, name)
}
_ATTENTION = "scaled_dot_product"  # a part of the names of its kernels
_REFUSAL = "selective activation checkpoint"  # a part of torch's errors in a second run


def find_checkpointed(
    module: nn.Module, wanted: bool | Sequence[str | type[nn.Module]]
) -> list[str]:
    """Qualified names of the modules that run again; none is inside another.

    Args:
        module: The root.
        wanted: `ZeroConfig.checkpointed_modules`; True: repeated blocks. A list of modules has no
            forward of its own and stands for its members.

    Raises:
        ValueError: There are none, or an item of `wanted` matches no module with parameters.
    """
    if wanted is False:
        return []
    kinds = () if wanted is True else wanted
    names = find_blocks(module, kinds, option=_OPTION, words=(SELECTIVE,))
    if not names:
        raise ValueError(
            f"{_OPTION}=True needs repeated blocks, but {type(module).__name__} has none in a "
            f"ModuleList, ModuleDict or Sequential; name classes: {_OPTION}=[Block]."
        )
    return outermost([found for name in names for found in _with_forward(module, name)])


def _with_forward(root: nn.Module, name: str) -> Iterator[str]:
    module = root.get_submodule(name)
    if not isinstance(module, LISTS):
        yield name
        return
    for child, _ in module.named_children():
        yield from _with_forward(root, f"{name}.{child}")


def outermost(names: Sequence[str]) -> list[str]:
    """The modules of `names` that are inside no other one, each once."""
    known = set(names)

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in known for length in range(1, len(parts)))

    return [name for name in dict.fromkeys(names) if not is_inside(name)]


def apply_checkpointing(
    module: nn.Module,
    names: Collection[str],
    *,
    is_selective: bool = False,
    preserve_rng_state: bool = True,
) -> Callable[[], None]:
    """Makes the forwards of `names` run again in backward. See [Note: A forward under checkpoint].

    Args:
        module: The root.
        names: Qualified names.
        is_selective: Whether outputs of some operations are saved, too. See [Note: Saved outputs].
        preserve_rng_state: Whether the second run draws the same random numbers, as for dropout.

    Returns:
        A function that removes the checkpointing; a second call has no effect.
    """
    children = {module.get_submodule(name): name for name in names}
    for child, name in children.items():
        if not isinstance(child.__dict__.get("forward"), _CheckpointedForward):
            child.__dict__["forward"] = _CheckpointedForward(
                child, name, preserve_rng_state, is_selective=is_selective
            )

    def end() -> None:
        for child in children:
            ours = child.__dict__.get("forward")
            if isinstance(ours, _CheckpointedForward):
                del child.__dict__["forward"]
                if ours.was_on_instance:
                    child.__dict__["forward"] = ours.forward

    return end


def drop_checkpointing(state: dict[str, Any]) -> None:
    """Removes checkpointing from `state`, a copy of a module's `__dict__`."""
    forward = state.get("forward")
    if isinstance(forward, _CheckpointedForward):
        del state["forward"]
        if forward.was_on_instance:
            state["forward"] = forward.forward


class _CheckpointedForward:
    """A forward that runs again in backward; replaces the module's own."""

    def __init__(
        self, module: nn.Module, name: str, preserve_rng_state: bool, *, is_selective: bool
    ) -> None:
        self.was_on_instance = "forward" in module.__dict__  # not in its class
        # The module's own forward, bound. Copies and pickles of the module contain only this one.
        self.forward: Callable[..., Any] = module.forward
        self._preserve_rng_state = preserve_rng_state
        self._is_selective = is_selective
        self._statistics = [
            buffer
            for part in module.modules()
            if isinstance(part, _HAS_STATISTICS)
            for buffer in part.buffers(recurse=False)
        ]
        self._contexts = _contexts(
            is_selective, self._statistics, f"{name} ({type(module).__name__})"
        )
        functools.update_wrapper(self, self.forward)  # with its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        args = tuple(_without_cache(value) for value in args)
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        options: dict[str, Any] = {}
        if self._statistics or self._is_selective:
            options["context_fn"] = self._contexts
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=self._preserve_rng_state,
            **options,
            **kwargs,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        own: Callable[..., Any] = copy.deepcopy(self.forward, memo)
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.forward,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `forward`: pickles of checkpointed modules call it when they are loaded."""
    return forward


def _without_cache(value: Any) -> Any:
    """Returns None instead of a cache of transformers; its argument's name depends on the version.

    Some models have classes of their own, which do not all inherit from transformers' `Cache`.
    """
    return None if _is_cache(type(value)) else value


@torch.compiler.assume_constant_result  # torch.compile cannot trace the bases of builtin classes
def _is_cache(kind: type) -> bool:
    return any(
        base.__module__.startswith("transformers") and base.__name__.endswith("Cache")
        for base in kind.__mro__
    )


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts(
    is_selective: bool, statistics: Sequence[Tensor], title: str
) -> Callable[[], _Contexts]:
    """A function that makes the contexts of a forward, and of the second one in backward.

    See [Note: Saved outputs] and [Note: Compiled checkpoints].
    """

    def make() -> _Contexts:
        is_traced = type(torch.empty(0)) is not Tensor  # a graph, on tensors without values
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if is_selective or is_traced:  # torch.compile takes no other contexts than these
            policy = _saved_outputs(saves_any=is_selective)
            first, again = create_selective_checkpoint_contexts(policy)
        if not is_traced:
            again = _SecondRun(title, statistics, again, is_selective=is_selective)
        return first, again

    return make


def _saved_outputs(*, saves_any: bool) -> Callable[..., CheckpointPolicy]:
    """A policy of torch's for one forward and its repetition. See [Note: Saved outputs]."""
    num_matmuls = {True: 0, False: 0}

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        is_saved = _ATTENTION in str(operation)
        if operation in _MATMULS:
            num_matmuls[context.is_recompute] += 1
            is_saved = num_matmuls[context.is_recompute] % 2 == 1
        is_saved = is_saved and saves_any
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class _SecondRun(AbstractContextManager[None]):
    """`inner`, with the values of `buffers` restored at its end. Each backward enters it.

    Raises:
        RuntimeError: torch refuses a selective forward's run; the text names the module, `title`.
    """

    def __init__(
        self,
        title: str,
        buffers: Sequence[Tensor],
        inner: AbstractContextManager[Any],
        *,
        is_selective: bool,
    ) -> None:
        self._title, self._buffers, self._inner = title, buffers, inner
        self._is_selective = is_selective
        self._before: list[list[Tensor]] = []  # of each entry that has not ended

    def __enter__(self) -> None:
        self._before.append([buffer.clone() for buffer in self._buffers])
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        with torch.no_grad():
            for buffer, values in zip(self._buffers, self._before.pop(), strict=True):
                buffer.copy_(values)
        if self._is_selective and _REFUSAL in str(error[1]):
            raise RuntimeError(
                f'{self._title} cannot run under activation_checkpointing="selective": it changes '
                "the output of a matrix product or of attention in place, computes a gradient in "
                "its forward, or backward runs twice through one forward. "
                f"{_OPTION}=True allows all of these."
            ) from error[1]
