"""The optimizer step: the user's own optimizer, on this rank's slices, bucket by bucket.

[Note: One step of the user's optimizer] The optimizer object is kept as it is; a pre-hook and a
post-hook do the work, so that `optimizer.step()` is right whoever calls it: Lightning, a
GradScaler, a hand-written loop. The pre-hook runs a closure first (parameters must be whole in it),
then steps bucket after bucket by calling the optimizer's own step function on the bucket's
parameters alone: the gather of a stepped bucket travels while the next one is stepped. The body
that follows finds no gradients and does nothing. An optimizer that counts calls in its groups
cannot be called once for each bucket; it runs its body once over all of them instead. `probe` finds
out which kind an optimizer is.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_zero.bucket import Bucket
from lightning_zero.guard import has_placement

__all__ = ["NotElementwiseError", "OptimizerStep", "StepKind", "probe"]


class NotElementwiseError(ValueError):
    """An optimizer that must see whole tensors, or all of them."""


class StepKind(Enum):
    """How an optimizer may be called."""

    BY_BUCKET = "each bucket by itself"
    AT_ONCE = "all slices in one call"


class OptimizerStep:
    """Runs one optimizer on the slices of this rank, from hooks on `optimizer.step`.

    Attributes:
        optimizer: The user's optimizer.
        kind: How it may be called.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: StepKind,
        *,
        before: Callable[[], None],
        order: Callable[[], Sequence[Bucket]],
    ) -> None:
        self.optimizer = optimizer
        self.kind = kind
        self._before = before  # waits for what the step must not overtake
        self._order = order  # all buckets, in the order in which the next forward needs them
        self._stepping: list[Bucket] = []
        # A subclass's step may call its parent's, which calls hooks too.
        self._is_inside = self._is_inside_bucket = False
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_hook),
            optimizer.register_step_post_hook(self._post_hook),
        ]

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _pre_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_inside:
            return None
        # torch counts the optimizer itself among the arguments.
        _, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
            args = (optimizer, lambda: loss, *rest[1:]) if rest else args
            kwargs = kwargs if rest else {**kwargs, "closure": lambda: loss}
        self._before()
        members = self._members()
        self._stepping = [
            bucket
            for bucket in self._order()
            if any(p in members and p.grad is not None for p in bucket.parameters)
        ]
        self._is_inside = True
        if self.kind is StepKind.BY_BUCKET:
            try:
                for bucket in self._stepping:
                    self._step_bucket(bucket)
            except BaseException:
                self._is_inside = False
                raise
            for bucket in self._stepping:
                _hide_grads(bucket)
        else:
            for bucket in self._stepping:
                bucket.enter_step()
        return args, kwargs

    def _post_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_inside_bucket:
            return
        self._is_inside = False
        for bucket in self._stepping:
            if self.kind is StepKind.AT_ONCE:
                bucket.leave_step(is_changed=True)
            else:
                bucket.grads.show()
        self._stepping = []

    def _step_bucket(self, bucket: Bucket) -> None:
        with record_function(f"zero::step {bucket.plan.name}"), self._only(bucket):
            bucket.enter_step()
            self._is_inside_bucket = True
            try:
                _raw_step(self.optimizer)
            finally:
                self._is_inside_bucket = False
                bucket.leave_step(is_changed=True)

    def _members(self) -> set[nn.Parameter]:
        """The optimizer's parameters.

        Raises:
            ValueError: One was added that no engine holds.
        """
        members = {p for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in members:
            if not has_placement(parameter):
                raise ValueError(
                    f"{type(self.optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that the engine does not: its gradient would not be "
                    "averaged. Add parameters to the module before the engine is built."
                )
        return members

    @contextmanager
    def _only(self, bucket: Bucket) -> Iterator[None]:
        """Restricts the optimizer's groups to the parameters of `bucket`."""
        members = set(bucket.parameters)
        groups = self.optimizer.param_groups
        kept = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if p in members]
        try:
            yield
        finally:
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = parameters


def _hide_grads(bucket: Bucket) -> None:
    for parameter in bucket.parameters:
        parameter.grad = None


def _raw_step(optimizer: Optimizer) -> None:
    """The step function itself, under the wrapper that torch puts around it to call hooks."""
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    step(optimizer)


# -------------------------------------------------------------------- what kind of optimizer

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
        _raw_step(clone)
        return
    kept = [group["params"] for group in clone.param_groups]
    for toy in toys:
        for group, parameters in zip(clone.param_groups, kept, strict=True):
            group["params"] = [p for p in parameters if p is toy]
        _raw_step(clone)
    for group, parameters in zip(clone.param_groups, kept, strict=True):
        group["params"] = parameters
    for toy in toys:
        toy.grad = None
    _raw_step(clone)  # the body that follows the hook finds no gradients and must do nothing


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
                clone.state[toy][key] = value.reshape(-1)[0].expand(toy.shape).clone()
            else:
                clone.state[toy][key] = copy.deepcopy(value)
