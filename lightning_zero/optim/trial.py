"""Finds out what an optimizer looks at, and how it may be called: by trying it on toy tensors.

[Note: Shapes of toys] What an optimizer does to a tensor may depend on its dimensions (Adafactor,
Muon), on sizes of one, and on whether it is large enough (Adafactor's variants factor from 128 on).
So each group has a toy for every such pattern among its parameters, as large as the largest of
these up to a bound, and a small one beside it; groups that differ in numbers alone, as in rates by
layer, share the large ones.

[Note: Blocks] Low-bit optimizers keep a scale for each block of elements, often only where a tensor
has at least 4096 of them and is a multiple of the block (torchao, bitsandbytes). So where a
parameter has as many, its toy is a multiple of 4096: all of it is quantised, whatever block of a
power of two up to that size is used. It is cut at an odd element, where no block ends.

It may look at every element by itself (Adam), at every tensor by itself (Muon, Adafactor, LAMB), or
at all tensors together (a norm over all gradients), in which case it cannot be sharded.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.optim.clone import copy_of, enter_training, raw_step, settings_of

__all__ = ["CannotShardError", "Findings", "StepKind", "find_whole_tensors", "probe"]

_Shape = tuple[int, ...]

_BOUNDS = {0: 1, 1: 136, 2: 160, 3: 40, 4: 16}  # of each size, by number of dimensions
_BOUND = 6  # of each size, beyond
_BLOCK_NUMEL = 4096  # see [Note: Blocks]
_BLOCKS = 4  # in a toy, where the parameter has as many
_SMALL = (5, 7, 3, 2, 2, 2)
_SCALES = (1.0, 30.0, 1.0)  # of the gradients of each step: thresholds act in some
_MANY_STEPS = 9


@dataclass(frozen=True)
class _Trial:
    """How toys are stepped.

    Attributes:
        is_cut: In two slices each, 1-D; else whole.
        num_ranks: Each rank steps its pieces with a clone of its own: one slice of each toy, or
            every second toy; the other toys are empty there and have no gradients.
        is_in_turn: One call for each piece.
        has_closure: The step is given a closure, which brings gradients that depend on where it
            finds the toys.
        num_steps: Three, or more for an optimizer that begins to move parameters later.
    """

    is_cut: bool = False
    num_ranks: int = 1
    is_in_turn: bool = False
    has_closure: bool = False
    num_steps: int = len(_SCALES)


def _run_trial(optimizer: Optimizer, device: torch.device, trial: _Trial) -> Tensor:
    """Values of all toys after the steps of `trial`, 1-D, in the same order for every trial."""
    toys: dict[tuple[int, int], nn.Parameter] = {}
    for rank in range(trial.num_ranks):
        toys.update(_Run(optimizer, device, trial, rank).toys)
    return torch.cat([toys[place].detach().reshape(-1) for place in sorted(toys)])


class _Run:
    """One rank's part of a trial."""

    def __init__(
        self, optimizer: Optimizer, device: torch.device, trial: _Trial, rank: int
    ) -> None:
        self._trial = trial
        self._rank = rank
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self._shapes: list[_Shape] = []  # of the toys, in order
        self.toys: dict[tuple[int, int], nn.Parameter] = {}  # by toy and piece: this rank's
        # Compiling takes seconds for each shape and gives the same values.
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices=[], enabled=True), torch.no_grad(), eager:
            groups = [{**_trial_settings(g), "params": []} for g in optimizer.param_groups]
            self._clone = copy_of(optimizer, groups)
            self._fill_groups(optimizer)
            enter_training(self._clone)
            for number in range(trial.num_steps):
                self._step(_SCALES[number % len(_SCALES)])

    def _fill_groups(self, optimizer: Optimizer) -> None:
        seen: set[tuple[_Shape, str]] = set()
        for group, source in zip(self._clone.param_groups, optimizer.param_groups, strict=True):
            for shape, like in _shapes_like(source, seen):
                number = len(self._shapes)
                self._shapes.append(shape)
                for piece, values in enumerate(self._cut(self._draw(shape))):
                    is_mine = self._is_mine(number, piece)
                    if not is_mine and self._trial.is_cut:
                        continue
                    toy = nn.Parameter(values if is_mine else values.new_empty(0))
                    group["params"].append(toy)
                    if is_mine:
                        self.toys[number, piece] = toy
                        _copy_initial_state(optimizer, like, self._clone, toy)

    def _step(self, scale: float) -> None:
        for number, shape in enumerate(self._shapes):
            for piece, values in enumerate(self._cut(self._draw(shape) * scale)):
                if self._is_mine(number, piece):
                    self.toys[number, piece].grad = values
        if self._trial.has_closure:
            self._step_around_closure()
        elif self._trial.is_in_turn:
            self._step_in_turn()
        else:
            raw_step(self._clone)

    def _step_around_closure(self) -> None:
        grads = {place: toy.grad for place, toy in self.toys.items()}
        for toy in self.toys.values():  # whoever looks at gradients before the closure is found out
            toy.grad = torch.full_like(toy, math.nan)

        def closure() -> float:
            for place, toy in self.toys.items():
                grad = grads[place]
                assert grad is not None
                toy.grad = grad + 0.5 * toy.detach()
            return 0.0

        raw_step(self._clone, closure)

    def _step_in_turn(self) -> None:
        groups = self._clone.param_groups
        kept = [group["params"] for group in groups]
        for toy in self.toys.values():
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = [p for p in parameters if p is toy]
            raw_step(self._clone)
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
        for toy in self.toys.values():
            toy.grad = None
        raw_step(self._clone)  # the body after the hook finds no gradients and must do nothing

    def _draw(self, shape: _Shape) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, torch.float32)

    def _cut(self, whole: Tensor) -> list[Tensor]:
        if not self._trial.is_cut:
            return [whole]
        flat = whole.reshape(-1)
        cut = flat.numel() // 3 | 1  # in the middle of a row, and of a block
        return [flat[:cut].clone(), flat[cut:].clone()]

    def _is_mine(self, number: int, piece: int) -> bool:
        turn = piece if self._trial.is_cut else number
        return turn % self._trial.num_ranks == self._rank


