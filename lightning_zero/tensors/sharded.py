"""Sharded tensors: `p.grad` before a step, `p.data` while sharded.

[Note: Sharded tensors] Shape, dtype, stride and other metadata are those of the full tensor. The
local values are a range of its row-major elements, possibly empty. Operators with torch's tag
`pointwise` run on that range, together with tensors of the same sharding, and with full tensors, of
which the same range is taken after broadcasting. Reductions over all elements are all-reduced.
Other operators need more than the shard: for `p.data`, the values are gathered (full_view.py); for
`p.grad`, the operator raises an error that states how to get the full tensor.

Collective, every rank must call them: reductions; `full_tensor`; operators that gather; and
pointwise operators on a tensor of another sharding, or that write to a plain tensor, because both
need full values.

[Note: No gradient] A shard cannot be part of an autograd graph: every rank would differentiate only
its own elements. So results require no gradient, and the backward of a number that was reduced from
tensors which require one raises an error, instead of training without that term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_zero.tensors.full_view import FullTensorView, is_writing
from lightning_zero.tensors.lazy import arguments_of, read_flat, written_by
from lightning_zero.tensors.shard_spec import InMemoryShard, LocalShard, ShardSpec

__all__ = ["ShardedTensor", "ShardedTensorError", "is_elementwise_operator"]


class ShardedTensorError(RuntimeError):
    """An operation needs elements of a sharded tensor that this rank does not have.

    Not a TypeError: Python's operators would take that for "not implemented" and compare
    identities.

    Attributes:
        sharded: The tensor.
        why: Reason for the error text.
        needs_full: Whether the operation is possible with full values.
    """

    sharded: ShardedTensor | None = None
    why: str = ""
    needs_full: bool = False


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ShardedTensor, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(name)

    return refuse


class ShardedTensor(Tensor):
    """This rank's shard of a tensor. See [Note: Sharded tensors].

    Attributes:
        spec: Elements that each rank has.
        role: "p.grad", "p.data" or "optimizer.state": role of the tensor, or of the tensor from
            which it was computed.
        is_tracked: Whether it was computed from a tensor that requires a gradient. See
            [Note: No gradient].
    """

    spec: ShardSpec
    role: str
    is_tracked: bool
    _shard: LocalShard

    @staticmethod
    def of(
        shard: LocalShard,
        spec: ShardSpec,
        role: str,
        like: Tensor,
        shape: Sequence[int] | None = None,
    ) -> ShardedTensor:
        """Wraps `shard`, the elements `spec.owned`, as a tensor of full shape; memory is shared.

        Args:
            shard: The local elements.
            spec: Elements that each rank has.
            role: See `ShardedTensor`.
            like: Has the dtype and the device of the elements.
            shape: Full shape; None: that of the parameter.
        """
        size = torch.Size(spec.slot.shape if shape is None else shape)
        sharded = Tensor._make_wrapper_subclass(
            ShardedTensor, size, dtype=like.dtype, device=like.device
        )
        assert isinstance(sharded, ShardedTensor)
        sharded.spec, sharded.role, sharded.is_tracked = spec, role, False
        sharded._shard = shard
        return sharded

    @property
    def local(self) -> Tensor:
        """This rank's elements as a plain tensor, 1-D; a copy if they are stored in a file."""
        return self._shard.read()

    def change(self, write: Callable[[Tensor], object]) -> None:
        """Calls `write` with this rank's elements, 1-D and plain, to change them. Local."""
        self._shard.change(write)

    def is_view_of(self, shard: LocalShard | None) -> bool:
        """Whether the local elements are those of `shard`, as in tensors created from it."""
        return self._shard is shard

    def full_tensor(self) -> Tensor:
        """All elements, a new plain tensor. Collective: every rank."""
        return self._gather("full_tensor")

    def full_view(self, name: str, dtype: torch.dtype | None = None) -> FullTensorView:
        """All elements, to be read and written. Collective: every rank.

        Args:
            name: Name of the operation that needs them, for errors.
            dtype: Dtype of the result; None: the dtype of this tensor.
        """
        num_bytes = self.numel() * (dtype or self.dtype).itemsize
        self._shard.check_memory(self._call_of(name), num_bytes)
        values = self._gather(name)
        return FullTensorView.of(values if dtype is None else values.to(dtype), _Origin(self))

    def _gather(self, name: str) -> Tensor:
        local = self.local
        # A sum of integers, where all ranks but one have zeros, preserves every bit.
        words = 2 * -(-self.numel() * local.element_size() // 16)
        memory = torch.zeros(words, dtype=torch.int64, device=local.device)
        flat = memory.view(local.dtype)[: self.numel()]
        owned = self.spec.owned
        flat[owned.start : owned.stop] = local
        self._all_reduce_sum(memory, name)
        return flat.view(self.shape)

    def _all_reduce_sum(self, values: Tensor, name: str) -> Tensor:
        """Sum over the shard group, in place. Collective."""
        return self.spec.comm.sum_over_shards_(values, self._call_of(name))

    def _all_reduce_max(self, values: Tensor, name: str) -> Tensor:
        """Elementwise maximum over all ranks, in place. Collective."""
        return self.spec.comm.max_(values, self._call_of(name))

    def _call_of(self, name: str) -> str:
        return f"{self.role}.{name}() of {self.spec.slot.name}"

    def _refuse(self, name: str, why: str = "", *, needs_full: bool = True) -> NoReturn:
        raise _error(self, name, why, needs_full=needs_full and self.role == _DATA)

    # ---------------------------------------------------------------- dispatch of torch

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handles autograd; the operators of `func` arrive in `__torch_dispatch__`."""
        kwargs = kwargs or {}
        if any(issubclass(other, (nn.Parameter, FullTensorView)) for other in types):
            return NotImplemented  # their __torch_function__ calls again with shards or values
        if func == _SET_DATA:
            return args[0].copy_(args[1])
        if func in _FROM_MEMORY:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            is_tracked = torch.is_grad_enabled() and any(map(_requires_grad, tensors))
            name = _name_of(func)
            if name in _ON_MEMORY:
                _first_of(args, kwargs)._refuse(name, needs_full=False)
            written = args[0] if args else None
            if is_tracked and is_writing(name) and not isinstance(written, ShardedTensor | None):
                sharded = next(t for t in tensors if isinstance(t, ShardedTensor))
                why = "no gradient flows through it; call it under torch.no_grad()"
                sharded._refuse(name, why, needs_full=False)
            try:
                with torch.no_grad():
                    result = func(*args, **kwargs)
            except ShardedTensorError as error:
                if not error.needs_full:
                    raise _renamed(error, name) from None
                result = None
                needs_full = True
            else:
                needs_full = False
        if needs_full:
            result = _call_with_full_values(func, name, args, kwargs)
        if is_tracked and func not in _UNTRACKED:
            with torch._C.DisableTorchFunctionSubclass():
                result = tree_map(lambda value: _track(value, tensors, name), result)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__ if func.namespace == "aten" else str(func)
        if name in _SAME_ELEMENTS and not (func.overloadpacket is _VIEW and "dtype" in str(func)):
            return _with_shape(func, name, args, kwargs)
        if name in _REDUCTIONS and torch.Tag.pointwise not in func.tags:
            return _reduce(func, name, args, kwargs)
        if name in _OTHERS:
            return _OTHERS[name](func, args, kwargs)
        if name.startswith("new_"):
            like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            return func(like, *args[1:], **kwargs)
        if name.startswith(_FOREACH) and _is_pointwise_name(name.removeprefix(_FOREACH)):
            return _foreach(func, name, args, kwargs)
        if _is_pointwise(func, name):
            return _elementwise(func, name, args, kwargs)
        first = _first_of(args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            first._refuse(name, "every rank would draw different numbers", needs_full=False)
        first._refuse(name)

    # ---------------------------------------------------------------- methods that bypass dispatch

    data_ptr = _refused("data_ptr")
    untyped_storage = _refused("untyped_storage")

    def tolist(self) -> Any:
        """Like `Tensor.tolist`. Collective: every rank."""
        return self._values_for("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Like `Tensor.numpy`, but read-only. Collective: every rank."""
        return self._values_for("numpy").numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._values_for("numpy").__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._values_for("pickle").__reduce_ex__(protocol)

    def _values_for(self, name: str) -> FullTensorView:
        if self.role != _DATA:
            self._refuse(name)
        return self.full_view(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        copy = self.detach().clone()
        assert isinstance(copy, ShardedTensor)
        memo[id(self)] = copy
        return copy

    def __format__(self, spec: str) -> str:
        """Formats a 0-dim tensor as a Python number. With a `spec` it is collective: every rank."""
        if spec and self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    # mypy drops the names of a dunder's keyword-only arguments, so that even equal ones mismatch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedTensor({self.role} of {self.spec.slot.name}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, {len(self.spec.owned)} elements on this rank)"
        )


# ---------------------------------------------------------------- errors

_DATA = "p.data"
_REMEDIES = {
    "p.grad": "use lightning_zero.full_grad(parameter) for the full gradient; a result of the "
    "parameter's shape may be assigned to parameter.grad",
    _DATA: "use `with lightning_zero.gathered(parameter):` for the full values, with "
    "writeback=True to keep changes; to train through it, call it within the forward of the root "
    "module, in Lightning's training_step, or in `with engine.forward_context():`",
    "optimizer.state": "use .full_tensor() on every rank for the full state; to save it, use "
    "trainer.save_checkpoint(path), or strategy.optimizer_state(optimizer) or "
    "engine.optimizer_state(optimizer) on every rank",
}


def _error(
    sharded: ShardedTensor, name: str, why: str = "", *, needs_full: bool = False
) -> ShardedTensorError:
    why = why or "it would see only this rank's elements"
    error = ShardedTensorError(
        f"{name!r} on {sharded.role} of parameter {sharded.spec.slot.name}, which is sharded: "
        f"{why}; {_REMEDIES[sharded.role]}. Elementwise operations, and reductions over all "
        "elements on every rank, give the results of the full tensor."
    )
    error.sharded, error.why, error.needs_full = sharded, why, needs_full
    return error


def _renamed(error: ShardedTensorError, name: str) -> ShardedTensorError:
    """The same error with the name of the function that the user called."""
    return error if error.sharded is None else _error(error.sharded, name, error.why)


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _first_of(*values: Any) -> ShardedTensor:
    return next(leaf for leaf in tree_leaves(values) if isinstance(leaf, ShardedTensor))


# ---------------------------------------------------------------- autograd

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ON_MEMORY = {"apply_", "map_", "map2_"}  # torch accesses the memory without dispatch
_UNTRACKED = {Tensor.detach, Tensor.detach_, Tensor.data.__get__}  # type: ignore[attr-defined]


def _requires_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad or (isinstance(tensor, ShardedTensor) and tensor.is_tracked)


def _track(value: Any, given: Sequence[Tensor], name: str) -> Any:
    """Marks a result that was computed from tensors which require a gradient."""
    if isinstance(value, ShardedTensor):
        value.is_tracked = True
        return value
    is_new = isinstance(value, Tensor) and not any(value is tensor for tensor in given)
    if not is_new or not (value.is_floating_point() or value.is_complex()):
        return value
    sharded = next(tensor for tensor in given if isinstance(tensor, ShardedTensor))

    def track(value: Tensor) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)
        tracked: Tensor = _NoGradient.apply(value, anchor, sharded, name)
        return tracked

    return value.tracked(track) if isinstance(value, FullTensorView) else track(value)


