"""Probes an optimizer by steps on small tensors: how it may be sharded and called.

[Note: What a probe decides] Copies of the optimizer step the same small tensors in several ways.
The optimizer is refused if they show that it combines tensors: if a tensor gets other values where
others have no gradients, if a number of a group or of the optimizer depends on gradients, if a
step draws random numbers, or uses the loss of its closure. Whether it is elementwise is known by
its class (known.py), unless 1-D slices get other values than the full tensor: an option, such as a
clipping of the update by its norm, may combine the elements of a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.optim.clone import dropped_gradients
from lightning_zero.optim.known import known_elementwise, refusal_reason
from lightning_zero.optim.probe_run import ProbeRun, Way, are_same

__all__ = [
    "CannotShardError",
    "CannotStepError",
    "ProbeResult",
    "StepKind",
    "check_takes_dense",
    "find_full_optimizers",
    "is_assumed_elementwise",
    "probe",
    "probe_assumed",
    "probed_settings",
    "refusal",
]

_NUM_STEPS = (3, 12)  # steps of a run; the second if nothing moves in the first, as in a warm-up
_CLIPPED_AT = 1.0  # suggested bound if the option is not a number


class CannotShardError(ValueError):
    """An optimizer whose step depends on all tensors at once."""


class CannotStepError(CannotShardError):
    """An optimizer that no stage can step, not even stage 0."""


class StepKind(Enum):
    """Way in which an optimizer may be called."""

    BY_BUCKET = "one call for each bucket"
    AT_ONCE = "all slices in one call"


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        kind: Way in which the optimizer may be called.
        is_elementwise: Whether each element depends on itself alone; else it is stepped as if it
            depended on its full tensor.
    """

    kind: StepKind
    is_elementwise: bool

    def __and__(self, other: ProbeResult) -> ProbeResult:
        """The more restrictive result of both."""
        kind = self.kind if self.kind is other.kind else StepKind.AT_ONCE
        return ProbeResult(kind, self.is_elementwise and other.is_elementwise)


def probe(optimizer: Optimizer, device: torch.device) -> ProbeResult:
    """Probes an optimizer on small tensors: how it may be sharded and called.

    Steps copies of the optimizer, with its settings but without its states.

    Raises:
        CannotShardError: Its step depends on all tensors together.
        ValueError: Its step needs a closure, or fails on the small tensors.
    """
    check_takes_dense(optimizer)
    _check_steps_its_groups(optimizer)
    known_reason = refusal_reason(type(optimizer))
    if known_reason is not None:
        raise refusal(optimizer, known_reason)
    found = _Probe(optimizer, device)
    if found.drops_gradients():
        raise CannotStepError(dropped_gradients(optimizer))
    reason = found.find_crossing()
    if reason is not None:
        raise refusal(optimizer, reason + found.advice())
    return ProbeResult(found.kind(), is_elementwise=found.is_elementwise())


def probe_assumed(optimizer: Optimizer, config: ZeroConfig, device: torch.device) -> ProbeResult:
    """Result for an optimizer for which `is_assumed_elementwise` is True.

    It may be called once for each bucket only if its class is named, and a probe allows it.
    """
    check_takes_dense(optimizer)
    _check_steps_its_groups(optimizer)
    kind = StepKind.AT_ONCE
    if not isinstance(config.assume_elementwise, bool):
        with suppress(ValueError):
            kind = _Probe(optimizer, device).kind()
    return ProbeResult(kind, is_elementwise=True)


