"""Sharded tensors: `p.grad` before a step, `p.data` while sharded.

[Note: Sharded tensors] Shape, dtype, stride and other metadata are those of the full tensor. The
local values are a range of its row-major elements, possibly empty.

- Elementwise operators (torch's tag `pointwise`) run on that range, together with tensors of the
  same sharding, and with full tensors, of which the same range is taken after broadcasting.
- Sums, means, norms, extremes, `any` and `all` over all elements, and `torch.equal`, are computed
  on that range and all-reduced.
- Everything else raises a `ShardedTensorError`, which states how to get the full tensor: rows and
  indices, matrix products, arrays, random numbers, operators of extensions, collectives, functions
  that give the tensor another memory or shape.

Collective, every rank must call them: reductions; `full_tensor` and `full_copy`; and elementwise
operators on a tensor of another sharding, or that write to a plain tensor, because both all-gather.

[Note: No gradient] A shard cannot be part of an autograd graph: every rank would differentiate only
its own elements. So results that are sharded require no gradient; they are marked as tracked if
they were computed from tensors that require one. The backward of a plain result of such tensors,
for example their norm, raises an error, instead of training without that term.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_zero.record import streams
from lightning_zero.record.frames import called_from, calling_collective
from lightning_zero.tensors.lazy import arguments_of, read_flat, written_by
from lightning_zero.tensors.live import EndedShard
from lightning_zero.tensors.operators import (
    FOREACH,
    is_elementwise_operator,
    is_writing,
)
from lightning_zero.tensors.reductions import REDUCTIONS, norms, sum_of_bits
from lightning_zero.tensors.shard_spec import InMemoryShard, LocalShard, ShardComm, ShardSpec

__all__ = ["READ_BY_COLLECTIVES", "ShardedTensor", "ShardedTensorError"]


class ShardedTensorError(RuntimeError):
    """An operation needs elements of a sharded tensor that this rank does not have.

    Not a TypeError: Python's operators would take that for "not implemented" and compare
    identities.

    Args:
        sharded: The tensor.
        name: Name of the operation.
        why: Reason; the default is that an operation needs all elements.
    """

    def __init__(self, sharded: ShardedTensor, name: str, why: str = "") -> None:
        self._sharded, self._why = sharded, why
        super().__init__(
            f"{name!r} on {sharded.title}, which is sharded, called at {called_from()}: "
            f"{why or _NEEDS_ALL}; {_REMEDIES[sharded.role]}. "
            "Elementwise operations, and sums, norms and extremes over all elements on every "
            "rank, give the results of the full tensor."
        )

    def renamed(self, name: str) -> ShardedTensorError:
        """The same error with the name of the function that the user called."""
        return ShardedTensorError(self._sharded, name, self._why)


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
        *,
        is_tracked: bool = False,
    ) -> ShardedTensor:
        """Wraps `shard`, the elements `spec.owned`, as a tensor of full shape; memory is shared.

        Args:
            shard: The local elements.
            spec: Elements that each rank has.
            role: See `ShardedTensor`.
            like: Has the dtype and the device of the elements.
            shape: Full shape; None: that of the parameter.
            is_tracked: See `ShardedTensor`.
        """
        size = torch.Size(spec.slot.shape if shape is None else shape)
        dtype, device = like.dtype, like.device
        sharded = Tensor._make_wrapper_subclass(ShardedTensor, size, dtype=dtype, device=device)
        assert isinstance(sharded, ShardedTensor)
        # Collectives take lists of lists, in which torch looks for no subclasses: without this,
        # they would crash the process.
        torch._C._set_throw_on_mutable_data_ptr(sharded)
        sharded.spec, sharded.role, sharded.is_tracked = spec, role, is_tracked
        sharded._shard = shard
        live, parameter = spec.live, spec.number
        number, checksum = live.histories[parameter]
        live.histories[parameter] = number + 1, zlib.crc32(f"{size} {dtype}".encode(), checksum)
        live.tensors[parameter, number] = sharded
        return sharded

    @property
    def comm(self) -> ShardComm:
        return self.spec.comm

    @property
    def local(self) -> Tensor:
        """This rank's elements as a plain tensor, 1-D; a copy if they are stored in a file."""
        return self._shard.read()

    def tracked(self) -> ShardedTensor:
        """The same tensor, marked as tracked; memory is shared."""
        return ShardedTensor.of(
            self._shard, self.spec, self.role, self, self.shape, is_tracked=True
        )

    def change(self, write: Callable[[Tensor], object]) -> None:
        """Calls `write` with this rank's elements, 1-D and plain, to change them. Local."""
        self._shard.change(write)

    def is_view_of(self, shard: LocalShard | None) -> bool:
        """Whether the local elements are those of `shard`, as in tensors created from it."""
        return self._shard is shard

    @property
    def shard(self) -> LocalShard:
        """Access to this rank's elements; the same object in tensors that share their memory."""
        return self._shard

    def end(self, reason: str) -> None:
        """Makes every use of this tensor an error: its engine is closed. Local.

        `reason`: why it did not become a full tensor; see `EndedShard`.
        """
        self._shard = EndedShard(self.title, reason)

    def full_tensor(self) -> Tensor:
        """All elements, a new plain tensor. Collective: every rank."""
        return self._gather("full_tensor")

    def full_copy(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """All elements, a new plain tensor in CPU memory. Collective: every rank.

        Args:
            name: Name of the operation that needs them, for errors.
            dtype: Dtype of the result; None: the dtype of this tensor.

        Raises:
            RuntimeError: The copies of the ranks of a node do not fit into its memory.
        """
        num_bytes = self.numel() * (dtype or self.dtype).itemsize
        self._shard.check_memory(self.call_of(name), num_bytes)
        return self._gather(name).to("cpu", dtype or self.dtype)

    def _gather(self, name: str) -> Tensor:
        local, call = self.local, self.call_of(name)
        self.comm.announce(call)
        with torch.inference_mode(mode=False), torch.no_grad():  # the result has a version counter
            return self.spec.all_gather(local, call).to(local.device).view(self.shape)

    @property
    def title(self) -> str:
        return f"{self.role} of parameter {self.spec.slot.name}"

    def call_of(self, name: str) -> str:
        """Describes a call of method `name` for errors and reports of long waits."""
        return f"{self.role}.{name}() of {self.spec.slot.name}"

    def _refuse(self, name: str, why: str = "") -> NoReturn:
        if isinstance(self._shard, EndedShard):
            self._shard.read()
        raise ShardedTensorError(self, name, why)

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
        if any(issubclass(other, nn.Parameter) for other in types):
            return NotImplemented  # its __torch_function__ calls again with shards
        if func == _SET_DATA:
            return _set_data(*args)
        if func in READ_BY_COLLECTIVES and (collective := calling_collective()):
            args[0]._refuse(collective)
        if func in _FROM_MEMORY:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            sharded = next(tensor for tensor in tensors if isinstance(tensor, ShardedTensor))
            is_tracked = torch.is_grad_enabled() and any(map(_requires_grad, tensors))
            if name in _ON_MEMORY:
                sharded._refuse(name)
            is_plain = bool(args) and not isinstance(args[0], ShardedTensor)
            if is_tracked and is_plain and is_writing(name):
                why = "no gradient flows through it; call it under torch.no_grad()"
                sharded._refuse(name, why)
            try:
                with torch.no_grad():
                    result = func(*args, **kwargs)
            except ShardedTensorError as error:
                raise error.renamed(name) from None
        if is_tracked and func not in _UNTRACKED:
            failure = ShardedTensorError(sharded, name, "no gradient flows through it")
            given = set(map(id, tensors))
            with torch._C.DisableTorchFunctionSubclass():
                result = tree_map(
                    lambda leaf: leaf if id(leaf) in given else _track(leaf, failure), result
                )
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
        if name in _SAME_ELEMENTS and func is not torch.ops.aten.view.dtype:
            return _with_shape(func, name, args, kwargs)
        if name in REDUCTIONS and torch.Tag.pointwise not in func.tags:
            return _reduce(func, name, args, kwargs)
        if name in _OTHERS:
            return _OTHERS[name](func, args, kwargs)
        if name.startswith("new_"):
            like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            return func(like, *args[1:], **kwargs)
        if func.namespace == "aten" and is_elementwise_operator(func):
            run = _foreach if name.startswith(FOREACH) else _elementwise
            return run(func, name, args, kwargs)
        first = _first_of(args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            first._refuse(name, "every rank would draw different numbers")
        first._refuse(name)

    # ---------------------------------------------------------------- methods that bypass dispatch

    data_ptr = _refused("data_ptr")
    untyped_storage = _refused("untyped_storage")
    tolist = _refused("tolist")
    numpy = __array__ = _refused("numpy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.role != _DATA:
            self._refuse("pickle")
        return self.full_copy("pickle").__reduce_ex__(protocol)

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
_NEEDS_ALL = "it would see only this rank's elements"
_REMEDIES = {
    "p.grad": "use lightning_zero.full_grad(parameter) for the full gradient; a result of the "
    "parameter's shape may be assigned to parameter.grad",
    _DATA: "use `with lightning_zero.gathered(module):` for the full values, and "
    "`gathered(module, writeback=True)` to change them; to train through it, call it within the "
    "forward of the root "
    "module, in Lightning's training_step, or in `with engine.forward_context():`",
    "optimizer.state": "use .full_tensor() on every rank for the full state; to save it, use "
    "trainer.save_checkpoint(path), or strategy.optimizer_state(optimizer) or "
    "engine.optimizer_state(optimizer) on every rank",
}


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


def _track(value: Any, error: Exception) -> Any:
    """Marks a result that was computed from tensors which require a gradient."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    if isinstance(value, ShardedTensor):
        return value.tracked()
    return _NoGradient.apply(value, torch.zeros((), requires_grad=True), error)


class _NoGradient(torch.autograd.Function):
    """A copy whose backward raises. See [Note: No gradient]."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, error: Exception) -> Any:
        ctx.error = error
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.error


def _set_data(sharded: ShardedTensor, values: Tensor) -> Tensor:
    """Implements `sharded.data = values` of a gradient or a result.

    `parameter.data.data = values` would leave the parameter as it is.
    """
    is_own = sharded.role != _DATA or isinstance(sharded._shard, InMemoryShard)
    if not is_own or sharded.shape != values.shape:
        sharded._refuse("data", "it would give this tensor other memory, and not the parameter")
    return sharded.copy_(values)


# What collectives read of each tensor that they are given, also in lists. Before they write: that
# counts no version.
READ_BY_COLLECTIVES = {Tensor.dtype.__get__, Tensor.is_complex}  # type: ignore[attr-defined]

# Functions with which torch reads the memory; a shard has none of the full shape.
_FROM_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr}
_FROM_MEMORY |= {Tensor.untyped_storage}


# ---------------------------------------------------------------- elementwise

_WITH_SCALAR = {"fill", "fill_"}  # take a 0-dim tensor as a number, as operators on lists do
# Take tensors of one dtype only, such as that of a 16-bit parameter; its shard may be float32.
_WITHOUT_PROMOTION = {"lerp"}
_DROPPED_ARGUMENTS = ("memory_format",)  # a shard is 1-D


def _elementwise(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` on this rank's elements of all its tensors."""
    kwargs = {key: value for key, value in kwargs.items() if key not in _DROPPED_ARGUMENTS}
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    written = written_by(func, args, kwargs)
    first = _first_of(leaves)
    if len(written) > 1:
        first._refuse(name)
    if name.removeprefix(FOREACH).removesuffix("_") in _WITHOUT_PROMOTION:
        leaves = _in_one_dtype(leaves, (written or tensors)[0].dtype)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
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
        first._refuse(name, why)
    assert isinstance(home, ShardedTensor)
    takes_scalar = name in _WITH_SCALAR or name.startswith(FOREACH)

    def run(own: Tensor) -> Any:
        def part_of(value: Any) -> Any:
            if not isinstance(value, Tensor) or value is home:
                return own if value is home else value
            is_number = not value.dim() and (takes_scalar or bool(shape))  # is not promoted
            if isinstance(value, ShardedTensor):
                has_same_shards = value.numel() == home.numel() and home.spec.matches(value.spec)
                if has_same_shards and not is_number:
                    return _moved(value.local, own.device)
                value = value.full_tensor()
            return _moved(value if is_number else _narrow(value, shape, home.spec), own.device)

        args, kwargs = tree_unflatten(list(map(part_of, leaves)), tree)
        return func(*args, **kwargs)

    if written:
        home.change(run)
        return home
    return tree_map(lambda part: _result(part, home, shape), run(home.local))


def _in_one_dtype(leaves: list[Any], dtype: torch.dtype) -> list[Any]:
    def cast(leaf: Any) -> Any:
        is_other = isinstance(leaf, Tensor) and leaf.dtype is not dtype
        return torch.ops.aten._to_copy(leaf, dtype=dtype) if is_other else leaf

    return list(map(cast, leaves))


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

_SAME_ELEMENTS = {"_reshape_alias", "_unsafe_view", "alias", "detach", "detach_", "lift_fresh"}
_SAME_ELEMENTS |= {"view"}


def _with_shape(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sharded, *rest = args
    if name == "detach_":
        return sharded
    like = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    shape = func(like, *rest, **kwargs).shape
    if shape.numel() != sharded.numel():
        sharded._refuse(name)
    return ShardedTensor.of(sharded._shard, sharded.spec, sharded.role, sharded, shape)


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
    dtype = given.get("dtype") or sharded.dtype
    if name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        sharded._refuse(name, f"a mean of {dtype} has no default dtype; pass one")
    if dims and {d % max(sharded.dim(), 1) for d in dims} != set(range(max(sharded.dim(), 1))):
        sharded._refuse(name, "it needs every rank's elements of a row or a column")
    result = REDUCTIONS[name](sharded, given)
    if given.get("dtype") is not None:
        result = result.to(given["dtype"])
    return result.reshape([1] * sharded.dim()) if given.get("keepdim") else result


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, *rest = args
    order = float(rest[0] if rest else kwargs.get("ord", 2))
    dtype = kwargs.get("dtype")
    of_sharded = iter(
        norms([tensor for tensor in tensors if isinstance(tensor, ShardedTensor)], order)
    )
    found = [
        next(of_sharded).to(tensor.dtype.to_real())
        if isinstance(tensor, ShardedTensor)
        else torch.linalg.vector_norm(tensor, order)
        for tensor in tensors
    ]
    return [norm if dtype is None else norm.to(dtype) for norm in found]


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`torch.equal`: one small all-reduce, except for equal tensors of another sharding.

    Most tensors that are not equal differ in the sums of their bits, so that nothing is gathered:
    Lightning's fine-tuning callbacks compare all parameters with all others.
    """
    first, other = args
    if first.shape != other.shape:
        return False
    are_sharded = isinstance(first, ShardedTensor) and isinstance(other, ShardedTensor)
    if are_sharded and first.dtype is other.dtype and not first.spec.matches(other.spec):
        bits = [sum_of_bits(each.local + 0) for each in (first, other)]  # + 0: -0.0 equals 0.0
        difference = bits[0] - bits[1].to(bits[0].device)
        if int(first.comm.sum_over_shards_(difference, first.call_of("equal"))) != 0:
            return False
    is_same = _elementwise(torch.ops.aten.eq.Tensor, "equal", args, {})
    return bool(REDUCTIONS["all"](is_same, {}))


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (sharded,) = args
    if sharded.numel() != 1:
        sharded._refuse("item")
    return sharded.full_tensor().item()


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscales for a GradScaler: an infinity in any shard makes all ranks skip the step."""
    grads, found_inf, scale = args
    first = _first_of(grads)
    if found_inf.device != first.comm.device:
        streams.wait_for_current(first.comm.device)  # the scaler copies both asynchronously
    for grad in grads:
        if isinstance(grad, ShardedTensor):
            grad.change(lambda part: func([part], found_inf, scale))
        else:
            func([grad], found_inf, scale)
    first.comm.max_(found_inf, first.call_of("unscale_"))


_OTHERS: dict[str, Callable[..., Any]] = {
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_norm": _foreach_norm,
    "_local_scalar_dense": _item,
    "equal": _equal,
}