def _shapes_like(
    group: Mapping[str, Any], seen: set[tuple[_Shape, str]]
) -> list[tuple[_Shape, nn.Parameter | None]]:
    """Shapes of the toys of a group, each with the parameter it stands for.

    `seen`: the large toys so far, with the settings of their groups.
    """
    settings = repr({k: v for k, v in group.items() if k != "params" and not isinstance(v, float)})
    largest: dict[_Shape, nn.Parameter] = {}
    for parameter in group["params"]:
        pattern = tuple(min(size, 2) for size in parameter.shape)
        if pattern not in largest or parameter.numel() > largest[pattern].numel():
            largest[pattern] = parameter
    shapes: list[tuple[_Shape, nn.Parameter | None]] = []
    for pattern, parameter in largest.items():
        if not math.prod(pattern):
            continue  # nothing to step
        large = _large_shape(tuple(parameter.shape))
        if (large, settings) not in seen:
            shapes.append((large, parameter))
            seen.add((large, settings))
        sizes = _SMALL + (2,) * len(pattern)
        small = tuple(n if size > 1 else 1 for n, size in zip(sizes, pattern, strict=False))
        shapes.append((small, parameter))
    return shapes or [(_SMALL[:2], None)]


def _large_shape(shape: _Shape) -> _Shape:
    """The shape of a toy that behaves as a parameter of `shape`; see [Note: Blocks]."""
    bound = _BOUNDS.get(len(shape), _BOUND)
    if math.prod(shape) < _BLOCK_NUMEL:
        return tuple(min(size, bound) for size in shape)
    # The longest size makes a multiple of the block of what is a power of two without it.
    sizes = [1 << min(size, bound).bit_length() - 1 for size in shape]
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    sizes[longest] = 1
    others = math.prod(sizes)
    step = max(1, _BLOCK_NUMEL // others)
    wanted = min(shape[longest], max(bound, _BLOCKS * _BLOCK_NUMEL // others))
    sizes[longest] = max(step, wanted // step * step)
    return tuple(sizes)


def _trial_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = copy.deepcopy(settings_of(group))
    if "lr" in settings:  # a warm-up may start at zero, which would prove nothing
        lr = settings["lr"]
        settings["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
    return settings


def _copy_initial_state(
    optimizer: Optimizer, like: nn.Parameter | None, clone: Optimizer, toy: nn.Parameter
) -> None:
    """Gives a toy the state that the optimizer was born with, shaped like it.

    States of other shapes were made in a step, and are left to be made again.
    """
    if like is None or like not in optimizer.state:
        return
    state: dict[str, Any] = optimizer.state[like]
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if any(value.dim() and value.shape != like.shape for value in tensors.values()):
        return
    for key, value in state.items():
        if key in tensors and value.shape == like.shape and key != "step":
            first = value[(0,) * value.dim()]  # of what may be one number for all
            clone.state[toy][key] = first.expand(toy.shape).clone()
        else:
            clone.state[toy][key] = copy.deepcopy(value)


class CannotShardError(ValueError):
    """An optimizer that must see all tensors at once."""


class StepKind(Enum):
    """How an optimizer may be called."""

    BY_BUCKET = "each bucket by itself"
    AT_ONCE = "all slices in one call"
    AROUND_CLOSURE = "all slices in one call, with a closure inside"


@dataclass(frozen=True)
class Findings:
    """What a probe has found out."""

    kind: StepKind
    is_elementwise: bool  # it treats every element by itself; else every tensor

    def __and__(self, other: Findings) -> Findings:
        """What holds for both."""
        kind = self.kind if self.kind is other.kind else StepKind.AT_ONCE
        return Findings(kind, self.is_elementwise and other.is_elementwise)


def probe(optimizer: Optimizer, device: torch.device) -> Findings:
    """Finds out, on toy parameters, what an optimizer looks at and how it may be called.

    Clones of the optimizer, with its settings but none of its state, step toys: all in one call;
    then divided as ranks would divide them, in slices and in whole tensors, and piece after piece.
    Equal results prove that the division does not matter.

    Raises:
        CannotShardError: It looks at all tensors together.
        ValueError: Its step needs a closure, or cannot be tried.
    """
    name = type(optimizer).__name__
    run = partial(_run_trial, optimizer, device)
    plain = _Trial()
    try:
        start = run(_Trial(num_steps=0))
        try:
            whole = run(plain)
        except TypeError:  # it needs a closure
            plain = _Trial(has_closure=True, num_steps=_MANY_STEPS)
            whole = run(plain)
            if torch.equal(start, whole):
                raise
    except Exception as error:
        raise ValueError(
            f"optimizer {name} cannot be stepped after the backward, bucket by bucket: its step "
            f"failed on a probe with {type(error).__name__}: {error}. Use an optimizer whose "
            "step() needs no closure and takes dense gradients, such as AdamW."
        ) from error
    if torch.equal(start, whole):  # RAdamScheduleFree collects variances in its first steps
        plain = dataclasses.replace(plain, num_steps=_MANY_STEPS)
        whole = run(plain)
    if torch.equal(start, whole):
        raise _refusal(name, "a clone of it does not move the parameters in its groups")
    tried = _Tried(run, plain, whole)
    # Slices of one tensor may be rounded in other places than the tensor.
    if all(tried.agrees(_Trial(is_cut=True, num_ranks=number), 1e-4) for number in (2, 1)):
        return Findings(tried.kind(is_cut=True), is_elementwise=True)
    tried.error = None
    if tried.agrees(_Trial(num_ranks=2), 1e-6):
        return Findings(tried.kind(is_cut=False), is_elementwise=False)
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


def find_whole_tensors(optimizers: Sequence[Optimizer], config: ZeroConfig) -> list[int]:
    """Which optimizers must step whole tensors; of one that cannot be tried nothing is known."""
    found: list[int] = []
    for index, optimizer in enumerate([] if config.assume_elementwise else optimizers):
        with suppress(ValueError):
            if not probe(optimizer, torch.device("cpu")).is_elementwise:
                found.append(index)
    return found


class _Tried:
    """Trials of one optimizer, compared with stepping whole toys in one call."""

    def __init__(self, run: Callable[[_Trial], Tensor], plain: _Trial, whole: Tensor) -> None:
        self._run_anew = run
        self._plain = plain
        self._whole = whole
        self._results: dict[_Trial, Tensor | Exception] = {plain: whole}
        self.error: Exception | None = None  # of the last trial that failed

    def agrees(self, trial: _Trial, tolerance: float) -> bool:
        """Whether a trial gives the same values, relative to each and to the largest."""
        values = self._run(trial)
        if values is None:
            return False
        atol = tolerance / 100 * max(1.0, float(self._whole.abs().max()))
        return torch.allclose(self._whole, values, rtol=tolerance, atol=atol)

    def kind(self, *, is_cut: bool) -> StepKind:
        """Whether pieces may be stepped one after another: only where the very bits agree."""
        if self._plain.has_closure:
            return StepKind.AROUND_CLOSURE
        together = self._run(_Trial(is_cut=is_cut))
        in_turn = self._run(_Trial(is_cut=is_cut, is_in_turn=True))
        if together is None or in_turn is None or not torch.equal(together, in_turn):
            return StepKind.AT_ONCE
        return StepKind.BY_BUCKET

    def _run(self, trial: _Trial) -> Tensor | None:
        plain = self._plain
        trial = dataclasses.replace(trial, has_closure=plain.has_closure, num_steps=plain.num_steps)
        if trial not in self._results:
            try:
                self._results[trial] = self._run_anew(trial)
            except Exception as error:
                self._results[trial] = error
        result = self._results[trial]
        if isinstance(result, Exception):
            self.error = result
            return None
        return result


def _refusal(name: str, reason: str) -> CannotShardError:
    return CannotShardError(
        f"optimizer {name} cannot be sharded: {reason}. Sharding it would change the training; use "
        "stage 0, or an optimizer that treats every element or every tensor by itself, such as "
        "AdamW, Muon or Adafactor; or promise by assume_elementwise=True that it treats every "
        "element by itself."
    )
