"""Sharded parameters, which are unsharded when they are used.

[Note: Guarded parameters] The parameter object never changes, but its class does. While the
parameter is sharded, or its all-gather is in progress, the class is `GuardedParameter`: every torch
function applied to it first calls the guard, which unshards the parameter. While it is unsharded,
the class is a subclass of its original class that torch treats as plain (`plain_class_of`), so the
module computes at full speed and torch.compile does not break the graph. A parameter used outside
its module's forward (`self.w @ x`, a penalty over `self.parameters()`) thus gives the correct value
and gradient, or an error with its name, but never a shard. Metadata (shape, dtype, numel) is that
of the unsharded parameter and needs no communication. Between steps, a use does not unshard the
parameter: it acts on the sharded `.data` (sharded.py), unless autograd has to record it.

[Note: `.data` shares the version] In torch, `parameter.data` has a version counter of its own. The
plain class has a `data` property that is `parameter.detach()`, whose writes increment the counter
of the parameter: so they are found, and between a forward and its backward they are torch's error
about tensors "modified by an inplace operation". Collectives write without a counter. They ask
`is_complex` first, or are given `.data` or `.detach()`: so all three are noted, and the values are
compared later (core/writes.py).

[Note: Plain copies] `copy.deepcopy` and `pickle` look up their methods on the object first. A
parameter of an engine has its own, so that its copy is an ordinary parameter in its original dtype
and class. Attributes that the engine sets on modules are excluded from copies, too (core/hooks.py).
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.record.frames import calling_collective
from lightning_zero.tensors.operators import is_writing
from lightning_zero.tensors.sharded import READ_BY_COLLECTIVES, ShardedTensor

__all__ = [
    "BetweenStepsError",
    "ENGINE_ATTRIBUTES",
    "FULL_NUMEL",
    "GuardedParameter",
    "ParameterHolder",
    "Placement",
    "unguarded",
    "attributes_of",
    "data_of",
    "explain_copy_error",
    "guard",
    "placement_of",
    "plain_class_of",
    "raw_data",
    "set_plain_data",
    "unguard",
]

_ATTRIBUTE = "_zero_placement"
FULL_NUMEL = "_zero_full_numel"  # of a stand-in: elements of the user's parameter
ENGINE_ATTRIBUTES = frozenset({_ATTRIBUTE, FULL_NUMEL, "__deepcopy__", "__reduce_ex__"})


class BetweenStepsError(RuntimeError):
    """Values were requested outside a step, where ranks do not run the same operations."""


class ParameterHolder(Protocol):
    """Object that has the values of a parameter, usually the access to a bucket.

    The other holder is the placeholder for a dropped parameter.
    """

    @property
    def device(self) -> torch.device:
        """Device of the parameter while it is unsharded."""

    def sharded_data(self, index: int) -> Tensor:
        """`parameter.data` of slot `index` while it is sharded."""

    def wait_for_update(self) -> None:
        """Waits, before `parameter.data` is set, until it is sharded, or unsharded and plain."""

    def assign_data(self, index: int, values: Tensor) -> None:
        """`parameter.data = values` of slot `index` while it is sharded."""

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """Returns a plain copy of slot `index`. Collective if it is sharded."""


@dataclass(frozen=True)
class Placement:
    """Link of a parameter to its bucket.

    Attributes:
        name: Qualified name of the parameter.
        shape: Shape of the unsharded parameter.
        dtype: Dtype of the unsharded parameter.
        own_class: Class of the parameter while it is not guarded.
        holder: Holder of the values.
        index: Slot of the parameter in its bucket.
        ensure_unsharded: Called with the name before the values are used.
        set_grad: Called with the slot and the new `.grad`; None: torch sets `.grad`.
        on_data_read: Called with the slot before the `.data` of a plain parameter is returned.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    own_class: type[nn.Parameter]
    holder: ParameterHolder
    index: int
    ensure_unsharded: Callable[[str], None]
    set_grad: Callable[[int, Tensor], None] | None = None
    on_data_read: Callable[[int], None] | None = None

    # Set as methods of the parameter object; see [Note: Plain copies].

    def deepcopy(self, memo: dict[int, Any]) -> nn.Parameter:
        plain = self.holder.copy_plain(self.index, is_for_file=False)
        copied: nn.Parameter = copy.deepcopy(plain)  # its class may define __deepcopy__
        return copied

    def reduce_ex(self, protocol: Any) -> Any:
        plain = self.holder.copy_plain(self.index, is_for_file=True)
        return plain.__reduce_ex__(protocol)


