"""Parameters without memory: those that get some, those with awaited values, and dropped ones.

Values that a checkpoint holds for them are kept on the tensors themselves until the engine takes
these over, and each rank then reads its own part.

Dropped parameters are those that nobody holds after training: whole on every rank, they would not
fit. They are on the meta device and guarded: whoever uses one is told how to get its values.
Loading a checkpoint into their module makes them ordinary parameters on the meta device again, of
which each rank then reads its own part.
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
    """Remembers where parameters and buffers on the meta device will get their values from.

    These are whole tensors by qualified name: kept, and read when an engine takes `module` over.
    """
    named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name, value in values.items():
        named[name].__dict__[_AWAITED] = value


def pending_values(tensor: Tensor) -> Tensor | None:
    """What `set_pending_values` has kept for `tensor`."""
    value = tensor.__dict__.get(_AWAITED)
    return value if isinstance(value, Tensor) else None


def clear_pending_values(module: nn.Module) -> None:
    """Drops what was kept: it is loaded, or will not be."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.__dict__.pop(_AWAITED, None)


def swap_memory(parameter: nn.Parameter, name: str, memory: Tensor) -> None:
    """Makes a parameter on the meta device a view of `memory`, and back.

    The object stays the same, with its hooks and attributes, and so do the optimizer's groups and
    states. torch refuses to set `.data` across this border; it swaps what two tensors stand for.

    Raises:
        RuntimeError: Something refers to the parameter in a way that torch cannot swap.
    """
    attributes = dict(parameter.__dict__)
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    # `.data` has a version counter of its own: what others write to the buffer is not our change.
    other = Tensor._make_subclass(type(parameter), memory.data, parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise RuntimeError(
            f"parameter {name} is on the meta device and cannot be given memory ({error}); keep no "
            "weak references to it and run no graph through it before training begins."
        ) from error
    parameter.__dict__.update(attributes)
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def fill_sentinel(tensor: Tensor) -> None:
    """Fills `tensor` with what nobody means, where its dtype has such a value."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif _dtype_has_sentinel(tensor):
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _dtype_has_sentinel(tensor: Tensor) -> bool:
    """Whether the integers of its dtype include one that nobody means."""
    return tensor.dtype in (torch.int16, torch.int32, torch.int64)


def has_sentinel(tensor: Tensor) -> bool:
    """Whether any element is still as `fill_sentinel` has left it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return _dtype_has_sentinel(tensor) and bool((tensor == torch.iinfo(tensor.dtype).min).any())


class ConstantStates(TorchFunctionMode):
    """Lets optimizers that are born with states (Adagrad) be built over meta parameters.

    Their constants come out as tensors of the whole shape with the memory of one element.
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
    """Has the place of the bucket that held a parameter; whatever is asked of it is an error.

    That is what a guarded parameter, or `gathered`, asks for.
    """

    device = torch.device("meta")

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself does
            raise AttributeError(name)
        self.refuse()

    def refuse(self, _: str = "") -> NoReturn:
        raise RuntimeError(_text(self._name))


def drop_parameter(
    parameter: nn.Parameter, name: str, dtype: torch.dtype, shape: torch.Size
) -> None:
    """Frees the values of a parameter that no bucket holds any more; the object stays."""
    try:
        swap_memory(parameter, name, torch.empty(shape, dtype=dtype, device="meta"))
    except RuntimeError:  # a graph still refers to it: then it cannot be loaded into
        parameter.data = torch.empty(0, dtype=dtype)
    parameter.__dict__[_DROPPED] = name, shape
    _guard(parameter)


def is_dropped(parameter: nn.Parameter) -> bool:
    """Whether it has no values since the end of a run."""
    return _DROPPED in parameter.__dict__


def _guard(parameter: nn.Parameter) -> None:
    name, shape = parameter.__dict__[_DROPPED]
    owner = _Dropped(name)
    placement = Placement(
        name=name,
        shape=shape,
        dtype=parameter.dtype,
        own_class=type(parameter),
        bucket=cast("ParameterHolder", owner),
        index=0,
        ensure_unsharded=owner.refuse,
    )
    set_placement(parameter, placement)
    guard([parameter])


@contextmanager
def accepting_pending_values(module: nn.Module) -> Iterator[None]:
    """Around loading into `module`: what was left out may get values that it awaits."""
    left_out = [parameter for parameter in module.parameters() if is_dropped(parameter)]
    for parameter in left_out:
        unguard(parameter)
        set_placement(parameter, None)
    try:
        yield
    finally:
        for parameter in left_out:
            if pending_values(parameter) is None:
                _guard(parameter)


def check_none_dropped(module: nn.Module) -> None:
    """Before an engine takes it over: what was left out has something to load, or ValueError."""
    for parameter in module.parameters():
        if is_dropped(parameter) and pending_values(parameter) is None:
            raise ValueError(_text(parameter.__dict__[_DROPPED][0]))


def clear_dropped(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.__dict__.pop(_DROPPED, None)


def _text(name: str) -> str:
    return (
        f"parameter {name} was left out when training ended: whole on every rank, the module was "
        "too large (unshard_after_fit). Load a checkpoint: Model.load_from_checkpoint(path) for a "
        "whole module, ckpt_path=path for fit, validate, test and predict."
    )
