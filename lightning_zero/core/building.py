"""Sharding of parameters while the module that owns them is being built.

[Note: Sharded as built] Constructors run unchanged, on every rank, on the device. Whenever a
parameter is registered, others that have not been used for some time are reduced to this rank's
shard, in CPU memory: each rank slices its own values, so nothing is communicated. A sharded
parameter is guarded (tensors/guarded.py): any use, such as an `apply(init)` over the module,
unshards it, by an all-gather in a round of `GlooControlPlane.agree`. Ranks that do not request it
take part when they leave the context. The values are those that the constructors set.

[Note: What may be sharded] A parameter is sharded only if nothing else refers to its values: its
storage has no other user, and it is no argument of the current call. So views, `.data` and arrays
that a constructor keeps stay valid.

[Note: Equal values] Shards of different ranks form one tensor only if all ranks have built the same
values. So ranks draw the same random numbers while they build, and compare sums over the bits at
the end. The registered parameters, with their order and shapes, are compared before any all-gather
whose size depends on them: see [Note: Consistency] in comm/consistency.py.

Alternatives considered: building on the meta device and calling `reset_parameters` gives other
values than constructors that initialize in their own way. Broadcasting rank 0's values of each
parameter before it is sharded would wait for rank 0 at every layer.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.consistency import compare
from lightning_zero.core.writes import sum_of_bits
from lightning_zero.health.watchdog import Watchdog
from lightning_zero.tensors.guarded import (
    Placement,
    guard,
    has_placement,
    placement_of,
    set_placement,
    unguard,
)

__all__ = ["Building", "PartialParameter", "move_all_but_parameters", "partial_of"]


class PartialParameter:
    """One parameter that is being built: unsharded, or this rank's shard of it."""

    def __init__(self, building: Building, name: str, index: int, parameter: nn.Parameter) -> None:
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
        self._building = building
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        return self._parameter()  # None once it is freed

    # The protocol of a guarded parameter:

    @property
    def device(self) -> torch.device:
        return self._building.device

    def sharded_data(self, index: int) -> Tensor:
        """`parameter.data`, unsharded. Collective."""
        self._building.unshard(self)
        parameter = self.parameter
        assert parameter is not None
        return parameter.data

    def wait_for_update(self) -> None:
        """Unshards the parameter before `parameter.data` is set. Collective."""
        self._building.unshard(self)

    def assign_data(self, index: int, values: Tensor) -> None:
        """Implements `parameter.data = values`. Collective."""
        self.sharded_data(index).copy_(values)

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """A copy of the parameter. Collective."""
        values = self.sharded_data(index)
        parameter = self.parameter
        assert parameter is not None
        return nn.Parameter(values.detach().clone(), parameter.requires_grad)

    def equals(self, one: Tensor, other: Tensor) -> bool:
        """Not reached: a comparison first uses the values, which unshards them."""
        raise AssertionError(self.name)

    def read_into(self, view: Tensor) -> None:
        """Copies the full values into `view` and frees the shard. Collective."""
        view.copy_(self._building.all_gather(self).view(self.shape))
        self._building.free(self)


def partial_of(parameter: Tensor) -> PartialParameter | None:
    """Record of a sharded parameter; None if it is unsharded or wrapped by an engine."""
    holder = placement_of(parameter).holder if has_placement(parameter) else None
    return holder if isinstance(holder, PartialParameter) else None


def move_all_but_parameters(root: nn.Module, device: torch.device) -> None:
    """Moves buffers, and the tensors that modules move in an `_apply` of their own."""

    def move(tensor: Tensor) -> Tensor:
        stays = tensor.is_meta or isinstance(tensor, nn.Parameter)
        return tensor if stays else tensor.to(device)

    # `_apply` of a metric moves its state, which is in plain attributes.
    with _hidden_parameters(root):
        root._apply(move)


@contextmanager
def _hidden_parameters(root: nn.Module) -> Iterator[None]:
    """Hides sharded parameters from `Module._apply`, which would set the `.data` of each."""
    # Recurrent modules have an `_apply` of their own and lists of their parameters.
    hidden = [
        (module, name, parameter)
        for module in root.modules()
        if type(module)._apply is nn.Module._apply
        for name, parameter in module._parameters.items()
        if parameter is not None and partial_of(parameter) is not None
    ]
    for module, name, _ in hidden:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in hidden:
            module._parameters[name] = parameter


