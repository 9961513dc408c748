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


def refuse_optimizer(optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
    """Raises a ValueError with lines of torch that step as these sections, if one is not empty."""
    sections = {"optimizer": optimizer, "scheduler": scheduler}
    if not any(sections.values()):
        return
    rates = _code(scheduler.get("params", {}))
    rate = rates.get("warmup_max_lr", "0.001" if scheduler.get("type") == "WarmupDecayLR" else None)
    text = "\n".join([*_optimizer_lines(optimizer, rate), *_scheduler_lines(scheduler, rates)])
    hints = ["import math"] if "math." in text else []
    hints += ['args = ...  # TrainingArguments: the file has "auto"'] if "args." in text else []
    names = " and ".join(name for name, section in sections.items() if section)
    raise ValueError(
        f"from_deepspeed does not read the {names} of a file. Remove this part, and write in "
        "configure_optimizers:\n\n" + indent("\n".join([*hints, text]), "    ")
    )


def _code(params: dict[str, Any]) -> dict[str, str]:
    """Python code of each value; that of TrainingArguments where the file has "auto"."""
    code = {}
    for key, value in params.items():
        if value == "auto" and key in _AUTO:
            code[key] = _AUTO[key]
        elif value is not None and value != "auto":
            code[key] = repr(value if isinstance(value, (str, int, float)) else tuple(value))
    return code


_ADAM_ONLY = {  # arguments of DeepSpeed's Adam that torch's does not need, with these values
    **dict.fromkeys(("adam_w_mode", "torch_adam", "set_grad_none"), ("True", "False")),
    **dict.fromkeys(("bias_correction", "fp32_optimizer_states"), ("True",)),
}


def _optimizer_lines(section: dict[str, Any], rate: str | None) -> Iterator[str]:
    params = _code(section.get("params", {}))
    name = str(section.get("type"))
    is_adam = name.lower() in ("adam", "adamw")
    if is_adam:
        is_decoupled = name.lower() == "adamw" or params.get("adam_w_mode") != "False"
        name = "AdamW" if is_decoupled else "Adam"
        if params.get("torch_adam") != "True":
            params = {"weight_decay": "0.0", **params}  # torch's AdamW decays by 0.01
        params = {key: params[key] for key in params if params[key] not in _ADAM_ONLY.get(key, ())}
        params["fused"] = "True"
    names = {name.lower(): name for name in dir(torch.optim) if name[0].isupper()}
    name = names.get(name.lower(), "")
    if name in ("", "Lion", "Muon", "Optimizer"):  # torch's are others
        if section:
            yield _no("optimizer", section)
        yield f"optimizer = ...{f'  # with lr={rate}' if rate else ''}"
        return
    params |= {"lr": rate} if rate else {}
    known = inspect.signature(getattr(torch.optim, name)).parameters
    for key in [key for key in params if key not in known]:
        yield f"# torch.optim.{name} has no {key}={params.pop(key)}"
    listed = ", ".join(["self.parameters()", *(f"{key}={code}" for key, code in params.items())])
    yield f"optimizer = torch.optim.{name}({listed})"


def _no(what: str, section: dict[str, Any]) -> str:
    params = section["params"]
    return f"# torch has no {what} that is DeepSpeed's {str(section.get('type'))!r} with {params}"


_SHARES = {  # of the warm-up that is done before optimizer step `step`
    "'linear'": "min(1, max(0, step - 1) / warmup)",
    "'log'": "min(1, math.log(max(1, step)) / math.log(warmup))",
}
_DECAY = "max(0, (total - step + 1) / max(1, total - warmup))"
_ANGLE = "math.pi * min(1, (step - warmup) / max(1, total - warmup))"
_FACTORS = {  # of the learning rate, in optimizer step `step`
    "WarmupLR": ("low + (1 - low) * {share}",),
    "WarmupDecayLR": (f"low + (1 - low) * min({_DECAY}, {{share}})",),
    "WarmupCosineLR": (
        "min(step, low + (1 - low) * {share}) if step <= warmup else (",
        f"    {{last}} + (1 - {{last}}) * (1 + math.cos({_ANGLE})) / 2",
        ")",
    ),
}


def _scheduler_lines(section: dict[str, Any], params: dict[str, str]) -> Iterator[str]:
    if not section:
        yield "return optimizer"
        return
    name, share = section.get("type"), _SHARES.get(params.get("warmup_type", "'log'"))
    has_rates_of_groups = any(code.startswith("(") for code in params.values())
    if name not in _FACTORS or share is None or has_rates_of_groups:
        yield from (_no("scheduler", section), "scheduler = ...")
    else:
        yield f"warmup = max(2, {params.get('warmup_num_steps', 1000)})"
        if name != "WarmupLR":
            total = params.get("total_num_steps", "self.trainer.estimated_stepping_batches")
            yield f"total = {total}"
        low = params.get("warmup_min_ratio", "0.0")
        if name != "WarmupCosineLR" and "warmup_min_lr" in params:
            low = f"{params['warmup_min_lr']} / optimizer.param_groups[0]['lr']"
        yield f"low = {low}"
        first, *others = _FACTORS[name]
        for line in (f"factor = lambda step: {first}", *others):
            yield line.format(share=share, last=params.get("cos_min_ratio", "0.0001"))
        yield "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"
    yield "lr_scheduler = {'scheduler': scheduler, 'interval': 'step'}"
    yield "return {'optimizer': optimizer, 'lr_scheduler': lr_scheduler}"
