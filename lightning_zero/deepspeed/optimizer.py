"""Builds the optimizer and scheduler sections of a DeepSpeed configuration with torch's classes.

[Note: the first step] DeepSpeed's schedulers count from -1: the first optimizer step uses the
initial learning rate, and step k (from 0) that of iteration k - 1. The `LambdaLR`s here give every
step the same learning rate (as DeepSpeed since 0.15.3; earlier releases used the optimizer's own
rate in the first step).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_zero.deepspeed.file import Section, check_keys, is_unset, plain

__all__ = ["Parameters", "build_optimizer", "build_scheduler"]

Parameters: TypeAlias = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]

# DeepSpeed's own optimizers; torch lacks them, or has a different one of the same name.
_UNSUPPORTED = (*("lamb", "muadam", "muadamw", "musgd", "lion", "muon"),)
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")  # in DeepSpeed before 0.19.8
_ADAM_SWITCHES = ("adam_w_mode", "torch_adam")
_FUSED_ADAM = {"bias_correction": True, "amsgrad": False, "fp32_optimizer_states": True}


def build_optimizer(section: Mapping[str, Any], parameters: Parameters) -> Optimizer:
    """Builds the torch optimizer that is equivalent to DeepSpeed's.

    "Adam" and "AdamW" have DeepSpeed's defaults: decoupled weight decay unless Adam has
    `adam_w_mode: false`, and weight_decay 0. Any other name is looked up in `torch.optim`.

    Args:
        section: `{"type": ..., "params": {...}}`. "auto" means DeepSpeed's default, except for lr.
        parameters: Parameters or parameter groups.

    Raises:
        ValueError: torch does not have the optimizer or an argument.
    """
    name, given = _type_and_params(section, "optimizer")
    if given.has("max_grad_norm"):
        raise ValueError(
            "optimizer.params.max_grad_norm is not supported; set gradient_clipping instead."
        )
    if given.values.get("lr") == "auto":
        raise ValueError(
            'optimizer.params.lr is "auto", which only Hugging Face replaces; set a number.'
        )
    settings = {key: value for key, value in given.values.items() if not is_unset(value)}
    if name.lower() in ("adam", "adamw"):
        kind, settings = _adam(name.lower(), given, settings)
    else:
        kind = _torch_optimizer(name)
    known = set(inspect.signature(kind).parameters) - {"params"}
    check_keys(Section(settings, given.name), known)
    return kind(parameters, **settings)


def _type_and_params(section: Mapping[str, Any], name: str) -> tuple[str, Section]:
    top = Section(plain(section), name).checked()
    kind = top.values.get("type")
    if not isinstance(kind, str):
        raise ValueError(f"{name}.type must be a name such as AdamW or WarmupLR, got {kind!r}.")
    return kind, top.section("params")


def _torch_optimizer(name: str) -> Callable[..., Optimizer]:
    if name.lower() in _ONE_BIT:
        raise ValueError(
            f"optimizer.type {name} is not supported: DeepSpeed has removed 1-bit optimizers in "
            "0.19.8, and gradients are not compressed here; use AdamW."
        )
    if name.lower() not in _UNSUPPORTED:
        for key, kind in vars(torch.optim).items():
            is_optimizer = isinstance(kind, type) and issubclass(kind, Optimizer)
            if key.lower() == name.lower() and is_optimizer and kind is not Optimizer:
                return cast("type[Optimizer]", kind)
    raise ValueError(
        f"optimizer.type {name} is not supported: expected Adam, AdamW, SGD, Adagrad or another "
        "optimizer of torch.optim; build it in configure_optimizers and remove the section."
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
                raise given.error(key, f"{str(only).lower()} (other values are not supported)")
        rest = {"weight_decay": 0.0, **rest}  # torch's AdamW decays by 0.01 by default
        rest.pop("set_grad_none", None)
    if "betas" in rest:
        rest["betas"] = tuple(rest["betas"])
    return kind, rest


Factor: TypeAlias = Callable[[int], float]


def build_scheduler(
    section: Mapping[str, Any], optimizer: Optimizer, *, total_num_steps: int | None = None
) -> LambdaLR:
    """Builds the schedule as a `LambdaLR`, which must be stepped after every optimizer step.

    Schedules with their own learning rates (all but WarmupCosineLR) replace the optimizer's.

    Args:
        section: `{"type": ..., "params": {...}}`.
        optimizer: Optimizer whose learning rates follow the schedule.
        total_num_steps: Number of optimizer steps, if the file does not set total_num_steps.

    Raises:
        ValueError: The schedule or an argument is not supported.
    """
    name, given = _type_and_params(section, "scheduler")
    if name not in _SCHEDULES:
        names = ", ".join(_SCHEDULES)
        raise ValueError(
            f"scheduler.type {name} is not supported: expected {names}; "
            "build it with torch.optim.lr_scheduler in configure_optimizers and remove the section."
        )
    build, known = _SCHEDULES[name]
    check_keys(given, (*known, "last_batch_iteration"))
    if given.get("last_batch_iteration") not in (None, -1):
        raise given.error("last_batch_iteration", "-1 (a resumed run loads the scheduler's state)")
    if "total_num_steps" in known and total_num_steps and not given.has("total_num_steps"):
        given = Section({**given.values, "total_num_steps": total_num_steps}, given.name)
    return build(given, optimizer)


def _steps(given: Section, key: str, default: int | None = None) -> int:
    """A number of steps. "auto", or no value and no default, is an error."""
    if given.values.get(key) == "auto" or (default is None and not given.has(key)):
        raise ValueError(f"{given.path(key)} has no value: set the number of steps.")
    value = given.integer(key, minimum=1) if given.has(key) else default
    assert value is not None
    return value


def _rates(given: Section, key: str, optimizer: Optimizer, default: float | None) -> list[float]:
    """A learning rate for each parameter group; without a value the default, or the group's own."""
    value = given.get(key)
    groups = optimizer.param_groups
    if value is None:
        return [float(group["lr"]) if default is None else default for group in groups]
    if not isinstance(value, list):
        return [given.number(key) or 0.0] * len(groups)
    if len(value) != len(groups):
        raise given.error(key, f"one number, or one for each of the {len(groups)} groups,")
    return [Section({key: rate}, given.name).number(key) or 0.0 for rate in value]