def check_takes_dense(optimizer: Optimizer) -> None:
    """Raises a ValueError for an optimizer that steps only sparse gradients."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} cannot be stepped: it needs sparse gradients, "
            "but flat buffers hold the gradients of nn.Embedding(sparse=True) as dense ones. Use "
            "another optimizer for these parameters, such as torch.optim.Adagrad, which gives the "
            "same values for dense and sparse gradients, or torch.optim.Adam, which also updates "
            "the rows that a batch does not use."
        )


def is_assumed_elementwise(optimizer: Optimizer, config: ZeroConfig) -> bool:
    """Whether `assume_elementwise` is True, or names the class of `optimizer`."""
    assumed = config.assume_elementwise
    return assumed if isinstance(assumed, bool) else type(optimizer).__name__ in assumed


def find_full_optimizers(optimizers: Sequence[Optimizer], config: ZeroConfig) -> list[int]:
    """Indices of optimizers that must step full tensors; those that fail a probe are skipped."""
    found: list[int] = []
    for index, optimizer in enumerate(optimizers):
        if is_assumed_elementwise(optimizer, config):
            continue
        with suppress(ValueError):
            if not probe(optimizer, torch.device("cpu")).is_elementwise:
                found.append(index)
    return found


def probed_settings(optimizer: Optimizer) -> list[Any]:
    """Settings on which the result of a probe may depend.

    A number counts only as zero or not zero.
    """
    return [
        len(group["params"]) if key == "params" else _choice_of(value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in ("lr", "initial_lr", "param_names")
    ]


def _choice_of(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return bool(value)
    if isinstance(value, (list, tuple)):
        return [_choice_of(part) for part in value]
    return value if isinstance(value, (str, type(None))) else type(value)


# -------------------------------------------------------------------- comparisons


class _Probe:
    """Comparisons of one optimizer's steps.

    Args:
        optimizer: The optimizer, which is not changed.
        device: Device of the small tensors.
        options: Options that replace those of the optimizer, by name.

    Raises:
        ValueError: Its step needs a closure, fails on the small tensors, or does not move them.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, options: Mapping[str, Any] | None = None
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._way = Way(options=options or {})
        try:
            self._full = self._find_way()
        except CannotShardError:
            raise
        except Exception as error:
            raise ValueError(self._why_not(error)) from error

    def _run(self, **changes: Any) -> ProbeRun:
        return ProbeRun(self._optimizer, self._device, replace(self._way, **changes))

    def _find_way(self) -> ProbeRun:
        """Finds how the optimizer can be stepped; returns the run in which tensors move."""
        self._way = replace(self._way, has_states=self._needs_states())
        start = self._run(num_steps=0)
        for num_steps in _NUM_STEPS:
            self._way = replace(self._way, num_steps=num_steps)
            full = self._run()
            if not full.equals(start):
                return full
        raise _cannot_step(
            self._optimizer,
            f"a copy of it does not move the parameters in its groups in {num_steps} steps",
        )

    def _needs_states(self) -> bool:
        """Whether the optimizer can only step parameters that already have states."""
        for has_states in (False, True):
            with suppress(Exception):
                self._run(num_steps=1, has_states=has_states)
                return has_states
        return False

    def find_crossing(self) -> str | None:
        """Reason why tensors cannot be stepped independently of each other; None: they can."""
        if not self._full.equals(self._run(rng_seed=1)):
            return (
                "it draws random numbers, and each rank would draw other numbers than one process "
                "that steps all parameters"
            )
        other = self._run(seed=1)
        for words in self._full.numbers[-1]:
            if not are_same(self._full.numbers[-1][words], other.numbers[-1].get(words)):
                return f"{words} depends on the gradients of its parameters"
        for parity in (0, 1):
            try:
                some = self._run(parity=parity)
            except Exception as error:
                return (
                    "its step fails if some of its tensors are empty and have no gradients "
                    f"({type(error).__name__}: {error})"
                )
            if not some.equals(self._full, tolerance=1e-6):
                return "the update of each parameter depends on the gradients of other parameters"
        return self._find_closure_use()

    def _find_closure_use(self) -> str | None:
        """Reason why its closure cannot be called once, before the step; None: it can."""
        if "closure" not in inspect.signature(type(self._optimizer).step).parameters:
            return None
        try:
            first, second = self._run(loss=1.0), self._run(loss=2.0)
        except Exception:
            return None  # the step has the parameter, but does not support closures
        if not first.is_closure_first:
            return (
                "it calls its closure more than once in a step, or after it has changed the "
                "parameters, but the gradients of all ranks are averaged once, before the step"
            )
        if not first.equals(second) or not are_same(first.numbers, second.numbers):
            return "it uses the loss of its closure, which differs between ranks"
        return None

    def drops_gradients(self) -> bool:
        """Whether its step sets gradients to None or zero."""
        return self._full.drops_gradients

    def is_elementwise(self) -> bool:
        """Whether slices of tensors may be stepped. See [Note: What a probe decides]."""
        if not known_elementwise(type(self._optimizer)):
            return False
        try:
            parts = [self._run(part=part) for part in (0, 1)]
        except Exception:
            return False
        # The rounding of slices may differ from that of the full tensor.
        return parts[0].joined(parts[1]).equals(self._full, tolerance=1e-4)

    def kind(self) -> StepKind:
        """Way in which the optimizer may be called: by bucket only if all bits stay the same."""
        numbers = pairwise(self._full.numbers[1:])
        if self._full.has_other_states or not all(are_same(a, b) for a, b in numbers):
            return StepKind.AT_ONCE  # it counts its calls
        try:
            in_turn = self._run(is_in_turn=True)
        except Exception:
            return StepKind.AT_ONCE
        return StepKind.BY_BUCKET if in_turn.equals(self._full) else StepKind.AT_ONCE

    # ---------------------------------------------------------------- reasons

    def advice(self) -> str:
        """Text about the option that makes the step depend on all gradients; "" if none does."""
        groups = self._optimizer.param_groups
        for key, value in {k: v for group in groups for k, v in group.items()}.items():
            if "norm" not in key and "clip" not in key:
                continue
            for off in (None, 0.0, False):
                with suppress(Exception):
                    other = _Probe(self._optimizer, self._device, {key: off})
                    if other.find_crossing() is None:
                        bound = value if isinstance(value, (int, float)) else _CLIPPED_AT
                        return (
                            f". Its option {key}={value!r} makes it do so: pass {key}={off!r}, and "
                            f"to clip by that norm Trainer(gradient_clip_val={bound}) or "
                            f"engine.clip_grad_norm_({bound})"
                        )
        return ""

    def _why_not(self, error: Exception) -> str:
        """Error text for a step that fails without a closure."""
        name = type(self._optimizer).__name__
        failed = f"{type(error).__name__}: {error}"
        needs_closure = False
        if "closure" in inspect.signature(type(self._optimizer).step).parameters:
            with suppress(Exception):
                self._run(loss=1.0)
                needs_closure = True
        if needs_closure:
            return (
                f"optimizer {name} cannot be stepped bucket by bucket after the backward: its "
                f"step() needs a closure, which evaluates the loss within the step ({failed}). Use "
                "an optimizer whose step() needs no closure, such as AdamW."
            )
        return (
            f"optimizer {name} cannot be stepped: step() of a copy with its settings and without "
            f"states failed on small tensors shaped like its parameters ({failed}). If it steps "
            "the module without lightning_zero and is elementwise, set assume_elementwise=True; "
            "otherwise use another optimizer, such as AdamW."
        )