_ATTRIBUTE = "_zero_piece"
_UNSHARDED_NUMEL = 2**20  # unsharded at a time, besides the module that is being built
_MIN_SHARDED_NUMEL = 2**12  # smaller parameters stay unsharded
_DONE = 2**31  # the request of a rank that requests no parameter


class Building:
    """Parameters of a module that is being built, until an engine wraps them.

    Every rank creates it at the same point. Collective. The module is built on `device`, where it
    will compute.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: timedelta | None = None,
        *,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.device = device
        self._comm = Communicator(device, timeout=timeout, watchdog=watchdog)
        self._pieces: list[PartialParameter] = []
        self._unsharded: dict[PartialParameter, None] = {}  # the last used comes last
        self._current: nn.Module | None = None  # the module that registers parameters
        self._is_busy = False  # calls of torch are those of this class

    # ---------------------------------------------------------------- contexts

    @contextmanager
    def track_parameters(self) -> Iterator[None]:
        """Context of constructors. Collective."""
        handles = [
            torch_module.register_module_parameter_registration_hook(self._on_parameter),
            torch_module.register_module_module_registration_hook(self._on_module),
        ]
        try:
            with self._same_random_numbers(), self.resharding():
                yield
            self._serve()
        except BaseException:
            self.abort()
            raise
        finally:
            self._current = None
            for handle in handles:
                handle.remove()

    def resharding(self) -> AbstractContextManager[object]:
        """Context of code that uses parameters one by one; used parameters are sharded again."""
        return _UseMode(self)

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        own = _random_states(self.device)
        first = self._comm.control.broadcast_object(own)
        differs = any(not torch.equal(a, b) for a, b in zip(own, first, strict=True))
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=differs):
            if differs:
                torch.set_rng_state(first[0])
                for state in first[1:]:
                    torch.cuda.set_rng_state(state, self.device)
            yield

    def finalize(self) -> None:
        """Shards the same parameters on every rank, before an engine wraps them. Collective.

        Raises:
            ValueError: Ranks have built different parameters or values.
        """
        self._serve()
        compare(self._comm.control, dict(piece.description for piece in self._pieces))
        sharded = self._comm.control.union([piece.shard is not None for piece in self._pieces])
        bits = []
        for piece, is_sharded in zip(self._pieces, sharded, strict=True):
            if is_sharded and piece.shard is None and piece.parameter is not None:
                self._shard(piece, piece.parameter)
            bits.append(piece.bits if is_sharded else 0)
        lowest = self._comm.control.min_ints([*bits, *(-value for value in bits)])
        for piece, low, high in zip(self._pieces, lowest, lowest[len(bits) :], strict=False):
            if low != -high:
                raise ValueError(
                    f"configure_model has built different values on different ranks, first in "
                    f"{piece.name} of shape {tuple(piece.shape)}; it must do the same on every "
                    "rank (random numbers of torch are the same without further code)."
                )
        self._is_busy = True  # no parameter is sharded any more
        for piece in self._pieces:
            if piece.parameter is not None:
                piece.parameter.__dict__.pop(_ATTRIBUTE, None)

    def close(self) -> None:
        """Closes the communicator, once an engine has wrapped all parameters. Local."""
        self._comm.close()

    def abort(self) -> None:
        """Makes the other ranks fail if they wait for this one. Local."""
        self._comm.abort(sys.exc_info()[1])

    # ---------------------------------------------------------------- registration

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self._current = module
        self._track(f"{type(module).__name__}.{name}", parameter)
        self._shard_unused(module._parameters.values())

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None:
            return
        for key, parameter in child.named_parameters():  # copies were not registered by the hook
            self._track(f"{type(child).__name__}.{key}", parameter)
        self._shard_unused(self._current._parameters.values() if self._current else ())

    def _track(self, name: str, parameter: nn.Parameter) -> None:
        if (
            type(parameter) is not nn.Parameter
            or _ATTRIBUTE in parameter.__dict__
            or parameter.is_meta
            or not parameter.is_floating_point()
            or parameter.layout is not torch.strided
            or parameter.numel() < _MIN_SHARDED_NUMEL
        ):
            return
        piece = PartialParameter(self, name, len(self._pieces), parameter)
        parameter.__dict__[_ATTRIBUTE] = piece
        self._pieces.append(piece)
        self._unsharded[piece] = None

    # ---------------------------------------------------------------- sharding

    def _shard_unused(self, kept: Any) -> None:
        """Shards the least recently used parameters beyond the limit, but none of `kept`."""
        if self._is_busy:
            return
        kept_ids = {id(parameter) for parameter in kept}
        numel = sum(piece.shape.numel() for piece in self._unsharded)
        with self._busy():
            for piece in list(self._unsharded):
                if numel <= _UNSHARDED_NUMEL:
                    return
                parameter = piece.parameter
                if parameter is None:
                    del self._unsharded[piece]
                elif id(parameter) in kept_ids or not _has_exclusive_storage(parameter):
                    continue
                else:
                    self._shard(piece, parameter)
                numel -= piece.shape.numel()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        was_busy, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = was_busy

    def _shard(self, piece: PartialParameter, parameter: nn.Parameter) -> None:
        piece.shape = parameter.shape
        flat = parameter.detach().reshape(-1)
        piece.bits = int(sum_of_bits(flat))
        piece.shard = self._shard_of(flat)
        placement = Placement(
            piece.name,
            parameter.shape,
            parameter.dtype,
            type(parameter),
            piece,
            0,
            lambda _: self.unshard(piece),
        )
        set_placement(parameter, placement)
        parameter.data = piece.shard
        guard([parameter])
        self._unsharded.pop(piece, None)

    def _shard_of(self, flat: Tensor) -> Tensor:
        numel = -(-flat.numel() // self._comm.size)
        own = flat[numel * self._comm.rank :][:numel]
        shard = torch.zeros(numel, dtype=flat.dtype)
        shard[: own.numel()].copy_(own)
        return shard

    # ---------------------------------------------------------------- use

    def unshard(self, piece: PartialParameter) -> None:
        """Unshards `piece`, after the parameters that other ranks request. Collective."""
        with self._busy():
            while piece.shard is not None:
                self._round(piece.index)

    def mark_used(self, parameters: list[nn.Parameter]) -> None:
        """Keeps `parameters` unsharded for a call with them, and shards others."""
        for parameter in parameters:
            piece = parameter.__dict__.get(_ATTRIBUTE)
            if piece in self._unsharded:
                self._unsharded[piece] = self._unsharded.pop(piece)
        current = self._current._parameters.values() if self._current is not None else ()
        self._shard_unused([*parameters, *current])

    def free(self, piece: PartialParameter) -> None:
        """Frees the shard, whose values have been copied. Local."""
        parameter = piece.parameter
        assert parameter is not None
        piece.shard = None
        set_placement(parameter, None)
        unguard(parameter)
        self._unsharded[piece] = None

    def all_gather(self, piece: PartialParameter) -> Tensor:
        """The full values of `piece`: 1-D, new, on the device. Collective."""
        shard, parameter = piece.shard, piece.parameter
        if shard is None:
            if parameter is None:
                raise RuntimeError(
                    f"another rank uses {piece.name}, which this rank has deleted; use and delete "
                    "the same parameters on all ranks."
                )
            shard = self._shard_of(parameter.detach().reshape(-1))
        numel = self._comm.size * shard.numel()
        full = torch.empty(numel, dtype=shard.dtype, device=self.device)
        self._comm.all_gather(full, piece.name, source=shard).wait()
        return full[: piece.shape.numel()]

    def _round(self, request: int) -> int:
        agreed = self._comm.control.agree(request)
        if agreed < _DONE:
            # The shape must be the same on every rank before the all-gather.
            requested = self._pieces[agreed : agreed + 1]
            compare(self._comm.control, dict(piece.description for piece in requested))
            piece = self._pieces[agreed]
            values, parameter = self.all_gather(piece), piece.parameter
            if piece.shard is not None and parameter is not None:
                self.free(piece)
                parameter.data = values.view(piece.shape)
        return agreed

    def _serve(self) -> None:
        """Takes part in the requests of other ranks, until all ranks are done."""
        while self._round(_DONE) != _DONE:
            pass


class _UseMode(TorchFunctionMode):
    """Mode that keeps the arguments of every call of torch unsharded during the call."""

    def __init__(self, building: Building) -> None:
        super().__init__()
        self._building = building

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        if used:
            self._building.mark_used(used)
        return func(*args, **kwargs)


def _has_exclusive_storage(parameter: nn.Parameter) -> bool:
    """Whether nothing else uses its storage. See [Note: What may be sharded]."""
    if parameter.grad is not None or parameter.layout is not torch.strided:
        return False
    storage = parameter.untyped_storage()
    num_users: int = torch._C._storage_Use_Count(storage._cdata)
    return num_users <= 2  # the parameter, and `storage` here


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
