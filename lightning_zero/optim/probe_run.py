"""Steps a copy of an optimizer on small tensors.

[Note: Only a copy is stepped] The copy has no states of the run and shares no list, dict or number
with the user's optimizer. If it cannot step without states that it creates before its first step
(Adagrad's sums), these are created again as zeros of the same dtypes.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optim.clone import enter_training, fresh_copy, raw_step, settings_of

__all__ = ["ProbeRun", "Way", "are_same"]

_SCALES = (1.0, 30.0, 1.0)  # scale of the gradients, by step, so that thresholds take effect
_BOUND = {0: 1, 1: 40, 2: 24, 3: 8}  # bound of each size of a small tensor, by dimensions
_SIZES = (5, 7, 3, 2, 2, 2)  # sizes of another one


@dataclass(frozen=True)
class Way:
    """Way to step the small tensors.

    Attributes:
        num_steps: Number of steps.
        seed: Seed of the gradients.
        rng_seed: Seed of torch's random numbers, for steps that draw some.
        parity: Only every second tensor has a gradient, those of this parity; the others are empty.
        part: Only this part of each tensor is stepped: 0 or 1; 1-D. None: full tensors.
        is_in_turn: Step each tensor in its own call.
        loss: Loss that a closure returns; None: no closure is passed.
        has_states: Start with states, if the parameters have some.
        options: Options that replace those of the optimizer, by name.
    """

    num_steps: int = 3
    seed: int = 0
    rng_seed: int = 0
    parity: int | None = None
    part: int | None = None
    is_in_turn: bool = False
    loss: float | None = None
    has_states: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kind:
    """Kind of a small tensor.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        like: Parameter that it represents; None: no parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    like: nn.Parameter | None = field(default=None, compare=False)


