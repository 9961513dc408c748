"""Classifies an optimizer by steps on small tensors: how it may be sharded and called.

The update of an element may depend on that element alone (Adam), on its full tensor (Muon,
Adafactor, LAMB), or on all tensors (a norm over all gradients). In the last case the optimizer
cannot be sharded.

[Note: Data flow decides] The values of a few steps prove little: a threshold may never be reached,
a norm may be clipped, an estimate may still be zero. So a step is traced (flow.py), and the labels
of parameters and states decide, independently of the values:

    each element depends on itself alone                elementwise
    elements depend on others of the same parameter     full tensors
    elements depend on other parameters or on random    refused, with that reason
    numbers; or a number of a group or of the
    optimizer depends on gradients

The further use of a number that Python has read is not visible. Its own parameter is assumed to
depend on it. Other parameters must not: in further runs, the numbers of every second parameter are
altered (larger, smaller, the other truth value), and the other parameters must keep every bit.

In addition, the same steps on divided tensors are compared with those on undivided ones. This
detects dependence on shapes, and failures on empty tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optim.probe import CannotShardError, ProbeResult, StepKind, refusal
from lightning_zero.tensors.composite import plain_tensors
from tests.tools.data_flow.flow import RANDOM, Flow, element_labels, owner_of, united
from tests.tools.data_flow.probe_run import Division, ProbeRun

__all__ = ["trace"]

_NUM_STEPS = (3, 12)  # steps of a run; the second if nothing moves in the first, as in a warm-up
_MAX_FAILED_READS = 8
# Factors of altered numbers, by step; tried in order, since the root of a negative one may fail.
_FACTORS = ((1e45, 1e-45, -1e45), (1e45, 1e-45, 1e45), (1e3, 1e-3, 1e3))
_CLIPPED_AT = 1.0  # suggested bound if the option is not a number


def trace(optimizer: Optimizer, device: torch.device) -> ProbeResult:
    """Traces an optimizer on small tensors: how it may be sharded and called.

    Steps copies of the optimizer, with its settings but without its states.

    Raises:
        CannotShardError: Its step depends on all tensors together.
        ValueError: Its step needs a closure, or fails on the small tensors.
    """
    name = type(optimizer).__name__
    inner = _find_inner(optimizer)
    if inner is not None:
        raise refusal(
            optimizer,
            f"it wraps another optimizer ({inner}), which steps the parameters itself, so a probe "
            f"of {name} does not see that step",
        )
    try:
        undivided, start, flow, traced = _trace(optimizer, device)
    except CannotShardError:
        raise
    except Exception as error:
        raise ValueError(_why_not(optimizer, device, error)) from error
    run = partial(ProbeRun, optimizer, device, undivided)
    dependence = _Dependence(run, flow, traced)
    reason = dependence.find_crossing(start)
    if reason is not None:
        raise refusal(optimizer, reason + _advice(optimizer, run, start))
    _check_closure(optimizer, device, replace(undivided, has_closure=True))
    counts = _changes(traced.numbers[1:]) or any(
        not isinstance(key, Tensor) for key in traced.clone.state
    )
    runs = _DividedRuns(optimizer, device, undivided)
    # The rounding of slices may differ from that of the full tensor.
    is_elementwise = dependence.is_elementwise and all(
        runs.agrees(Division(is_sliced=True, num_ranks=number), 1e-4) for number in (2, 1)
    )
    if is_elementwise:
        return ProbeResult(runs.kind(is_sliced=True, counts=counts), is_elementwise=True)
    runs.error = None
    if runs.agrees(Division(num_ranks=2), 1e-6):
        return ProbeResult(runs.kind(is_sliced=False, counts=counts), is_elementwise=False)
    if runs.error is not None:
        raise refusal(
            optimizer,
            "its step fails if some of its tensors are empty and have no gradients "
            f"({type(runs.error).__name__}: {runs.error})",
        )
    raise refusal(
        optimizer,
        "its step depends on all tensors together: stepping some of them separately gives other "
        "values than stepping all in one call, as with a norm over all gradients",
    )


def _trace(optimizer: Optimizer, device: torch.device) -> tuple[Division, Tensor, Flow, ProbeRun]:
    """Steps undivided tensors and traces them, until one of them changes.

    Returns:
        How the tensors were stepped, their initial values, the flow, and the run.
    """
    has_states = _needs_states(optimizer, device)
    undivided = Division(has_states=has_states)
    start = ProbeRun(optimizer, device, Division(num_steps=0)).values()
    for num_steps in _NUM_STEPS:
        undivided = replace(undivided, num_steps=num_steps)
        flow = Flow()
        traced = ProbeRun(optimizer, device, undivided, flow=flow)
        is_moved = not torch.equal(start, traced.values())
        if is_moved or any(flow.is_written(tensor) for tensor in traced.tensors.values()):
            return undivided, start, flow, traced
    raise refusal(
        optimizer,
        f"a copy of it does not move the parameters in its groups in {num_steps} steps",
    )


# -------------------------------------------------------------------- by data flow


class _Dependence:
    """Dependences of the parameters of a traced run. See [Note: Data flow decides].

    Args:
        run: Creates further runs.
        flow: The flow of `traced`.
        traced: A traced run on undivided tensors.
    """

    def __init__(self, run: Callable[..., ProbeRun], flow: Flow, traced: ProbeRun) -> None:
        self._run = run
        self._flow = flow
        self._traced = traced
        self._tensors = {number: t for (number, _), t in traced.tensors.items()}

    @property
    def is_elementwise(self) -> bool:
        """Whether no element of parameters and states depends on another one.

        Valid only if `find_crossing` returned None.
        """
        return all(
            (number not in self._flow.owners_read or tensor.numel() == 1)
            and all(self._is_of_elements(number, value) for value in self._values_of(number))
            for number, tensor in self._tensors.items()
        )

    def find_crossing(self, start: Tensor) -> str | None:
        """Reason why parameters cannot be stepped independently of each other; None: they can.

        Args:
            start: Values of all parameters before the first step.
        """
        if self._flow.untraceable is not None:
            return f"its step uses {self._flow.untraceable}, after which it cannot be traced"
        begin = 0
        for tensor in self._tensors.values():
            old, begin = start[begin : begin + tensor.numel()], begin + tensor.numel()
            if not self._flow.is_written(tensor) and not torch.equal(old, _flat(tensor)):
                return "its step runs compiled code that is not an operator of torch"
        return self._find_flow() or self._find_number()

    def _find_flow(self) -> str | None:
        """Finds a dependence across parameters by labels."""
        for words, values in self._traced.last_values().items():
            if self._flow.label_of(values):
                return f"{words} depends on the gradients of its parameters"
        labels = {n: self._flow.label_of(self._values_of(n)) for n in self._tensors}
        if RANDOM in labels.values():
            return (
                "it draws random numbers, and each rank would draw other numbers than one process "
                "that steps all parameters"
            )
        if any(label and owner_of(label) != number for number, label in labels.items()):
            return "the update of each parameter depends on the gradients of other parameters"
        return None

    def _find_number(self) -> str | None:
        """Finds a dependence across parameters by altering the numbers that Python has read."""
        for parity in (0, 1) if self._flow.owners_read else ():
            altered = self._alter(parity)
            if altered is None:
                return "its step uses numbers of gradients in a way that cannot be traced"
            numbers = zip(self._traced.numbers, altered.numbers, strict=True)
            for words in (w for one, other in numbers for w in _differing(one, other)):
                return f"{words} depends on the gradients of its parameters"
            others = [number for number in self._tensors if number % 2 != parity]
            if not all(_is_same(self._values_of(n), _values(altered, n)) for n in others):
                return (
                    "the update of each parameter depends on numbers of the gradients of other "
                    "parameters"
                )
        return None

    def _alter(self, parity: int) -> ProbeRun | None:
        """Runs with altered numbers of every second parameter; None: all such runs fail."""
        for factors in _FACTORS:
            alteration = _Alteration(parity, factors)
            for _ in range(_MAX_FAILED_READS):
                try:
                    return self._run(flow=Flow(alteration))
                except Exception:
                    alteration.spare_last()
        return None

    def _values_of(self, number: int) -> list[Any]:
        return _values(self._traced, number)

    def _is_of_elements(self, number: int, value: Any) -> bool:
        """Whether each element of `value` depends only on the element at the same index.

        False for a vector of another length, such as a step counter of shape (1,), because a slice
        may have that length, too.
        """
        tensor = self._tensors[number]
        for part in plain_tensors(value):
            if part is value and part.dim() and part.numel() != tensor.numel():
                return False
            labels = self._flow.labels_of(part)
            if labels is None or not united(labels):
                continue
            if part.numel() != tensor.numel() or part is not value:
                return False
            own = element_labels(number, tensor).view(-1)
            flat = labels.reshape(-1)
            if not bool(((flat == 0) | (flat == own)).all()):
                return False
        return True


def _values(run: ProbeRun, number: int) -> list[Any]:
    """A probe tensor and all values of its state."""
    tensor = run.tensors[number, 0]
    return [tensor, *tree_leaves(run.clone.state.get(tensor, {}))]


class _Alteration:
    """Alters numbers of every second owner, and of several owners, by very large factors.

    Args:
        parity: Parity of the owners' numbers: 0 or 1.
        factors: Factors of the numbers, by step.
    """

    def __init__(self, parity: int, factors: Sequence[float]) -> None:
        self._parity = parity
        self._factors = factors
        self._num_read = 0
        self._last = -1  # last altered number, by order of reading
        self._spared: set[int] = set()  # numbers that are not altered, by order of reading

    def spare_last(self) -> None:
        """Restarts after a failed step, without altering the last altered number."""
        self._spared.add(self._last)
        self._num_read, self._last = 0, -1

    def __call__(self, label: int, number: Any, num_steps: int) -> Any:
        """Returns the number that replaces `number` in step `num_steps`, counted from 1."""
        self._num_read += 1
        owner = owner_of(label)
        is_altered = owner is None or owner % 2 == self._parity
        if not is_altered or self._num_read in self._spared:
            return number
        self._last = self._num_read
        if isinstance(number, bool):
            return not number
        if isinstance(number, int):
            return number + 1 if num_steps % 2 else number - 1
        if not math.isfinite(abs(number)):
            return 1.0
        return (number + 1) * self._factors[(num_steps - 1) % len(self._factors)]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys under which two records differ."""
    return [key for key in one.keys() | other.keys() if not _is_same(one.get(key), other.get(key))]


