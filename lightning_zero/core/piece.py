"""A parameter of which this rank has a part, while the module around it is still being built."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_zero.tensors.guarded import has_placement, placement_of

__all__ = ["Piece", "PieceOwner", "move_all_but_parameters", "piece_of"]


class PieceOwner(Protocol):
    """What makes pieces whole; see `Building`."""

    device: torch.device

    def make_whole(self, piece: Piece) -> None:
        """The parameter is whole and plain again. Collective."""

    def gather(self, piece: Piece) -> Tensor:
        """All values, 1-D. Collective."""

    def free(self, piece: Piece) -> None:
        """The part is not needed any more. Local."""


class Piece:
    """One parameter that is being built: whole, or this rank's part of it.

    Attributes:
        name: For messages, such as `Linear.weight`.
        index: Position in the order of registration, the same on every rank.
        owner: Where it was registered first; None when that is gone.
        shape: Of the whole parameter.
        part: 1-D, ceil(numel / ranks), on the CPU, zeros at the end; None while it is whole.
        bits: Sum over the bits of the whole values that were cut last.
    """

    def __init__(
        self, building: PieceOwner, name: str, index: int, parameter: nn.Parameter
    ) -> None:
        self.name = name
        self.index = index
        self.shape = parameter.shape
        self.part: Tensor | None = None
        self.bits = 0
        self._building = building
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, unless nobody has it any more."""
        return self._parameter()

    # What a guarded parameter asks of what holds it:

    @property
    def device(self) -> torch.device:
        """Where it is when it is whole."""
        return self._building.device

    def look_at_rest(self, index: int) -> Tensor:
        """`parameter.data`: the whole values, gathered. Collective."""
        self._building.make_whole(self)
        parameter = self.parameter
        assert parameter is not None
        return parameter.data

    def settle(self) -> None:
        """`parameter.data` is about to be set, perhaps to itself. Collective."""
        self._building.make_whole(self)

    # What a bucket asks:

    def read_into(self, view: Tensor) -> None:
        """Copies the whole values into `view`; the part is freed. Collective."""
        view.copy_(self._building.gather(self).view(self.shape))
        self._building.free(self)


def piece_of(parameter: Tensor) -> Piece | None:
    """The piece of a parameter that is in parts; None where it is whole or an engine holds it."""
    holder = placement_of(parameter).bucket if has_placement(parameter) else None
    return holder if isinstance(holder, Piece) else None


def move_all_but_parameters(root: nn.Module, device: torch.device) -> None:
    """Moves what has memory: buffers, and what modules move in an `_apply` of their own."""

    def move(tensor: Tensor) -> Tensor:
        stays = tensor.is_meta or isinstance(tensor, nn.Parameter)
        return tensor if stays else tensor.to(device)

    # Metrics keep their state in plain attributes.
    with _hidden_pieces(root):
        root._apply(move)


@contextmanager
def _hidden_pieces(root: nn.Module) -> Iterator[None]:
    """Around `Module._apply` of what is no parameter: it would set `.data` of every one."""
    taken = [
        (module, name, parameter)
        for module in root.modules()
        if type(module)._apply is nn.Module._apply  # recurrent ones keep lists of their parameters
        for name, parameter in module._parameters.items()
        if parameter is not None and piece_of(parameter) is not None
    ]
    for module, name, _ in taken:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in taken:
            module._parameters[name] = parameter