class ProbeRun:
    """Steps of a copy of an optimizer; runs them in the constructor.

    Attributes:
        values: Values at the end, by number of the tensor: 1-D, float64, without empty ones.
        numbers: Data of the copy beside states, before the first step and after each step.
        has_other_states: Whether the copy has states of no parameter.
        drops_gradients: Whether a step set a gradient to None or zero.
        is_closure_first: Whether, in all steps, the closure was called at most once, before any
            value changed.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, way: Way) -> None:
        self._device = device
        self._way = way
        self._generator = torch.Generator().manual_seed(0)
        self._tensors: dict[int, nn.Parameter] = {}
        self._kinds: list[_Kind] = []
        self.drops_gradients = False
        self.is_closure_first = True
        # Compilation takes seconds for each shape and gives the same values.
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices=[]), torch.no_grad(), eager:
            torch.manual_seed(way.rng_seed)
            self._copy = _fresh_copy(optimizer, way.options)
            self._fill_groups(optimizer)
            enter_training(self._copy)
            self._generator.manual_seed(1 + way.seed)
            self.numbers = [_numbers_of(self._copy)]
            for number in range(way.num_steps):
                self._step(_SCALES[number % len(_SCALES)])
                self.numbers.append(_numbers_of(self._copy))
        self.values = {n: t.detach().reshape(-1).double() for n, t in self._tensors.items()}
        self.has_other_states = any(not isinstance(key, Tensor) for key in self._copy.state)

    def equals(self, other: ProbeRun, *, tolerance: float = 0.0) -> bool:
        """Whether both have the same values of the tensors that both have.

        `tolerance` is relative to each value, and 1/100 of it to the largest one.
        """
        for number in self.values.keys() & other.values.keys():
            own, second = self.values[number], other.values[number]
            atol = tolerance / 100 * max(1.0, float(second.abs().max())) if tolerance else 0.0
            if not torch.allclose(own, second, rtol=tolerance, atol=atol, equal_nan=True):
                return False
        return True

    def joined(self, other: ProbeRun) -> ProbeRun:
        """This run, with both parts of every tensor."""
        for number, values in other.values.items():
            self.values[number] = torch.cat([self.values[number], values])
        return self

    def _fill_groups(self, optimizer: Optimizer) -> None:
        seen: set[tuple[_Kind, str]] = set()
        for group, source in zip(self._copy.param_groups, optimizer.param_groups, strict=True):
            for kind in _kinds_of(source, seen):
                number = len(self._kinds)
                self._kinds.append(kind)
                values = self._part_of(self._draw(kind))
                is_mine = self._way.parity in (None, number % 2)
                tensor = nn.Parameter(values if is_mine else values.new_empty(0))
                group["params"].append(tensor)
                if is_mine:
                    self._tensors[number] = tensor
                    self._make_initial_state(optimizer, kind, tensor)

    def _make_initial_state(self, optimizer: Optimizer, kind: _Kind, tensor: nn.Parameter) -> None:
        """Creates the initial states of a small tensor, if its parameter has states."""
        state = optimizer.state.get(kind.like, {}) if kind.like is not None else {}
        if kind.like is None or not self._way.has_states:
            return
        for key, value in state.items():
            if not _is_shaped(optimizer, key, kind.like):
                self._copy.state[tensor][key] = copy.deepcopy(value)
                continue
            dtype = tensor.dtype if value.dtype == kind.like.dtype else value.dtype
            self._copy.state[tensor][key] = torch.zeros_like(tensor, dtype=dtype).detach()

    def _step(self, scale: float) -> None:
        for number, kind in enumerate(self._kinds):
            values = self._part_of(self._draw(kind) * scale)
            if number in self._tensors:
                self._tensors[number].grad = values
        if self._way.is_in_turn:
            self._step_in_turn()
        elif self._way.loss is not None:
            raw_step(self._copy, closure=self._closure(self._way.loss))
        else:
            raw_step(self._copy)
            for tensor in self._tensors.values():
                self.drops_gradients |= tensor.grad is None or not tensor.grad.any()

    def _closure(self, loss: float) -> Callable[[], Tensor]:
        before = {number: tensor.detach().clone() for number, tensor in self._tensors.items()}
        calls: list[None] = []

        def closure() -> Tensor:
            calls.append(None)
            is_same = all(torch.equal(before[n], t.detach()) for n, t in self._tensors.items())
            self.is_closure_first &= len(calls) == 1 and is_same
            return torch.tensor(loss, device=self._device)

        return closure

    def _step_in_turn(self) -> None:
        groups = self._copy.param_groups
        kept = [group["params"] for group in groups]
        for tensor in self._tensors.values():
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = [p for p in parameters if p is tensor]
            raw_step(self._copy)
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
        for tensor in self._tensors.values():
            tensor.grad = None
        raw_step(self._copy)  # without gradients, it must not do anything

    def _draw(self, kind: _Kind) -> Tensor:
        drawn = torch.randn(kind.shape, generator=self._generator)
        return drawn.to(self._device, kind.dtype)

    def _part_of(self, full: Tensor) -> Tensor:
        if self._way.part is None:
            return full
        flat = full.reshape(-1)
        end = flat.numel() // 3 | 1  # in the middle of a row
        return flat[:end].clone() if self._way.part == 0 else flat[end:].clone()


def _is_shaped(optimizer: Optimizer, key: str, parameter: nn.Parameter) -> bool:
    """Whether state `key` has the shape of `parameter`.

    For a 0-dim parameter, the states of other parameters decide.
    """
    known: Any = optimizer.state
    states = [known[parameter]]
    if not parameter.dim():
        states = [known[p] for p in known if isinstance(p, Tensor) and p.dim()]
    values = [state.get(key) for state in states]
    return any(isinstance(value, Tensor) and value.dim() > 0 for value in values)


def _fresh_copy(optimizer: Optimizer, options: Mapping[str, Any]) -> Optimizer:
    """A copy without parameters; see [Note: Only a copy is stepped]."""
    groups = []
    for group in optimizer.param_groups:
        settings = copy.deepcopy(settings_of(group))
        if "lr" in settings:  # a warm-up may start at zero, where nothing moves
            lr = settings["lr"]
            settings["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
        groups.append({**settings, "params": []})
    made = fresh_copy(optimizer, groups)
    for settings in (*groups, vars(made).get("defaults", {})):
        settings.update({key: value for key, value in options.items() if key in settings})
    others = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    made.state.update(copy.deepcopy(others))
    return made


def _numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers of the optimizer beside the states of its parameters, by description for errors."""
    known: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                known.setdefault(f"parameter group number {key}", []).append(_leaves(value))
    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state", "defaults") and not key.startswith("_optimizer_"):
            known[f"attribute {key}"] = _leaves(value)
    others = {str(k): v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    known["a state of no parameter"] = _leaves(others)
    return known


def _leaves(value: Any) -> list[Any]:
    """Copies of the numbers in `value`; of objects that may count, their pickles."""
    leaves: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, (nn.Parameter, nn.Module, str, type)) or callable(leaf):
            continue
        if isinstance(leaf, Tensor):
            leaves.append(leaf.detach().clone())
        elif isinstance(leaf, (bool, int, float, complex)):
            leaves.append(leaf)
        elif leaf is not None:
            with suppress(Exception):
                leaves.append(pickle.dumps(leaf))
    return leaves


def are_same(value: Any, other: Any) -> bool:
    """Whether two trees of numbers are equal, where NaN equals NaN."""
    ones, others = tree_leaves(value), tree_leaves(other)
    return len(ones) == len(others) and all(map(_is_same, ones, others))


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        is_same = value.shape == other.shape and value.dtype is other.dtype
        return is_same and torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)
    return bool(value == other or (value != value and other != other))


def _kinds_of(group: Mapping[str, Any], seen: set[tuple[_Kind, str]]) -> list[_Kind]:
    """Kinds of small tensors of a group: two for each number of dimensions and sizes of one.

    Args:
        group: A parameter group.
        seen: Larger kinds so far, with the settings of their groups; new ones are added. Groups
            that differ only in numbers, such as learning rates by layer, share them.
    """
    settings = repr({k: v for k, v in group.items() if k != "params" and not isinstance(v, float)})
    kinds: dict[_Kind, None] = {}
    for parameter in group["params"]:
        pattern = tuple(min(size, 2) for size in parameter.shape)
        if not math.prod(pattern):
            continue  # nothing to step
        dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        sizes = _SIZES + (2,) * len(pattern)
        small = tuple(n if size > 1 else 1 for n, size in zip(sizes, pattern, strict=False))
        kinds.setdefault(_Kind(small, dtype, parameter))
        bound = _BOUND.get(len(pattern), 4)
        larger = _Kind(tuple(min(size, bound) for size in parameter.shape), dtype, parameter)
        if (larger, settings) not in seen:
            seen.add((larger, settings))
            kinds.setdefault(larger)
    return list(kinds) or [_Kind(_SIZES[:2])]
