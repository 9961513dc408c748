"""Waits for the all-gathers after a step before code that cannot be seen reads the parameters.

[Note: First use after a step] A replicated parameter is in flight from its step to its first use.
A torch function waits for it (tensors/guarded.py). C++ that is given the parameter calls no torch
function: a scripted function, `torch.vmap`, a kernel of an extension. So modules wait before their
forward:

- Each module waits for the parameters that it holds.
- The nearest module around it waits if the module that holds them is not called itself, as far as
  hooks can see: a `ParameterList`, a scripted module, a part of a compiled one, a layer of which
  another module uses the weight.
- The root waits if a module was called with other tensors in place of its parameters
  (`torch.func.functional_call`): its own were used before, anywhere.

The last forward after a step shows which modules are called. Until there was one, the root waits
for all parameters. The end of a forward and the begin of a backward wait for all.

C++ that is given a parameter even earlier finds no values (`unreadable` in tensors/freed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.jit import ScriptModule

from lightning_zero.core.bucket import Bucket, Phase

__all__ = ["FirstUse"]

_Hook = Callable[[nn.Module, object], None]


class FirstUse:
    """Decides which module waits for which replicated buckets, and waits.

    See [Note: First use after a step].

    Args:
        module: The root.
        buckets: All buckets of the engine.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        self._root = module
        self._buckets = [bucket for bucket in buckets if bucket.plan.stage.all_gathers_after_step]
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._held: dict[nn.Module, dict[str, nn.Parameter]] = {}  # parameters that a module holds
        self._held_buckets: dict[nn.Module, list[Bucket]] = {}
        self._parents: dict[nn.Module, list[nn.Module]] = {}
        for part in module.modules():
            for child in part.children():
                self._parents.setdefault(child, []).append(part)
            held = {name: p for name, p in part._parameters.items() if p in bucket_of}
            if held:
                self._held[part] = held
                self._held_buckets[part] = list(dict.fromkeys(bucket_of[p] for p in held.values()))
        # Buckets that a module waits for before its forward.
        self._waits: dict[nn.Module, list[Bucket]] = {module: self._buckets}
        self._called: set[nn.Module] = set()  # in this forward
        self._replaced: set[nn.Module] = set()  # of them, those without their own parameters
        self._is_learning = True  # this forward is the first, or the first after a step

    def hooks(self) -> Iterator[tuple[nn.Module, _Hook]]:
        """Yields the modules below the root that may wait, each with its hook before a forward."""
        around = [self._root]
        for part in self._held:
            around.append(part)
            while (parents := self._parents.get(part)) is not None:
                part = parents[0]
                around.append(part)
        for part in dict.fromkeys(around):
            if part is not self._root and not isinstance(part, ScriptModule):
                yield part, self._hook_of(part)

    def _hook_of(self, part: nn.Module) -> _Hook:
        held = self._held.get(part, {})

        def hook(module: nn.Module, args: object) -> None:
            if torch.compiler.is_compiling() or module is not part:
                return  # a compiled graph does not wait; a copy has a copy of this hook
            self._called.add(part)
            own = part._parameters
            if any(own.get(name) is not parameter for name, parameter in held.items()):
                self._replaced.add(part)
            for bucket in self._waits.get(part, ()):
                if bucket.phase is Phase.UNSHARDING:
                    bucket.wait_for_unshard()

        return hook

    def begin_forward(self) -> None:
        """Begins a forward of the root, which waits for its buckets."""
        if not self._is_learning:
            self._is_learning = any(b.phase is Phase.UNSHARDING for b in self._buckets)
        self._called.clear()
        self._replaced.clear()
        self.wait_as_root()

    def wait_as_root(self) -> None:
        """Waits for what the root waits for."""
        for bucket in self._waits.get(self._root, ()):
            bucket.wait_for_unshard()

    def end_forward(self) -> None:
        """Ends a forward of the root without an exception."""
        if not self._is_learning:
            return
        self._is_learning = False
        self._waits = {}
        for part, buckets in self._held_buckets.items():
            waiting = self._waits.setdefault(self._waiting_for(part), [])
            waiting += [bucket for bucket in buckets if bucket not in waiting]
        self.wait_for_all()

    def _waiting_for(self, part: nn.Module) -> nn.Module:
        """The module that waits for the parameters that `part` holds."""
        if part in self._replaced:
            return self._root
        while part not in self._called:
            parents = self._parents.get(part, ())
            if len(parents) != 1:
                return self._root
            part = parents[0]
        return part

    def wait_for_all(self) -> None:
        """Waits for all replicated parameters."""
        for bucket in self._buckets:
            bucket.wait_for_unshard()
