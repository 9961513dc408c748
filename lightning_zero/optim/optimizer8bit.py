"""Optimizers with moments of 8 bits: all that does not depend on their update.

[Note: Moments of 8 bits] Of a large tensor, a signed moment, and the square root of one that is
never negative, are codes and scales of blocks (dynamic8.py): 1.02 bytes per element instead of 4.
The root needs half the decades of the square, so elements with small gradients keep their step
size. A step decodes some blocks, steps them in float32, and encodes them, while they are in the
cache.

[Note: The same bits everywhere] A value depends on its block alone, and blocks are counted from the
first element of the full tensor. Every operation is rounded by itself: torch may fuse an `addcmul`
or not, depending on where in memory an element is. So neither the number of ranks, nor the division
into buckets and chunks, changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.layout.flat import StateBlocks
from lightning_zero.optim.blocks import full_numel
from lightning_zero.optim.dynamic8 import BLOCK_NUMEL, Piece, decode, encode_, num_blocks, pieces_of

__all__ = ["MAX_FLOAT32_NUMEL", "Optimizer8bit", "Options", "Tensors"]

Options = Mapping[str, Any]
Tensors = Sequence[Tensor]
MAX_FLOAT32_NUMEL = 4096  # larger tensors have moments of 8 bits


class Optimizer8bit(Optimizer):
    """Base of optimizers with moments of 8 bits, which have names, signs and an update.

    Attributes:
        moments: Keys of the moments, and whether a moment is signed.
        counters: Keys of the counters of steps.
        fixed: Options of the class with float32 moments that have only this value here. Groups have
            them, so that no class resumes a checkpoint of another one with another value.
        full: The class with float32 moments, for errors.
    """

    moments: ClassVar[Mapping[str, bool]]
    counters: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[Mapping[str, Any]]
    full: ClassVar[str]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], saves_codes: bool) -> None:
        super().__init__(params, {**defaults, **self.fixed})
        self.saves_codes = saves_codes

    def __getstate__(self) -> dict[str, Any]:  # of copies and pickles
        return {**super().__getstate__(), "saves_codes": self.saves_codes}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. Raises a ValueError for options that this class cannot have."""
        self._check_options(self.defaults | param_group)
        super().add_param_group(param_group)

    @property
    def state_blocks(self) -> StateBlocks:
        """Blocks of the states; see `blocks`."""
        scales = frozenset(map(_scales, self.moments))
        nbytes = len(self.moments) * (BLOCK_NUMEL + torch.float32.itemsize)
        return StateBlocks(BLOCK_NUMEL, scales, scales | self.moments.keys(), nbytes)

    @torch.compiler.disable  # a compiler may fuse operations: see [Note: The same bits everywhere]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient; returns the loss of the closure, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, grad: Tensor, group: Options) -> None:
        if grad.layout is not torch.strided or not grad.is_floating_point():
            raise RuntimeError(
                f"{type(self).__name__} needs dense gradients of real numbers, got one of "
                f"{grad.layout} and {grad.dtype}; give such parameters to another optimizer."
            )
        state = self.state[parameter]
        if not state:
            state.update(self._initial_state(parameter))
        for counter in self.counters:
            state[counter] += 1
        options = {**group, **{counter: float(state[counter]) for counter in self.counters}}
        flat, flat_grad = parameter.reshape(-1), grad.reshape(-1)
        if state.keys() >= self.moments.keys():
            moments = [state[moment].reshape(-1) for moment in self.moments]
            self._apply(flat, flat_grad, moments, options)
        else:
            for piece in pieces_of(flat.numel(), flat.device):
                moments = [_decoded(piece, state, *moment) for moment in self.moments.items()]
                updated = self._apply(piece.of(flat), piece.of(flat_grad), moments, options)
                for moment, numbers in zip(self.moments.items(), updated, strict=True):
                    _encode(piece, numbers, state, *moment)
        if flat.data_ptr() != parameter.data_ptr():  # a copy of a tensor that is not contiguous
            parameter.copy_(flat.view(parameter.shape))

    def _apply(self, values: Tensor, grad: Tensor, moments: Tensors, options: Options) -> Tensors:
        stepped = values.to(torch.promote_types(values.dtype, torch.float32))
        updated = self._update(stepped, grad.to(moments[0].dtype), moments, options)
        if stepped is not values:
            values.copy_(stepped)
        return updated

    def _update(self, values: Tensor, grad: Tensor, moments: Tensors, options: Options) -> Tensors:
        """Changes values and moments in place, in float32; see [Note: The same bits everywhere].

        `grad` may not be changed. `options`: those of the parameter group, and the counters.
        Returns what is encoded of each moment: itself if it is signed, else its root.
        """
        raise NotImplementedError

    def _check_options(self, group: Options) -> None:
        """Raises a ValueError if an option is wrong, or of another class, without its effect."""
        betas = group.get("betas", (0, 0))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}.")
        for name in ("lr", "eps", "weight_decay"):
            if not float(group.get(name, 0)) >= 0:
                raise ValueError(f"{name} must not be negative, got {group[name]}.")
        for name, value in self.fixed.items():
            if group.get(name, value) != value:
                raise ValueError(
                    f"{type(self).__name__} has only {name}={value}, got {group[name]}; use "
                    f"{self.full}."
                )

    # ---------------------------------------------------------------- saved states

    def pack_state(self, state: Mapping[str, Any], numel: int) -> dict[str, Any]:
        """A state as this class keeps it, of one that is packed already or has float32 moments.

        Args:
            state: State of a parameter, or some entries of it. Its tensors may be slices that
                begin with a block.
            numel: Elements of the full tensor.

        Raises:
            ValueError: An entry is of another optimizer.
        """
        others = state.keys() - {*self.counters, *self.moments, *self._packed_keys()}
        if others:
            raise ValueError(
                f"{type(self).__name__} cannot resume a state with {', '.join(sorted(others))}; "
                "resume with the optimizer that saved it."
            )
        packed: dict[str, Any] = {}
        for key, value in state.items():
            is_packed = key in self.moments and numel > MAX_FLOAT32_NUMEL
            packed |= _packed(value, key, self.moments[key]) if is_packed else {key: value}
        return packed

    def unpack_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state for a full checkpoint, from full tensors; see `saves_codes`."""
        own = self._packed_keys()
        if self.saves_codes or not state.keys() >= own:
            return dict(state)
        rest = {key: value for key, value in state.items() if key not in own}
        return rest | {key: _unpacked(state, key, sign) for key, sign in self.moments.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or of one with the same update and float32 moments.

        Raises:
            ValueError: It has options or states that this class does not have, or states of another
                size. The optimizer is then unchanged.
        """
        packed: dict[Any, Any] = {}

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            packed.update(self._packed_states(given))
            return {**given, "state": {}}  # torch would cast scales to the dtype of the parameter

        def put(_: Optimizer) -> None:
            self.state.update(packed)

        before = self.register_load_state_dict_pre_hook(take)  # the last one
        with before, self.register_load_state_dict_post_hook(put, prepend=True):
            super().load_state_dict(state_dict)

    def _packed_states(self, state_dict: Mapping[str, Any]) -> dict[Any, Any]:
        """States of a state dict, by parameter; others by their own keys."""
        for group in state_dict["param_groups"]:
            self._check_options(self.defaults | group)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=False))  # torch checks their number
        states: dict[Any, Any] = {}
        for number, state in state_dict["state"].items():
            parameter = by_number.get(number)
            if parameter is None:
                states[number] = state
                continue
            self._check_state(state, parameter)
            moved = {key: _to(parameter.device, value) for key, value in state.items()}
            states[parameter] = self.pack_state(moved, full_numel(parameter))
        return states

    def _check_state(self, state: Mapping[str, Any], parameter: Tensor) -> None:
        """Raises a ValueError if `state` is not of this update and a parameter of this size."""
        missing = [counter for counter in self.counters if counter not in state]
        if state and missing:
            raise ValueError(
                f"{type(self).__name__} cannot resume a state with {', '.join(state)} and without "
                f"{', '.join(missing)}; resume with the optimizer that saved it."
            )
        numel = parameter.numel()
        sizes = dict.fromkeys([*self.moments, *map(_codes, self.moments)], numel)
        sizes |= dict.fromkeys(map(_scales, self.moments), num_blocks(numel))
        for key in sizes:
            if key in state and state[key].numel() != sizes[key]:
                raise ValueError(
                    f"{type(self).__name__} cannot resume {key} of shape "
                    f"{tuple(state[key].shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}; resume with the model of the state."
                )

    def _packed_keys(self) -> set[str]:
        return {key for moment in self.moments for key in (_codes(moment), _scales(moment))}

    def _initial_state(self, parameter: Tensor) -> dict[str, Any]:
        state = {key: torch.tensor(0.0, dtype=torch.float32) for key in self.counters}
        shape, device = parameter.shape, parameter.device
        if full_numel(parameter) <= MAX_FLOAT32_NUMEL:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            zeros = {m: torch.zeros(shape, dtype=dtype, device=device) for m in self.moments}
            return state | zeros
        for moment in self.moments:
            state |= _zeros(parameter, moment)
        return state