def _changes(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step changes data other than the states of its parameters."""
    return any(_differing(one, other) for one, other in pairwise(records))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees are equal bit by bit."""
    ones, others = tree_leaves(one), tree_leaves(other)
    return len(ones) == len(others) and all(map(_is_same_leaf, ones, others))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        is_nan = one != one and other != other
        return isinstance(one, Tensor) == isinstance(other, Tensor) and (is_nan or one == other)
    parts = zip(plain_tensors(one), plain_tensors(other), strict=True)
    return all(a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in parts)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).double()


# -------------------------------------------------------------------- by values


class _DividedRuns:
    """Runs of one optimizer on divided tensors, compared with one on undivided ones."""

    def __init__(self, optimizer: Optimizer, device: torch.device, undivided: Division) -> None:
        self._optimizer = optimizer
        self._device = device
        self._undivided = undivided
        self._results: dict[Division, Tensor | Exception] = {}
        self.error: Exception | None = None  # raised by the last run that failed

    def agrees(self, division: Division, tolerance: float) -> bool:
        """Whether `division` gives the values of the undivided run, up to `tolerance`.

        The tolerance is relative to each value, and 1/100 of it to the largest value.
        """
        undivided, values = self._run(self._undivided), self._run(division)
        if values is None or undivided is None:
            return False
        atol = tolerance / 100 * max(1.0, float(undivided.abs().max()))
        return torch.allclose(undivided, values, rtol=tolerance, atol=atol)

    def kind(self, *, is_sliced: bool, counts: bool) -> StepKind:
        """Way in which the optimizer may be called: by bucket only if all bits stay the same.

        Args:
            is_sliced: Whether slices are stepped, or full tensors.
            counts: Whether the optimizer counts its calls.
        """
        together = self._run(Division(is_sliced=is_sliced))
        in_turn = self._run(Division(is_sliced=is_sliced, is_in_turn=True))
        if counts or together is None or in_turn is None or not torch.equal(together, in_turn):
            return StepKind.AT_ONCE
        return StepKind.BY_BUCKET

    def _run(self, division: Division) -> Tensor | None:
        same = self._undivided
        division = replace(
            division,
            num_steps=same.num_steps,
            has_states=same.has_states,
        )
        if division not in self._results:
            try:
                self._results[division] = self._run_ranks(division)
            except Exception as error:
                self._results[division] = error
        result = self._results[division]
        if isinstance(result, Exception):
            self.error = result
            return None
        return result

    def _run_ranks(self, division: Division) -> Tensor:
        """Values of all pieces, 1-D, in the same order for every division."""
        pieces = {}
        for rank in range(division.num_ranks):
            pieces.update(ProbeRun(self._optimizer, self._device, division, rank=rank).tensors)
        return torch.cat([_flat(pieces[place]) for place in sorted(pieces)])