class GuardedParameter(nn.Parameter):
    """Class of a parameter while it is sharded or being all-gathered.

    See [Note: Guarded parameters].
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        classes: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_given = func in READ_BY_COLLECTIVES and calling_collective() != ""
        if func in _METADATA and isinstance(args[0], GuardedParameter) and not is_given:
            return _METADATA[func](placement_of(args[0]), *args[1:], **kwargs)
        if func in _WITHOUT_VALUES:
            result = _WITHOUT_VALUES[func](*args, **kwargs)
            if result is not _NEEDS_VALUES:
                return result
        if is_given or func not in _UNTOUCHED:
            if any(isinstance(leaf, ShardedTensor) for leaf in tree_leaves((args, kwargs))):
                return _call_on_shards(func, args, kwargs)
            try:
                _unshard_all(args, kwargs)
            except BetweenStepsError:
                if _needs_autograd(func, args, kwargs):
                    raise
                return _call_on_shards(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As `Tensor.set_`, for which torch calls no `__torch_function__`."""
        (values, *_) = (*args, *kwargs.values(), None)
        is_recorded = torch.is_grad_enabled() and self.requires_grad
        if len(args) + len(kwargs) == 1 and isinstance(values, Tensor) and not is_recorded:
            _set_data(self, values)
            return self
        return _call_on_shards(Tensor.set_, (self, *args), kwargs)

    def _use_count(self) -> int:
        return _refuse_swap(self)

    # mypy drops the names of a dunder's keyword-only arguments, so that even equal ones mismatch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        placement = placement_of(self)
        return f"Parameter {placement.name} of shape {tuple(placement.shape)}, sharded"


@torch.compiler.disable
def _ensure_unsharded(placement: Placement) -> None:
    placement.ensure_unsharded(placement.name)


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Attributes that a user has set on `parameter`, such as flags for an optimizer."""
    own = parameter.__dict__
    return {key: own[key] for key in own if key not in ENGINE_ATTRIBUTES}


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """Makes `parameters` guarded ones, so that every use calls their guards."""
    for parameter in parameters:
        parameter.__class__ = _guarded_class_of(parameter.__dict__[_ATTRIBUTE].own_class)


@cache
def _guarded_class_of(own_class: type[nn.Parameter]) -> type[nn.Parameter]:
    """A guarded subclass of the parameter's original class, for which `isinstance` still holds."""
    if own_class is nn.Parameter:
        return GuardedParameter
    names = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    return types.new_class(
        own_class.__name__,
        (GuardedParameter, own_class),
        exec_body=lambda space: space.update(names),
    )


def set_plain_data(parameters: Iterable[nn.Parameter], targets: Iterable[Tensor]) -> None:
    """Makes the parameters of a bucket plain ones, whose `.data` are `targets`."""
    for parameter, target in zip(parameters, targets, strict=True):
        # The class first: assigning `.data` of a guarded parameter means new values.
        parameter.__class__ = plain_class_of(parameter.__dict__[_ATTRIBUTE].own_class)
        _SET_DATA(parameter, target)


def data_of(parameter: Tensor) -> Tensor:
    """`parameter.data` of torch, also of a guarded parameter. Only for the engine."""
    with torch._C.DisableTorchFunctionSubclass():
        data: Tensor = raw_data(parameter)
    return data