def _codes(moment: str) -> str:
    return f"{moment}_codes"


def _scales(moment: str) -> str:
    return f"{moment}_scales"


def _to(device: torch.device, value: Any) -> Any:
    """A tensor with dimensions on `device`, row-major; a counter stays where it is."""
    is_moved = isinstance(value, Tensor) and value.dim() > 0
    return value.to(device).contiguous() if is_moved else value


def _zeros(values: Tensor, moment: str) -> dict[str, Tensor]:
    """Codes and scales of a moment that is zero."""
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.zeros(num_blocks(values.numel()), dtype=torch.float32, device=values.device)
    return {_codes(moment): codes, _scales(moment): scales}


def _decoded(piece: Piece, state: Mapping[str, Any], moment: str, is_signed: bool) -> Tensor:
    codes, scales = state[_codes(moment)].view(-1), state[_scales(moment)]
    numbers = decode(piece.of(codes), scales[piece.blocks], is_signed=is_signed)
    return numbers if is_signed else numbers.mul_(numbers)


def _encode(
    piece: Piece, numbers: Tensor, state: Mapping[str, Any], moment: str, is_signed: bool
) -> None:
    codes, scales = state[_codes(moment)].view(-1), state[_scales(moment)]
    encode_(numbers, piece.of(codes), scales[piece.blocks], is_signed=is_signed)


def _packed(values: Tensor, moment: str, is_signed: bool) -> dict[str, Tensor]:
    """Codes and scales of a float32 moment."""
    packed = _zeros(values, moment)
    flat = values.reshape(-1)
    for piece in pieces_of(values.numel(), values.device):
        part = piece.of(flat).to(torch.float32, copy=True)
        _encode(piece, part if is_signed else part.sqrt_(), packed, moment, is_signed)
    return packed


def _unpacked(state: Mapping[str, Any], moment: str, is_signed: bool) -> Tensor:
    """A float32 moment of codes and scales."""
    codes = state[_codes(moment)]
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for piece in pieces_of(values.numel(), values.device):
        piece.of(values.view(-1)).copy_(_decoded(piece, state, moment, is_signed))
    return values
