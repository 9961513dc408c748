"""What `parameter.grad` is between backward and step where gradients are sharded.

It holds this rank's slice, 1-D, and answers reductions for the whole gradient: `p.grad.norm()`, and
so Lightning's `grad_norm` and torch's `clip_grad_norm_`, give what data parallel gives. Elementwise
operations act on the slice. Anything else would see a part and be silently wrong, so it is refused
with the way to the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm import Communicator
from lightning_zero.stored import StoredTensor

__all__ = ["ShardedGrad"]


class ShardedGrad(Tensor):
    """This rank's slice of a reduced gradient.

    Reductions are collective: every rank must call them.
    """

    _comm: Communicator
    _settle: Callable[[], None] | None = None  # before it is written to
    _change: Callable[[Callable[[Tensor], object]], None] | None = None  # of one in a file

    @staticmethod
    def wrap(
        local: Tensor,
        comm: Communicator,
        *,
        settle: Callable[[], None] | None = None,
        change: Callable[[Callable[[Tensor], object]], None] | None = None,
    ) -> ShardedGrad:
        """`local` (1-D, possibly empty) as this rank's part of one gradient; memory is shared.

        Args:
            local: A StoredTensor stays one: its elements are read when they are used.
            comm: Adds up over ranks.
            settle: Called before it is written to.
            change: Applies a function that writes to elements which rest in a file.
        """
        grad: ShardedGrad
        if isinstance(local, StoredTensor):
            grad = _StoredGrad.like(local)
            grad._change = change
        else:
            grad = local.as_subclass(ShardedGrad)
        grad._comm = comm
        grad._settle = settle
        return grad

    @property
    def local(self) -> Tensor:
        """The slice as a plain tensor."""
        return _plain(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _REDUCTIONS:
            return _REDUCTIONS[name](*args, **kwargs)
        if name not in _ELEMENTWISE:
            raise TypeError(
                f"torch function {name!r} on a gradient that rests as a shard would see only this "
                "rank's slice; use lightning_zero.full_grad(parameter) for the whole gradient."
            )
        grads = [g for a in args for g in (a if isinstance(a, (list, tuple)) else [a])]
        comm = next((g._comm for g in grads if isinstance(g, ShardedGrad)), None)
        if _is_writing(name):
            result = _write(func, args, kwargs)
        else:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        if name == _UNSCALE and comm is not None:
            comm.max_(args[1])  # an infinity in anybody's slice makes every rank leave out the step
        is_new = type(result) is Tensor or (
            type(result) is ShardedGrad and "_comm" not in vars(result)
        )
        return ShardedGrad.wrap(result, comm) if is_new and comm is not None else result

    # mypy drops the names of a dunder's keyword-only arguments, so that even equal ones mismatch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = self.local
        return f"ShardedGrad(local={local.numel()} elements, dtype={local.dtype})"


class _StoredGrad(ShardedGrad, StoredTensor):  # type: ignore[misc]  # as above, in __repr__
    """A slice that rests in a file: reductions read it, writing is refused."""

    @staticmethod
    def like(stored: StoredTensor) -> _StoredGrad:
        grad = Tensor._make_wrapper_subclass(_StoredGrad, stored.shape, dtype=stored.dtype)
        assert isinstance(grad, _StoredGrad)
        grad._read = stored._read
        return grad

    @property
    def local(self) -> Tensor:
        """The slice, read now."""
        return self.read()


def _is_writing(name: str) -> bool:
    """By torch's convention a trailing underscore, or an in-place operator, means writing."""
    is_operator = name.startswith("__i") and name.endswith("__") and name != "__init__"
    return is_operator or (name.endswith("_") and not name.endswith("__"))