@cache
def plain_class_of(own_class: type[nn.Parameter]) -> type[nn.Parameter]:
    """Class of an unsharded parameter. See [Note: `.data` shares the version]."""

    def note_read(self: nn.Parameter) -> None:
        placement = self.__dict__.get(_ATTRIBUTE)
        if placement is not None and placement.on_data_read is not None:
            placement.on_data_read(placement.index)

    def get(self: nn.Parameter) -> Tensor:
        note_read(self)
        return own_class.detach(self)

    def detach(self: nn.Parameter) -> Tensor:
        if not torch.compiler.is_compiling():
            note_read(self)
        return own_class.detach(self)

    def put(self: nn.Parameter, values: Tensor) -> None:
        if isinstance(values, GuardedParameter):
            values = values.data
        if isinstance(values, ShardedTensor):
            values = values.full_tensor()  # collective, as are all uses of a sharded tensor
        _SET_DATA(self, values)

    def is_complex(self: nn.Parameter) -> bool:
        if not torch.compiler.is_compiling():
            note_read(self)
        return own_class.is_complex(self)

    names = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    own = {
        "data": property(get, put),
        "detach": detach,
        "is_complex": is_complex,
        "_use_count": _refuse_swap,
        "__doc__": own_class.__doc__,
    }
    return type(own_class.__name__, (own_class,), {**names, **own})


def _refuse_swap(parameter: nn.Parameter) -> NoReturn:
    """The `_use_count` of a parameter, which `torch.utils.swap_tensors` calls before it swaps."""
    raise RuntimeError(
        f"torch.utils.swap_tensors would replace parameter {placement_of(parameter).name}, which "
        "an engine holds. Assign new values, parameter.data = values, or write them inside `with "
        "lightning_zero.gathered(module, writeback=True):`. If module.to() or load_state_dict() "
        "was called, reset torch.__future__.set_swap_module_params_on_conversion(False)."
    )


def unguard(parameter: nn.Parameter) -> None:
    """Makes `parameter` an ordinary parameter again."""
    placement = parameter.__dict__.get(_ATTRIBUTE)
    parameter.__class__ = nn.Parameter if placement is None else placement.own_class


def placement_of(parameter: Tensor) -> Placement:
    """Placement of `parameter` in a bucket.

    Raises:
        ValueError: `parameter` belongs to no engine.
    """
    placement = parameter.__dict__.get(_ATTRIBUTE)
    if placement is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} does not belong to an engine; call "
            "this between setup and teardown, with a parameter of the trained module."
        )
    assert isinstance(placement, Placement)
    return placement