class _NoGradient(torch.autograd.Function):
    """Identity whose backward raises. See [Note: No gradient]."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, sharded: ShardedTensor, name: str) -> Any:
        ctx.sharded, ctx.name = sharded, name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.sharded._refuse(ctx.name, "no gradient flows through it", needs_full=False)


# ---------------------------------------------------------------- full values

# Functions with which torch reads the memory; a shard has none of the full shape.
_FROM_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr}
_FROM_MEMORY |= {Tensor.untyped_storage}


@dataclass(frozen=True)
class _Origin:
    """Implements `ShardedOrigin` for a sharded tensor."""

    sharded: ShardedTensor

    @property
    def name(self) -> str:
        return f"{self.sharded.role} of parameter {self.sharded.spec.slot.name}"

    @property
    def version(self) -> int:
        return self.sharded._shard.version

    def write_back(self, values: Tensor) -> None:
        owned = self.sharded.spec.owned
        new = read_flat(values, owned.start, owned.stop)

        def write(own: Tensor) -> None:
            here = new.to(own.device)
            is_changed = here != own.to(here.dtype)  # else a wider main parameter keeps its value
            own.copy_(torch.where(is_changed, here.to(own.dtype), own))

        with torch.no_grad():
            self.sharded.change(write)


def _call_with_full_values(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Calls `func`, which cannot run on shards, with full values. Collective."""
    full: dict[int, Tensor] = {}
    sharded: dict[int, ShardedTensor] = {}

    def give(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        if id(value) not in full:
            is_data = value.role == _DATA
            full[id(value)] = value.full_view(name) if is_data else value._gather(name)
            sharded[id(full[id(value)])] = value
        return full[id(value)]

    args, kwargs = tree_map(give, (args, dict(kwargs)))
    with torch.no_grad():
        result = func(*args, **kwargs)
    return tree_map(lambda value: sharded.get(id(value), value), result)


# ---------------------------------------------------------------- elementwise

_FOREACH = "_foreach_"
_VIEW = torch.ops.aten.view
# Elementwise operators that torch does not tag.
_ALSO_POINTWISE = {
    "_to_copy",
    "copy",
    "empty_like",
    "fill",
    "floor_divide",
    "full_like",
    "isclose",
    "masked_fill",
    "ones_like",
    "zero",
    "zeros_like",
}
_WITH_SCALAR = {"fill", "fill_"}  # take a 0-dim tensor as a number
_DROPPED_ARGUMENTS = ("memory_format",)  # a shard is 1-D


def _is_pointwise(func: Any, name: str) -> bool:
    if torch.Tag.data_dependent_output in func.tags:
        return False
    is_tagged = torch.Tag.pointwise in func.tags or name in _ALSO_POINTWISE
    return is_tagged or (is_writing(name) and _is_pointwise_name(name))


def is_elementwise_operator(func: Any) -> bool:
    """Whether an operator of torch is elementwise; also for operators on lists of tensors."""
    name = func.overloadpacket.__name__
    if name.startswith(_FOREACH):
        return _is_pointwise_name(name.removeprefix(_FOREACH))
    return _is_pointwise(func, name)


def _is_pointwise_name(name: str) -> bool:
    """Whether torch tags an overload of `name`, without the in-place underscore, as pointwise."""
    name = name.removesuffix("_")
    if name in _ALSO_POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _REDUCTIONS:
        return False
    return any(torch.Tag.pointwise in getattr(packet, one).tags for one in packet.overloads())


def _elementwise(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` on this rank's elements of all its tensors."""
    kwargs = {key: value for key, value in kwargs.items() if key not in _DROPPED_ARGUMENTS}
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    written = written_by(func, args, kwargs)
    first = _first_of(leaves)
    if len(written) > 1:
        first._refuse(name)
    if written and not isinstance(written[0], ShardedTensor):
        full = [t.full_tensor() if isinstance(t, ShardedTensor) else t for t in leaves]
        full = [_moved(t, written[0].device) for t in full]
        args, kwargs = tree_unflatten(full, tree)
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    candidates = written or [t for t in tensors if isinstance(t, ShardedTensor)]
    home = next((t for t in candidates if t.numel() == shape.numel()), None)
    if home is None or (written and home.shape != shape):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        why = f"shapes {shapes} would make a tensor of another size"
        first._refuse(name, why, needs_full=not written)
    assert isinstance(home, ShardedTensor)

    def is_number(leaf: Any) -> bool:
        takes_scalar = name in _WITH_SCALAR or name.startswith(_FOREACH)
        is_other = isinstance(leaf, Tensor) and leaf is not home and leaf.dim() == 0
        return takes_scalar and is_other

    def run(own: Tensor) -> Any:
        parts = [
            _number(leaf, own.device) if is_number(leaf) else _part_for(leaf, home, shape, own)
            for leaf in leaves
        ]
        args, kwargs = tree_unflatten(parts, tree)
        return func(*args, **kwargs)

    if written:
        home.change(run)
        return home
    return tree_map(lambda part: _result(part, home, shape), run(home.local))


def _number(value: Tensor, device: torch.device) -> Any:
    full = value.full_tensor() if isinstance(value, ShardedTensor) else value
    return _moved(full, device)


def _part_for(value: Any, home: ShardedTensor, shape: torch.Size, own: Tensor) -> Any:
    """This rank's elements of `value`; `own` are those of `home`."""
    if not isinstance(value, Tensor):
        return value
    if value is home:
        return own
    if isinstance(value, ShardedTensor):
        if value.numel() == shape.numel() and value.spec.matches(home.spec):
            return _moved(value.local, own.device)
        value = value.full_tensor()
    if value.dim() == 0 and shape:
        return _moved(value, own.device)  # 0-dim tensors take no part in type promotion
    return _moved(_narrow(value, shape, home.spec), own.device)


def _narrow(full: Tensor, shape: torch.Size, spec: ShardSpec) -> Tensor:
    expanded = full if full.shape == shape else full.expand(shape)
    return read_flat(expanded, spec.owned.start, spec.owned.stop)


def _moved(value: Any, device: torch.device) -> Any:
    """Moves a tensor to `device`: offloaded gradients are combined with parameters and norms."""
    is_device_free = not isinstance(value, Tensor) or (value.dim() == 0 and value.is_cpu)
    return value if is_device_free else value.to(device)


def _result(part: Any, like: ShardedTensor, shape: torch.Size) -> Any:
    if not isinstance(part, Tensor):
        return part
    return ShardedTensor.of(InMemoryShard(part), like.spec, like.role, part, shape)


def _foreach(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on lists for one index after the other."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if not lists or any(other.dim() for other in others):
        _first_of(args, kwargs)._refuse(name)

    def one(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, (list, tuple)) else value

    results = []
    for index in range(len(lists[0])):
        single = tuple(one(value, index) for value in args)
        named = {key: one(value, index) for key, value in kwargs.items()}
        if any(isinstance(leaf, ShardedTensor) for leaf in tree_leaves((single, named))):
            result = _elementwise(func, name, single, named)
        else:
            result = func(*single, **named)
        results.append(result)
    return None if name.endswith("_") else [result for (result,) in results]


# ---------------------------------------------------------------- changes of shape

_SAME_ELEMENTS = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "detach_",
    "expand",
    "lift_fresh",
    "reshape",
    "squeeze",
    "unsqueeze",
    "view",
}


def _with_shape(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sharded, *rest = args
    if name == "detach_":
        return sharded
    like = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    shape = func(like, *rest, **kwargs).shape
    if shape.numel() != sharded.numel():
        sharded._refuse(name)
    return ShardedTensor.of(sharded._shard, sharded.spec, sharded.role, sharded, shape)


def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """This rank's shard of a full random tensor.

    Ranks with equal seeds would draw the same numbers for different elements.
    """
    sharded, *rest = args
    like = torch.zeros((), dtype=sharded.dtype, device=sharded.device).expand(sharded.shape)
    kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    full = func(like, *rest, **kwargs)
    own = _narrow(full, sharded.shape, sharded.spec).clone()
    return ShardedTensor.of(InMemoryShard(own), sharded.spec, sharded.role, own, sharded.shape)


# ---------------------------------------------------------------- reductions


def _reduce(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reduces all elements of the only tensor to a number; reductions of some dims are refused."""
    sharded = args[0]
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= arguments_of(func, args, kwargs)
    if not isinstance(sharded, ShardedTensor) or written_by(func, args, kwargs):
        _first_of(args, kwargs)._refuse(name)
    dim = given.get("dim")
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    if dim is None:
        dims = ()
    if name in ("max", "min") and "dim" in given:
        sharded._refuse(name, "it has no indices of the full tensor")
    if dims and {d % max(sharded.dim(), 1) for d in dims} != set(range(max(sharded.dim(), 1))):
        sharded._refuse(name, "it needs every rank's elements of a row or a column")
    result = _REDUCTIONS[name](sharded, given)
    if given.get("dtype") is not None:
        result = result.to(given["dtype"])
    return result.reshape([1] * sharded.dim()) if given.get("keepdim") else result


def _wide(tensor: Tensor) -> torch.dtype:
    """Dtype in which shards are summed."""
    is_float = tensor.dtype.is_floating_point
    return torch.promote_types(tensor.dtype, torch.float32) if is_float else tensor.dtype


def _sum(sharded: ShardedTensor, given: Mapping[str, Any], name: str = "sum") -> Tensor:
    dtype = given.get("dtype") or sharded.dtype
    local = sharded.local.to(dtype)
    own = local.sum(dtype=_wide(local)) if dtype.is_floating_point else local.sum()
    total = sharded._all_reduce_sum(own, name)
    return total.to(dtype) if dtype.is_floating_point else total


def _mean(sharded: ShardedTensor, given: Mapping[str, Any]) -> Tensor:
    dtype = given.get("dtype") or sharded.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        sharded._refuse("mean", f"a mean of {dtype} has no default dtype; pass one")
    wide = torch.promote_types(dtype, torch.float32)
    return (_sum(sharded, {"dtype": wide}, "mean") / sharded.numel()).to(dtype)


def _variance(sharded: ShardedTensor, given: Mapping[str, Any], name: str = "var") -> Tensor:
    correction = given.get("correction", given.get("unbiased"))
    correction = 1 if correction is None else correction
    wide = sharded.local.to(_wide(sharded))
    mean = sharded._all_reduce_sum(wide.sum(), name) / sharded.numel()
    squares = sharded._all_reduce_sum((wide - mean).abs().square().sum(), name)
    return (squares / max(sharded.numel() - correction, 0)).to(sharded.dtype)


def _deviation(sharded: ShardedTensor, given: Mapping[str, Any]) -> Tensor:
    return _variance(sharded, given, "std").sqrt()


def _extreme(sign: int, name: str) -> Callable[..., Tensor]:
    def extreme(sharded: ShardedTensor, given: Mapping[str, Any]) -> Tensor:
        local, dtype = sharded.local, sharded.dtype
        is_float = dtype.is_floating_point
        local = sign * local.to(_wide(local) if is_float else torch.int64)
        lowest = -math.inf if is_float else torch.iinfo(torch.int64).min
        best = local.max() if local.numel() else local.new_full((), lowest)
        return (sign * sharded._all_reduce_max(best, name)).to(dtype)

    return extreme


def _any(sharded: ShardedTensor, given: Mapping[str, Any]) -> Tensor:
    return sharded._all_reduce_max(sharded.local.any().to(torch.uint8), "any").bool()


def _all(sharded: ShardedTensor, given: Mapping[str, Any]) -> Tensor:
    has_false = (~sharded.local.bool().all()).to(torch.uint8)
    return sharded._all_reduce_max(has_false, "all").logical_not()


def _count_nonzero(sharded: ShardedTensor, given: Mapping[str, Any]) -> Tensor:
    return sharded._all_reduce_sum(sharded.local.count_nonzero(), "count_nonzero")


def _norm(sharded: ShardedTensor, given: Mapping[str, Any]) -> Tensor:
    order = given.get("ord", given.get("p"))
    dtype = given.get("dtype") or sharded.dtype
    (norm,) = _norms([sharded], 2.0 if order is None else float(order))
    return norm.to(dtype.to_real())


def _norms(tensors: Sequence[ShardedTensor], order: float) -> list[Tensor]:
    """Norms of all `tensors`, in one all-reduce."""
    first = tensors[0]
    device = first.spec.comm.device
    local = torch.stack([_power_sum(tensor.local, order).to(device) for tensor in tensors])
    if math.isinf(order):
        sign = 1 if order > 0 else -1
        return list((sign * first._all_reduce_max(sign * local, "norm")).unbind())
    total = first._all_reduce_sum(local, "norm")
    total = total if order == 0 else total ** (1.0 / order)
    pairs = zip(total.unbind(), tensors, strict=True)
    return [norm.to(tensor.device) for norm, tensor in pairs]


def _power_sum(local: Tensor, order: float) -> Tensor:
    """The value that ranks add (order p: the p-th power of the norm) or compare (order inf)."""
    dtype = torch.promote_types(local.dtype.to_real(), torch.float32)
    if local.numel() == 0:
        lowest = math.inf if order == -math.inf else 0.0
        return torch.full((), lowest, dtype=dtype, device=local.device)
    wide = local.to(torch.promote_types(local.dtype, torch.float32))
    norm: Tensor = torch.linalg.vector_norm(wide, order)
    return norm if math.isinf(order) or order == 0 else norm**order


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, *rest = args
    order = float(rest[0] if rest else kwargs.get("ord", 2))
    dtype = kwargs.get("dtype")
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    norms = iter(_norms(sharded, order))
    found = [
        next(norms).to(tensor.dtype.to_real())
        if isinstance(tensor, ShardedTensor)
        else torch.linalg.vector_norm(tensor, order)
        for tensor in tensors
    ]
    return [norm if dtype is None else norm.to(dtype) for norm in found]


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = args
    if one.shape != other.shape:
        return False
    is_equal = _elementwise(torch.ops.aten.eq.Tensor, "equal", args, {})
    return bool(_all(is_equal, {}))


def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    is_close = _elementwise(torch.ops.aten.isclose.default, "allclose", args, kwargs)
    return bool(_all(is_close, {}))


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    products = _elementwise(torch.ops.aten.mul.Tensor, "dot", args, {})
    return _sum(products, {}, "dot")


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (sharded,) = args
    if sharded.numel() != 1:
        sharded._refuse("item")
    return sharded.full_tensor().item()


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscales for a GradScaler: an infinity in any shard makes all ranks skip the step."""
    grads, found_inf, scale = args
    first = _first_of(grads)
    if found_inf.device != first.spec.comm.device:
        first.spec.comm.wait_for_cpu_copies()  # the scaler copies both asynchronously
    for grad in grads:
        if isinstance(grad, ShardedTensor):
            grad.change(lambda part: func([part], found_inf, scale))
        else:
            func([grad], found_inf, scale)
    first._all_reduce_max(found_inf, "unscale_")


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "all": _all,
    "amax": _extreme(1, "max"),
    "amin": _extreme(-1, "min"),
    "any": _any,
    "count_nonzero": _count_nonzero,
    "linalg_vector_norm": _norm,
    "max": _extreme(1, "max"),
    "mean": _mean,
    "min": _extreme(-1, "min"),
    "norm": _norm,
    "std": _deviation,
    "sum": _sum,
    "var": _variance,
}

_OTHERS: dict[str, Callable[..., Any]] = {
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_norm": _foreach_norm,
    "_local_scalar_dense": _item,
    "allclose": _allclose,
    "dot": _dot,
    "equal": _equal,
    "rand_like": _random_like,
    "randint_like": _random_like,
    "randn_like": _random_like,
    "vdot": _dot,
}