# -------------------------------------------------------------------- reasons


def _find_inner(optimizer: Optimizer) -> str | None:
    """Describes the optimizer that `optimizer` wraps, with its attribute; None: no such one."""
    for name, value in vars(optimizer).items():
        held = value if isinstance(value, (list, tuple)) else [value]
        for inner in held:
            if isinstance(inner, Optimizer):
                return f"{type(inner).__name__}, in its attribute {name!r}"
    return None


def _advice(optimizer: Optimizer, run: Callable[..., ProbeRun], start: Tensor) -> str:
    """Text about the option that makes the step depend on all gradients; "" if none is found."""
    options = {key: value for group in optimizer.param_groups for key, value in group.items()}
    for key, value in options.items():
        if "norm" not in key and "clip" not in key:
            continue
        for off in (None, 0.0, False):
            with suppress(Exception):
                flow = Flow()
                traced = run(flow=flow, options={key: off})
                if _Dependence(run, flow, traced).find_crossing(start) is None:
                    bound = value if isinstance(value, (int, float)) else _CLIPPED_AT
                    return (
                        f". Its option {key}={value!r} makes it do so: pass {key}={off!r}, and to "
                        f"clip by that norm Trainer(gradient_clip_val={bound}) or "
                        f"engine.clip_grad_norm_({bound})"
                    )
    return ""


