"""Finds out what an optimizer looks at, and how it may be called, by stepping small tensors.

It may look at every element by itself (Adam), at every tensor by itself (Muon, Adafactor, LAMB), or
at all tensors together (a norm over all gradients), in which case it cannot be sharded.

[Note: Data flow decides] Values of a few steps prove little: a threshold may never be reached, a
norm may be cut off, an estimate may still be zero. So a step is followed (flow.py) and the labels
of parameters and states decide, whatever the values:

    all elements depend on themselves alone             every element by itself
    on others of the same parameter                     every tensor by itself
    on other parameters, on random numbers, or a        refused, by that reason
    number of a group or of the optimizer on gradients

A number that Python has read may go anywhere. Its own parameter is taken to depend on it; that
others do not is shown by runs in which the numbers of every second parameter are altered: larger,
smaller, the other truth value. The others must then keep every bit.

The same steps on divided tensors are compared with those on undivided ones beside that. This finds
what depends on shapes alone, and what fails on empty tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.optim.flow import RANDOM, Flow, element_labels, owner_of, united
from lightning_zero.optim.probe_run import Division, ProbeRun
from lightning_zero.tensors.composite import plain_tensors

__all__ = ["CannotShardError", "ProbeResult", "StepKind", "find_full_optimizers", "probe"]

_NUM_STEPS = (3, 12)  # of a run; more where nothing moves in the first ones, as in a warm-up
_MAX_FAILED_READS = 8
# Of numbers that are altered, step by step; the root of a negative one may fail.
_FACTORS = ((1e45, 1e-45, -1e45), (1e45, 1e-45, 1e45), (1e3, 1e-3, 1e3))
_CLIPPED_AT = 1.0  # in an advice, where an option has no number


class CannotShardError(ValueError):
    """An optimizer that must see all tensors at once."""


class StepKind(Enum):
    """How an optimizer may be called."""

    BY_BUCKET = "each bucket by itself"
    AT_ONCE = "all slices in one call"
    AROUND_CLOSURE = "all slices in one call, with a closure inside"


@dataclass(frozen=True)
class ProbeResult:
    """What a probe has found out."""

    kind: StepKind
    is_elementwise: bool  # it treats every element by itself; else every tensor

    def __and__(self, other: ProbeResult) -> ProbeResult:
        """What holds for both."""
        kind = self.kind if self.kind is other.kind else StepKind.AT_ONCE
        return ProbeResult(kind, self.is_elementwise and other.is_elementwise)


def probe(optimizer: Optimizer, device: torch.device) -> ProbeResult:
    """Finds out, on small tensors, what an optimizer looks at and how it may be called.

    Copies of the optimizer, with its settings but none of its states, are stepped.

    Raises:
        CannotShardError: It looks at all tensors together.
        ValueError: Its step needs a closure, or cannot be tried.
    """
    name = type(optimizer).__name__
    inner = _find_inner(optimizer)
    if inner is not None:
        raise _refusal(
            name,
            f"it wraps another optimizer ({inner}), which steps the parameters in a way of its own "
            f"that is not seen from {name}",
        )
    try:
        undivided, start, flow, followed = _follow(optimizer, device)
    except CannotShardError:
        raise
    except Exception as error:
        raise ValueError(_why_not(optimizer, device, error)) from error
    run = partial(ProbeRun, optimizer, device, undivided)
    dependence = _Dependence(run, flow, followed)
    reason = dependence.find_crossing(start)
    if reason is not None:
        raise _refusal(name, reason + _advice(optimizer, run, start))
    if not undivided.is_around_closure:
        _check_closure(optimizer, device, replace(undivided, has_closure=True))
    counts = _changes(followed.numbers[1:]) or any(
        not isinstance(key, Tensor) for key in followed.clone.state
    )
    tried = _DividedRuns(optimizer, device, undivided)
    # Slices of one tensor may be rounded in other places than the tensor.
    is_elementwise = dependence.is_elementwise and all(
        tried.agrees(Division(is_sliced=True, num_ranks=number), 1e-4) for number in (2, 1)
    )
    if is_elementwise:
        return ProbeResult(tried.kind(is_sliced=True, counts=counts), is_elementwise=True)
    tried.error = None
    if tried.agrees(Division(num_ranks=2), 1e-6):
        return ProbeResult(tried.kind(is_sliced=False, counts=counts), is_elementwise=False)
    if tried.error is not None:
        raise _refusal(
            name,
            "it does not step some of its tensors where the others are empty and have no gradients "
            f"({type(tried.error).__name__}: {tried.error})",
        )
    raise _refusal(
        name,
        "it looks at all tensors together: stepping some of them by themselves gives other values "
        "than stepping all in one call, as a norm over all gradients does",
    )


def _follow(optimizer: Optimizer, device: torch.device) -> tuple[Division, Tensor, Flow, ProbeRun]:
    """Steps undivided tensors and follows them, until one of them moves.

    Returns:
        How they were stepped, their values before it, the flow, and the run.
    """
    has_states = _needs_states(optimizer, device)
    undivided = Division(has_states=has_states)
    start = ProbeRun(optimizer, device, Division(num_steps=0)).values()
    needs_closure: TypeError | None = None
    for num_steps in _NUM_STEPS:
        undivided = replace(undivided, num_steps=num_steps)
        flow = Flow()
        try:
            followed = ProbeRun(optimizer, device, undivided, flow=flow)
        except TypeError as error:  # it may want to call the closure itself
            undivided = replace(undivided, is_around_closure=True)
            try:
                followed = ProbeRun(optimizer, device, undivided, flow=(flow := Flow()))
            except Exception:
                raise error from None
            needs_closure = error
        is_moved = not torch.equal(start, followed.values())
        if is_moved or any(flow.is_written(tensor) for tensor in followed.tensors.values()):
            return undivided, start, flow, followed
    if needs_closure is not None:
        raise needs_closure
    raise _refusal(
        type(optimizer).__name__,
        f"a copy of it does not move the parameters in its groups in {num_steps} steps",
    )


def find_full_optimizers(optimizers: Sequence[Optimizer], config: ZeroConfig) -> list[int]:
    """Which optimizers must step whole tensors; of one that cannot be tried nothing is known."""
    found: list[int] = []
    for index, optimizer in enumerate([] if config.assume_elementwise else optimizers):
        with suppress(ValueError):
            if not probe(optimizer, torch.device("cpu")).is_elementwise:
                found.append(index)
    return found


# -------------------------------------------------------------------- by data flow


class _Dependence:
    """What the parameters of a run that has been followed depend on. See [Note: Data flow decides].

    Args:
        run: Makes further runs.
        flow: Followed `followed`.
        followed: A run on undivided tensors.
    """

    def __init__(self, run: Callable[..., ProbeRun], flow: Flow, followed: ProbeRun) -> None:
        self._run = run
        self._flow = flow
        self._followed = followed
        self._tensors = {number: t for (number, _), t in followed.tensors.items()}

    @property
    def is_elementwise(self) -> bool:
        """Every element of all parameters and states depends on no other. Nothing may cross."""
        return all(
            (number not in self._flow.owners_read or tensor.numel() == 1)
            and all(self._is_of_elements(number, value) for value in self._values_of(number))
            for number, tensor in self._tensors.items()
        )

    def find_crossing(self, start: Tensor) -> str | None:
        """Why parameters cannot be stepped apart from each other; None: they can.

        `start`: Values of all parameters before the first step.
        """
        if self._flow.untraceable is not None:
            return f"its step uses {self._flow.untraceable}, behind which it cannot be followed"
        begin = 0
        for tensor in self._tensors.values():
            old, begin = start[begin : begin + tensor.numel()], begin + tensor.numel()
            if not self._flow.is_written(tensor) and not torch.equal(old, _flat(tensor)):
                return "its step runs compiled code that is no operation of torch"
        return self._find_flow() or self._find_number()

    def _find_flow(self) -> str | None:
        """By labels."""
        for words, values in self._followed.last_values().items():
            if self._flow.label_of(values):
                return f"{words} depends on the gradients of its parameters"
        labels = {n: self._flow.label_of(self._values_of(n)) for n in self._tensors}
        if RANDOM in labels.values():
            return (
                "it draws random numbers, of which each rank would draw others than one process "
                "that steps all parameters"
            )
        if any(label and owner_of(label) != number for number, label in labels.items()):
            return "the update of each parameter depends on the gradients of other parameters"
        return None

    def _find_number(self) -> str | None:
        """By altering the numbers that Python has read."""
        for parity in (0, 1) if self._flow.owners_read else ():
            altered = self._alter(parity)
            if altered is None:
                return "its step uses numbers of gradients in a way that cannot be followed"
            numbers = zip(self._followed.numbers, altered.numbers, strict=True)
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
        """A run in which numbers of every second parameter are altered; None: it always fails."""
        for factors in _FACTORS:
            alteration = _Alteration(parity, factors)
            for _ in range(_MAX_FAILED_READS):
                try:
                    return self._run(flow=Flow(alteration))
                except Exception:
                    alteration.spare_last()
        return None

    def _values_of(self, number: int) -> list[Any]:
        return _values(self._followed, number)

    def _is_of_elements(self, number: int, value: Any) -> bool:
        """Whether nothing has flowed into each element but what is at its place."""
        tensor = self._tensors[number]
        for part in plain_tensors(value):
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
    """A parameter, and all that its state holds."""
    tensor = run.tensors[number, 0]
    return [tensor, *tree_leaves(run.clone.state.get(tensor, {}))]


class _Alteration:
    """Alters numbers of every second owner, and of several owners, beyond any bound that they have.

    Args:
        parity: 0 or 1: of the numbers of the owners.
        factors: Of numbers that are read, by step.
    """

    def __init__(self, parity: int, factors: Sequence[float]) -> None:
        self._parity = parity
        self._factors = factors
        self._num_read = 0
        self._last = -1  # that was altered, by order of reading
        self._spared: set[int] = set()  # by the same

    def spare_last(self) -> None:
        """The step has failed: begins anew, without the last number that was altered."""
        self._spared.add(self._last)
        self._num_read, self._last = 0, -1

    def __call__(self, label: int, number: Any, num_steps: int) -> Any:
        """The number in place of `number`, in the step that is the `num_steps`th."""
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
    """Whether a step counts or remembers anything outside of the states of its parameters."""
    return any(_differing(one, other) for one, other in pairwise(records))


def _is_same(one: Any, other: Any) -> bool:
    """To the last bit."""
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
        self.error: Exception | None = None  # of the last run that failed

    def agrees(self, division: Division, tolerance: float) -> bool:
        """Whether a division gives the same values, relative to each and to the largest."""
        undivided, values = self._run(self._undivided), self._run(division)
        if values is None or undivided is None:
            return False
        atol = tolerance / 100 * max(1.0, float(undivided.abs().max()))
        return torch.allclose(undivided, values, rtol=tolerance, atol=atol)

    def kind(self, *, is_sliced: bool, counts: bool) -> StepKind:
        """Whether pieces may be stepped one after another: only where the very bits agree.

        `counts`: The optimizer counts its calls.
        """
        if self._undivided.is_around_closure:
            return StepKind.AROUND_CLOSURE
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
            is_around_closure=same.is_around_closure,
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
    """The optimizer that another one wraps, with the attribute that holds it."""
    for name, value in vars(optimizer).items():
        held = value if isinstance(value, (list, tuple)) else [value]
        for inner in held:
            if isinstance(inner, Optimizer):
                return f"{type(inner).__name__}, in its attribute {name!r}"
    return None


def _advice(optimizer: Optimizer, run: Callable[..., ProbeRun], start: Tensor) -> str:
    """Which option of the optimizer's makes it look at all gradients, for an error's text."""
    options = {key: value for group in optimizer.param_groups for key, value in group.items()}
    for key, value in options.items():
        if "norm" not in key and "clip" not in key:
            continue
        for off in (None, 0.0, False):
            with suppress(Exception):
                flow = Flow()
                followed = run(flow=flow, options={key: off})
                if _Dependence(run, flow, followed).find_crossing(start) is None:
                    bound = value if isinstance(value, (int, float)) else _CLIPPED_AT
                    return (
                        f". Its option {key}={value!r} makes it do so: pass {key}={off!r}, and to "
                        f"clip by that norm Trainer(gradient_clip_val={bound}) or "
                        f"engine.clip_grad_norm_({bound})"
                    )
    return ""


def _needs_states(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether it only steps parameters that have states already."""
    for has_states in (False, True):
        with suppress(Exception):
            ProbeRun(optimizer, device, Division(num_steps=1, has_states=has_states))
            return has_states
    return False