@contextmanager
def unguarded(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which guarded parameters are plain, for code that moves modules unread."""
    guarded = [p for p in parameters if isinstance(p, GuardedParameter)]
    for parameter in guarded:
        unguard(parameter)
    try:
        yield
    finally:
        guard(guarded)


def explain_copy_error(error: BaseException) -> None:
    """Adds a note to torch's error for `nn.Parameter(parameter)`, which has no cure in it.

    `nn.Parameter` copies a parameter of its own class only. See [Note: Guarded parameters].
    """
    if "Creating a Parameter from an instance" in str(error) and sys.version_info >= (3, 11):
        error.add_note(
            "The engine has set the class of the module's parameters. For a new parameter with the "
            "same values write nn.Parameter(parameter.detach()) instead of nn.Parameter(parameter)."
        )


def set_placement(parameter: nn.Parameter, placement: Placement | None) -> None:
    """Links `parameter` to a bucket; None removes the link."""
    for key in ENGINE_ATTRIBUTES:
        parameter.__dict__.pop(key, None)
    if placement is not None:
        parameter.__dict__[_ATTRIBUTE] = placement
        parameter.__dict__["__deepcopy__"] = placement.deepcopy
        parameter.__dict__["__reduce_ex__"] = placement.reduce_ex


def has_placement(parameter: Tensor) -> bool:
    """Whether `parameter` belongs to an engine."""
    return _ATTRIBUTE in parameter.__dict__


def has_unmanaged_parameters(module: nn.Module) -> bool:
    """Whether `module` has a trainable parameter that belongs to no engine.

    Called in every step; ten times faster than iterating over `module.named_parameters()`.
    """
    seen: set[nn.Module] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        member = stack.pop()
        if member is None or member in seen:
            continue
        seen.add(member)
        for parameter in member._parameters.values():
            if parameter is None or _ATTRIBUTE in parameter.__dict__:
                continue
            if parameter.requires_grad:
                return True
        stack.extend(member._modules.values())
    return False


# ---------------------------------------------------------------- functions that need no values

_NEEDS_VALUES = object()  # result of a function below that cannot do without the values


def _get_data(parameter: Tensor) -> Any:
    placement = placement_of(parameter)
    return placement.holder.sharded_data(placement.index)


def _set_data(target: Any, values: Tensor) -> Any:
    if not isinstance(target, GuardedParameter):
        return _NEEDS_VALUES
    if values is not target:  # else it is `module.to(...)`, and nothing changes
        placement = placement_of(target)
        placement.holder.wait_for_update()
        parameter: Any = target
        if isinstance(parameter, GuardedParameter):  # it is sharded
            placement.holder.assign_data(placement.index, values)
        else:
            parameter.data = values
    return None


def _set_grad(parameter: Tensor, grad: Tensor | None) -> Any:
    placement = placement_of(parameter)
    if placement.set_grad is None or grad is None:
        return _NEEDS_VALUES  # not of the parameter: torch sets `.grad`
    return placement.set_grad(placement.index, grad)


def _convert_like(tensor: Tensor, *given: Any, **kwargs: Any) -> Any:
    """`tensor.to(like)` and `tensor.type_as(like)`, which use device and dtype of `like`."""
    if isinstance(tensor, GuardedParameter):
        return _NEEDS_VALUES
    like, *rest = given or [kwargs.pop("other")]
    placement = placement_of(like)
    return tensor.to(placement.holder.device, placement.dtype, *rest, **kwargs)


def _shape_as(shape: Callable[..., Tensor]) -> Callable[..., Any]:
    """A method of torch that uses only the shape of its second argument."""

    def shape_as(tensor: Tensor, other: Tensor) -> Any:
        is_sharded = isinstance(tensor, GuardedParameter)
        return _NEEDS_VALUES if is_sharded else shape(tensor, other.shape)

    return shape_as


def _equal(input: Tensor, other: Tensor) -> Any:
    """`torch.equal`: Lightning's fine-tuning compares each parameter with all others."""
    if input is other:
        return True
    return _NEEDS_VALUES if input.shape == other.shape else False


def _backward(tensors: Any, *, inputs: Any = None, **kwargs: Any) -> None:
    """`torch.autograd.backward`, which writes `.grad` of `inputs` and reads none of them."""
    for parameter in _guarded_in((tensors, kwargs)):
        _ensure_unsharded(placement_of(parameter))
    if inputs is not None:
        with torch._C.DisableTorchFunctionSubclass():
            inputs = [get_gradient_edge(i) if _guarded_in(i) else i for i in inputs]
    torch.autograd.backward(tensors, **kwargs, inputs=inputs)


# ---------------------------------------------------------------- functions that need the values


def _unshard_all(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for parameter in _guarded_in((args, kwargs)):
        if isinstance(parameter, GuardedParameter):  # else unsharded with the last one
            _ensure_unsharded(placement_of(parameter))


def _needs_autograd(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether autograd has to record `func` between steps.

    Results of parameters alone, such as a norm, are not recorded: their backward raises. Writes
    with gradients enabled are recorded, so they raise, as in torch.
    """
    if func in _DETACHING or not torch.is_grad_enabled():
        return False
    if getattr(func, "__module__", "") == nn.init.__name__:
        return False  # torch.nn.init writes under no_grad
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.requires_grad for tensor in tensors):
        return False
    if is_writing(getattr(func, "__name__", "")) or func is Tensor.numpy:
        return True
    is_other = [not isinstance(t, (GuardedParameter, ShardedTensor)) for t in tensors]
    return any(is_one and tensor.dim() for is_one, tensor in zip(is_other, tensors, strict=True))


def _call_on_shards(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Calls `func` with sharded parameters replaced by their sharded `.data`."""
    given: list[tuple[Tensor, nn.Parameter]] = []

    def shard(value: Any) -> Any:
        if not _guarded_in(value):
            return value
        placement = placement_of(value)
        data = placement.holder.sharded_data(placement.index)
        if not _guarded_in(value):  # its all-gather was in progress, and has ended
            return value
        if not isinstance(data, ShardedTensor):
            _ensure_unsharded(placement)
            return value
        if value.requires_grad:
            data = data.tracked()
        given.append((data, value))
        return data

    args, kwargs = tree_map(shard, (args, dict(kwargs)))
    result = func(*args, **kwargs)
    return next((value for data, value in given if data is result), result)


def _guarded_in(values: Any) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, GuardedParameter):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
    return found


def _size(placement: Placement, dim: int | None = None) -> Any:
    return placement.shape if dim is None else placement.shape[dim]


def _index_of(device: torch.device) -> int:
    return -1 if device.index is None else device.index


# Metadata of the unsharded parameter.
_METADATA: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.dtype.__get__: lambda placement: placement.dtype,  # type: ignore[attr-defined]
    Tensor.numel: lambda placement: placement.shape.numel(),
    Tensor.nelement: lambda placement: placement.shape.numel(),
    Tensor.dim: lambda placement: len(placement.shape),
    Tensor.ndimension: lambda placement: len(placement.shape),
    Tensor.ndim.__get__: lambda placement: len(placement.shape),  # type: ignore[attr-defined]
    Tensor.__len__: lambda placement: placement.shape[0],
    Tensor.device.__get__: lambda placement: placement.holder.device,
    Tensor.is_cpu.__get__: lambda placement: placement.holder.device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda placement: placement.holder.device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.get_device: lambda placement: _index_of(placement.holder.device),
}

# `parameter.data` of torch; of a guarded parameter only within `DisableTorchFunctionSubclass`.
raw_data: Callable[[Tensor], Tensor] = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_DETACHING = {Tensor.detach, torch.equal, Tensor.equal}
_SET_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]  # a descriptor, typed as its value

_WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    raw_data: _get_data,
    _SET_DATA: _set_data,
    _SET_GRAD: _set_grad,
    Tensor.to: _convert_like,
    Tensor.type_as: _convert_like,
    Tensor.view_as: _shape_as(Tensor.view),
    Tensor.reshape_as: _shape_as(Tensor.reshape),
    Tensor.expand_as: _shape_as(Tensor.expand),
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.autograd.backward: _backward,
}

# Functions that do not read the values; they act on the object itself.
_SETTABLE = ("grad_dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_READABLE = ("grad", "grad_fn", "is_leaf", "is_meta", "is_quantized", "is_sparse", "layout", "name")
_UNTOUCHED = {getattr(Tensor, name).__set__ for name in _SETTABLE}
_UNTOUCHED |= {getattr(Tensor, name).__get__ for name in (*_SETTABLE, *_READABLE, "_version")}
_UNTOUCHED |= {
    _SET_GRAD,
    Tensor.grad.__delete__,  # type: ignore[union-attr]  # a descriptor, typed as its value
    Tensor.__hash__,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.is_inference,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.requires_grad_,
    torch.is_complex,
    torch.is_floating_point,
}