def _needs_states(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether `optimizer` can only step parameters that already have states."""
    for has_states in (False, True):
        with suppress(Exception):
            ProbeRun(optimizer, device, Division(num_steps=1, has_states=has_states))
            return has_states
    return False


def _check_closure(optimizer: Optimizer, device: torch.device, division: Division) -> None:
    """Refuses uses of the closure that cannot work: the engine calls it once, before the step."""
    if "closure" not in inspect.signature(type(optimizer).step).parameters:
        return
    run = partial(ProbeRun, optimizer, device, division)
    start = ProbeRun(optimizer, device, Division(num_steps=0)).values()
    flow = Flow()
    try:
        traced = run(flow=flow)
    except Exception:
        return  # the step has the parameter, but does not support closures
    if not traced.is_closure_first:
        raise refusal(
            optimizer,
            "it calls its closure more than once in a step, or after it has changed the "
            "parameters, but the gradients of all ranks are averaged once, before the step",
        )
    if _Dependence(run, flow, traced).find_crossing(start) is not None:
        raise refusal(optimizer, "it uses the loss of its closure, which differs between ranks")


def _why_not(optimizer: Optimizer, device: torch.device, error: Exception) -> str:
    """Error text for a step that fails without a closure."""
    name = type(optimizer).__name__
    failed = f"{type(error).__name__}: {error}"
    needs_closure = False
    if "closure" in inspect.signature(type(optimizer).step).parameters:
        with suppress(Exception):
            ProbeRun(optimizer, device, Division(has_closure=True))
            needs_closure = True
    if needs_closure:
        return (
            f"optimizer {name} cannot be stepped bucket by bucket after the backward: its step() "
            f"needs a closure, which evaluates the loss within the step ({failed}). Use an "
            "optimizer whose step() needs no closure, such as AdamW."
        )
    return (
        f"optimizer {name} cannot be stepped: step() of a copy with its settings and without "
        f"states failed on small tensors shaped like its parameters ({failed}). If it steps the "
        "module without lightning_zero and is elementwise, set assume_elementwise=True; otherwise "
        "use another optimizer, such as AdamW."
    )
