"""Precision, loss scale and the dtype of gradients, from a DeepSpeed configuration."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_zero.deepspeed.file import Section

__all__ = ["precision", "reduce_dtype"]

_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


def _dtype(section: Section, key: str) -> torch.dtype | None:
    if not section.has(key):
        return None
    dtype = _DTYPES.get(str(section.values[key]).lower())
    if dtype is None:
        raise section.error(key, "fp16, bf16 or fp32")
    return dtype


def precision(file: Section, ignored: dict[str, str]) -> tuple[torch.dtype, dict[str, Any]]:
    """The dtype of training and the settings of the loss scaler."""
    fp16, autocast = file.section("fp16"), file.section("torch_autocast")
    bf16 = file.section("bf16" if "bf16" in file.values else "bfloat16")
    enabled = [section for section in (fp16, bf16, autocast) if section.flag("enabled")]
    if len(enabled) > 1:
        names = " and ".join(section.name for section in enabled)
        raise ValueError(f"{names} are enabled together; enable one of them.")
    for section in (fp16, bf16):
        for key in section.values:
            if key.endswith(("master_weights_and_grads", "optimizer_states")) and section.flag(key):
                raise ValueError(
                    f"{section.path(key)} = True changes the training and is not available here: "
                    "masters and optimizer state are float32; set it to false."
                )
    if autocast.flag("enabled"):
        if autocast.has("lower_precision_safe_modules"):
            key = autocast.path("lower_precision_safe_modules")
            ignored[key] = "torch's own list of operations decides"
        return _dtype(autocast, "dtype") or torch.bfloat16, {}
    if bf16.flag("enabled"):
        if bf16.has("immediate_grad_update"):
            ignored[bf16.path("immediate_grad_update")] = "gradients are added as they arrive"
        for key in ("check_grad_overflow", "check_overflow"):
            if bf16.flag(key):
                why = "a step with infinite gradients is not skipped in bf16"
                ignored[bf16.path(key)] = why
        return torch.bfloat16, {}
    if fp16.flag("enabled"):
        return torch.float16, _grad_scaler_kwargs(fp16, ignored)
    return torch.float32, {}


def _grad_scaler_kwargs(fp16: Section, ignored: dict[str, str]) -> dict[str, Any]:
    """Arguments for `torch.amp.GradScaler`; a static scale is one whose factors round to 1."""
    without_equal = {
        "auto_cast": "inputs of matrix products are cast by autocast",
        "hysteresis": "GradScaler lowers the scale at the first overflow",
        "consecutive_hysteresis": "GradScaler lowers the scale at the first overflow",
        "min_loss_scale": "GradScaler has no lowest scale",
    }
    for key, why in without_equal.items():
        if fp16.has(key):
            ignored[fp16.path(key)] = why
    power = fp16.whole("initial_scale_power")
    window = fp16.whole("loss_scale_window", least=1)
    if static := fp16.number("loss_scale"):
        # GradScaler wants factors on either side of 1; in float32 these two change nothing.
        up, down = math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)
        return {"init_scale": static, "growth_factor": up, "backoff_factor": down}
    return {
        "init_scale": 2.0 ** (16 if power is None else power),
        "growth_interval": 1000 if window is None else window,
    }


def reduce_dtype(file: Section, dtype: torch.dtype, ignored: dict[str, str]) -> torch.dtype | None:
    """The dtype in which gradients travel and are kept; None where the file leaves both open.

    DeepSpeed has a dtype for each; here it is one, so the one that holds both.
    """
    types = file.section("data_types")
    if types.has("buffer_dtype"):
        raise types.error("buffer_dtype", "left out (buffers keep their dtype)")
    if types.has("param_dtype"):
        if _dtype(types, "param_dtype") is not dtype:
            raise types.error("param_dtype", f"the dtype of training, {dtype},")
        ignored[types.path("param_dtype")] = "precision decides"
    wire, kept = _dtype(file, "communication_data_type"), _dtype(types, "grad_accum_dtype")
    if wire is None or kept is None or wire is kept:
        return wire or kept
    both = torch.promote_types(wire, kept)
    for section, key, own in (
        (file, "communication_data_type", wire),
        (types, "grad_accum_dtype", kept),
    ):
        if own is not both:
            why = f"gradients travel and are kept in one dtype, {both}, which holds both"
            ignored[section.path(key)] = why
    return both
