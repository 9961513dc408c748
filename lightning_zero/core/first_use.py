"""Waits for the all-gathers after a step before code that cannot be seen reads the parameters.

[Note: First use after a step] A replicated parameter is in flight from its step to its first use.
A torch function waits for it (tensors/guarded.py). C++ that is given the parameter calls no torch
function: a scripted function, `torch.vmap`, a kernel of an extension. So modules wait before their
forward. For the parameters that a module holds,

- the module itself waits, once it has been called;
- the nearest module around it that was called waits, if a backward has reached the parameters
  without a call of the module, as far as hooks can see: a `ParameterList`, a scripted module, a
  part of a compiled one, a layer of which another module uses the weight;
- the root waits, if the module was called with other tensors in place of its parameters
  (`torch.func.functional_call`): its own were used before, anywhere;
- the root waits until one of these is known.

A wait moves to modules further out, and never back. The begin of a backward waits for all.

C++ that is given a parameter even earlier finds no values (`unreadable` in tensors/freed.py): that
raises, or gives NaN with versions of torch that cannot raise. The gradient of a parameter for which
no forward has waited is an error, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.jit import ScriptModule

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.params import Phase
from lightning_zero.tensors.freed import read_error

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
        slot_of = {p: (b, index) for b in self._buckets for index, p in enumerate(b.parameters)}
        # Parameters that a module holds, with their buckets and slots.
        self._held: dict[nn.Module, dict[str, tuple[nn.Parameter, Bucket, int]]] = {}
        self._parents: dict[nn.Module, list[nn.Module]] = {}
        for part in module.modules():
            for child in part.children():
                self._parents.setdefault(child, []).append(part)
            own = part._parameters.items()
            held = {name: (p, *slot_of[p]) for name, p in own if p in slot_of}
            if held:
                self._held[part] = held
        # The module that waits for the parameters that a module holds, where that is known.
        self._waiting: dict[nn.Module, nn.Module] = {}
        self._waits: dict[nn.Module, list[Bucket]] = {}  # what a module waits for
        self._assign_waits()
        self._called: set[nn.Module] = set()  # in the forwards of this pass
        self._replaced: set[nn.Module] = set()  # of them, those without their own parameters
        self._is_recording = True  # in the first pass, and the first after a step
        self._has_forward = False  # with gradients, since the last backward
        self._late: list[Bucket] = []  # for which no forward had waited when backward began

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
        held = [(name, parameter) for name, (parameter, *_) in self._held.get(part, {}).items()]

        def hook(module: nn.Module, args: object) -> None:
            if torch.compiler.is_compiling() or module is not part:
                return  # a compiled graph does not wait; a copy has a copy of this hook
            if self._is_recording:
                self._called.add(part)
                own = part._parameters
                if any(own.get(name) is not parameter for name, parameter in held):
                    self._replaced.add(part)
            for bucket in self._waits.get(part, ()):
                if bucket.params.phase is Phase.UNSHARDING:
                    bucket.params.wait_for_unshard()

        return hook

    def begin_forward(self) -> None:
        """Begins a forward of the root, which waits for its buckets."""
        self._is_recording |= any(b.params.phase is Phase.UNSHARDING for b in self._buckets)
        if not self._has_forward:
            self._called.clear()
            self._replaced.clear()
        self.wait_as_root()

    def wait_as_root(self) -> None:
        """Waits for what the root waits for."""
        for bucket in self._waits.get(self._root, ()):
            bucket.params.wait_for_unshard()

    def end_forward(self) -> None:
        """Ends a forward of the root without an exception."""
        self._has_forward |= torch.is_grad_enabled()
        if not self._is_recording:
            return
        waiting = {part: part for part in self._called if part in self._held}
        waiting |= dict.fromkeys(self._replaced, self._root)
        self._move(
            {
                part: to
                for part, to in waiting.items()
                if part not in self._waiting or to is self._root
            }
        )

    def begin_backward(self) -> None:
        """Waits for all replicated parameters."""
        self._late = [bucket for bucket in self._buckets if bucket.params.phase is Phase.UNSHARDING]
        for bucket in self._buckets:
            bucket.params.wait_for_unshard()

    def end_backward(self) -> None:
        """Ends a backward, whose gradients show which parameters its forwards have used.

        Raises:
            RuntimeError: A parameter was used, but no forward has waited for it.
        """
        for bucket in self._late:
            for slot, is_touched in zip(
                bucket.plan.layout.slots, bucket.grads.touched, strict=True
            ):
                if is_touched:
                    raise read_error(slot.name)
        self._has_forward = False
        if not self._is_recording:
            return
        self._is_recording = False
        self._move(
            {
                part: self._around(part)
                for part, held in self._held.items()
                if part not in self._called
                and any(bucket.grads.touched[index] for _, bucket, index in held.values())
            }
        )

    def _around(self, part: nn.Module) -> nn.Module:
        """The nearest module around `part` that was called and does not wait further in."""
        part = self._waiting.get(part, part)
        while part not in self._called:
            parents = self._parents.get(part, ())
            if len(parents) != 1:
                return self._root
            part = parents[0]
        return part

    def _move(self, waiting: dict[nn.Module, nn.Module]) -> None:
        """Makes other modules wait for the parameters of some."""
        if any(self._waiting.get(part) is not to for part, to in waiting.items()):
            self._waiting |= waiting
            self._assign_waits()

    def _assign_waits(self) -> None:
        self._waits = {}
        for part, held in self._held.items():
            buckets = self._waits.setdefault(self._waiting.get(part, self._root), [])
            buckets += dict.fromkeys(b for _, b, _ in held.values() if b not in buckets)
