"""The optimizer section of a DeepSpeed configuration, as torch builds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch.optim import Optimizer

from lightning_zero.deepspeed.file import Section, check_keys, type_and_params
from lightning_zero.deepspeed.keys import is_unset

__all__ = ["Parameters", "build_optimizer"]

Parameters: TypeAlias = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]

# DeepSpeed's own optimizers, which torch lacks or has under the same name with other arithmetic.
_FOREIGN = (
    "lamb",
    "onebitadam",
    "onebitlamb",
    "zerooneadam",
    "muadam",
    "muadamw",
    "musgd",
    "lion",
    "muon",
)
_ADAM_SWITCHES = ("adam_w_mode", "torch_adam")
_FUSED_ADAM = {"bias_correction": True, "amsgrad": False, "fp32_optimizer_states": True}


def build_optimizer(section: Mapping[str, Any], parameters: Parameters) -> Optimizer:
    """The torch optimizer that does what DeepSpeed's would.

    "Adam" and "AdamW" have DeepSpeed's defaults: decoupled weight decay unless Adam says
    `adam_w_mode: false`, weight_decay 0. Any other name is looked up in `torch.optim`.

    Args:
        section: `{"type": ..., "params": {...}}`. "auto" takes DeepSpeed's default, except for lr.
        parameters: Parameters or parameter groups.

    Raises:
        ValueError: An optimizer or an argument that torch does not have.
    """
    name, given = type_and_params(section, "optimizer")
    if given.has("max_grad_norm"):
        raise ValueError("optimizer.params.max_grad_norm: write gradient_clipping instead.")
    if given.values.get("lr") == "auto":
        raise ValueError(
            'optimizer.params.lr is "auto", which only Hugging Face fills in; write it.'
        )
    settings = {key: value for key, value in given.values.items() if not is_unset(value)}
    if name.lower() in ("adam", "adamw"):
        kind, settings = _adam(name.lower(), given, settings)
    else:
        kind = _torch_optimizer(name)
    known = set(inspect.signature(kind).parameters) - {"params"}
    check_keys(Section(settings, given.name), known)
    return kind(parameters, **settings)


def _torch_optimizer(name: str) -> Callable[..., Optimizer]:
    if name.lower() not in _FOREIGN:
        for key, kind in vars(torch.optim).items():
            is_optimizer = isinstance(kind, type) and issubclass(kind, Optimizer)
            if key.lower() == name.lower() and is_optimizer and kind is not Optimizer:
                return cast("type[Optimizer]", kind)
    raise ValueError(
        f"optimizer.type {name} is not supported: expected Adam, AdamW, SGD, Adagrad or another of "
        "torch.optim; build it in configure_optimizers and remove the section."
    )


def _adam(
    name: str, given: Section, settings: dict[str, Any]
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    is_decoupled = name == "adamw" or given.flag("adam_w_mode") is not False
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    rest = {key: value for key, value in settings.items() if key not in _ADAM_SWITCHES}
    if not given.flag("torch_adam"):
        for key, only in _FUSED_ADAM.items():
            if rest.pop(key, only) is not only:
                raise given.error(key, f"{str(only).lower()} (nothing else is available here)")
        rest = {"weight_decay": 0.0, **rest}  # torch's AdamW decays by 0.01 unless told
        rest.pop("set_grad_none", None)
    if "betas" in rest:
        rest["betas"] = tuple(rest["betas"])
    return kind, rest