def _check_closure(optimizer: Optimizer, device: torch.device, division: Division) -> None:
    """Refuses what a closure leads to: it has been called before the step, and once."""
    if "closure" not in inspect.signature(type(optimizer).step).parameters:
        return
    name = type(optimizer).__name__
    run = partial(ProbeRun, optimizer, device, division)
    start = ProbeRun(optimizer, device, Division(num_steps=0)).values()
    flow = Flow()
    try:
        followed = run(flow=flow)
    except Exception:
        return  # it takes none, though it has a parameter for it
    if not followed.is_closure_first:
        raise _refusal(
            name,
            "it calls its closure more than once in a step, or after it has moved the parameters, "
            "and the gradients of all ranks are averaged once, before the step",
        )
    if _Dependence(run, flow, followed).find_crossing(start) is not None:
        raise _refusal(name, "it uses the loss that its closure returns, another on every rank")


def _why_not(optimizer: Optimizer, device: torch.device, error: Exception) -> str:
    """The text for a step that fails without a closure."""
    name = type(optimizer).__name__
    failed = f"{type(error).__name__}: {error}"
    needs_closure = False
    if "closure" in inspect.signature(type(optimizer).step).parameters:
        with suppress(Exception):
            ProbeRun(optimizer, device, Division(has_closure=True))
            needs_closure = True
    if needs_closure:
        return (
            f"optimizer {name} cannot be stepped after the backward, bucket by bucket: its step() "
            f"needs a closure, which evaluates the loss within the step ({failed}). Use an "
            "optimizer whose step() needs no closure, such as AdamW."
        )
    return (
        f"optimizer {name} cannot be stepped: step() of a copy of it, with its settings and "
        f"without states, failed on small tensors that are like its parameters ({failed}). If it "
        "steps the module without lightning_zero and treats every element by itself, promise that "
        "by assume_elementwise=True; else use another optimizer, such as AdamW."
    )


def _refusal(name: str, reason: str) -> CannotShardError:
    return CannotShardError(
        f"optimizer {name} cannot be sharded: {reason}. Sharding it would change the training; use "
        "stage 0, or an optimizer that treats every element or every tensor by itself, such as "
        "AdamW, Muon or Adafactor; or promise by assume_elementwise=True that it treats every "
        "element by itself."
    )
