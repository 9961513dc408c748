"""A module that was set up by Fabric, and the engines whose outputs are in the graph of a loss.

[Note: Engines of a backward] A loss may have been computed by several modules, as in a GAN, and
only the engines whose parameters or outputs are in its graph take part in its backward: an engine
that is left out keeps its forward open, for a later loss. With several engines, the graph is
searched for their parameters, and for the nodes of their modules' outputs: frozen parameters, such
as those of a discriminator in the step of the generator, are not in the graph. Each rank finds the
same ones, because all ranks run the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_zero._lightning.fabric import _BackwardSyncControl
from lightning_zero.core.hooks import PLAIN
from lightning_zero.engine.engine import Engine

__all__ = ["SyncControl", "ZeroModule", "engines_in_graph", "is_part"]

_CALLED = "lightning_zero: engines"  # in the metadata of nodes that made a module's output


class ZeroModule(nn.Module):
    """A module that was set up: Fabric sends calls of marked methods through its `forward`, too."""

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.module = module
        self.engine = engine

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    # `fabric.setup(torch.compile(module))` compiles this module, but gave the strategy the other
    # one as it was before. So the graphs begin inside of that one.
    @torch.compiler.disable(recursive=False)
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # A frozen module, such as a teacher, has no backward that would end its forward.
        with nullcontext() if self._needs_graph(args, kwargs) else torch.no_grad():
            output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._mark_outputs(output)
        return output

    @torch.compiler.disable
    def _mark_outputs(self, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                _metadata_of(leaf.grad_fn).setdefault(_CALLED, []).append(self.engine)

    @torch.compiler.disable
    def _needs_graph(self, args: Any, kwargs: Any) -> bool:
        if any(parameter.requires_grad for parameter in self.module.parameters()):
            return True
        # Another object may contain tensors: a dataclass, a UserDict.
        return any(
            x.requires_grad if isinstance(x, Tensor) else not isinstance(x, PLAIN)
            for x in tree_leaves((args, kwargs))
        )


class SyncControl(_BackwardSyncControl):
    """`fabric.no_backward_sync` for one module."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled or not isinstance(module, ZeroModule):
            return nullcontext()
        return module.engine.no_sync()


def is_part(value: object, engine: Engine) -> bool:
    """Whether `value` is the wrapper of the module of `engine`."""
    return isinstance(value, ZeroModule) and value.engine is engine


def engines_in_graph(loss: Tensor, engines: Sequence[Engine]) -> list[Engine]:
    """Those of `engines` that the graph of `loss` contains. See [Note: Engines of a backward]."""
    if len(engines) < 2:
        return list(engines)
    engine_of: dict[Tensor, Engine] = {p: e for e in engines for p in e.module.parameters()}
    found: set[Engine] = set()
    for node in _nodes_of(loss):
        parameter = getattr(node, "variable", None)
        if parameter in engine_of:
            found.add(engine_of[parameter])
        found.update(_metadata_of(node).get(_CALLED, ()))
        if len(found) == len(engines):
            break
    return [engine for engine in engines if engine in found]


def _metadata_of(node: Any) -> dict[str, list[Engine]]:
    metadata: dict[str, list[Engine]] = node.metadata  # a dict; torch's stub declares a method
    return metadata


def _nodes_of(loss: Tensor) -> Iterator[Node]:
    """Yields the nodes of the graph of `loss`, each once."""
    stack = [loss.grad_fn]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                stack.append(following)
