"""Hooks on a module and its parameters: where training tells what it is about to use.

[Note: Graphs end at hooks] The schedule's hooks are no part of a compiled graph: one that runs into
a hook ends there and another one begins behind it. So a whole module in one graph has one for each
unit, and compiled blocks are not cut. A graph must see plain parameters: it is compiled for their
class, and a guarded one, whose gather is still under way, would have it compiled again. Units are
whole by then; what is gathered after a step is waited for before a compiled module begins.

[Note: What a hook may trust] A copy of a module takes our hooks along, so each looks whether it is
called for its own. Backward enters a unit through the outputs that can be seen, and through inputs
that it has written to; what hides tensors is kept whole. It has left the unit when all inputs have
their gradients; a leaf has its gradient before the unit's last nodes have run, and tells nothing.
Where one call's output is the next one's input, backward enters the former before it leaves the
latter. Graphs of torch.compile end at our hooks.

A hook of a tensor sits on the node of the graph that has made the tensor. Where somebody writes to
a view, autograd leaves out the node of the view and goes from the write to the node of its base. So
a view has a hook on its base, too, and whichever is reached first counts. A node that was there
before the call leads to nothing of the unit.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.mixed_dtypes import explain_dtype_error
from lightning_zero.core.schedule import Schedule, is_compiled
from lightning_zero.core.unit import Call, Unit
from lightning_zero.layout.recompute import drop_checkpointing
from lightning_zero.tensors.guarded import placement_of
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = ["Hooks"]

# Of a module, by the number of a hook.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
)
_METHODS = ("__reduce_ex__", "__deepcopy__")  # of a module itself, in the place of its class's
_PLAIN = (Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Hooks:
    """All hooks of one engine, until `detach`. See [Note: What a hook may trust]."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], schedule: Schedule) -> None:
        self._module = module
        self._buckets = buckets
        self._schedule = schedule
        self._handles: list[Any] = []
        self._handled: BaseException | None = None  # when the module was called
        add, eager = self._handles.append, torch.compiler.disable
        add(module.register_forward_pre_hook(eager(self._root_pre_forward), prepend=True))
        add(module.register_forward_hook(eager(self._root_post_forward), always_call=True))
        for unit in schedule.units[1:]:
            if not unit.buckets:
                continue
            owner = unit.module = module.get_submodule(unit.name)
            before = eager(self._pre_forward(unit))
            after = eager(self._post_forward(unit))
            add(owner.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            add(owner.register_forward_hook(after, always_call=True))
        for compiled in filter(is_compiled, module.modules()):
            before = eager(_before_compiled(compiled, buckets))
            add(compiled.register_forward_pre_hook(before, prepend=True))
        held = {parameter for bucket in buckets for parameter in bucket.parameters}
        for part in module.modules():
            if not held.isdisjoint(part._parameters.values()):
                add(part.register_state_dict_post_hook(_fill_state_dict))
            vars(part)["__reduce_ex__"] = partial(self._reduce, part)
            if hasattr(type(part), "__deepcopy__"):
                vars(part)["__deepcopy__"] = partial(self._deepcopy, part)
        for bucket in buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.is_floating_point():
                    hook = partial(schedule.post_accumulate_grad, bucket, index)
                    was_trained = parameter.requires_grad
                    parameter.requires_grad_(True)  # torch registers on these only
                    add(parameter.register_post_accumulate_grad_hook(hook))
                    parameter.requires_grad_(was_trained)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for part in self._module.modules():
            for name in _METHODS:
                vars(part).pop(name, None)

    def _reduce(self, module: nn.Module, protocol: Any) -> Any:
        """What copies and pickles of `module` are made of: nothing of ours is in it."""
        with self._without_ours(module):
            reduced = type(module).__reduce_ex__(module, protocol)
            if not isinstance(reduced, tuple):
                return reduced
            # A class may give its `__dict__` as the state or as an argument.
            own = vars(module)
            return tuple(dict(part) if part is own else part for part in reduced)

    def _deepcopy(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        """The deep copy that the class of `module` makes by itself."""
        with self._without_ours(module):
            return cast("Any", type(module)).__deepcopy__(module, memo)

    @contextmanager
    def _without_ours(self, module: nn.Module) -> Iterator[None]:
        """Inside, `module` has the attributes that it has without an engine."""
        attributes = vars(module)
        held = dict(attributes)
        for name in _METHODS:
            attributes.pop(name, None)
        drop_checkpointing(attributes)
        ours = {handle.id for handle in self._handles}
        for key in _HOOKS:
            if not ours.isdisjoint(attributes.get(key) or ()):
                users = {number: hook for number, hook in held[key].items() if number not in ours}
                attributes[key] = OrderedDict(users)
        taken = {key: held[key] for key in held if attributes.get(key) is not held[key]}
        try:
            yield
        finally:
            attributes.update(taken)

    def _root_pre_forward(self, module: nn.Module, args: Any) -> None:
        if module is self._module:
            self._handled = sys.exc_info()[1]
            self._schedule.open()

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._module:
            # torch calls this after an exception too, with no output, while it is being handled.
            error = sys.exc_info()[1] if output is None else None
            if error is self._handled:
                error = None  # a caller is handling it all the while
            self._handled = None
            self._schedule.root_post_forward(has_failed=error is not None)
            if error is not None:
                explain_dtype_error(error, module, self._buckets)

    def _pre_forward(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is not unit.module:
                return
            self._schedule.pre_forward(unit)
            call = Call()
            unit.calls.append(call)
            if torch.is_grad_enabled() and not unit.stays_unsharded:
                given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
                call.given = [(tensor, tensor.grad_fn) for tensor in given]
                inputs = [tensor for tensor, node in call.given if node is not None]
                call.old_nodes = {seen.grad_fn for t in inputs for seen in _with_base(t)}
                if inputs:
                    unit.num_awaited += 1
                    self._watch_inputs(unit, call, inputs)

        return hook

    def _post_forward(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module is not unit.module:
                return
            call = unit.calls.pop() if unit.calls else Call()  # none: an earlier hook has failed
            leaves = tree_leaves(output)
            if any(isinstance(leaf, Tensor) and unit.aliases(leaf) for leaf in leaves):
                self._schedule.keep_unsharded(
                    unit, f"module {unit.name} returns a view of its parameters"
                )
            if torch.is_grad_enabled():
                self._watch_outputs(unit, call, leaves)
            call.forget_given()
            self._schedule.post_forward(unit)

        return hook

    def _watch_inputs(self, unit: Unit, call: Call, inputs: Sequence[Tensor]) -> None:
        """Tells when all gradients of `inputs` are there.

        Not by torch's hook for several tensors: it holds the nodes of the graph that hold it, so
        that no graph would ever go. Where a backward leaves one of them out, it is not told.
        """
        by_key = {id(tensor): tensor for tensor in inputs}
        call.inputs = frozenset(by_key)
        call.awaited = set(by_key)

        def arrived(key: int, _: Tensor) -> None:
            if key in call.awaited:
                call.awaited.discard(key)
                if not call.awaited:
                    self._schedule.post_backward(unit, call)

        for key, tensor in by_key.items():
            for seen in _with_base(tensor):
                seen.register_hook(partial(arrived, key))

    def _watch_outputs(self, unit: Unit, call: Call, leaves: Sequence[Any]) -> None:
        """Tells when backward comes to one of `leaves`, or to what the call has written to."""

        def enters(_: Tensor) -> None:
            self._schedule.pre_backward(unit, call)

        outputs = [leaf for leaf in leaves if _wants_grad(leaf) and not leaf.is_leaf]
        outputs += [tensor for tensor, node in call.given if tensor.grad_fn is not node]
        for tensor in outputs:
            for seen in _with_base(tensor):
                if seen.grad_fn not in call.old_nodes:
                    seen.register_hook(enters)
        hidden = next((type(x).__name__ for x in leaves if not isinstance(x, _PLAIN)), None)
        if hidden is not None:
            reason = f"module {unit.name} returns a {hidden}, which may hide tensors"
            self._schedule.keep_unsharded(unit, reason)


def _with_base(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor`, and what it is a view of, if that has a node in the graph."""
    yield tensor
    base = tensor._base
    if base is not None and base.grad_fn is not None:
        yield base


def _before_compiled(compiled: nn.Module, buckets: Sequence[Bucket]) -> Callable[..., None]:
    """Waits for gathers after the last step, which a graph would not."""
    inside = set(compiled.parameters())
    waited_for = [
        bucket
        for bucket in buckets
        if not bucket.shards_params and not inside.isdisjoint(bucket.parameters)
    ]

    def hook(module: nn.Module, args: Any) -> None:
        if module is compiled:
            for bucket in waited_for:
                bucket.wait_for_unshard()

    return hook


def _fill_state_dict(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
    """Gathers what rests as shards: a state dict is a plain one. Collective between steps."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, ShardedTensor) and parameter is not None:
            placement = placement_of(parameter)
            dtype = bucket_of(placement).orig_dtypes[placement.index]
            state_dict[prefix + name] = value.full_view("state_dict", dtype)


def _wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
