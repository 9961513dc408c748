"""Parameters of a module that is being built, of which a rank may have only its shard."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_zero.tensors.guarded import (
    Placement,
    guard,
    has_placement,
    placement_of,
    set_placement,
    unguard,
)

__all__ = ["PartialParameter", "partial_of"]


class Builder(Protocol):
    """The part of `Building` that its parameters use."""

    @property
    def device(self) -> torch.device: ...

    def unshard(self, piece: PartialParameter) -> None:
        """Unshards `piece`. Collective."""

    def all_gather(self, piece: PartialParameter) -> Tensor:
        """The full values of `piece`: 1-D, new, on the device. Collective."""

    def free(self, piece: PartialParameter) -> None:
        """Frees the shard, whose values have been copied. Local."""


class PartialParameter:
    """One parameter that is being built: unsharded, or this rank's shard of it."""

    def __init__(self, builder: Builder, name: str, index: int, parameter: nn.Parameter) -> None:
        self.name = name  # for messages, such as `Linear.weight`
        self.index = index  # in the order of registration, the same on every rank
        self.shape = parameter.shape  # of the full parameter
        # 1-D, ceil(numel / ranks), on the CPU, zero-padded; None while unsharded.
        self.shard: Tensor | None = None
        self.bits = 0  # sum over the bits of the full values that were sharded last
        # Name and properties that ranks compare.
        self.description = (
            f"{name}, parameter {index + 1} that configure_model has built",
            {"shape": str(tuple(parameter.shape)), "dtype": str(parameter.dtype)},
        )
        self._builder = builder
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        return self._parameter()  # None once it is freed

    def set_shard(self, shard: Tensor, *, bits: int) -> None:
        """Replaces the values of the parameter by `shard`, and guards it. Local.

        `bits`: sum over the bits of the full values.
        """
        parameter = self.parameter
        assert parameter is not None
        self.shape = parameter.shape
        self.bits = bits
        self.shard = shard
        placement = Placement(
            self.name,
            parameter.shape,
            parameter.dtype,
            type(parameter),
            self,
            0,
            lambda _: self._builder.unshard(self),
        )
        set_placement(parameter, placement)
        parameter.data = shard
        guard([parameter])

    def drop_shard(self) -> None:
        """Makes the parameter a plain one again, whose values the caller sets. Local."""
        parameter = self.parameter
        assert parameter is not None
        self.shard = None
        set_placement(parameter, None)
        unguard(parameter)

    def read_into(self, view: Tensor) -> None:
        """Copies the full values into `view` and frees the shard. Collective."""
        view.copy_(self._builder.all_gather(self).view(self.shape))
        self._builder.free(self)

    # The protocol of a guarded parameter:

    @property
    def device(self) -> torch.device:
        return self._builder.device

    def sharded_data(self, index: int) -> Tensor:
        """`parameter.data`, unsharded. Collective."""
        self._builder.unshard(self)
        parameter = self.parameter
        assert parameter is not None
        return parameter.data

    def wait_for_update(self) -> None:
        """Unshards the parameter before `parameter.data` is set. Collective."""
        self._builder.unshard(self)

    def assign_data(self, index: int, values: Tensor) -> None:
        """Implements `parameter.data = values`. Collective."""
        self.sharded_data(index).copy_(values)

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """A copy of the parameter. Collective."""
        values = self.sharded_data(index)
        parameter = self.parameter
        assert parameter is not None
        return nn.Parameter(values.detach().clone(), parameter.requires_grad)


def partial_of(parameter: Tensor) -> PartialParameter | None:
    """Record of a sharded parameter; None if it is unsharded or wrapped by an engine."""
    holder = placement_of(parameter).holder if has_placement(parameter) else None
    return holder if isinstance(holder, PartialParameter) else None
