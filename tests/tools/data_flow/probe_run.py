"""Steps a copy of an optimizer on small tensors, undivided or divided as over ranks.

[Note: Shapes of probe tensors] The step of a tensor may depend on its number of dimensions
(Adafactor, Muon), on sizes of one, and on a size threshold (variants of Adafactor factor from 128
on). So each group gets, for every such pattern among its parameters, a probe tensor as large as the
largest parameter up to a bound, and a small probe tensor. Groups that differ only in numbers, such
as learning rates by layer, share the large ones.

[Note: Blocks] Low-bit optimizers keep a scale for each block of elements, often only if a tensor
has at least 4096 elements and is a multiple of the block (torchao, bitsandbytes). So the probe
tensor of a parameter with at least 4096 elements has a multiple of 4096: all of it is quantized for
every block size that is a power of two up to 4096. It is divided at an odd element, where no block
ends.

[Note: Only a copy is stepped] The copy has no states of the run and shares no list, dict or number
with the user's optimizer. If it cannot step without states that it creates before its first step
(Adagrad's sums), these are created again as zeros of the same dtypes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_zero.optim.clone import copy_of, enter_training, raw_step, settings_of
from tests.tools.data_flow.flow import Flow

__all__ = ["LOSS", "Division", "ProbeRun", "numbers_of"]

_Shape = tuple[int, ...]

LOSS = 1 << 20  # owner number of the loss in a flow

_BOUNDS = {0: 1, 1: 136, 2: 160, 3: 40, 4: 16}  # bounds of each size, by number of dimensions
_BOUND = 6  # bound of each size for more dimensions
_BLOCK_NUMEL = 4096  # see [Note: Blocks]
_BLOCKS = 4  # blocks of a probe tensor, if the parameter has as many
_SMALL = (5, 7, 3, 2, 2, 2)
_NUM_STEPS = 3
_SCALES = (1.0, 30.0, 1.0)  # scale of the gradients, by step, so that thresholds take effect
_WIDE_DTYPES = (torch.float64,)  # main parameters of other dtypes are float32


@dataclass(frozen=True)
class Division:
    """Way to divide and step probe tensors.

    Attributes:
        is_sliced: Divide each tensor into two 1-D slices; else tensors are not divided.
        num_ranks: Number of ranks. Each steps its pieces with its own copy of the optimizer: one
            slice of each tensor, or every second tensor. Its other tensors are empty and have no
            gradients.
        is_in_turn: Step each piece in its own call.
        num_steps: Number of steps; some optimizers do not change parameters in the first ones.
        has_closure: Pass a closure to the step. Its loss is the owner `LOSS` in a flow.
        has_states: Start with states, if the parameters have some.
    """

    is_sliced: bool = False
    num_ranks: int = 1
    is_in_turn: bool = False
    num_steps: int = _NUM_STEPS
    has_closure: bool = False
    has_states: bool = False


@dataclass(frozen=True)
class _Kind:
    """Kind of a probe tensor.

    Attributes:
        shape: Shape of the probe tensor.
        dtype: Dtype of the probe tensor.
        like: Parameter that it represents; None: no parameter.
    """

    shape: _Shape
    dtype: torch.dtype = torch.float32
    like: nn.Parameter | None = field(default=None, compare=False)


class ProbeRun:
    """Steps of one rank with a copy of an optimizer; runs them in the constructor.

    Args:
        optimizer: The optimizer, which is not changed. See [Note: Only a copy is stepped].
        device: Device of the probe tensors.
        division: Way to divide and step the probe tensors.
        rank: Rank whose pieces are stepped.
        flow: Traces the steps; its owners are the numbers of the (undivided) probe tensors.
        options: Options that replace those of the optimizer, by name.

    Attributes:
        tensors: Pieces that this rank has stepped, by number of the probe tensor and of its piece.
        clone: The copy of the optimizer.
        numbers: Results of `numbers_of` before the first step and after each step.
        is_closure_first: Whether, in all steps, the closure was called at most once, before any
            value changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        division: Division = Division(),
        *,
        rank: int = 0,
        flow: Flow | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._division = division
        self._rank = rank
        self._device = device
        self._flow = flow
        self._generator = torch.Generator().manual_seed(0)
        self._kinds: list[_Kind] = []
        self.tensors: dict[tuple[int, int], nn.Parameter] = {}
        self.is_closure_first = True
        # Compilation takes seconds for each shape and gives the same values.
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices=[], enabled=True), torch.no_grad(), eager:
            self.clone = _fresh_copy(optimizer, options or {})
            self._fill_groups(optimizer)
            enter_training(self.clone)
            self.numbers = [numbers_of(self.clone)]
            for number in range(division.num_steps):
                self._step(_SCALES[number % len(_SCALES)])
                self.numbers.append(numbers_of(self.clone))

    def values(self) -> Tensor:
        """Values of all pieces: 1-D, float64, in the same order for every division."""
        ordered = [self.tensors[place].detach().reshape(-1) for place in sorted(self.tensors)]
        return torch.cat([values.double() for values in ordered])

    def last_values(self) -> dict[str, Any]:
        """Like `numbers_of` after the last step, but without copies of the tensors."""
        return numbers_of(self.clone, is_copied=False)

    def _fill_groups(self, optimizer: Optimizer) -> None:
        seen: set[tuple[_Kind, str]] = set()
        for group, source in zip(self.clone.param_groups, optimizer.param_groups, strict=True):
            for kind in _kinds_of(source, seen):
                number = len(self._kinds)
                self._kinds.append(kind)
                for piece, values in enumerate(self._pieces(self._draw(kind))):
                    is_mine = self._is_mine(number, piece)
                    if not is_mine and self._division.is_sliced:
                        continue
                    tensor = nn.Parameter(values if is_mine else values.new_empty(0))
                    group["params"].append(tensor)
                    if is_mine:
                        self.tensors[number, piece] = tensor
                        self._make_initial_state(optimizer, kind, tensor, number)
                        self._mark(tensor, number)

    def _make_initial_state(
        self, optimizer: Optimizer, kind: _Kind, tensor: nn.Parameter, number: int
    ) -> None:
        """Creates the initial states of a probe tensor, if its parameter has states.

        States of other shapes than the parameter's were created in a step and are not copied.
        """
        has_states = self._division.has_states and kind.like in optimizer.state
        if kind.like is None or not has_states:
            return
        state: dict[str, Any] = optimizer.state[kind.like]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        shapes = (kind.like.shape, (_numel_of(tensors),))
        if any(value.dim() and value.shape not in shapes for value in tensors.values()):
            return
        for key, value in state.items():
            if not _is_shaped(optimizer, key, kind.like):
                self.clone.state[tensor][key] = copy.deepcopy(value)
                continue
            is_wide = value.dtype == kind.like.dtype
            made = torch.zeros_like(tensor, dtype=tensor.dtype if is_wide else value.dtype)
            self.clone.state[tensor][key] = made.detach()
            self._mark(made, number)

    def _mark(self, tensor: Tensor, number: int) -> None:
        if self._flow is not None:
            self._flow.mark(tensor.detach(), number)

    def _step(self, scale: float) -> None:
        for number, kind in enumerate(self._kinds):
            for piece, values in enumerate(self._pieces(self._draw(kind) * scale)):
                if self._is_mine(number, piece):
                    self.tensors[number, piece].grad = values
                    self._mark(values, number)
        arguments: dict[str, Any] = {}
        if self._division.has_closure:
            arguments["closure"] = self._new_closure()
        if self._division.is_in_turn:
            self._step_in_turn()
        elif self._flow is not None:
            with self._flow:
                raw_step(self.clone, **arguments)
        else:
            raw_step(self.clone, **arguments)

    def _new_closure(self) -> Callable[[], Tensor]:
        before = self.values()
        calls: list[None] = []

        def closure() -> Tensor:
            calls.append(None)
            with nullcontext() if self._flow is None else self._flow.paused():
                is_unchanged = torch.equal(before, self.values())
            if len(calls) > 1 or not is_unchanged:
                self.is_closure_first = False
            loss = torch.ones((), device=self._device)
            if self._flow is not None:
                self._flow.mark(loss, LOSS)
            return loss

        return closure

    def _step_in_turn(self) -> None:
        groups = self.clone.param_groups
        kept = [group["params"] for group in groups]
        for tensor in self.tensors.values():
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = [p for p in parameters if p is tensor]
            raw_step(self.clone)
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
        for tensor in self.tensors.values():
            tensor.grad = None
        raw_step(self.clone)  # without gradients, it must not do anything

    def _draw(self, kind: _Kind) -> Tensor:
        drawn = torch.randn(kind.shape, generator=self._generator)
        return drawn.to(self._device, kind.dtype)

    def _pieces(self, undivided: Tensor) -> list[Tensor]:
        if not self._division.is_sliced:
            return [undivided]
        flat = undivided.reshape(-1)
        end = flat.numel() // 3 | 1  # in the middle of a row, and of a block
        return [flat[:end].clone(), flat[end:].clone()]

    def _is_mine(self, number: int, piece: int) -> bool:
        index = piece if self._division.is_sliced else number
        return index % self._division.num_ranks == self._rank


