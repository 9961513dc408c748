"""Descriptions of a model, its optimizers and settings, for the consistency check of all ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero._version import __version__
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.names import saved_name
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.optim.probe import ProbeResult
from lightning_zero.tensors.meta import pending_values

__all__ = ["describe_config", "describe_module", "describe_optimizer", "describe_software"]

# Options of parameter groups that may differ between ranks.
_RANK_OPTIONS = {"device", "generator", "global_rank", "local_rank", "rank", "seed"}
_NOT_COMPARED = {"params", "param_names"}  # each parameter has a description of its own
_NODE_OPTIONS = {"nvme_path", "pin_memory", "buffer_count", "buffer_size"}  # of an OffloadConfig


def describe_software() -> dict[str, str]:
    """Versions that must be equal on all ranks, which share formats and orders of operations."""
    return {
        "lightning_zero": __version__,
        "torch": torch.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def describe_module(module: nn.Module, config: ZeroConfig) -> dict[str, dict[str, str]]:
    """Describes parameters, the modules that hold them, and the buffers that ranks share."""
    descriptions: dict[str, dict[str, str]] = {}
    first_names: dict[Tensor, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        name = saved_name(name)
        if parameter in first_names:
            descriptions[f"parameter {name}"] = {"tensor": f"that of {first_names[parameter]}"}
            continue
        first_names[parameter] = name
        requires_grad = str(parameter.requires_grad)
        descriptions[f"parameter {name}"] = {
            **_describe_tensor(parameter),
            "requires_grad": requires_grad,
        }
    holders = {holder for name, _ in module.named_parameters() for holder in _holders(name)}
    for name, child in module.named_modules(remove_duplicate=False):
        if name in holders and not isinstance(child, OptimizedModule):
            own_name = saved_name(f"{name}.").removesuffix(".")
            subject = f"module {own_name}" if own_name else "the root module"
            descriptions[subject] = {"class": type(child).__qualname__}
    for name, buffer in module.named_buffers():
        if config.broadcast_buffers or buffer.is_meta:
            descriptions[f"buffer {saved_name(name)}"] = _describe_tensor(buffer)
    return descriptions


def _holders(name: str) -> Iterator[str]:
    """Names of all modules around the parameter `name`."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _describe_tensor(tensor: Tensor) -> dict[str, str]:
    if is_lazy(tensor):
        return {"shape": "lazy"}
    if pending_values(tensor) is not None:
        value = "to be loaded"
    else:
        value = "not set yet (meta device)" if tensor.is_meta else "set"
    return {"shape": str(tuple(tensor.shape)), "dtype": str(tensor.dtype), "value": value}


def describe_optimizer(
    number: int, optimizer: Optimizer, found: ProbeResult, names: Mapping[nn.Parameter, str]
) -> dict[str, dict[str, str]]:
    """Describes the `number`th optimizer of the engine. `names` are in the order of the module."""
    title = f"optimizer {number}"
    kind = "elementwise" if found.is_elementwise else "full tensors"
    descriptions = {
        title: {
            "class": type(optimizer).__qualname__,
            "number of groups": str(len(optimizer.param_groups)),
            "kind of step": f"{kind}, {found.kind.value}",
        }
    }
    group_of: dict[nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        group_of.update(dict.fromkeys(group["params"], index))
        descriptions[f"group {index} of {title} ({type(optimizer).__qualname__})"] = {
            str(key): _text(value)
            for key, value in group.items()
            if key not in _RANK_OPTIONS | _NOT_COMPARED
        }
    for parameter, name in names.items():  # a group made of a set has no fixed order
        if parameter in group_of:
            descriptions[f"parameter {name} in {title}"] = {"group": str(group_of[parameter])}
    return descriptions


def describe_config(config: ZeroConfig) -> dict[str, str]:
    return {
        field.name: _setting(getattr(config, field.name)) for field in dataclasses.fields(config)
    }


def _setting(value: object) -> str:
    if isinstance(value, OffloadConfig):
        kept = {k: v for k, v in dataclasses.asdict(value).items() if k not in _NODE_OPTIONS}
        return ", ".join(f"{name}={part!r}" for name, part in kept.items() if part is not None)
    return repr(value)


def _text(value: Any) -> str:
    """Text for `value` that is the same on every rank where the value is."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_meta:
            return f"tensor({value.item()})"
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, torch.device):
        return "a device"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