def _warmup(given: Section) -> tuple[int, Factor]:
    """Number of warm-up steps, and the fraction of the warm-up completed at iteration i."""
    num_steps = max(2, _steps(given, "warmup_num_steps", 1000))
    kind = given.get("warmup_type") if given.has("warmup_type") else "log"
    if kind not in ("log", "linear"):
        raise given.error("warmup_type", '"log" or "linear"')

    def fraction(i: int) -> float:
        if i < 0:
            return 0.0
        return math.log(i + 1) / math.log(num_steps) if kind == "log" else i / num_steps

    return num_steps, fraction


def _warmup_lr(given: Section, optimizer: Optimizer) -> LambdaLR:
    return _warmup_then(given, optimizer, lambda i: 1.0, highest=None)


def _warmup_decay_lr(given: Section, optimizer: Optimizer) -> LambdaLR:
    total, num_steps = _steps(given, "total_num_steps"), _warmup(given)[0]
    length = max(1, total - num_steps)
    is_auto = given.values.get("warmup_max_lr") == "auto"
    highest = None if is_auto else 0.001
    return _warmup_then(given, optimizer, lambda i: max(0.0, (total - i) / length), highest)


def _warmup_then(
    given: Section, optimizer: Optimizer, after: Factor, highest: float | None
) -> LambdaLR:
    lows = _rates(given, "warmup_min_lr", optimizer, 0.0)
    highs = _rates(given, "warmup_max_lr", optimizer, highest)
    num_steps, fraction = _warmup(given)
    if not all(highs):
        raise ValueError(f"the scheduler's warmup_max_lr must be above 0, got {highs}.")
    for group, high in zip(optimizer.param_groups, highs, strict=True):
        group["lr"] = high  # the base of the factors of `LambdaLR`

    def factor(low: float, high: float) -> Factor:
        def at(k: int) -> float:
            gamma = fraction(k - 1) if k - 1 < num_steps else after(k - 1)
            return (low + (high - low) * gamma) / high

        return at

    return LambdaLR(optimizer, [factor(*rates) for rates in zip(lows, highs, strict=True)])


def _warmup_cosine_lr(given: Section, optimizer: Optimizer) -> LambdaLR:
    total, (num_steps, fraction) = _steps(given, "total_num_steps"), _warmup(given)
    first = given.number("warmup_min_ratio") or 0.0
    last = given.number("cos_min_ratio")
    last = 0.0001 if last is None else last

    def factor(k: int) -> float:
        i = k - 1
        if i < 0:
            return 0.0
        if i < num_steps:
            return first + (1 - first) * fraction(i)
        progress = min(1.0, (i - num_steps + 1) / max(1, total - num_steps))
        return last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)


_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
_COSINE = ("warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type")
_SCHEDULES: dict[str, tuple[Callable[[Section, Optimizer], LambdaLR], tuple[str, ...]]] = {
    "WarmupLR": (_warmup_lr, _WARMUP),
    "WarmupDecayLR": (_warmup_decay_lr, ("total_num_steps", *_WARMUP)),
    "WarmupCosineLR": (_warmup_cosine_lr, ("total_num_steps", *_COSINE)),
}