def _write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function that writes to its first argument: a gradient, or a list of them."""
    first, *rest = args
    is_list = isinstance(first, (list, tuple))
    for grad in first if is_list else [first]:

        def change(part: Tensor) -> None:
            func([part] if is_list else part, *rest, **kwargs)

        if isinstance(grad, ShardedGrad) and grad._settle is not None:
            grad._settle()
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(grad, ShardedGrad) and grad._change is not None:
                grad._change(change)
            else:
                change(grad)
    return first


def _plain(grad: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return grad.as_subclass(Tensor)


def _norm(grad: ShardedGrad, ord: Any = 2, *args: Any, **kwargs: Any) -> Tensor:
    order = kwargs.pop("p", ord)
    if any(args) or any(kwargs.get(key) for key in ("dim", "keepdim", "out")):
        raise TypeError("a sharded gradient has a norm over all elements only; leave dim out.")
    return global_norms([grad], 2.0 if order in ("fro", None) else float(order))[0]


def _foreach_norm(
    grads: list[ShardedGrad], ord: float = 2.0, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return list(global_norms(grads, float(ord)))


def global_norms(grads: list[ShardedGrad], order: float) -> Tensor:
    """Norm of each whole gradient: 1-D, `len(grads)`. One all-reduce. Collective: every rank."""
    local = torch.stack([_power_sum(grad.local, order) for grad in grads])
    comm = grads[0]._comm
    if math.isinf(order):
        return comm.max_(local) if order > 0 else -comm.max_(-local)
    total = comm.sum_over_shards_(local)
    return total if order == 0 else total ** (1.0 / order)


def _power_sum(local: Tensor, order: float) -> Tensor:
    """What ranks add (order p: the p-th power of the norm) or compare (infinite orders)."""
    if local.numel() == 0:
        return local.new_full((), math.inf if order == -math.inf else 0.0)
    norm: Tensor = torch.linalg.vector_norm(local, order)
    return norm if math.isinf(order) or order == 0 else norm**order


def _sum(grad: ShardedGrad, *, dtype: torch.dtype | None = None) -> Tensor:
    return grad._comm.sum_over_shards_(grad.local.sum(dtype=dtype))


def _mean(grad: ShardedGrad, *, dtype: torch.dtype | None = None) -> Tensor:
    numel = grad._comm.sum_over_shards_(torch.tensor(grad.local.numel(), device=grad.local.device))
    return _sum(grad, dtype=dtype) / numel


def _extreme(sign: int) -> Callable[[ShardedGrad], Tensor]:
    def extreme(grad: ShardedGrad) -> Tensor:
        local = sign * grad.local
        best = local.max() if local.numel() else local.new_full((), -math.inf)
        return sign * grad._comm.max_(best)

    return extreme


def _any(grad: ShardedGrad) -> Tensor:
    return grad._comm.max_(grad.local.any().to(torch.uint8)).bool()


def _all(grad: ShardedGrad) -> Tensor:
    return grad._comm.max_((~grad.local.bool().all()).to(torch.uint8)).logical_not()


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "_foreach_norm": _foreach_norm,
    "sum": _sum,
    "mean": _mean,
    "max": _extreme(1),
    "amax": _extreme(1),
    "min": _extreme(-1),
    "amin": _extreme(-1),
    "any": _any,
    "all": _all,
}

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # what a GradScaler calls
_POINTWISE = [
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "clamp",
    "clamp_max",
    "clamp_min",
    "div",
    "float_power",
    "lerp",
    "mul",
    "nan_to_num",
    "neg",
    "pow",
    "rsub",
    "sign",
    "sqrt",
    "square",
    "sub",
    "true_divide",
    "where",
    "zero",
    "fill",
    "copy",
]
_ELEMENTWISE = {
    *_POINTWISE,
    *(f"{name}_" for name in _POINTWISE),
    *(f"_foreach_{name}_" for name in _POINTWISE),
    *(
        f"__{name}__"
        for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg")
    ),
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow")),
    _UNSCALE,
    # Metadata, and copies that stay slices.
    "__get__",
    "__set__",
    "__hash__",
    "__deepcopy__",
    "bfloat16",
    "clone",
    "contiguous",
    "cpu",
    "cuda",
    "data_ptr",
    "detach",
    "detach_",
    "dim",
    "double",
    "element_size",
    "float",
    "get_device",
    "half",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "isfinite",
    "isinf",
    "isnan",
    "logical_not",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "to",
    "type",
    "untyped_storage",
}
