"""From a tensor on the meta device to one with memory, as the same object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["ConstantStates", "give_memory", "is_marked", "mark"]


def give_memory(parameter: nn.Parameter, name: str, memory: Tensor) -> None:
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


def mark(tensor: Tensor) -> None:
    """Fills `tensor` with what nobody means, where its dtype has such a value."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif _has_mark(tensor):
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _has_mark(tensor: Tensor) -> bool:
    """Whether the integers of its dtype include one that nobody means."""
    return tensor.dtype in (torch.int16, torch.int32, torch.int64)


def is_marked(tensor: Tensor) -> bool:
    """Whether any element is still as `mark` has left it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return _has_mark(tensor) and bool((tensor == torch.iinfo(tensor.dtype).min).any())


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


_CONSTANTS: dict[Any, float | None] = {
    torch.full_like: None,
    torch.zeros_like: 0,
    torch.ones_like: 1,
}
