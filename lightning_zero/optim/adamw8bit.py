"""AdamW with moments of 8 bits.

[Note: Moments of 8 bits] Of a large tensor, `exp_avg` and the square root of `exp_avg_sq` are codes
and scales of blocks (dynamic8.py): 2.03 bytes per element instead of 8. The root needs half the
decades of the square, so elements with small gradients keep their step size. A step decodes some
blocks, steps them in float32, and encodes them, while they are in the cache.

[Note: The same bits everywhere] A value depends on its block alone, and blocks are counted from the
first element of the full tensor. Every operation is rounded by itself: torch may fuse an `addcmul`
or not, depending on where in memory an element is. So neither the number of ranks, nor the division
into buckets and chunks, changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.layout.flat import StateBlocks
from lightning_zero.optim.blocks import full_numel
from lightning_zero.optim.dynamic8 import BLOCK_NUMEL, Piece, decode, encode_, num_blocks, pieces_of

__all__ = ["MAX_FLOAT32_NUMEL", "AdamW8bit"]

MAX_FLOAT32_NUMEL = 4096  # larger tensors have moments of 8 bits
_IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # moments, by key
_CODES = {"exp_avg": "exp_avg_codes", "exp_avg_sq": "exp_avg_sq_codes"}  # keys of states
_SCALES = {"exp_avg": "exp_avg_scales", "exp_avg_sq": "exp_avg_sq_scales"}
# Options of torch's Adam and AdamW that have only this value here. Groups have them, so that no
# class resumes a checkpoint of another one with another value.
_FIXED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}


class AdamW8bit(Optimizer):
    """AdamW whose moments take a quarter of the memory, on any device, with or without an engine.

    The moments of tensors with at most 4,096 elements are float32. See [Note: Moments of 8 bits].

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Number that is added to the denominator.
        weight_decay: Decoupled weight decay.
        saves_codes: Whether a full checkpoint of an engine has codes and scales, a quarter of the
            bytes, which only this class can load; else it has moments in float32, as those of
            `torch.optim.AdamW`. Both are lossless.
    """

    state_blocks: ClassVar = StateBlocks(
        BLOCK_NUMEL,
        frozenset(_SCALES.values()),
        frozenset({*_SCALES.values(), *_IS_SIGNED}),
        nbytes=len(_IS_SIGNED) * (BLOCK_NUMEL + torch.float32.itemsize),
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        saves_codes: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | _FIXED
        )
        self.saves_codes = saves_codes

    def __getstate__(self) -> dict[str, Any]:  # of copies and pickles
        return {**super().__getstate__(), "saves_codes": self.saves_codes}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. Raises a ValueError for options that this class cannot have."""
        _check_options(self.defaults | param_group)
        super().add_param_group(param_group)

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

    def _step(self, parameter: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        if grad.layout is not torch.strided or not grad.is_floating_point():
            raise RuntimeError(
                "AdamW8bit needs dense gradients of real numbers, got one of "
                f"{grad.layout} and {grad.dtype}; give such parameters to another optimizer."
            )
        state = self.state[parameter]
        if not state:
            state.update(_initial_state(parameter))
        state["step"] += 1
        update = _Update.of(group, float(state["step"]))
        flat, flat_grad = parameter.reshape(-1), grad.reshape(-1)
        if "exp_avg" in state:
            moments = [state[moment].reshape(-1) for moment in _IS_SIGNED]
            update(flat, flat_grad, *moments)
        else:
            for piece in pieces_of(flat.numel(), flat.device):
                self._step_piece(piece, piece.of(flat), piece.of(flat_grad), state, update)
        if flat.data_ptr() != parameter.data_ptr():  # a copy of a tensor that is not contiguous
            parameter.copy_(flat.view(parameter.shape))

    def _step_piece(
        self, piece: Piece, values: Tensor, grad: Tensor, state: Mapping[str, Any], update: _Update
    ) -> None:
        exp_avg, root = (_decoded(piece, state, moment) for moment in _IS_SIGNED)
        root = update(values, grad, exp_avg, root.mul_(root))
        _encode(piece, exp_avg, state, "exp_avg")
        _encode(piece, root, state, "exp_avg_sq")

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
        others = state.keys() - {"step", *_IS_SIGNED, *_CODES.values(), *_SCALES.values()}
        if others:
            raise ValueError(
                f"AdamW8bit cannot resume a state with {', '.join(sorted(others))}; resume with "
                "the optimizer that saved it."
            )
        packed: dict[str, Any] = {}
        for key, value in state.items():
            is_packed = key in _IS_SIGNED and numel > MAX_FLOAT32_NUMEL
            packed |= _packed(key, value) if is_packed else {key: value}
        return packed

    def unpack_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state for a full checkpoint, from full tensors; see `saves_codes`."""
        if self.saves_codes or _CODES["exp_avg"] not in state:
            return dict(state)
        own = {*_CODES.values(), *_SCALES.values()}
        rest = {key: value for key, value in state.items() if key not in own}
        return rest | {moment: _unpacked(state, moment) for moment in _IS_SIGNED}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or one of `torch.optim.AdamW` or `Adam`.

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
            _check_options(self.defaults | group)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=False))  # torch checks their number
        states: dict[Any, Any] = {}
        for number, state in state_dict["state"].items():
            parameter = by_number.get(number)
            if parameter is None:
                states[number] = state
                continue
            _check_state(state, parameter)
            moved = {key: _to(parameter.device, value) for key, value in state.items()}
            states[parameter] = self.pack_state(moved, full_numel(parameter))
        return states


def _check_options(group: Mapping[str, Any]) -> None:
    """Raises a ValueError if an option is wrong, or of AdamW, but without its effect here."""
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}.")
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name} must not be negative, got {group[name]}.")
    for name, value in _FIXED.items():
        has_effect = name != "decoupled_weight_decay" or group.get("weight_decay")
        if has_effect and group.get(name, value) != value:
            raise ValueError(
                f"AdamW8bit has only {name}={value}, got {group[name]}; use torch.optim.Adam or "
                "AdamW, which have both."
            )


def _check_state(state: Mapping[str, Any], parameter: Tensor) -> None:
    """Raises a ValueError if `state` is not of an AdamW with a parameter of this size."""
    if state and "step" not in state:
        raise ValueError(
            f"AdamW8bit cannot resume a state with {', '.join(state)} and without step; resume "
            "with the optimizer that saved it."
        )
    numel = parameter.numel()
    sizes = dict.fromkeys([*_IS_SIGNED, *_CODES.values()], numel)
    sizes |= dict.fromkeys(_SCALES.values(), num_blocks(numel))
    for key in sizes:
        if key in state and state[key].numel() != sizes[key]:
            raise ValueError(
                f"AdamW8bit cannot resume {key} of shape {tuple(state[key].shape)} for a parameter "
                f"of shape {tuple(parameter.shape)}; resume with the model of the state."
            )


def _to(device: torch.device, value: Any) -> Any:
    """A tensor with dimensions on `device`, row-major; a counter stays where it is."""
    is_moved = isinstance(value, Tensor) and value.dim() > 0
    return value.to(device).contiguous() if is_moved else value


@dataclass(frozen=True)
class _Update:
    """One step of AdamW (I. Loshchilov, F. Hutter, arXiv 1711.05101, algorithm 2)."""

    beta1: float
    beta2: float
    eps: float
    decay: float  # factor of the values
    step_size: float
    root_factor: float  # of the denominator

    @classmethod
    def of(cls, group: Mapping[str, Any], step: float) -> _Update:
        """Step number `step` with the settings of a parameter group."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return cls(
            beta1,
            beta2,
            group["eps"],
            1 - lr * group["weight_decay"],
            lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
        )

    def __call__(self, values: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
        """Changes values and moments in place; returns the root of `exp_avg_sq`.

        See [Note: The same bits everywhere].
        """
        grad = grad.to(exp_avg.dtype)
        exp_avg.mul_(self.beta1).add_(grad * (1 - self.beta1))
        exp_avg_sq.mul_(self.beta2).add_((grad * grad).mul_(1 - self.beta2))
        root = exp_avg_sq.sqrt()
        denominator = (root * self.root_factor).add_(self.eps)
        change = torch.div(exp_avg, denominator, out=denominator).mul_(self.step_size)
        stepped = values.to(torch.promote_types(values.dtype, torch.float32))
        stepped.mul_(self.decay).sub_(change)
        if stepped is not values:
            values.copy_(stepped)
        return root


def _initial_state(parameter: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=torch.float32)}
    shape, device = parameter.shape, parameter.device
    if full_numel(parameter) <= MAX_FLOAT32_NUMEL:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return state | {m: torch.zeros(shape, dtype=dtype, device=device) for m in _IS_SIGNED}
    for moment in _IS_SIGNED:
        state[_CODES[moment]] = torch.zeros(shape, dtype=torch.uint8, device=device)
        state[_SCALES[moment]] = _zero_scales(parameter)
    return state


