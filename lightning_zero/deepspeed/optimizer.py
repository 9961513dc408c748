"""Refuses the optimizer and scheduler sections of a DeepSpeed file, and writes them in torch.

[Note: the first step] DeepSpeed's schedulers count from -1: the first optimizer step uses the
initial learning rate, and step k (from 0) that of iteration k - 1. The `LambdaLR` of the message
gives every step the same learning rate (as DeepSpeed since 0.15.3).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.deepspeed.file import Section

__all__ = ["refuse_optimizer"]

# What Hugging Face's Trainer puts in place of "auto"; `args` are its TrainingArguments.
_AUTO = {
    "lr": "args.learning_rate",
    "betas": "(args.adam_beta1, args.adam_beta2)",
    "eps": "args.adam_epsilon",
    "weight_decay": "args.weight_decay",
    "warmup_max_lr": "args.learning_rate",
    "warmup_num_steps": "args.warmup_steps",
}


def refuse_optimizer(file: Section) -> None:
    """Refuses a file with an optimizer or a scheduler section.

    Raises:
        ValueError: It has one; the message has lines of torch that step in the same way.
    """
    optimizer, scheduler = file.section("optimizer"), file.section("scheduler")
    found = [section for section in (optimizer, scheduler) if section.values]
    if not found:
        return
    lines = [*_optimizer_lines(optimizer, scheduler), *_scheduler_lines(scheduler)]
    text = "\n".join(lines)
    hints = ["import math"] if "math." in text else []
    hints += ['args = ...  # TrainingArguments: the file has "auto"'] if "args." in text else []
    names = " and ".join(section.name for section in found)
    raise ValueError(
        f"from_deepspeed does not read the {names} of a file. Remove this part, and write in "
        "configure_optimizers:\n\n" + indent("\n".join([*hints, text]), "    ")
    )


def _code(params: Section, key: str, default: Any = None) -> str:
    """Python code of a value; that of TrainingArguments where the file has "auto"."""
    if params.values.get(key) == "auto" and key in _AUTO:
        return _AUTO[key]
    value = params.get(key) if params.has(key) else default
    return repr(tuple(value) if isinstance(value, list) else value)


# -------------------------------------------------------------------- optimizer

_ADAMS = ("adam", "adamw")
# Arguments of DeepSpeed's Adam, and the values at which torch's does not need them.
_ADAM_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("adam_w_mode", "torch_adam", "set_grad_none"), (True, False, "auto", None)),
    **dict.fromkeys(("bias_correction", "fp32_optimizer_states"), (True, "auto", None)),
}
_OTHERS = ("lion", "muon", "optimizer")  # torch's are others, or none


def _optimizer_lines(section: Section, scheduler: Section) -> Iterator[str]:
    params = section.section("params")
    name, rate = str(section.values.get("type")), _own_rate(scheduler)
    kind = _torch_optimizer(name, is_decoupled=params.flag("adam_w_mode") is not False)
    if kind is None:
        if section.values:
            yield f"# torch has no optimizer that is DeepSpeed's {name!r} with {params.values}"
        yield f"optimizer = ...{f'  # with lr={rate}' if rate else ''}"
        return
    given = dict(params.values)
    if name.lower() in _ADAMS:
        given = {key: given[key] for key in given if given[key] not in _ADAM_ONLY.get(key, ())}
        if not params.flag("torch_adam"):
            given = {"weight_decay": 0.0, **given}  # torch's AdamW decays by 0.01
    known = inspect.signature(kind).parameters
    filled = Section(given, params.name)
    arguments = {key: _code(filled, key, known[key].default) for key in given if key in known}
    arguments |= {"lr": rate} if rate else {}
    arguments |= {"fused": "True"} if name.lower() in _ADAMS else {}
    listed = ", ".join(["self.parameters()", *(f"{k}={code}" for k, code in arguments.items())])
    for key in (key for key in given if key not in known):
        yield f"# torch.optim.{kind.__name__} has no {key}={given[key]!r}"
    yield f"optimizer = torch.optim.{kind.__name__}({listed})"


def _own_rate(scheduler: Section) -> str | None:
    """Code of the learning rate that the schedule has for the optimizer; None: it has none."""
    params = scheduler.section("params")
    if params.values.get("warmup_max_lr") is not None:
        return _code(params, "warmup_max_lr")
    return "0.001" if scheduler.values.get("type") == "WarmupDecayLR" else None


def _torch_optimizer(name: str, *, is_decoupled: bool) -> type[Optimizer] | None:
    """Class of torch that steps as DeepSpeed's optimizer `name`; None: there is none."""
    if name.lower() == "adam" and is_decoupled:
        return torch.optim.AdamW
    if name.lower() in _OTHERS:
        return None
    kinds = {key.lower(): kind for key, kind in vars(torch.optim).items()}
    kind = kinds.get(name.lower())
    return kind if isinstance(kind, type) and issubclass(kind, Optimizer) else None


# -------------------------------------------------------------------- scheduler

_SHARES = {  # of the warm-up that is done before optimizer step `step`
    "linear": "min(1, max(0, step - 1) / warmup)",
    "log": "min(1, math.log(max(1, step)) / math.log(warmup))",
}
_SCHEDULES = {
    "WarmupLR": """\
def factor(step):
    return low + (1 - low) * {share}
""",
    "WarmupDecayLR": """\
def factor(step):
    decay = max(0, (total - step + 1) / max(1, total - warmup))
    return low + (1 - low) * min(decay, {share})
""",
    "WarmupCosineLR": """\
def factor(step):
    if step == 0:
        return 0.0
    if step <= warmup:
        return low + (1 - low) * {share}
    angle = math.pi * min(1, (step - warmup) / max(1, total - warmup))
    return {last} + (1 - {last}) * (1 + math.cos(angle)) / 2
""",
}


def _scheduler_lines(section: Section) -> Iterator[str]:
    if not section.values:
        yield "return optimizer"
        return
    name, params = section.values.get("type"), section.section("params")
    share = _SHARES.get(str(params.get("warmup_type") or "log"))
    has_rates_of_groups = any(isinstance(value, list) for value in params.values.values())
    if name in _SCHEDULES and share is not None and not has_rates_of_groups:
        yield f"warmup = max(2, {_code(params, 'warmup_num_steps', 1000)})"
        total = "self.trainer.estimated_stepping_batches"
        if params.has("total_num_steps"):
            total = _code(params, "total_num_steps")
        yield from [f"total = {total}"] if name != "WarmupLR" else []
        low = _code(params, "warmup_min_ratio", 0.0)
        if name != "WarmupCosineLR" and params.get("warmup_min_lr"):
            low = f"{_code(params, 'warmup_min_lr')} / optimizer.param_groups[0]['lr']"
        yield f"low = {low}"
        last = _code(params, "cos_min_ratio", 0.0001)
        yield from _SCHEDULES[name].format(share=share, last=last).splitlines()
        yield "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"
    else:
        yield f"# torch has no scheduler that is DeepSpeed's {name!r} with {params.values}"
        yield "scheduler = ..."
    yield "lr_scheduler = {'scheduler': scheduler, 'interval': 'step'}"
    yield "return {'optimizer': optimizer, 'lr_scheduler': lr_scheduler}"