def numbers_of(optimizer: Optimizer, *, is_copied: bool = True) -> dict[str, Any]:
    """Data of the optimizer besides the states of its parameters, by description for errors."""
    known: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                words = f"parameter group number {key}"
                known.setdefault(words, []).append(_contents_of(value, is_copied))
    own = {"param_groups", "state", "defaults"}
    for key, value in vars(optimizer).items():
        if key not in own and not key.startswith("_optimizer_"):
            known[f"attribute {key}"] = _contents_of(value, is_copied)
    others = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    known["a state of no parameter"] = _contents_of(others, is_copied)
    return known


def _contents_of(value: Any, is_copied: bool) -> Any:
    """Copies the numbers in `value`; other leaves become None."""
    if isinstance(value, Mapping):
        return {str(key): _contents_of(part, is_copied) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_contents_of(part, is_copied) for part in value]
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter):
            return None
        return value.detach().clone() if is_copied else value
    return value if isinstance(value, (bool, int, float, complex)) else None


def _fresh_copy(optimizer: Optimizer, options: Mapping[str, Any]) -> Optimizer:
    """A copy without parameters; see [Note: Only a copy is stepped]."""
    own = {"param_groups", "state"}
    attributes = {k: _fresh(v) for k, v in vars(optimizer).items() if k not in own}
    groups = []
    for group in optimizer.param_groups:
        settings = copy.deepcopy(settings_of(group))
        if "lr" in settings:  # a warm-up may start at zero, where nothing moves
            lr = settings["lr"]
            settings["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
        groups.append({**settings, "params": []})
    for settings in (*groups, attributes.get("defaults", {})):
        settings.update({key: value for key, value in options.items() if key in settings})
    made = copy_of(optimizer, groups, attributes)
    others = {k: _fresh(v) for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    made.state.update(others)
    return made


def _fresh(value: Any) -> Any:
    """Copies containers in `value`, and tensors of one element."""
    if isinstance(value, (dict, list, tuple, set)):
        with torch.no_grad():
            return tree_map(_fresh_leaf, copy.copy(value))
    return _fresh_leaf(value)


def _fresh_leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.numel() <= 1:
        return value.clone()
    return copy.copy(value) if isinstance(value, set) else value


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


def _numel_of(tensors: Mapping[str, Tensor]) -> int:
    """Number of elements of the slice that the states belong to; 0 if no state is 1-D."""
    return next((value.numel() for value in tensors.values() if value.dim() == 1), 0)


def _kinds_of(group: Mapping[str, Any], seen: set[tuple[_Kind, str]]) -> list[_Kind]:
    """Kinds of probe tensors of a group.

    Args:
        group: A parameter group.
        seen: Large kinds so far, with the settings of their groups; new ones are added.
    """
    settings = repr({k: v for k, v in group.items() if k != "params" and not isinstance(v, float)})
    largest: dict[tuple[_Shape, torch.dtype], nn.Parameter] = {}
    for parameter in group["params"]:
        is_wide = parameter.dtype in _WIDE_DTYPES
        dtype = parameter.dtype if is_wide else torch.float32
        key = tuple(min(size, 2) for size in parameter.shape), dtype
        if key not in largest or parameter.numel() > largest[key].numel():
            largest[key] = parameter
    kinds: list[_Kind] = []
    for (pattern, dtype), parameter in largest.items():
        if not math.prod(pattern):
            continue  # nothing to step
        large = _Kind(_large_shape(tuple(parameter.shape)), dtype, parameter)
        if (large, settings) not in seen:
            kinds.append(large)
            seen.add((large, settings))
        sizes = _SMALL + (2,) * len(pattern)
        small = tuple(n if size > 1 else 1 for n, size in zip(sizes, pattern, strict=False))
        kinds.append(_Kind(small, dtype, parameter))
    return kinds or [_Kind(_SMALL[:2])]


def _large_shape(shape: _Shape) -> _Shape:
    """Shape of a probe tensor that represents a parameter of `shape`; see [Note: Blocks]."""
    bound = _BOUNDS.get(len(shape), _BOUND)
    if math.prod(shape) < _BLOCK_NUMEL:
        return tuple(min(size, bound) for size in shape)
    # All sizes but the longest are powers of two; the longest makes the product a multiple.
    sizes = [1 << min(size, bound).bit_length() - 1 for size in shape]
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    sizes[longest] = 1
    others = math.prod(sizes)
    step = max(1, _BLOCK_NUMEL // others)
    wanted = min(shape[longest], max(bound, _BLOCKS * _BLOCK_NUMEL // others))
    sizes[longest] = max(step, wanted // step * step)
    return tuple(sizes)