def _zero_scales(values: Tensor) -> Tensor:
    return torch.zeros(num_blocks(values.numel()), dtype=torch.float32, device=values.device)


def _decoded(piece: Piece, state: Mapping[str, Any], moment: str) -> Tensor:
    codes, scales = state[_CODES[moment]].view(-1), state[_SCALES[moment]]
    return decode(piece.of(codes), scales[piece.blocks], is_signed=_IS_SIGNED[moment])


def _encode(piece: Piece, values: Tensor, state: Mapping[str, Any], moment: str) -> None:
    codes, scales = state[_CODES[moment]].view(-1), state[_SCALES[moment]]
    encode_(values, piece.of(codes), scales[piece.blocks], is_signed=_IS_SIGNED[moment])


def _packed(moment: str, values: Tensor) -> dict[str, Tensor]:
    """Codes and scales of a float32 moment."""
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    packed = {_CODES[moment]: codes, _SCALES[moment]: _zero_scales(values)}
    flat = values.reshape(-1)
    for piece in pieces_of(values.numel(), values.device):
        part = piece.of(flat).to(torch.float32, copy=True)
        _encode(piece, part if _IS_SIGNED[moment] else part.sqrt_(), packed, moment)
    return packed


def _unpacked(state: Mapping[str, Any], moment: str) -> Tensor:
    """A float32 moment of codes and scales."""
    codes = state[_CODES[moment]]
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for piece in pieces_of(values.numel(), values.device):
        part = _decoded(piece, state, moment)
        piece.of(values.view(-1)).copy_(part if _IS_SIGNED[moment] else part.mul_(part))
    return values
