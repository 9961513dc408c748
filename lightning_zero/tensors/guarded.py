"""A parameter that is not whole at this moment, and knows how to be used all the same.

[Note: Guarded parameters] The parameter object never changes, its class does: while its values are
not at hand on this rank (they rest as a shard, or their gather is under way) the class is
`GuardedParameter`, and any torch function applied to it first calls the guard, which makes the
values whole. While they are whole the class is a subclass of the parameter's own one that torch
treats as plain (`plain_class_of`), so the module computes at full speed and sees nothing of this; a
graph of torch.compile is not cut. A parameter read outside its module's forward (`self.w @ x`, a
penalty over `self.parameters()`) thus gives the right value and gradient, or an error that names
it, never a part. Metadata (shape, dtype, numel) is answered for the whole parameter without
touching it. Between steps, where a use makes nothing whole, it takes what its `.data` takes
(sharded.py), unless it is to be trained through.

[Note: `.data` has no version] Writes to `parameter` or `parameter.detach()` count up a version;
`parameter.data` begins a count of its own, and what is assigned to it may be a part of a tensor. So
the plain class has a `data` of its own, which tells the holder first.

[Note: Plain copies] `copy.deepcopy` and `pickle` ask an object for its methods, and those that a
held parameter has itself hide those of its class: a copy is an ordinary parameter in its own dtype
and class. What the engine hangs on modules is left out likewise (core/hooks.py).
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.tensors.full_view import FullTensorView, is_writing
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = [
    "BetweenStepsError",
    "GuardedParameter",
    "ParameterHolder",
    "Placement",
    "unguarded",
    "attributes_of",
    "data_of",
    "guard",
    "placement_of",
    "plain_class_of",
    "set_plain_data",
    "unguard",
]

_ATTRIBUTE = "_zero_placement"
_OURS = (_ATTRIBUTE, "__deepcopy__", "__reduce_ex__")


class BetweenStepsError(RuntimeError):
    """Values are asked for outside a step, where ranks do not act in lockstep."""


class ParameterHolder(Protocol):
    """Who has the values of a parameter: a bucket, mostly.

    Others are a bucket of an average, a piece of a module that is being built, and what has the
    place of a bucket when its values have been dropped.
    """

    @property
    def device(self) -> torch.device:
        """Where the parameter is when it is whole."""

    def sharded_data(self, index: int) -> Tensor:
        """What `parameter.data` is of slot `index`."""

    def wait_for_update(self) -> None:
        """Before `parameter.data` is set: it is at rest then, or whole and plain."""

    def assign_data(self, index: int, values: Tensor) -> None:
        """`parameter.data = values` of slot `index`, at rest."""

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """A parameter of its own like slot `index`, unguarded. Collective where it is at rest."""

    def equals(self, one: Tensor, other: Tensor) -> bool:
        """`torch.equal` between steps, of which at least `one` is at rest. Collective."""


@dataclass(frozen=True)
class Placement:
    """What a parameter knows of its bucket."""

    name: str  # qualified
    shape: torch.Size  # of the whole parameter, as dtype
    dtype: torch.dtype
    own_class: type[nn.Parameter]  # while it is not guarded
    bucket: ParameterHolder
    index: int  # its slot there
    ensure_unsharded: Callable[[str], None]  # called with the name before the values are used
    # Called with the slot and what is set as `.grad`; None: torch sets it.
    set_grad: Callable[[int, Tensor], None] | None = None
    # Called with the slot before the `.data` of a plain parameter is handed out.
    on_data_read: Callable[[int], None] | None = None

    # As methods of the parameter itself; see [Note: Plain copies].

    def deepcopy(self, memo: dict[int, Any]) -> nn.Parameter:
        plain = self.bucket.copy_plain(self.index, is_for_file=False)
        copied: nn.Parameter = copy.deepcopy(plain)  # of its class, which may have its own way
        return copied

    def reduce_ex(self, protocol: Any) -> Any:
        plain = self.bucket.copy_plain(self.index, is_for_file=True)
        return plain.__reduce_ex__(protocol)


class GuardedParameter(nn.Parameter):
    """The class of a parameter whose values are not at hand. See [Note: Guarded parameters]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        classes: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and isinstance(args[0], GuardedParameter):
            return _METADATA[func](placement_of(args[0]), *args[1:], **kwargs)
        if func == _GET_DATA and isinstance(args[0], GuardedParameter):
            placement = placement_of(args[0])
            return placement.bucket.sharded_data(placement.index)
        if func == _SET_DATA and isinstance(args[0], GuardedParameter):
            if args[1] is args[0]:
                return None  # `module.to(...)` where nothing changes
            placement = placement_of(args[0])
            placement.bucket.wait_for_update()
            target: Any = args[0]
            if isinstance(target, GuardedParameter):  # it rests as a shard
                return placement.bucket.assign_data(placement.index, args[1])
            target.data = args[1]
            return None
        elif func == _SET_GRAD:
            placement = placement_of(args[0])
            if placement.set_grad is not None and args[1] is not None:
                return placement.set_grad(placement.index, args[1])
        elif func in (Tensor.to, Tensor.type_as) and not isinstance(args[0], GuardedParameter):
            return args[0].to(*_kind_of(args[1:]), **kwargs)
        elif func in _SHAPED_AS and not isinstance(args[0], GuardedParameter):
            return _SHAPED_AS[func](args[0], args[1].shape)
        elif func in (torch.equal, Tensor.equal):
            return _equal(*args, **kwargs)
        elif func is torch.autograd.backward:
            return _backward(*args, **kwargs)
        elif func not in _UNTOUCHED:
            if any(isinstance(leaf, ShardedTensor) for leaf in tree_leaves((args, kwargs))):
                return _beside_sharded(func, args, kwargs)
            try:
                for parameter in _guarded_in((args, kwargs)):
                    if isinstance(parameter, GuardedParameter):  # not made whole with its neighbour
                        _ensure_unsharded(placement_of(parameter))
            except BetweenStepsError:
                if _wants_graph(func, args, kwargs):
                    raise
                return _beside_sharded(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # mypy drops the names of a dunder's keyword-only arguments, so that even equal ones mismatch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        placement = placement_of(self)
        return f"Parameter {placement.name} of shape {tuple(placement.shape)}, not gathered"


@torch.compiler.disable
def _ensure_unsharded(placement: Placement) -> None:
    placement.ensure_unsharded(placement.name)


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """What a user has written on `parameter`, such as flags that an optimizer reads."""
    return {key: value for key, value in parameter.__dict__.items() if key not in _OURS}


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """From now on, uses of `parameters` go through their guards."""
    for parameter in parameters:
        parameter.__class__ = _guarded_class_of(parameter.__dict__[_ATTRIBUTE].own_class)


@cache
def _guarded_class_of(own_class: type[nn.Parameter]) -> type[nn.Parameter]:
    """A guarded class that is the parameter's own one as well: `isinstance` stays what it is."""
    if own_class is nn.Parameter:
        return GuardedParameter
    names = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    return types.new_class(
        own_class.__name__,
        (GuardedParameter, own_class),
        exec_body=lambda space: space.update(names),
    )


def set_plain_data(parameters: Iterable[nn.Parameter], targets: Iterable[Tensor]) -> None:
    """Makes the parameters of a bucket ordinary ones, whose `.data` are `targets`."""
    for parameter, target in zip(parameters, targets, strict=True):
        # First: what is put into a guarded one is taken for new values.
        parameter.__class__ = plain_class_of(parameter.__dict__[_ATTRIBUTE].own_class)
        _SET_DATA(parameter, target)


def data_of(parameter: Tensor) -> Tensor:
    """`parameter.data` as torch has it, also of a guarded one; for the engine alone."""
    with torch._C.DisableTorchFunctionSubclass():
        data: Tensor = _GET_DATA(parameter)
    return data


@cache
def plain_class_of(own_class: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter whose values are at hand. See [Note: `.data` has no version]."""

    def get(self: nn.Parameter) -> Tensor:
        placement = self.__dict__.get(_ATTRIBUTE)
        if placement is not None and placement.on_data_read is not None:
            placement.on_data_read(placement.index)
        data: Tensor = _GET_DATA(self)
        return data

    def put(self: nn.Parameter, values: Tensor) -> None:
        if isinstance(values, GuardedParameter):
            values = values.data
        if isinstance(values, ShardedTensor):
            values = values.full_tensor()  # collective, as every use of one is
        _SET_DATA(self, values)

    names = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    own = {"data": property(get, put), "__doc__": own_class.__doc__}
    return type(own_class.__name__, (own_class,), {**names, **own})


def unguard(parameter: nn.Parameter) -> None:
    """`parameter` is an ordinary parameter again."""
    placement = parameter.__dict__.get(_ATTRIBUTE)
    parameter.__class__ = nn.Parameter if placement is None else placement.own_class


def placement_of(parameter: Tensor) -> Placement:
    """Where an engine keeps `parameter`.

    Raises:
        ValueError: No engine holds it.
    """
    placement = parameter.__dict__.get(_ATTRIBUTE)
    if placement is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is not held by an engine at this "
            "moment; call this between setup and teardown, with a parameter of the trained module."
        )
    assert isinstance(placement, Placement)
    return placement


@contextmanager
def unguarded(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, those that are guarded are plain: for code that moves modules, and reads no value."""
    guarded = [p for p in parameters if isinstance(p, GuardedParameter)]
    for parameter in guarded:
        unguard(parameter)
    try:
        yield
    finally:
        guard(guarded)


def set_placement(parameter: nn.Parameter, placement: Placement | None) -> None:
    for key in _OURS:
        parameter.__dict__.pop(key, None)
    if placement is not None:
        parameter.__dict__[_ATTRIBUTE] = placement
        parameter.__dict__["__deepcopy__"] = placement.deepcopy
        parameter.__dict__["__reduce_ex__"] = placement.reduce_ex


def has_placement(parameter: Tensor) -> bool:
    return _ATTRIBUTE in parameter.__dict__


def has_unmanaged_parameters(module: nn.Module) -> bool:
    """Whether `module` has a trainable parameter that no engine holds.

    As `module.named_parameters()` would tell, at a tenth of its cost: this is asked in every step.
    """
    seen: set[nn.Module] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        one = stack.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        for parameter in one._parameters.values():
            if parameter is None or _ATTRIBUTE in parameter.__dict__:
                continue
            if parameter.requires_grad:
                return True
        stack.extend(one._modules.values())
    return False


def _equal(input: Tensor, other: Tensor) -> bool:
    """`torch.equal`, which between steps asks the other ranks only where it must."""
    one = input
    if one is other:
        return True
    if one.shape != other.shape:
        return False
    if not has_placement(one):
        one, other = other, one
    placement = placement_of(one)
    try:
        for parameter in _guarded_in((one, other)):
            if isinstance(parameter, GuardedParameter):
                _ensure_unsharded(placement_of(parameter))
    except BetweenStepsError:
        return placement.bucket.equals(one, other)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.equal(one, other)


def _backward(tensors: Any, *, inputs: Any = None, **kwargs: Any) -> None:
    """`torch.autograd.backward`, which writes `.grad` of `inputs` and reads none of them."""
    for parameter in _guarded_in((tensors, kwargs)):
        _ensure_unsharded(placement_of(parameter))
    if inputs is not None:
        with torch._C.DisableTorchFunctionSubclass():
            inputs = [get_gradient_edge(i) if _guarded_in(i) else i for i in inputs]
    torch.autograd.backward(tensors, **kwargs, inputs=inputs)


def _kind_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `tensor.to(*given)` asks for, where that is to be like a guarded parameter."""
    like, *rest = given
    if not isinstance(like, GuardedParameter):
        return given
    placement = placement_of(like)
    return placement.bucket.device, placement.dtype, *rest


def _wants_graph(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether `func`, between steps, is to be trained through, and not a look at parameters.

    What is made of parameters alone, a norm say, is a look: its backward is an error. A write in
    autograd's sight is none in torch either.
    """
    if func in _DETACHING or not torch.is_grad_enabled():
        return False
    if getattr(func, "__module__", "") == nn.init.__name__:
        return False  # it writes under no_grad
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.requires_grad for tensor in tensors):
        return False
    if is_writing(getattr(func, "__name__", "")) or func is Tensor.numpy:
        return True
    is_other = [
        not isinstance(t, (GuardedParameter, ShardedTensor, FullTensorView)) for t in tensors
    ]
    return any(is_one and tensor.dim() for is_one, tensor in zip(is_other, tensors, strict=True))


def _beside_sharded(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Runs `func` on this rank's parts of parameters, such as `p.grad` with `p`."""
    given: list[tuple[Tensor, nn.Parameter]] = []

    def part(value: Any) -> Any:
        if not _guarded_in(value):
            return value
        placement = placement_of(value)
        data = placement.bucket.sharded_data(placement.index)
        if not _guarded_in(value):  # its gather was under way, and is over
            return value
        if not isinstance(data, ShardedTensor):
            _ensure_unsharded(placement)
            return value
        data.is_tracked = value.requires_grad
        given.append((data, value))
        return data

    args, kwargs = tree_map(part, (args, dict(kwargs)))
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


# Answered for the whole parameter.
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
    Tensor.device.__get__: lambda placement: placement.bucket.device,
    Tensor.is_cpu.__get__: lambda placement: placement.bucket.device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda placement: placement.bucket.device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.get_device: lambda placement: _index_of(placement.bucket.device),
}

# Of these the second only lends its shape.
_SHAPED_AS: dict[Any, Callable[..., Any]] = {
    Tensor.view_as: Tensor.view,
    Tensor.reshape_as: Tensor.reshape,
    Tensor.expand_as: Tensor.expand,
}

# `data` is what rests on this rank; where that is the whole, its gather must be over.
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_DETACHING = {Tensor.detach}
_SET_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]  # a descriptor, typed as its value

# Answered by the object as it is; none of these reads the values.
_SETTABLE = ("grad_dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_READABLE = ("grad", "grad_fn", "is_leaf", "is_meta", "is_quantized", "is_sparse", "layout", "name")
_UNTOUCHED = {getattr(Tensor, name).__set__ for name in _SETTABLE}
_UNTOUCHED |= {getattr(Tensor, name).__get__ for name in (*_SETTABLE, *_READABLE, "_version")}
_UNTOUCHED |= {
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
