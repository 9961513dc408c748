"""Parameters without memory: on the meta device, with pending values, or dropped after training.

Pending values are those that a checkpoint has for parameters on the meta device. They are kept on
the tensors themselves until an engine wraps these; each rank then reads its own shard.

Dropped parameters have no values after training, because unsharded on every rank they would not fit
into memory. They are on the meta device and guarded: using one raises an error that states how to
get its values. Loading a checkpoint into their module makes them ordinary meta parameters with
pending values again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.tensors.guarded import ParameterHolder, Placement, guard, set_placement, unguard

__all__ = [
    "ConstantStates",
    "set_pending_values",
    "pending_values",
    "check_none_dropped",
    "accepting_pending_values",
    "clear_pending_values",
    "clear_dropped",
    "swap_memory",
    "is_dropped",
    "has_sentinel",
    "drop_parameter",
    "fill_sentinel",
]

_AWAITED = "_zero_awaited"


def set_pending_values(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Sets the values that parameters and buffers on the meta device will get from an engine.

    Args:
        module: Module that an engine will wrap.
        values: Full tensors by qualified name; they are read when the engine wraps `module`.
    """
    named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name, value in values.items():
        named[name].__dict__[_AWAITED] = value


def pending_values(tensor: Tensor) -> Tensor | None:
    """Pending values of `tensor`, as set by `set_pending_values`; None if there are none."""
    value = tensor.__dict__.get(_AWAITED)
    return value if isinstance(value, Tensor) else None


def clear_pending_values(module: nn.Module) -> None:
    """Removes all pending values of `module`, which are loaded or not needed any longer."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.__dict__.pop(_AWAITED, None)


def swap_memory(parameter: nn.Parameter, name: str, memory: Tensor) -> None:
    """Makes a parameter on the meta device a view of `memory`, or the reverse.

    The object stays the same, with its hooks and attributes, so the optimizer's groups and states
    stay valid. torch refuses to assign `.data` between meta and other devices, so
    `torch.utils.swap_tensors` is used.

    Raises:
        RuntimeError: The parameter has references that torch cannot swap.
    """
    attributes = dict(parameter.__dict__)
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    # `.data` has its own version counter: writes to the buffer do not count for the parameter.
    other = Tensor._make_subclass(type(parameter), memory.data, parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise RuntimeError(
            f"parameter {name} is on the meta device and cannot be given memory ({error}); do not "
            "keep weak references to it or build an autograd graph on it before training begins."
        ) from error
    parameter.__dict__.update(attributes)
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def fill_sentinel(tensor: Tensor) -> None:
    """Fills `tensor` with a sentinel (NaN, or the minimum of the dtype), if the dtype has one."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif _dtype_has_sentinel(tensor):
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _dtype_has_sentinel(tensor: Tensor) -> bool:
    """Whether the dtype is a wide integer, whose minimum serves as the sentinel."""
    return tensor.dtype in (torch.int16, torch.int32, torch.int64)


def has_sentinel(tensor: Tensor) -> bool:
    """Whether any element still has the value of `fill_sentinel`."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return _dtype_has_sentinel(tensor) and bool((tensor == torch.iinfo(tensor.dtype).min).any())


class ConstantStates(TorchFunctionMode):
    """Lets optimizers that create states in the constructor (Adagrad) use meta parameters.

    Constant states become expanded tensors: the full shape, with memory for one element.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTANTS and isinstance(args[0], nn.Parameter) and args[0].is_meta:
            value = _CONSTANTS[func]
            if value is None:
                value = args[1] if len(args) > 1 else kwargs["fill_value"]
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.full((), value, dtype=dtype).expand(args[0].shape)
        return func(*args, **kwargs)


_CONSTANTS = {torch.full_like: None, torch.zeros_like: 0, torch.ones_like: 1}


_DROPPED = "_zero_left_out"


class _Dropped:
    """Stands for the bucket of a dropped parameter; every use of it is an error.

    Guarded parameters and `gathered` use it.
    """

    device = torch.device("meta")

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # looked up by Python itself
            raise AttributeError(name)
        self.refuse()

    def refuse(self, _: str = "") -> NoReturn:
        raise RuntimeError(_text(self._name))


def drop_parameter(
    parameter: nn.Parameter, name: str, dtype: torch.dtype, shape: torch.Size
) -> None:
    """Frees the values of a parameter that no bucket holds any longer; the object stays."""
    try:
        swap_memory(parameter, name, torch.empty(shape, dtype=dtype, device="meta"))
    except RuntimeError:  # an autograd graph refers to it: no values can be loaded into it
        parameter.data = torch.empty(0, dtype=dtype)
    parameter.__dict__[_DROPPED] = name, shape
    _guard(parameter)


def is_dropped(parameter: nn.Parameter) -> bool:
    """Whether `parameter` was dropped at the end of a run and has no values."""
    return _DROPPED in parameter.__dict__


def _guard(parameter: nn.Parameter) -> None:
    name, shape = parameter.__dict__[_DROPPED]
    owner = _Dropped(name)
    placement = Placement(
        name=name,
        shape=shape,
        dtype=parameter.dtype,
        own_class=type(parameter),
        holder=cast("ParameterHolder", owner),
        index=0,
        ensure_unsharded=owner.refuse,
    )
    set_placement(parameter, placement)
    guard([parameter])


@contextmanager
def accepting_pending_values(module: nn.Module) -> Iterator[None]:
    """Context of loading into `module`: dropped parameters may get pending values."""
    dropped = [parameter for parameter in module.parameters() if is_dropped(parameter)]
    for parameter in dropped:
        unguard(parameter)
        set_placement(parameter, None)
    try:
        yield
    finally:
        for parameter in dropped:
            if pending_values(parameter) is None:
                _guard(parameter)


def check_none_dropped(module: nn.Module) -> None:
    """Checks, before an engine wraps `module`, that dropped parameters have pending values.

    Raises:
        ValueError: A dropped parameter has none.
    """
    for parameter in module.parameters():
        if is_dropped(parameter) and pending_values(parameter) is None:
            raise ValueError(_text(parameter.__dict__[_DROPPED][0]))


def clear_dropped(module: nn.Module) -> None:
    """Removes the marks of dropped parameters, whose values have been loaded."""
    for parameter in module.parameters():
        parameter.__dict__.pop(_DROPPED, None)


def _text(name: str) -> str:
    return (
        f"parameter {name} was dropped when training ended, because the unsharded module would not "
        "fit into memory (see unshard_after_fit). Load a checkpoint: "
        "lightning_zero.load_from_checkpoint(Model, path) for an unsharded module, or "
        "ckpt_path=path for fit, validate, test and predict."
    )