def _find_inner(optimizer: Optimizer) -> str | None:
    """Describes the optimizer that `optimizer` wraps, with its attribute; None: no such one."""
    for name, value in vars(optimizer).items():
        held = value if isinstance(value, (list, tuple)) else [value]
        for inner in held:
            if isinstance(inner, Optimizer):
                return f"{type(inner).__name__}, in its attribute {name!r}"
    return None


def _check_steps_its_groups(optimizer: Optimizer) -> None:
    inner = _find_inner(optimizer)
    if inner is not None:
        reason = f"it wraps another optimizer ({inner}), which steps the parameters itself"
        raise _cannot_step(optimizer, reason)
    for name, value in vars(optimizer).items():
        has_keys = isinstance(value, dict) and name != "state"
        if has_keys and any(isinstance(key, Tensor) for key in value):
            reason = f"its attribute {name!r} has parameters as keys (use self.state[parameter])"
            raise _cannot_step(optimizer, reason)


def _cannot_step(optimizer: Optimizer, reason: str) -> CannotStepError:
    return CannotStepError(
        f"optimizer {type(optimizer).__name__} cannot be stepped, in any stage: {reason}, but the "
        "engine steps copies of an optimizer, with this rank's shards in their groups. Use the "
        'optimizer that it wraps, another one such as AdamW, or Trainer(strategy="ddp").'
    )


def refusal(optimizer: Optimizer, reason: str) -> CannotShardError:
    return CannotShardError(
        f"optimizer {type(optimizer).__name__} cannot be sharded: {reason}. Sharding it would "
        "change the training; use stage 0, or an optimizer that steps every element or every "
        "tensor independently, such as AdamW, Muon or Adafactor; or set assume_elementwise=True if "
        "it is elementwise."
    )
