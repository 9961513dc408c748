"""Finds out whether an optimizer may step slices, and how: by trying it on toy tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["NotElementwiseError", "StepKind", "probe", "raw_step"]


class NotElementwiseError(ValueError):
    """An optimizer that must see whole tensors, or all of them."""


class StepKind(Enum):
    """How an optimizer may be called."""

    BY_BUCKET = "each bucket by itself"
    AT_ONCE = "all slices in one call"


def raw_step(optimizer: Optimizer) -> None:
    """The step function itself, under the wrapper that torch puts around it to call hooks."""
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    step(optimizer)


_SHAPE = (4, 6)
_CUT = 7  # in the middle of a row
_STEPS = 3


def probe(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> StepKind:
    """Finds out, on toy parameters, whether slices may be stepped and how.

    A clone of the optimizer, with its settings but none of its state, steps two whole tensors; then
    the same tensors cut into slices: by a clone of its own for each slice, as ranks do, in one
    call, and in one call for each slice. Equal results prove that it treats every element by
    itself.

    Raises:
        NotElementwiseError: It does not, so that sharding it would change the training.
        ValueError: Its step needs a closure, or cannot be tried.
    """
    name = type(optimizer).__name__
    try:
        start = _run_probe(optimizer, device, dtype, _Cut.WHOLE, num_steps=0)
        whole = _run_probe(optimizer, device, dtype, _Cut.WHOLE)
    except Exception as error:
        raise ValueError(
            f"optimizer {name} cannot be stepped after the backward, bucket by bucket: its step "
            f"failed on a probe with {type(error).__name__}: {error}. Use an optimizer whose "
            "step() needs no closure and takes dense gradients, such as AdamW."
        ) from error
    reason = "stepping the slices of a tensor gives other values than stepping the tensor"
    try:
        by_rank = _run_probe(optimizer, device, dtype, _Cut.BY_RANK)
        cut = _run_probe(optimizer, device, dtype, _Cut.AT_ONCE)
        is_elementwise = all(torch.allclose(whole, x, rtol=1e-4, atol=1e-6) for x in (by_rank, cut))
    except Exception as error:
        is_elementwise = False
        reason = f"it refuses a 1-D slice of a tensor ({type(error).__name__}: {error})"
    if torch.equal(start, whole):
        is_elementwise, reason = False, "a clone of it does not move the parameters in its groups"
    if not is_elementwise:
        raise NotElementwiseError(
            f"optimizer {name} is not elementwise: {reason}. Sharding it would change the "
            "training; use stage 0, or an elementwise optimizer such as SGD, Adam, AdamW, Adagrad "
            "or RMSprop; or promise by assume_elementwise=True that it is one."
        )
    try:
        by_slice = _run_probe(optimizer, device, dtype, _Cut.BY_SLICE)
    except Exception:
        return StepKind.AT_ONCE
    return StepKind.BY_BUCKET if torch.equal(cut, by_slice) else StepKind.AT_ONCE


class _Cut(Enum):
    """How the toy tensors of a probe are stepped."""

    WHOLE = "whole"
    BY_RANK = "slices, a clone for each"
    AT_ONCE = "slices, in one call"
    BY_SLICE = "slices, in one call for each"


def _run_probe(
    optimizer: Optimizer,
    device: torch.device,
    dtype: torch.dtype,
    cut: _Cut,
    *,
    num_steps: int = _STEPS,
) -> Tensor:
    """Values of the toy parameters after some steps, flattened."""
    if cut is _Cut.BY_RANK:
        runs = [_run_toys(optimizer, device, dtype, cut, num_steps, only=i) for i in range(2)]
        groups = range(len(optimizer.param_groups))
        return torch.cat([runs[i][group] for group in groups for i in range(2)])
    return torch.cat(_run_toys(optimizer, device, dtype, cut, num_steps))


def _run_toys(
    optimizer: Optimizer,
    device: torch.device,
    dtype: torch.dtype,
    cut: _Cut,
    num_steps: int,
    only: int | None = None,
) -> list[Tensor]:
    """By group, the toys after `num_steps`, flattened; only one of the slices where asked."""

    def parts_of(whole: Tensor) -> list[Tensor]:
        if cut is _Cut.WHOLE:
            return [whole]
        flat = whole.reshape(-1)
        parts = [flat[:_CUT].clone(), flat[_CUT:].clone()]
        return parts if only is None else [parts[only]]

    def draw() -> Tensor:
        return torch.randn(_SHAPE, generator=generator).to(device, dtype)

    with torch.random.fork_rng(devices=[], enabled=True), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        clone = _clone_without_state(optimizer)
        for group, source in zip(clone.param_groups, optimizer.param_groups, strict=True):
            group["params"] = [nn.Parameter(part) for part in parts_of(draw())]
            _copy_initial_state(optimizer, source, clone, group["params"])
        toys = [toy for group in clone.param_groups for toy in group["params"]]
        for _ in range(num_steps):
            for group in clone.param_groups:
                for toy, part in zip(group["params"], parts_of(draw()), strict=True):
                    toy.grad = part
            _step_toys(clone, toys, cut is _Cut.BY_SLICE)
        return [
            torch.cat([toy.detach().reshape(-1) for toy in group["params"]])
            for group in clone.param_groups
        ]


def _step_toys(clone: Optimizer, toys: list[nn.Parameter], is_by_slice: bool) -> None:
    if not is_by_slice:
        raw_step(clone)
        return
    kept = [group["params"] for group in clone.param_groups]
    for toy in toys:
        for group, parameters in zip(clone.param_groups, kept, strict=True):
            group["params"] = [p for p in parameters if p is toy]
        raw_step(clone)
    for group, parameters in zip(clone.param_groups, kept, strict=True):
        group["params"] = parameters
    for toy in toys:
        toy.grad = None
    raw_step(clone)  # the body that follows the hook finds no gradients and must do nothing


def _clone_without_state(optimizer: Optimizer) -> Optimizer:
    clone: Optimizer = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the original
    clone.state = defaultdict(dict)
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    clone.param_groups = []
    for group in optimizer.param_groups:
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        if "lr" in settings:  # a warm-up may start at zero, which would prove nothing
            lr = settings["lr"]
            settings["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
        clone.param_groups.append({**settings, "params": []})
    return clone


def _copy_initial_state(
    optimizer: Optimizer, source: dict[str, Any], clone: Optimizer, toys: list[nn.Parameter]
) -> None:
    """Gives toys the state that the optimizer was born with, shaped like them."""
    like = next((p for p in source["params"] if p in optimizer.state), None)
    if like is None:
        return
    for toy in toys:
        for key, value in optimizer.state[like].items():
            if isinstance(value, Tensor) and value.shape == like.shape and key != "step":
                first = value[(0,) * value.dim()]  # of what may be one number for all
                clone.state[toy][key] = first.expand(toy.shape).clone()
            else:
                clone.state[toy][key] = copy.deepcopy(value)
