"""Hooks on a module and its parameters, which call `Step` and, at the root, the coordinator.

[Note: Graphs end at hooks] Our hooks are not part of a compiled graph: a graph ends at a
hook, and another one begins after it. So a fully compiled module has one graph for each unit, and
compiled blocks are not split. A graph must see plain parameters: it is compiled for their class,
and a guarded parameter, whose all-gather is in flight, would trigger a recompilation. Units are
unsharded by then; for all-gathers after a step see [Note: First use after a step].

[Note: When backward enters and leaves a unit] A copy of a module has copies of our hooks, so each
hook checks whether it is called for its own module. Backward enters a unit through the outputs that
the hook can see, and through inputs that the unit has written to; a unit whose output type may hide
tensors stays unsharded. Backward has left the unit when all inputs have their gradients; a leaf
gets its gradient before the unit's last nodes have run, so it is not counted. Where one call's
output is the next call's input, backward enters the former before it leaves the latter.

A hook of a tensor is attached to the node of the graph that made the tensor. After a write to a
view, autograd skips the node of the view and goes from the write to the node of its base. So a view
also has a hook on its base, and the first of the two counts. A node that existed before the call
does not belong to the unit.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils._pytree import tree_leaves

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import BucketAccess, bucket_of
from lightning_zero.core.coordinator import StepCoordinator
from lightning_zero.core.mixed_dtypes import explain_dtype_error
from lightning_zero.core.recompute import drop_checkpointing
from lightning_zero.core.unit import Call, Unit, with_base
from lightning_zero.tensors.guarded import explain_copy_error, has_placement, placement_of
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = ["PLAIN", "Hooks"]

# Attributes of a module that hold hooks by number.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
)
_METHODS = ("__reduce_ex__", "__deepcopy__")  # set on the module itself, instead of its class's
# Leaves of arguments and outputs; another object may contain tensors.
PLAIN = (Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Hooks:
    """All hooks of one engine, until `detach`."""

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], coordinator: StepCoordinator
    ) -> None:
        self._module = module
        self._buckets = buckets
        self._coordinator = coordinator
        self._handles: list[Any] = []
        # The exception that was being handled when the module was called.
        self._handled: BaseException | None = None
        # Hooks before and after a call of a module, by module.
        self._around: dict[nn.Module, tuple[Callable[..., None], Callable[..., None]]] = {}
        # Methods that count as forwards, by module and name, and the attributes that they replace.
        self._forward_methods: dict[nn.Module, dict[str, dict[str, Any]]] = {}
        self._grad_hooks: dict[nn.Parameter, int] = {}  # ids of our hooks on gradients
        add, eager = self._handles.append, torch.compiler.disable
        add(module.register_forward_pre_hook(eager(self._root_pre_forward), prepend=True))
        add(module.register_forward_hook(eager(self._root_post_forward), always_call=True))
        for unit in coordinator.units[1:]:
            if not unit.buckets:
                continue
            owner = unit.attach(module)
            before = eager(self._pre_forward(unit))
            after = eager(self._post_forward(unit))
            add(owner.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            add(owner.register_forward_hook(after, always_call=True))
            self._around[owner] = before, after
        for part, wait in coordinator.first_use.hooks():
            add(part.register_forward_pre_hook(wait, prepend=True))
        held = {parameter for bucket in buckets for parameter in bucket.parameters}
        for part in module.modules():
            if not isinstance(part, ScriptModule) and _holds_any(part, held):
                add(part.register_state_dict_post_hook(_fill_state_dict))
            vars(part)["__reduce_ex__"] = partial(self._reduce, part)
            if hasattr(type(part), "__deepcopy__"):
                vars(part)["__deepcopy__"] = partial(self._deepcopy, part)
        for bucket in buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.is_floating_point():
                    hook = partial(coordinator.step.post_accumulate_grad, bucket, index)
                    was_trained = parameter.requires_grad
                    parameter.requires_grad_(True)  # torch requires it for registering the hook
                    handle = parameter.register_post_accumulate_grad_hook(hook)
                    add(handle)
                    self._grad_hooks[parameter] = handle.id
                    parameter.requires_grad_(was_trained)

    def run_last(self) -> None:
        """Makes the hooks on gradients come after those that users have registered since. Local.

        A hook of the user's may change or drop the gradient, which ours may send.
        """
        with torch._C.DisableTorchFunctionSubclass():  # guarded parameters would be slow
            for parameter, number in self._grad_hooks.items():
                hooks = parameter._post_accumulate_grad_hooks
                if hooks and next(reversed(hooks)) != number and number in hooks:
                    hooks[number] = hooks.pop(number)

    def detach(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for part, replaced in self._forward_methods.items():
            _restore_methods(vars(part), replaced)
        self._forward_methods.clear()
        for part in self._module.modules():
            for name in _METHODS:
                vars(part).pop(name, None)

    def register_forward_method(
        self, module: nn.Module, name: str, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Runs method `name` of `module` within `context`, and the hooks of its unit around it."""
        if all(module is not part for part in self._module.modules()):
            raise ValueError(
                f"{type(module).__name__} is not a part of {type(self._module).__name__}, which "
                "this engine holds; call the method of the engine that holds it."
            )
        if name in ("forward", "__call__"):
            raise ValueError(f'"{name}" runs as a forward already, when the module is called.')
        method = getattr(module, name)  # an AttributeError if there is none
        if not callable(method) or isinstance(method, nn.Module):
            raise TypeError(
                f"{name} of {type(module).__name__} must be a method, got {type(method).__name__}."
            )
        replaced = self._forward_methods.setdefault(module, {})
        if name in replaced:
            return  # registered before
        before, after = self._around.get(module, (None, None))

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            output = None
            with context():
                if before is None or after is None:
                    return method(*args, **kwargs)
                before(module, args, kwargs)
                try:
                    output = method(*args, **kwargs)
                finally:
                    after(module, args, output)
            return output

        own = vars(module)
        replaced[name] = {name: own[name]} if name in own else {}
        own[name] = call

    def _reduce(self, module: nn.Module, protocol: Any) -> Any:
        """The reduced form of `module` for copies and pickles, without the engine's attributes."""
        with self._without_engine_attributes(module):
            reduced = type(module).__reduce_ex__(module, protocol)
            if not isinstance(reduced, tuple):
                return reduced
            # A class may give its `__dict__` as the state or as an argument.
            own = vars(module)
            return tuple(dict(part) if part is own else part for part in reduced)

    def _deepcopy(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        """The deep copy that the class of `module` makes itself."""
        if isinstance(module, ScriptModule):
            _check_can_copy(module)
        with self._without_engine_attributes(module):
            return cast("Any", type(module)).__deepcopy__(module, memo)

    @contextmanager
    def _without_engine_attributes(self, module: nn.Module) -> Iterator[None]:
        """Context in which `module` has the attributes that it has without an engine."""
        attributes = vars(module)
        held = dict(attributes)
        for name in _METHODS:
            attributes.pop(name, None)
        drop_checkpointing(attributes)
        _restore_methods(attributes, self._forward_methods.get(module, {}))
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
        """Hook of the root module: begins a forward."""
        if module is self._module:
            self._handled = sys.exc_info()[1]
            self._coordinator.open()

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the root module: ends a forward."""
        if module is self._module:
            # torch also calls this while an exception is being handled, without an output.
            error = sys.exc_info()[1] if output is None else None
            if error is self._handled:
                error = None  # a caller was handling it before this call
            self._handled = None
            self._coordinator.root_post_forward(error)
            if error is not None:
                explain_dtype_error(error, module, self._buckets)
                explain_copy_error(error)

    def _pre_forward(self, unit: Unit) -> Callable[..., None]:
        """A hook that unshards `unit` and watches its inputs."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is not unit.module:
                return
            self._coordinator.step.pre_forward(unit)
            leaves: list[Any] = []
            if torch.is_grad_enabled() and not unit.stays_unsharded:
                leaves = tree_leaves((args, kwargs))
            call = unit.begin_call(leaves)
            self._watch_inputs(unit, call)

        return hook

    def _post_forward(self, unit: Unit) -> Callable[..., None]:
        """A hook that watches the outputs of `unit` and reshards it."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module is not unit.module:
                return
            call = unit.calls.pop() if unit.calls else Call()  # empty if an earlier hook failed
            leaves = tree_leaves(output)
            if unit.is_aliased_by(leaves):
                self._coordinator.keep_unsharded(
                    unit, f"module {unit.name} returns a view of its parameters"
                )
            if torch.is_grad_enabled():
                self._watch_outputs(unit, call, leaves)
            call.release_args()
            self._coordinator.step.post_forward(unit)

        return hook

    def _watch_inputs(self, unit: Unit, call: Call) -> None:
        """Calls `post_backward` when all gradients of the inputs of `call` have arrived.

        torch's hook for several tensors would keep the graph alive: it holds the nodes that hold
        it. If a backward leaves out one of the inputs, `post_backward` is not called.
        """

        def arrived(key: int, _: Tensor) -> None:
            if call.arrive(key):
                self._coordinator.step.post_backward(unit, call)

        for key, tensor in call.inputs.items():
            for seen in with_base(tensor):
                seen.register_hook(partial(arrived, key))

    def _watch_outputs(self, unit: Unit, call: Call, leaves: Sequence[Any]) -> None:
        """Calls `pre_backward` when backward reaches one of `leaves`, or a written argument."""

        def on_reached(_: Tensor) -> None:
            self._coordinator.step.pre_backward(unit, call)

        outputs: list[Tensor] = []
        hidden: str | None = None
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.requires_grad and not leaf.is_leaf:
                    outputs.append(leaf)
            elif hidden is None and not isinstance(leaf, PLAIN):
                hidden = type(leaf).__name__
        outputs += [tensor for tensor, node in call.tensor_args if tensor.grad_fn is not node]
        for tensor in outputs:
            for seen in with_base(tensor):
                if seen.grad_fn not in call.prior_nodes:
                    seen.register_hook(on_reached)
        if hidden is not None:
            reason = f"module {unit.name} returns a {hidden}, which may contain tensors"
            self._coordinator.keep_unsharded(unit, reason)


def _restore_methods(attributes: dict[str, Any], replaced: Mapping[str, Mapping[str, Any]]) -> None:
    """Undoes `Hooks.register_forward_method` in the attributes of a module."""
    for name, before in replaced.items():
        attributes.pop(name, None)
        attributes.update(before)


def _holds_any(module: nn.Module, parameters: Set[nn.Parameter]) -> bool:
    """Whether `module`, or a scripted module directly below it, holds one of `parameters`."""
    scripted = [child for child in module.children() if isinstance(child, ScriptModule)]
    below = [parameter for child in scripted for parameter in child.parameters()]
    return not parameters.isdisjoint([*module._parameters.values(), *below])


def _check_can_copy(module: nn.Module) -> None:
    """Before a scripted module is copied, which reads its parameters in C++: waits for them.

    Raises:
        RuntimeError: A parameter is sharded.
    """
    for parameter in module.parameters():
        if not has_placement(parameter):
            continue
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        if bucket.params.are_sharded and not bucket.params.is_unsharded:
            raise RuntimeError(
                f"a scripted module with parameter {placement.name}, which is sharded, cannot be "
                "copied; copy it inside `with lightning_zero.gathered(module):`."
            )
        bucket.params.wait_for_unshard()


def _fill_state_dict(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
    """Replaces parameters in a state dict that are sharded when idle. Collective between steps.

    They become full copies in CPU memory: the memory of unsharded ones is freed after the step.
    Scripted modules have no hooks, so this is done for those directly below `module`, too.
    """
    for name, child in module.named_children():
        if isinstance(child, ScriptModule):
            _fill_state_dict(child, state_dict, f"{prefix}{name}.", None)
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is None or value is None or value is parameter:
            continue
        if not has_placement(parameter):
            continue
        placement = placement_of(parameter)
        if not isinstance(placement.holder, BucketAccess):
            continue
        bucket = placement.holder.bucket
        dtype = bucket.orig_dtypes[placement.index]
        if isinstance(value, ShardedTensor):
            copied = value.full_copy("state_dict", dtype)
        elif bucket.params.are_sharded and not bucket.params.has_views_installed:
            copied = value.to("cpu", copy=True)
        else:
            continue
        bucket.writes.watch_copy(placement.index, copied)
        state_dict[prefix + name] = copied
